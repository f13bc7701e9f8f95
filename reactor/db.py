"""Opens connections, applies sql/, scopes a transaction to a tenant, and turns the driver's errors into ours."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
from pgvector.asyncpg import register_vector

from reactor.errors import Misuse, Unavailable

SQL_FOLDER = next(
    folder
    for folder in (Path(__file__).parent / "_sql", Path(__file__).parent.parent / "sql")  # installed; from a clone
    if folder.is_dir()
)
if TYPE_CHECKING:  # generic in the stubs only
    OwnConnection = asyncpg.Connection[asyncpg.Record]
    Connection = OwnConnection | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    OwnConnection = Connection = asyncpg.Connection
    Pool = asyncpg.Pool

# What asyncpg raises when Postgres cannot be reached or is going away; a statement's own errors are not among them.
_OUT_OF_REACH = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InvalidAuthorizationSpecificationError,  # wrong password or role
    asyncpg.InvalidCatalogNameError,  # the database does not exist (yet)
    asyncpg.InternalClientError,
    asyncpg.ProtocolViolationError,  # how a pooler says that it lost its server
)


@contextmanager
def reaching(what: str = "Postgres") -> Iterator[None]:
    """Turns "cannot reach it" into Unavailable; a wrong statement stays what it is.

    Raises:
        Unavailable: The server is down, refuses us, or went away in mid-statement.
    """
    try:
        yield
    except _OUT_OF_REACH as exc:
        raise Unavailable(f"{what} is out of reach ({type(exc).__name__})", code="postgres") from exc
    except asyncpg.InterfaceError as exc:
        # asyncpg says "closed" with the same class it uses for a wrong argument count.
        if "closed" in str(exc) or "closing" in str(exc) or "released" in str(exc):
            raise Unavailable(f"{what} closed the connection", code="postgres") from exc
        raise


async def prepare_connection(conn: OwnConnection) -> None:
    """Teach a new connection jsonb and halfvec."""
    await conn.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    schema = await conn.fetchval(
        "select nspname from pg_extension e join pg_namespace n on n.oid = extnamespace where extname = 'vector'"
    )
    if schema is not None:
        await register_vector(conn, schema=schema)


async def connect(dsn: str, *, application: str, timeout_s: float = 10.0) -> OwnConnection:
    """One connection outside any pool.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    with reaching():
        conn: OwnConnection = await asyncpg.connect(
            dsn, timeout=timeout_s, server_settings={"application_name": application}, statement_cache_size=0
        )
        return conn


def create_pool(
    dsn: str, *, application: str, size: int, timeout_s: float = 10.0, statement_cache_size: int = 100
) -> Pool:
    """A pool that connects when first used: `async with` or `await` it, and nothing is reached yet.

    `statement_cache_size=0` lets any pooler stand between, and costs a round trip a statement.
    """
    return asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=size,
        timeout=timeout_s,
        init=prepare_connection,
        server_settings={"application_name": application},
        statement_cache_size=statement_cache_size,
    )


@asynccontextmanager
async def tenant(pool: Pool, tenant_id: str, *, timeout_s: float = 10.0) -> AsyncIterator[Connection]:
    """One transaction that may touch this tenant's rows of ours and no others.

    Raises:
        Unavailable: Postgres is out of reach, or no connection came free within `timeout_s`.
    """
    with reaching():
        async with pool.acquire(timeout=timeout_s) as conn, conn.transaction():
            await conn.execute("select reactor.enter_tenant($1)", tenant_id)
            yield conn


def sql_files() -> list[tuple[int, str, str]]:
    """The numbered files of sql/ as (number, name, text), in order."""
    files = sorted(path for path in SQL_FOLDER.glob("*.sql") if re.match(r"\d{4}_", path.name))
    return [(int(path.name[:4]), path.name, path.read_text("utf-8")) for path in files]


async def migrate(dsn: str, *, with_tables: bool = False, say: Callable[[str], None] = lambda _line: None) -> bool:
    """Bring the database's `reactor` schema to this release, in one transaction; True when anything was applied.

    Every file is written so that applying it again changes nothing; all are applied, in order, when any is new or has
    changed. Two migrators at once take turns.

    Raises:
        Misuse: The database is newer than this code, pgvector is missing, or the role may not do it: one clear line.
        Unavailable: Postgres is out of reach.
    """
    conn = await connect(dsn, application="memory-reactor migrate")
    try:
        with reaching():
            async with conn.transaction():
                await conn.execute("select pg_advisory_xact_lock(hashtext('memory-reactor migrate'))")
                applied = await _apply(conn, say)
                if with_tables:
                    await _make_producer_tables(conn, say)
                return applied
    except asyncpg.InsufficientPrivilegeError as exc:
        raise Misuse(f"this role may not migrate: {exc}") from exc
    finally:
        await conn.close()


