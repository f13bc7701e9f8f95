"""Holds the LISTEN connection, reconnects, and rings a doorbell that also knows how to be slept on."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import anyio
import asyncpg

from reactor.db import connect, reaching
from reactor.errors import Unavailable
from reactor.log import Log


class Wakeup:
    """A doorbell: however often it rings before somebody looks, it says one thing, "look at the table"."""

    def __init__(self) -> None:
        self._rung = anyio.Event()

    def ring(self) -> None:
        """Wake the sleeper, or let the next one not fall asleep."""
        self._rung.set()

    def clear(self) -> None:
        """Forget earlier rings: called before the look they ask for, never after."""
        if self._rung.is_set():
            self._rung = anyio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Sleep until rung; False when nobody rang for `timeout_s` seconds."""
        with anyio.move_on_after(timeout_s):
            await self._rung.wait()
            return True
        return False


class Listener:
    """Listens on channels of one database for as long as `run` runs, through restarts of it.

    Args:
        dsn: A direct or session-pooled connection; a transaction pooler hears nothing.
        channels: What to call with the payload of each notification of a channel.
        on_ready: Called whenever listening (again): whatever was sent meanwhile was missed.
        on_lost: Called when the connection is gone.
        beat_s: How often a silent connection is asked whether it lives.
    """

    def __init__(
        self,
        dsn: str,
        channels: Mapping[str, Callable[[str], None]],
        *,
        log: Log,
        on_ready: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        application: str = "memory-reactor listener",
        beat_s: float = 30.0,
    ) -> None:
        self._dsn = dsn
        self._channels = channels
        self._log = log
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._application = application
        self._beat_s = beat_s

    async def run(self) -> None:
        """Listen until cancelled. Retries with a jittered delay of at most 10 s; never raises for an outage."""
        delay_s = 0.1
        says_lost = True
        while True:
            reason, was_ready = await self._listen()
            if was_ready:
                self._on_lost()
                delay_s = 0.1
            if was_ready or says_lost:  # one line an outage, not one an attempt
                self._log.warning("listener_lost", reason=reason)
            says_lost = False
            await anyio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311  # jitter
            delay_s = min(delay_s * 2, 10.0)

    async def _listen(self) -> tuple[str, bool]:
        """One connection's life; returns why it ended and whether it ever listened."""
        was_ready = False
        lost = anyio.Event()
        conn = None
        try:
            conn = await connect(self._dsn, application=self._application)
            conn.add_termination_listener(lambda _conn: lost.set())
            with reaching():
                for channel, heard in self._channels.items():
                    await conn.add_listener(
                        channel, lambda _conn, _pid, _channel, payload, heard=heard: heard(str(payload))
                    )
                was_ready = True
                self._log.info("listener_ready")
                self._on_ready()
                while True:
                    with anyio.move_on_after(self._beat_s):
                        await lost.wait()
                        return "the connection was closed", was_ready
                    await conn.execute("select 1", timeout=self._beat_s)  # a half-open socket is silent
        except Unavailable as exc:
            return str(exc), was_ready
        except asyncpg.PostgresError as exc:  # a standby refuses LISTEN, for one
            return f"{type(exc).__name__} {exc.sqlstate}", was_ready
        finally:
            if conn is not None:
                conn.terminate()
