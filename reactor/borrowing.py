"""Lends a connection of a pool for one short use, for which nobody ever waits longer than it was lent for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import asyncpg

from reactor.db import Connection, Pool, reaching


@asynccontextmanager
async def borrowed(pool: Pool, timeout_s: float) -> AsyncIterator[Connection]:
    """A connection for at most `timeout_s` seconds; one that has not answered by then is dropped, not waited for.

    Raises:
        Unavailable: Postgres is out of reach, no connection came free, or it took too long.
    """
    with reaching(), anyio.fail_after(timeout_s):
        conn = await pool.acquire(timeout=timeout_s)
        try:
            yield conn
        except BaseException as exc:
            if not isinstance(exc, asyncpg.PostgresError):  # those are answers
                conn.terminate()
            raise
        finally:
            with anyio.CancelScope(shield=True):  # bounded: by the timeout it was acquired with
                await pool.release(conn)
