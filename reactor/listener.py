"""Holds the LISTEN connection, sleeps safely on it, reconnects, and rings a doorbell."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import anyio
import asyncpg

from reactor.db import OwnConnection, connect, reaching
from reactor.errors import Unavailable
from reactor.log import Log

_POLLING_RETRY_S = 60.0  # between two looks whether a transaction pooler still stands between
_DEAF = (
    "notifications do not arrive: a transaction pooler stands between, so the table is polled instead; "
    "use the session pooler (Supabase: port 5432) or the direct address"
)


class Wakeup:
    """A doorbell: however often it rings before somebody looks, it says one thing, "look at the table"."""

    def __init__(self) -> None:
        self._rung = anyio.Event()
        self.reason = ""

    def ring(self, reason: str = "") -> None:
        """Wake the sleeper, or let the next one not fall asleep; the first reason since the last look is kept."""
        if not self._rung.is_set():
            self.reason = reason
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


State = Literal["listening", "polling", "down"]
Watch = Literal["armed", "in_flight", "watched"]


class Listener:
    """Listens on channels of one database for as long as `run` runs, through restarts of it.

    A canary, a notification to itself sent through another connection, must come back before it counts as listening
    and every `beat_s` from then on: neither a transaction pooler nor a half-open connection gives any other sign.

    Args:
        dsn: A direct or session-pooled connection; a transaction pooler is found out, and said once.
        channels: What to call with the payload of each notification of a channel.
        notify: Sends an empty notification on a channel, through another connection. Raises Unavailable.
        on_ready: Called whenever listening (again): whatever was sent meanwhile was missed.
        on_lost: Called when the connection is gone.
        beat_s: Between two canaries.
        patience_s: How long one may take.
    """

    def __init__(
        self,
        dsn: str,
        channels: Mapping[str, Callable[[str], None]],
        *,
        notify: Callable[[str], Awaitable[None]],
        log: Log,
        on_ready: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        application: str = "memory-reactor listener",
        beat_s: float = 5.0,
        patience_s: float = 3.0,
    ) -> None:
        self._dsn = dsn
        self._channels = channels
        self._notify = notify
        self._log = log
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._application = application
        self._beat_s = beat_s
        self._patience_s = patience_s
        self._canary = f"reactor_canary_{secrets.token_hex(8)}"
        self._heard = anyio.Event()
        self._conn: OwnConnection | None = None  # while listening
        self._turn = anyio.Lock()  # a connection does one thing at a time
        self._last_session: asyncpg.Record | None = None
        self.state: State = "down"
        self.state_since = time.monotonic()
        self.is_armed = False

    async def run(self) -> None:
        """Listen until cancelled. Retries with a jittered delay of at most 10 s; never raises for an outage."""
        delay_s = 0.1
        said: str | None = None  # one line an outage, not one an attempt
        while True:
            reason, was_ready = await self._listen()
            if was_ready:
                delay_s, said = 0.1, None
                self._on_lost()
            is_deaf = reason == _DEAF
            if said is None or (said == _DEAF) != is_deaf:
                self._log.warning("listener_lost", reason=reason)
                said = reason
            self._become("polling" if is_deaf else "down")
            await anyio.sleep((_POLLING_RETRY_S if is_deaf else delay_s) * random.uniform(0.5, 1.5))  # noqa: S311
            delay_s = min(delay_s * 2, 10.0)

    def _become(self, state: State) -> None:
        if state != self.state:
            self.state, self.state_since = state, time.monotonic()

    async def _listen(self) -> tuple[str, bool]:
        """One connection's life; returns why it ended and whether it ever listened."""
        lost = anyio.Event()
        conn = None
        try:
            conn = await connect(self._dsn, application=f"{self._application} connecting")
            conn.add_termination_listener(lambda _conn: lost.set())
            with reaching():
                for channel, heard in self._channels.items():
                    await conn.add_listener(
                        channel, lambda _conn, _pid, _channel, payload, heard=heard: heard(str(payload))
                    )
                await conn.add_listener(self._canary, lambda *_: self._heard.set())
                if not await self._comes_back(conn):
                    return _DEAF, False
                await self._settle_in(conn)
            self._conn = conn
            self._become("listening")
            self._log.info("listener_ready")
            self._on_ready()
            with reaching():
                while True:
                    with anyio.move_on_after(self._beat_s):
                        await lost.wait()
                        return "the connection was closed", True
                    if not await self._comes_back(conn):
                        return "no canary came back", True
        except Unavailable as exc:
            return str(exc), self._conn is not None
        except asyncpg.PostgresError as exc:  # a standby refuses LISTEN, for one
            return f"{type(exc).__name__} {exc.sqlstate}", self._conn is not None
        finally:
            self._conn, self.is_armed = None, False
            if conn is not None:
                conn.terminate()

    async def _comes_back(self, conn: OwnConnection) -> bool:
        """Whether a notification sent elsewhere arrives; also True when none could be sent and the session lives."""
        self._heard = anyio.Event()
        try:
            await self._notify(self._canary)
        except Unavailable:
            self._heard.set()  # the others have no connection; what can be asked is whether ours is one
        else:
            with anyio.move_on_after(self._patience_s):
                await self._heard.wait()
                return True
        # A loop that was blocked sees its timers first: what came meanwhile stands before this answer in the stream.
        async with self._turn:
            await conn.execute("select 1", timeout=self._patience_s)
        return self._heard.is_set()

    async def _settle_in(self, conn: OwnConnection) -> None:
        """Be seen as listening; end one's own former session, which may still hold the watch after a half-open end."""
        async with self._turn:
            await conn.execute(
                "select set_config('application_name', $1, false), set_config('tcp_keepalives_idle', '15', false), "
                "set_config('tcp_keepalives_interval', '5', false), set_config('tcp_keepalives_count', '3', false)",
                self._application,
            )
            if self._last_session is not None:
                await conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where pid = $1 and backend_start = $2 and usename = current_user",
                    *self._last_session,
                )
            self._last_session = await conn.fetchrow(
                "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"
            )

    async def arm(self) -> Watch | None:
        """Before sleeping: see `reactor.arm` in sql/0002. None when not listening, so that only polling is left.

        `armed` asks for one more look before the sleep; whoever writes later rings.
        """
        answer = await self._ask("select reactor.arm()")
        self.is_armed = answer == "armed"
        return answer  # type: ignore[return-value]

    async def disarm(self, *, hand_over: bool) -> None:
        """Awake; `hand_over` rings the other reactors, which slept relying on us."""
        if self.is_armed:
            self.is_armed = False
            await self._ask("select reactor.disarm($1)", hand_over)

    async def _ask(self, query: str, *args: object) -> str | None:
        if self._conn is None:
            return None
        conn = self._conn
        try:
            async with self._turn:
                with reaching():
                    answer: str | None = await conn.fetchval(query, *args, timeout=self._patience_s)
                    return answer
        except (Unavailable, asyncpg.PostgresError):
            conn.terminate()  # `run` notices
            return None
