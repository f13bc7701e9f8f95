"""Opens connections, applies sql/, scopes a transaction to a tenant, and turns the driver's errors into ours."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
from pgvector.asyncpg import register_vector

from reactor.errors import Misuse, Unavailable

SQL_FOLDER = next(
    folder
    for folder in (Path(__file__).parent / "_sql", Path(__file__).parent.parent / "sql")  # installed; from a clone
    if folder.is_dir()
)
_GRANTS = 99
if TYPE_CHECKING:  # generic in the stubs only
    OwnConnection = asyncpg.Connection[asyncpg.Record]
    Connection = OwnConnection | asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
    Pool = asyncpg.Pool[asyncpg.Record]
else:
    OwnConnection = Connection = asyncpg.Connection
    Pool = asyncpg.Pool

# What asyncpg raises when Postgres is going away; a statement's own errors are not among them.
GOING_AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.InternalClientError,
)
_OUT_OF_REACH = (
    *GOING_AWAY,
    OSError,
    TimeoutError,
    asyncpg.InvalidAuthorizationSpecificationError,  # wrong password or role
    asyncpg.InvalidCatalogNameError,  # the database does not exist (yet)
    asyncpg.ProtocolViolationError,  # how a pooler says that it lost its server
)

_TIMEOUT_S = 10.0
_CANCEL_S = 1.0  # nor for its answer to a cancel
_WHY = {
    "gaierror": "its host name does not resolve; a password with @, # or / in DATABASE_URL must be percent-encoded",
    "ConnectionRefusedError": "the connection is refused",
    "InvalidPasswordError": "it refuses the password",
    "InvalidAuthorizationSpecificationError": "it refuses the role",
    "InvalidCatalogNameError": "there is no such database",
    "TooManyConnectionsError": "it has no connection left",
    "CannotConnectNowError": "it is starting or stopping",
    "TimeoutError": "it does not answer",
}


@contextmanager
def reaching() -> Iterator[None]:
    """Turns "cannot reach it" into Unavailable; a wrong statement stays what it is.

    Raises:
        Unavailable: The server is down, refuses us, or went away in mid-statement.
    """
    try:
        yield
    except _OUT_OF_REACH as exc:
        why = _WHY.get(type(exc).__name__, type(exc).__name__)
        raise Unavailable(f"Postgres is out of reach ({why})", code="postgres") from exc
    except asyncpg.InterfaceError as exc:
        # asyncpg says "closed" with the same class it uses for a wrong argument count.
        if "closed" in str(exc) or "closing" in str(exc) or "released" in str(exc):
            raise Unavailable("Postgres closed the connection", code="postgres") from exc
        raise


def sentence_of(exc: asyncpg.PostgresError) -> str:
    """What Postgres said, on one line, with its hint; without the detail, which quotes rows."""
    return " ".join(f"{exc.args[0]} ({exc.hint})".split() if exc.hint else str(exc.args[0]).split())


class Unreadable(dict[str, Any]):
    """Stands for JSON that Postgres keeps and Python cannot read: too deep, or a number of thousands of digits."""


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # one such value must not take its neighbours' answer with it
        return Unreadable()


async def prepare_connection(conn: OwnConnection) -> None:
    """Teach a new connection jsonb and halfvec."""
    await conn.set_type_codec("jsonb", encoder=json.dumps, decoder=_read_json, schema="pg_catalog")
    schema = await conn.fetchval(
        "select nspname from pg_extension e join pg_namespace n on n.oid = extnamespace where extname = 'vector'"
    )
    if schema is not None:
        await register_vector(conn, schema=schema)


_READ_COMMITTED = "set default_transaction_isolation = 'read committed'"


class _ReadCommitted(OwnConnection):
    """A session whose own level stays the one that the queue is written for, and whose role its next user gets back.

    Where a role or database defaults to a stricter level, two claims at once would be a serialization failure.
    """

    def get_reset_query(self) -> str:
        return f"{super().get_reset_query()}\nreset role;\n{_READ_COMMITTED}"


async def _prepare_session(conn: OwnConnection) -> None:
    await conn.execute(_READ_COMMITTED)
    await prepare_connection(conn)


async def _connect(*args: Any, **kwargs: Any) -> Any:
    try:
        return await asyncpg.connect(*args, **kwargs)
    except ValueError:  # asyncpg parses the address when it connects; its words may quote the password
        raise Misuse(
            "DATABASE_URL: not an address that Postgres could have (postgresql://user:password@host/database)"
        ) from None


async def connect(dsn: str, *, application: str) -> OwnConnection:
    """One connection outside any pool.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    with reaching():
        conn: OwnConnection = await _connect(
            dsn, timeout=_TIMEOUT_S, server_settings={"application_name": application}, statement_cache_size=0
        )
        return conn


