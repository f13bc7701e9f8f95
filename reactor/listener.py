"""Holds the LISTEN connection, sleeps safely on it, reconnects, and rings a doorbell."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Literal

import anyio
import asyncpg

from reactor.db import OwnConnection, connect, reaching
from reactor.errors import Unavailable
from reactor.log import Log

_FIRST_RETRY_S = 0.1
_MOST_RETRY_S = 10.0
_SETUP_S = 30.0
_POLLING_RETRY_S = 60.0  # between two looks whether a transaction pooler still stands between
_DEAF = (
    "notifications do not arrive: a transaction pooler stands between, so the table is polled instead; "
    "use the session pooler (Supabase: port 5432) or the direct address"
)
# None is sent while the queue of notifications is nearly full, because some listener sits in a transaction.
_BEAT = "select pg_notify('{}', '') where pg_notification_queue_usage() < 0.9"


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


async def hears(ours: OwnConnection, other: OwnConnection) -> bool:
    """Whether a notification sent through `other` arrives at `ours`: through a transaction pooler it does not."""
    heard, canary = anyio.Event(), f"reactor_canary_{secrets.token_hex(8)}"
    await ours.add_listener(canary, lambda *_: heard.set())
    # Asking how full the queue of notifications is also frees what everybody has read.
    await other.execute(f"select pg_notify('{canary}', '') where pg_notification_queue_usage() <= 1")
    await ours.execute("unlisten *")  # what was sent before comes before this answer, however late we read it
    return heard.is_set()


State = Literal["listening", "polling", "down"]


class Listener:
    """Listens on channels of one database for as long as `run` runs, through restarts of it.

    A canary sent through another connection must come back before it counts as listening, and one of its own every
    `beat_s` from then on: neither a transaction pooler nor a half-open connection gives any other sign. No pool has a
    part in it: all its connections may be half-open, too, or lent.

    Args:
        dsn: A direct or session-pooled connection; a transaction pooler is found out, and said once.
        channels: What to call with the payload of each notification of a channel.
        on_ready: Called whenever listening (again): whatever was sent meanwhile was missed.
        on_lost: Called whenever `state` becomes another than that.
        beat_s: Between two canaries.
        patience_s: How long an answer may take.
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
        beat_s: float = 5.0,
        patience_s: float = 3.0,
    ) -> None:
        self._dsn = dsn
        self._channels = channels
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
        self.reason = ""
        """Why it does not listen."""
        self.deaf_since: float | None = time.monotonic()
        self.is_armed = False
        self._is_relied_on = False  # was armed since it last handed over

    async def run(self) -> None:
        """Listen until cancelled. Retries with a jittered delay of at most 10 s; never raises for an outage."""
        delay_s = _FIRST_RETRY_S
        said: str | None = None  # one line an outage, not one an attempt
        while True:
            reason, was_ready = await self._listen()
            if was_ready:
                delay_s, said = _FIRST_RETRY_S, None
            is_deaf = reason == _DEAF
            self.reason = reason
            if said is None or (said == _DEAF) != is_deaf:
                self._log.warning("listener_lost", reason=reason)
                said = reason
            self._become("polling" if is_deaf else "down")
            await anyio.sleep((_POLLING_RETRY_S if is_deaf else delay_s) * random.uniform(0.5, 1.5))  # noqa: S311
            delay_s = min(delay_s * 2, _MOST_RETRY_S)

    def _become(self, state: State) -> None:
        if state == self.state:
            return
        self.state = state
        if state == "listening":
            self.reason, self.deaf_since = "", None
            self._on_ready()
        else:
            self.deaf_since = self.deaf_since or time.monotonic()
            self._on_lost()

    async def _listen(self) -> tuple[str, bool]:
        """One connection's life; returns why it ended and whether it ever listened."""
        lost = anyio.Event()
        conn = None
        try:
            conn = await connect(self._dsn, application=f"{self._application} connecting")
            conn.add_termination_listener(lambda _conn: lost.set())
            with reaching(), anyio.fail_after(_SETUP_S):
                other = await connect(self._dsn, application=f"{self._application} connecting")
                try:
                    if not await hears(conn, other):
                        return _DEAF, False
                finally:
                    other.terminate()
                await conn.add_listener(self._canary, lambda *_: self._heard.set())
                for channel, heard in self._channels.items():
                    await conn.add_listener(
                        channel, lambda _conn, _pid, _channel, payload, heard=heard: heard(str(payload))
                    )
                await self._settle_in(conn)
            self._conn = conn
            self._log.info("listener_ready")
            self._become("listening")
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
        self._heard = anyio.Event()
        async with self._turn:
            sent = await conn.execute(_BEAT.format(self._canary), timeout=self._patience_s)
        return self._heard.is_set() or sent == "SELECT 0"

    async def _settle_in(self, conn: OwnConnection) -> None:
        """Be seen as listening; end one's own former session, which may still hold the watch after a half-open end."""
        async with self._turn:
            await conn.execute(
                "select set_config('application_name', $1, false), set_config('synchronous_commit', 'off', false), "
                "set_config('tcp_keepalives_idle', '15', false), "
                "set_config('tcp_keepalives_interval', '5', false), set_config('tcp_keepalives_count', '3', false)",
                self._application,
            )
            if self._last_session is not None:
                # Behind a session pooler it may have passed to another, or back to us.
                await conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where pid = $1 and backend_start = $2 "
                    "and usename = current_user and application_name = $3 and pid <> pg_backend_pid()",
                    *self._last_session,
                    self._application,
                )
            self._last_session = await conn.fetchrow(
                "select pid, backend_start from pg_stat_activity where pid = pg_backend_pid()"
            )

    async def arm(self) -> str | None:
        """Before sleeping: see `reactor.arm` in sql/0002. None when not listening, so that only polling is left.

        `armed` asks for one more look before the sleep; whoever writes later rings.
        """
        conn = self._conn
        answer = await self._ask("select reactor.arm()")
        if answer == "armed" and self._conn is conn:  # and was not lost meanwhile
            self.is_armed = self._is_relied_on = True
        return answer

    async def disarm(self, *, hand_over: bool) -> None:
        """Awake; `hand_over` rings the other reactors, which slept relying on us, be it before an earlier disarming."""
        if self.is_armed:
            self.is_armed, self._is_relied_on = False, not hand_over
            await self._ask("select reactor.disarm($1)", hand_over)
        elif hand_over and self._is_relied_on:
            self._is_relied_on = False
            await self._ask("select pg_notify('reactor_wake', '') where pg_notification_queue_usage() < 0.9")

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
