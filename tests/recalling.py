"""What tests of the read path share: memories written without a reactor, searches that can be counted and held, a proxy that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import asyncpg
import numpy as np
from pgvector import HalfVector

from reactor import db
from reactor.text import Chunk, chunk

LOCAL = "use-multilingual"
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


async def store(
    conn: asyncpg.Connection,
    tenant: str,
    source_id: str,
    text: str,
    *,
    kind: str = "post",
    source: int | None = None,
    metadata: dict | None = None,
    occurred_at: datetime | None = None,
    vectors: Sequence[np.ndarray | None] | None = None,
    model: str = LOCAL,
    version: int = 1,
) -> None:
    """One source row's memories, as the reactor would leave them; a source of posts unless another is given."""
    pieces = chunk(text) or [Chunk("", 0)]
    vectors = vectors or [None] * len(pieces)
    if source is None:
        source = await conn.fetchval("select id from reactor.sources where relation = 'posts'::regclass")
    if any(vector is not None for vector in vectors):
        async with scoped(conn, tenant):
            await conn.execute("select reactor.model_of($1, $2)", tenant, model)
    async with scoped(conn, tenant):
        await conn.execute(
            "select reactor.replace_memories($1, $2, $3, $4, $5, $6, $7, $8, $9, 'portuguese', $10, $11, $12, $13, $14)",
            tenant, source, [source_id], [version], [1] * len(pieces), list(range(len(pieces))), [p.overlap for p in pieces],
            [kind] * len(pieces), [p.content for p in pieces], [None if v is None else HalfVector(v) for v in vectors],
            [None if v is None else model for v in vectors], [metadata or {}] * len(pieces), [occurred_at] * len(pieces),
            [b"hash"] * len(pieces),
        )  # fmt: skip


async def store_one_of_each_kind(conn: asyncpg.Connection) -> None:
    """Rows "0" to "2" of acme about "bolo": a post, a chat and a note of three days from NOON on, each with its metadata."""
    for n, kind in enumerate(["post", "chat", "note"]):
        day = NOON + timedelta(days=n)
        await store(conn, "acme", str(n), "bolo", kind=kind, occurred_at=day, metadata={"n": n, "tags": ["a", kind]})


@asynccontextmanager
async def scoped(conn: asyncpg.Connection, tenant: str) -> AsyncIterator[None]:
    """One transaction as the worker."""
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant($1)", tenant)
        yield


class Searches:
    """The searches that reach Postgres: how many, and a gate that keeps acme's answers, already read, from leaving."""

    def __init__(self, conn: asyncpg.Connection, gate: asyncpg.Connection) -> None:
        self._conn = conn
        self._gate = gate

    async def count(self) -> int:
        return await self._conn.fetchval("select case when is_called then last_value else 0 end from public.searches")

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        await self._gate.execute("select pg_advisory_lock(42)")
        try:
            yield
        finally:
            await self._gate.execute("select pg_advisory_unlock(42)")

    async def waiting(self, count: int = 1) -> None:
        """Return once so many stand at the gate."""
        with anyio.fail_after(30):
            while (
                await self._conn.fetchval(
                    "select count(*) from pg_locks where locktype = 'advisory' and objid = 42 and not granted"
                )
                < count
            ):
                await anyio.sleep(0.01)


@asynccontextmanager
async def watched_searches(dsn: str) -> AsyncIterator[Searches]:
    conn, gate = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    arguments, result = await conn.fetchrow(
        "select pg_get_function_identity_arguments(oid), pg_get_function_result(oid) from pg_proc where oid = 'reactor.recall'::regproc"
    )
    await conn.execute(f"""
        create sequence public.searches;
        alter function reactor.recall({arguments}) rename to recall_itself;
        create function reactor.recall({arguments}) returns {result} language plpgsql as $$
        begin
            perform nextval('public.searches');
            return query select * from reactor.recall_itself($1, $2, $3, $4, $5, $6, $7, $8, $9);
            if $1 = 'acme' then
                perform pg_advisory_xact_lock_shared(42);
            end if;
        end
        $$""")
    try:
        yield Searches(conn, gate)
    finally:
        await gate.close()
        await conn.close()


class Proxy:
    """A TCP address in front of a server's socket, which can be slow, silent, refuse with an SQLSTATE, or break off."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None
        self.address = ""
        self.accepted = 0
        self.refuse_with: str | None = None
        self.takes = True  # False: new connections hear nothing
        self.delay_s = 0.0  # of each packet, either way

    def dsn(self, database: str, user: str = "postgres") -> str:
        return f"postgresql://{user}:secret@{self.address}/{database}?sslmode=disable"

    def go_silent(self) -> None:
        """As if a cable were cut: nobody is told."""
        self.takes = False
        for task in self._tasks:
            task.cancel()

    def break_off(self) -> None:
        """Every connection is reset."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        if not self.takes:
            return
        if (sqlstate := self.refuse_with) is not None:
            await reader.read(10_000)
            fields = b"SFATAL\0VFATAL\0C" + sqlstate.encode() + b"\0Mrefused by the proxy\0\0"
            writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
            writer.close()
            return
        up_reader, up_writer = await asyncio.open_unix_connection(self._socket)
        self._writers.add(up_writer)
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                sink.write(data)
            sink.close()


@asynccontextmanager
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy to the server of a DSN with a socket (`?host=/folder`)."""
    proxy = Proxy(Path(dsn.partition("host=")[2]) / ".s.PGSQL.5432")
    server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        proxy.go_silent()
        proxy.break_off()
        await anyio.sleep(0)


async def connected(dsn: str) -> asyncpg.Connection:
    conn = await asyncpg.connect(dsn)
    await db.prepare_connection(conn)
    return conn
