"""Lends a connection of a pool for one short use, for which nobody waits longer than it was lent for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import anyio

from reactor.db import Connection, Pool, reaching
from reactor.errors import Unavailable

_CANCEL_S = 1.0


@contextmanager
def _in_time(timeout_s: float) -> Iterator[anyio.CancelScope]:
    with anyio.move_on_after(timeout_s) as scope:
        yield scope
    if scope.cancelled_caught:
        raise Unavailable("Postgres did not answer in time", code="deadline")


@asynccontextmanager
async def borrowed(pool: Pool, timeout_s: float, *, connect_s: float | None = None) -> AsyncIterator[Connection]:
    """A connection for at most `timeout_s` seconds; what has not answered by then is canceled in Postgres, too.

    `connect_s`: how long it may take to have one, where that is not to count.

    Raises:
        Unavailable: Postgres is out of reach; or, as code "deadline", no connection came free or it took too long.
    """
    with reaching(), _in_time(connect_s or timeout_s) as waiting:
        conn = await pool.acquire()
        if connect_s is not None:
            waiting.deadline = anyio.current_time() + timeout_s
        try:
            yield conn
        finally:
            # A connection that cannot be given back in time is dropped by the pool; that is no failure of what it did.
            with anyio.CancelScope(shield=True), suppress(Exception):
                await pool.release(conn, timeout=_CANCEL_S)