async def _keep_as_is(_conn: object) -> None:
    pass


def create_pool(
    dsn: str,
    *,
    application: str,
    size: int,
    statement_cache_size: int = 100,
    resets: bool = True,
    lock_timeout_s: float | None = None,
) -> Pool:
    """A pool that connects when first used: `async with` or `await` it, and nothing is reached yet.

    `statement_cache_size=0` lets any pooler stand between, and costs a round trip a statement; the session may be
    somebody else's next, so its isolation level stays as it is. `resets=False` saves the one that cleans a connection
    after use, for users that leave nothing behind. `lock_timeout_s` is for sessions of one's own, which keep their
    settings.
    """
    is_ours = statement_cache_size > 0

    async def init(conn: OwnConnection) -> None:
        await (_prepare_session if is_ours else prepare_connection)(conn)
        if lock_timeout_s is not None:
            await conn.execute(f"set lock_timeout = '{lock_timeout_s * 1000:.0f}ms'")

    return asyncpg.create_pool(
        dsn,
        connect=_connect,
        min_size=0,
        max_size=size,
        timeout=_TIMEOUT_S,
        connection_class=_ReadCommitted if is_ours else OwnConnection,
        init=init,
        reset=None if resets else _keep_as_is,
        server_settings={"application_name": application},
        statement_cache_size=statement_cache_size,
    )


@asynccontextmanager
async def borrowed(pool: Pool, timeout_s: float, *, connect_s: float | None = None) -> AsyncIterator[Connection]:
    """A connection for at most `timeout_s` seconds; what has not answered by then is canceled in Postgres, too.

    `connect_s`: how long it may take to have one, where that is not to count.

    Raises:
        Unavailable: Postgres is out of reach; or, as code "deadline", no connection came free or it took too long.
    """
    with reaching():
        with anyio.move_on_after(connect_s or timeout_s) as scope:
            conn = await pool.acquire()
            if connect_s is not None:
                scope.deadline = anyio.current_time() + timeout_s
            try:
                yield conn
            finally:
                # One that cannot be given back in time is dropped by the pool; that is no failure of what it did.
                with anyio.CancelScope(shield=True), suppress(Exception):
                    await pool.release(conn, timeout=_CANCEL_S)
        if scope.cancelled_caught:
            raise Unavailable("Postgres did not answer in time", code="deadline")


async def fetch(pool: Pool, query: str, *args: Any) -> list[asyncpg.Record]:
    """The rows of one statement.

    Raises:
        Unavailable: Postgres is out of reach, or no connection came free within 10 s.
    """
    with reaching():
        async with pool.acquire(timeout=_TIMEOUT_S) as conn:
            return await conn.fetch(query, *args)


