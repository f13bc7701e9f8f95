"""Reads of one statement as cheap as the way to Postgres allows, each under its caller's deadline."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
import asyncpg

from reactor import db
from reactor.errors import Unavailable
from reactor.listener import hears

APPLICATION = "memory-reactor tokens"
_POOL_SIZE = 5
_LOCK_TIMEOUT_S = 0.5


class Reads:
    """Reads, of one event loop.

    Args:
        pool: Whatever stands between, it works.
        dsn: Where to look, once, whether a connection is a session of its own: then one is kept at hand, with its
            prepared statements. Behind a transaction pooler these are some other session's. None: do not look.
    """

    def __init__(self, pool: db.Pool, dsn: str | None = None) -> None:
        self._pool = pool
        self._dsn = dsn
        self._line = db.Line(pool, statement_s=None)
        self._watch = _Watch(self._line)
        self._is_busy = False
        self._looking = anyio.Lock()
        self._closes = AsyncExitStack()

    async def fetch(self, query: str, *args: object, until: float) -> list[asyncpg.Record]:
        """Its rows. `until`: by the event loop's clock.

        Raises:
            Unavailable: Postgres is out of reach, or does not answer by then.
        """
        if not self._is_busy and self._line.is_open:
            self._is_busy = True
            self._watch.start(until)
            try:
                with db.reaching():
                    return await self._line.fetch(query, *args)
            finally:
                self._watch.stop()
                self._is_busy = False
        with anyio.CancelScope(deadline=until):
            if self._dsn is not None:
                async with self._looking:
                    if self._dsn is not None:
                        await self._look(self._dsn)
            if self._is_busy or not self._line.is_kept:
                return await db.fetch(self._pool, query, *args)
            self._is_busy = True
            try:
                with db.reaching():
                    return await self._line.fetch(query, *args)
            finally:
                self._is_busy = False
        raise Unavailable("Postgres did not answer in time", code="deadline")

    async def _look(self, dsn: str) -> None:
        if await _is_session(dsn):
            # One table that somebody has locked must not keep back the tokens of the others.
            pool = db.create_pool(
                dsn, application=APPLICATION, size=_POOL_SIZE, resets=False, lock_timeout_s=_LOCK_TIMEOUT_S
            )
            self._pool = await self._closes.enter_async_context(pool)
            self._line = db.Line(self._pool, statement_s=None)
            self._line.is_kept = True
            self._watch = _Watch(self._line)
        self._dsn = None

    async def aclose(self) -> None:
        """Close what was opened here."""
        self._watch.close()
        await self._line.let_go()
        await self._closes.aclose()


class _Watch:
    """Cuts a line whose statement takes too long. One timer for all: to set one each costs a fifth of a read."""

    def __init__(self, line: db.Line) -> None:
        self._line = line
        self._until: float | None = None  # None: no statement is under way
        self._timer: asyncio.TimerHandle | None = None

    def start(self, until: float) -> None:
        self._until = until
        if self._timer is None or self._timer.when() > until:
            self.close()
            self._timer = asyncio.get_running_loop().call_at(until, self._look)

    def stop(self) -> None:
        self._until = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._until is None:
            return
        loop = asyncio.get_running_loop()
        if self._until <= loop.time():
            self._line.cut()
        else:
            self._timer = loop.call_at(self._until, self._look)


async def _is_session(dsn: str) -> bool:
    async with AsyncExitStack() as stack:
        conns = []
        for _ in range(2):
            conns.append(await db.connect(dsn, application=f"{APPLICATION} connecting"))
            stack.callback(conns[-1].terminate)
        ours, other = conns
        try:
            with db.reaching():
                return await hears(ours, other)
        except asyncpg.PostgresError:  # a standby, or a full queue of notifications: it works without
            return False
