"""Lends a connection of a pool for one short use, for which nobody waits longer than it was lent for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from reactor.db import Connection, Pool, reaching

_CANCEL_S = 1.0


@asynccontextmanager
async def borrowed(pool: Pool, timeout_s: float) -> AsyncIterator[Connection]:
    """A connection for at most `timeout_s` seconds; what has not answered by then is canceled in Postgres, too.

    Raises:
        Unavailable: Postgres is out of reach, no connection came free, or it took too long.
    """
    with reaching(), anyio.fail_after(timeout_s):
        conn = await pool.acquire(timeout=timeout_s)
        try:
            yield conn
        finally:
            # A connection that cannot be given back in time is dropped by the pool; that is no failure of what it did.
            with anyio.CancelScope(shield=True), suppress(Exception):
                await pool.release(conn, timeout=_CANCEL_S)