class Line:
    """A connection for one task at a time; `is_kept`: at hand, as taking one from the pool costs more than a statement.

    `statement_s`: how long one may take; None: whoever asks sees to it.
    """

    def __init__(self, pool: Pool, *, statement_s: float | None) -> None:
        self._pool = pool
        self._conn: Any = None  # of the pool
        self._statement_s = statement_s
        self.is_kept = False

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        """The rows of one statement; within `reaching()`, an outage is Unavailable."""
        try:
            if not self.is_open:
                await self.let_go()
                self._conn = await self._pool.acquire(timeout=_TIMEOUT_S)
            rows: list[Any] = await self._conn.fetch(query, *args, timeout=self._statement_s)
        except BaseException:
            await self.let_go()
            raise
        if not self.is_kept:
            await self.let_go()
        return rows

    @property
    def is_open(self) -> bool:
        """Whether a connection is at hand."""
        return self._conn is not None and not self._conn.is_closed()

    def cut(self) -> None:
        """Drop the connection: a statement under way ends as one that Postgres did not answer."""
        if self._conn is not None:
            self._conn.terminate()

    async def let_go(self) -> None:
        """Give the connection back, where one is held."""
        conn, self._conn = self._conn, None
        if conn is not None:
            # What cannot be given back in time is dropped by the pool: no failure of what it did.
            with anyio.CancelScope(shield=True), suppress(Exception):
                await self._pool.release(conn, timeout=_CANCEL_S)


@asynccontextmanager
async def tenant(pool: Pool, tenant_id: str) -> AsyncIterator[Connection]:
    """One transaction that may touch this tenant's rows of ours and no others.

    Raises:
        Unavailable: Postgres is out of reach, or no connection came free within 10 s.
    """
    theirs: Exception | None = None
    try:
        with reaching():
            async with pool.acquire(timeout=_TIMEOUT_S) as conn, conn.transaction(isolation="read_committed"):
                # A process that is stopped in here holds locks that a producer's TRUNCATE would wait for.
                await conn.execute(
                    "select reactor.enter_tenant($1), set_config('idle_in_transaction_session_timeout', '15s', true)",
                    tenant_id,
                )
                try:
                    yield conn
                except (OSError, TimeoutError) as exc:
                    if not conn.is_closed():  # a file, another service: not Postgres
                        theirs = exc
                    raise
    except Unavailable:
        if theirs is not None:
            raise theirs from theirs.__cause__
        raise


def sql_files() -> list[tuple[int, str, str, str]]:
    """The numbered files of sql/ as (number, name, text, checksum), in order."""
    files = [(path.name, path.read_text("utf-8")) for path in sorted(SQL_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))]
    return [(int(name[:4]), name, text, hashlib.sha256(text.encode()).hexdigest()) for name, text in files]


async def migrate(dsn: str, *, with_tables: bool = False, say: Callable[[str], None] = lambda _line: None) -> bool:
    """Bring the database's `reactor` schema to this release, in one transaction; True when anything was applied.

    Every file is written so that applying it again changes nothing; all are applied, in order, when any is new or has
    changed. Two migrators at once take turns.

    Raises:
        Misuse: The database is newer than this code, pgvector is missing, or the role may not do it: one clear line.
        Unavailable: Postgres is out of reach.
    """
    conn = await connect(dsn, application="memory-reactor migrate")
    conn.add_log_listener(
        lambda _conn, words: say(str(words.message)) if isinstance(words, asyncpg.PostgresWarning) else None
    )
    try:
        with reaching():
            async with conn.transaction(isolation="read_committed"):  # sees what another migrator did while we waited
                await conn.execute("select pg_advisory_xact_lock(hashtext('memory-reactor migrate'))")
                applied = await _apply(conn, say)
                if with_tables:
                    applied |= await _make_producer_tables(conn, say, again=applied)
                return applied
    except asyncpg.InsufficientPrivilegeError as exc:
        raise Misuse(f"this role may not migrate: {sentence_of(exc)}") from exc
    except asyncpg.LockNotAvailableError as exc:
        raise Unavailable(
            "a long transaction holds a table: nothing was changed, migrate again later", code="locked"
        ) from exc
    finally:
        await conn.close()


async def check_schema(conn: Connection) -> None:
    """Nothing, when the database's schema is the one this release was written for.

    Raises:
        Misuse: It is missing, older or newer; the message says what to do.
    """
    if not await conn.fetchval(_HAS_SCHEMA):
        raise Misuse("this database has no reactor schema yet: run `reactor migrate`")
    await _check_owner(conn)
    have = {
        row["number"]: row["checksum"] for row in await conn.fetch("select number, checksum from reactor.migrations")
    }
    want = {number: checksum for number, _, _, checksum in sql_files()}
    if _newest(have) > _newest(want):
        raise Misuse("this database was migrated by a newer memory-reactor: upgrade the code")
    if have != want:
        raise Misuse("this database's reactor schema is of another release: run `reactor migrate`")