async def check_schema(conn: Connection) -> None:
    """Nothing, when the database's schema is the one this release was written for.

    Raises:
        Misuse: It is missing, older or newer; the message says what to do.
    """
    if not await conn.fetchval("select to_regclass('reactor.migrations') is not null"):
        raise Misuse("this database has no reactor schema yet: run `reactor migrate`")
    have = {row["number"]: row["checksum"] for row in await conn.fetch("select number, checksum from reactor.migrations")}
    want = {number: _checksum(text) for number, _, text in sql_files()}
    if max(have) > max(want):
        raise Misuse("this database was migrated by a newer memory-reactor: upgrade the code")
    if have != want:
        raise Misuse("this database's reactor schema is of another release: run `reactor migrate`")


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


async def _apply(conn: OwnConnection, say: Callable[[str], None]) -> bool:
    files = [(number, name, text, _checksum(text)) for number, name, text in sql_files()]
    owner = await conn.fetchval(
        "select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'reactor'"
        " and pg_get_userbyid(nspowner) <> current_user"
    )
    if owner is not None:
        raise Misuse(f"schema reactor belongs to {owner}: migrate and run as that role")
    known: list[asyncpg.Record] = []
    if await conn.fetchval("select to_regclass('reactor.migrations') is not null"):
        known = await conn.fetch("select number, checksum, release from reactor.migrations")
    newest = max((row["number"] for row in known), default=0)
    if newest > files[-1][0]:
        release = max(row["release"] for row in known if row["number"] == newest)
        raise Misuse(
            f"this database was migrated by memory-reactor {release} (file {newest:04}); "
            f"this is {version('memory-reactor')} (file {files[-1][0]:04}): upgrade the code"
        )
    have = {row["number"]: row["checksum"] for row in known}
    if have == {number: checksum for number, _, _, checksum in files}:
        return False
    await conn.execute("create schema if not exists reactor")
    vector = await _vector_schema(conn)
    for number, name, text, checksum in files:
        say(f"applying {name}")
        await conn.execute(text.replace("@extschema:vector@", vector))
        await conn.execute(
            "insert into reactor.migrations (number, name, checksum, release) values ($1, $2, $3, $4) "
            "on conflict (number) do update set name = excluded.name, checksum = excluded.checksum, "
            "release = excluded.release, applied_at = now()",
            number,
            name,
            checksum,
            version("memory-reactor"),
        )
    return True


async def _vector_schema(conn: OwnConnection) -> str:
    """The quoted schema of pgvector, installed into `extensions` (Supabase's habit) or our own when it is missing."""
    find = (
        "select quote_ident(nspname) as schema, extversion from pg_extension e "
        "join pg_namespace n on n.oid = extnamespace where extname = 'vector'"
    )
    row = await conn.fetchrow(find)
    if row is None:
        home = "extensions" if await conn.fetchval("select to_regnamespace('extensions') is not null") else "reactor"
        try:
            async with conn.transaction():
                await conn.execute(f"create extension vector with schema {home}")
        except asyncpg.InsufficientPrivilegeError:
            raise Misuse(
                "pgvector is not installed and this role may not install it: run `create extension vector` as an "
                "administrator (Supabase: Database > Extensions > vector)"
            ) from None
        except (asyncpg.UndefinedFileError, asyncpg.FeatureNotSupportedError):
            raise Misuse("this server does not have pgvector: install version 0.8 or newer") from None
        row = await conn.fetchrow(find)
        assert row is not None  # noqa: S101  # it was created in this transaction
    if tuple(int(part) for part in re.findall(r"\d+", row["extversion"])[:2]) < (0, 7):
        raise Misuse(f"pgvector {row['extversion']} has no halfvec: alter extension vector update")
    return str(row["schema"])


async def _make_producer_tables(conn: OwnConnection, say: Callable[[str], None]) -> None:
    for table in ("posts", "chat_messages"):
        taken = await conn.fetchval(
            "select to_regclass('public.' || $1) is not null and not exists "
            "(select from reactor.sources where relation = to_regclass('public.' || $1))",
            table,
        )
        if taken:
            raise Misuse(f"public.{table} exists already: attach it instead (reactor attach {table} --help)")
    say("applying producer_tables.sql")
    await conn.execute((SQL_FOLDER / "producer_tables.sql").read_text("utf-8"))