def _newest(numbers: Iterable[int]) -> int:
    """The number of the last file; the one that grants comes after all others and has its own for ever."""
    return max((number for number in numbers if number != _GRANTS), default=0)


# Read from the catalog: to_regclass() raises where the role may not use the schema.
_HAS_SCHEMA = (
    "select exists (select from pg_class where relname = 'migrations' and relnamespace = to_regnamespace('reactor'))"
)


async def _check_owner(conn: Connection) -> None:
    owner = await conn.fetchval(
        "select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'reactor'"
        " and pg_get_userbyid(nspowner) <> current_user"
    )
    if owner is not None:
        raise Misuse(f"schema reactor belongs to {owner}: migrate and run as that role")


async def _apply(conn: OwnConnection, say: Callable[[str], None]) -> bool:
    files = sql_files()
    await _check_owner(conn)
    known: list[asyncpg.Record] = []
    if await conn.fetchval(_HAS_SCHEMA):
        known = await conn.fetch("select number, checksum, release from reactor.migrations")
    newest, ours = _newest(row["number"] for row in known), _newest(number for number, *_ in files)
    if newest > ours:
        release = max(row["release"] for row in known if row["number"] == newest)
        raise Misuse(
            f"this database was migrated by memory-reactor {release} (file {newest:04}); "
            f"this is {version('memory-reactor')} (file {ours:04}): upgrade the code"
        )
    have = {row["number"]: row["checksum"] for row in known}
    if have == {number: checksum for number, _, _, checksum in files}:
        return False
    if not await conn.fetchval("select to_regnamespace('reactor') is not null"):
        await conn.execute("create schema reactor")  # "if not exists" needs CREATE all the same
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
    await conn.execute("delete from reactor.migrations where number <> all ($1)", [number for number, *_ in files])
    return True


async def _vector_schema(conn: OwnConnection) -> str:
    """The quoted schema of pgvector, installed into `extensions` (Supabase's habit) or our own when it is missing."""
    find = (
        "select quote_ident(nspname) as schema, extversion, has_schema_privilege(n.oid, 'usage') as is_usable "
        "from pg_extension e join pg_namespace n on n.oid = extnamespace where extname = 'vector'"
    )
    row = await conn.fetchrow(find)
    if row is None:
        in_extensions = "select coalesce(has_schema_privilege(to_regnamespace('extensions'), 'create'), false)"
        home = "extensions" if await conn.fetchval(in_extensions) else "reactor"
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
    if not row["is_usable"]:
        raise Misuse(
            f"pgvector is in schema {row['schema']}, which this role may not use: grant usage on that schema to it"
        )
    return str(row["schema"])


_PRODUCER_TABLE = "made by memory-reactor: reactor migrate --with-tables"  # the comment on a table of ours


async def _make_producer_tables(conn: OwnConnection, say: Callable[[str], None], *, again: bool) -> bool:
    """Make and attach the tables; nothing when they are there, unless `again`. True when anything was done."""
    are_attached = []
    for table in ("posts", "chat_messages", "tokens"):
        [state] = await conn.fetch(
            "select c.oid is not null as is_there, obj_description(c.oid, 'pg_class') = $2 as is_ours, "
            "exists (select from reactor.sources s where s.relation = c.oid and s.detached_at is null "
            "union all select from reactor.token_sources t where t.relation = c.oid) as is_attached "
            "from (select to_regclass('public.' || $1) as oid) c",
            table,
            _PRODUCER_TABLE,
        )
        if state["is_there"] and not state["is_ours"]:
            attach = "attach-tokens" if table == "tokens" else "attach"
            raise Misuse(f"public.{table} exists already: attach it instead (reactor {attach} --help)")
        are_attached.append(state["is_attached"])
    if all(are_attached) and not again:
        return False
    say("applying producer_tables.sql")
    await conn.execute((SQL_FOLDER / "producer_tables.sql").read_text("utf-8"))
    return True
