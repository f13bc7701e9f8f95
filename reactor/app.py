"""Composition: opens the resources, binds the handlers, runs the loops in one task group."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import asyncpg
from pydantic import SecretStr

from reactor import db
from reactor.embedder import Embedder
from reactor.errors import Misuse, Unavailable
from reactor.jobs import Jobs
from reactor.listener import Listener, Wakeup, hears
from reactor.loading import bind, load_handlers, wanted_by
from reactor.log import Log, get_log
from reactor.models import Embedders
from reactor.refresher import Refresher
from reactor.schedules import fire_due
from reactor.settings import Settings
from reactor.tokens import Tokens
from reactor.worker import Worker

if TYPE_CHECKING:
    import aiohttp

_CLOSE_S = 2.0
_SWITCH_S = (
    0.0005  # beside the local model's thread every answer of Postgres waits this long for the interpreter, not 5 ms
)
_LOOK_S = 30.0
_WORK_S = 30.0  # a connection that is half open says nothing
_SCHEDULES_S = 60.0  # the floor under a schedule changed unheard
_HEALTH_S = 60.0
_DEAF_S = 30.0  # a listener that reconnects is no news
_SWEEP_TOKENS_S = 60.0
_JOURNAL_S = 5.0  # between two looks into this host's journal
_AWAY_S = 300.0  # a lane that rests is no news either
_SLEPT_S = 2.0  # the wall clock ahead of the monotonic one by this much: the machine slept


async def run(settings: Settings, dsn: str) -> None:
    """Be a reactor until SIGTERM or SIGINT: claim, run, settle; then drain. A second signal ends it at once.

    Waits for a Postgres that is away, at start as later.

    Raises:
        Misuse: The environment, the handlers or the database's schema are not what this release needs.
    """
    log = get_log()
    sys.setswitchinterval(_SWITCH_S)
    workers: list[Worker] = []
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stop_on_signal, workers, tasks.cancel_scope, log)
            async with reactor(settings, dsn, log=log) as worker:
                workers.append(worker)
                await worker.run()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        for exc in group.exceptions:
            if isinstance(exc, Misuse):
                raise exc from None
        raise
    log.info("stopped")
    if workers and workers[0].hangs:  # the event loop would wait for its tasks for ever
        sys.stdout.flush()
        os._exit(0)


async def _stop_on_signal(workers: list[Worker], scope: anyio.CancelScope, log: Log) -> None:
    """Drain the worker; end at once on a second signal, or when there is no worker yet."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        stopping = False
        async for received in signals:
            if stopping:
                log.warning("stopped_at_once", signal=received.name)
            if stopping or not workers:
                scope.cancel()
                return
            stopping = True
            log.info("stopping", signal=received.name)
            workers[0].stop()


@asynccontextmanager
async def reactor(settings: Settings, dsn: str, *, log: Log) -> AsyncIterator[Worker]:
    """A worker with its listener and schedule running around it; call `worker.run()` inside."""
    handlers = load_handlers(settings.handlers)
    async with AsyncExitStack() as stack:
        embedders = Embedders(settings)
        stack.push_async_callback(embedders.aclose)
        if embedders.target is None:
            raise Misuse(
                "there is nothing to embed with: set VOYAGE_API_KEY, "
                "or pip install 'memory-reactor[embedded]' for the local model"
            )
        place = await _wait_for_schema(dsn, log)
        # Behind a transaction pooler a prepared statement is some other session's.
        cache = 100 if place.hears else 0
        application = "memory-reactor worker"
        pool = await db.create_pool(dsn, application=application, size=settings.pool_size, statement_cache_size=cache)
        stack.push_async_callback(_close, pool)
        queue_pool = await db.create_pool(
            dsn, application=application, size=5, statement_cache_size=cache, resets=False
        )
        stack.push_async_callback(_close, queue_pool)
        resources: dict[str, Any] = {
            "pool": pool,
            "embedder": embedders.target,
            "embedders": embedders,
            "http": None,
            "log": log,
            "settings": settings,
        }
        tokens = Tokens(pool, settings=settings, log=log)
        stack.push_async_callback(tokens.aclose)
        resources |= {"tokens": tokens, "refresher": tokens.refresher}
        webhook = settings.alert_webhook
        if webhook or any("http" in wanted_by(type_, handler, resources) for type_, handler in handlers.items()):
            import aiohttp  # noqa: PLC0415  # 10 MB that only who asks for it pays

            resources["http"] = await stack.enter_async_context(aiohttp.ClientSession())
        bound = bind(handlers, resources)
        name = f"{socket.gethostname()}:{os.getpid()}"
        jobs = Jobs(
            queue_pool,
            worker=name,
            lease=timedelta(seconds=settings.lease_s),
            instance=place.instance,
            snooze_limit=timedelta(days=settings.snooze_limit_d),
        )
        wakeup, schedules_bell, health_bell, alerts_bell = Wakeup(), Wakeup(), Wakeup(), Wakeup()

        def look_at_everything() -> None:
            for bell in (wakeup, schedules_bell, health_bell, alerts_bell):
                bell.ring("listener")

        def distrust_connections() -> None:  # the listener's was half-open, perhaps: then these are, too
            for one in (pool, queue_pool):
                tasks.start_soon(_drop_dead, one)
            look_at_everything()

        listener = Listener(
            dsn,
            {
                "reactor_wake": lambda _payload: wakeup.ring("notify"),
                "reactor_schedules": lambda _payload: schedules_bell.ring(),
                "reactor_alerts": lambda _payload: alerts_bell.ring(),
            },
            log=log,
            on_ready=look_at_everything,
            on_lost=distrust_connections,
        )
        worker = Worker(
            jobs, bound, wakeup=wakeup, watch=listener, poll_s=settings.poll_s, drain_s=settings.drain_s, log=log
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run)
            tasks.start_soon(_warm, embedders.target)
            tasks.start_soon(_owe_reconcile, queue_pool, settings.reconcile_s, log)
            tasks.start_soon(_fire_schedules, queue_pool, schedules_bell, log)
            tasks.start_soon(_check_health, queue_pool, worker, listener, health_bell, name, settings.stuck_s, log)
            tasks.start_soon(_sweep_tokens, tokens.refresher, log)
            tasks.start_soon(_recover_tokens, tokens.refresher, log)
            if webhook:
                tasks.start_soon(_tell_alerts, queue_pool, webhook, resources["http"], alerts_bell, log)
            tasks.start_soon(_notice_sleep, (wakeup, schedules_bell, alerts_bell))
            log.info("started", model=embedders.target.model, handlers=sorted(bound))
            yield worker
            tasks.cancel_scope.cancel()


async def _drop_dead(pool: db.Pool) -> None:
    """Ask every idle connection; what does not answer is dropped by the pool."""

    async def ask() -> None:
        with suppress(Unavailable, asyncpg.PostgresError):
            async with db.borrowed(pool, _CLOSE_S) as conn:
                await conn.execute("select 1")

    async with anyio.create_task_group() as asking:
        for _ in range(pool.get_idle_size()):
            asking.start_soon(ask)


async def _close(pool: db.Pool) -> None:
    with anyio.move_on_after(_CLOSE_S):  # a server that has gone says nothing; the pool then drops its connections
        await pool.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """The database as this process reaches it."""

    instance: str  # what tells it from others
    hears: bool  # notifications: no transaction pooler stands between


async def _wait_for_schema(dsn: str, log: Log) -> _Place:
    """Return once Postgres answers and its schema is ours.

    Raises:
        Misuse: The schema is missing or of another release.
    """
    delay_s, said = 0.5, ""
    while True:
        try:
            return await _look_at(dsn)
        except Unavailable as exc:
            if str(exc) != said:  # one line an outage, not one an attempt
                said = str(exc)
                log.warning("postgres_awaited", error_code=exc.code, reason=said)
            await anyio.sleep(delay_s * random.uniform(0.5, 1.5))  # noqa: S311  # jitter
            delay_s = min(delay_s * 2, 10.0)


async def _look_at(dsn: str) -> _Place:
    async with AsyncExitStack() as stack:
        conns = []
        for _ in range(2):
            conns.append(await db.connect(dsn, application="memory-reactor worker"))
            stack.callback(conns[-1].terminate)
        ours, other = conns
        try:
            with db.reaching(), anyio.fail_after(_LOOK_S):
                await db.check_schema(ours)
                instance: str = await ours.fetchval("select left(id::text, 8) from reactor.instance")
                try:
                    return _Place(instance, await hears(ours, other))
                except asyncpg.ProgramLimitExceededError:  # the queue of notifications is full: nobody hears anything
                    return _Place(instance, hears=False)
        except asyncpg.ReadOnlySQLTransactionError:
            raise Unavailable("Postgres is out of reach (it is a standby)", code="postgres") from None


async def _warm(embedder: Embedder) -> None:
    """Load the model now, so that the first row need not wait for it; a failure is left to that row."""
    with suppress(Unavailable):
        await embedder.warm()


async def _repeat(
    what: str, work: Callable[[], Awaitable[float]], log: Log, *, bell: Wakeup | None = None, retry_s: float = 5.0
) -> None:
    """Do it, sleep for as long as it says, do it again; an outage is one line."""
    bell, is_away = bell or Wakeup(), False
    while True:
        bell.clear()
        try:
            sleep_s = await work()
            is_away = False
        except (Unavailable, asyncpg.PostgresError) as exc:
            if not is_away:
                log.warning("upkeep_failed", what=what, error_code=getattr(exc, "code", type(exc).__name__))
            is_away, sleep_s = True, retry_s
        await bell.wait(sleep_s)


async def _owe_reconcile(pool: db.Pool, every_s: float, log: Log) -> None:
    """Owe a look at every source `every_s` from now; jobs owed already absorb each other."""

    async def work() -> float:
        async with db.borrowed(pool, _WORK_S) as conn:
            await conn.execute("select reactor.owe_reconcile($1)", timedelta(seconds=every_s))
        return every_s

    await _repeat("schedule", work, log, retry_s=min(every_s, 60.0))


async def _fire_schedules(pool: db.Pool, bell: Wakeup, log: Log) -> None:
    async def work() -> float:
        due_s = await fire_due(pool, log=log)
        return _SCHEDULES_S if due_s is None else min(due_s, _SCHEDULES_S)

    await _repeat("schedules", work, log, bell=bell)


async def _check_health(
    pool: db.Pool, worker: Worker, listener: Listener, bell: Wakeup, name: str, stuck_s: float, log: Log
) -> None:
    """Once a minute: alerts for what stands still, opened and closed; and whether this reactor hears notifications."""

    async def work() -> float:
        deaf_s = None if listener.deaf_since is None else time.monotonic() - listener.deaf_since
        away, well = worker.lanes(_AWAY_S)
        async with db.borrowed(pool, _WORK_S) as conn:
            for event, cause, subject in await conn.fetch(
                "select * from reactor.check_health($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                name,
                socket.gethostname(),
                listener.state,
                listener.reason,
                deaf_s is not None and deaf_s >= _DEAF_S,
                away,
                well,
                timedelta(seconds=stuck_s),
                timedelta(seconds=2.5 * _HEALTH_S),
            ):
                log.log(logging.ERROR if event == "alert_opened" else logging.INFO, event, cause=cause, subject=subject)
        return _HEALTH_S if deaf_s is None or deaf_s >= _DEAF_S else min(_DEAF_S - deaf_s, _HEALTH_S)

    try:
        await _repeat("health_check", work, log, bell=bell)
    finally:
        with anyio.CancelScope(shield=True), suppress(Unavailable, asyncpg.PostgresError):
            async with db.borrowed(pool, _CLOSE_S) as conn:
                await conn.execute("delete from reactor.reactors where name = $1", name)


async def _sweep_tokens(refresher: Refresher, log: Log) -> None:
    is_first = True

    async def work() -> float:
        nonlocal is_first
        await refresher.sweep()
        if is_first:
            await refresher.say_plain()
            is_first = False
        return _SWEEP_TOKENS_S

    await _repeat("sweep_tokens", work, log)


async def _recover_tokens(refresher: Refresher, log: Log) -> None:
    """At start, and whenever an answer is left in the journal: what a process of this host could not finish."""
    is_first = True

    async def work() -> float:
        nonlocal is_first
        if is_first or await anyio.to_thread.run_sync(refresher.is_owed):
            await refresher.recover()
            is_first = False
        return _JOURNAL_S

    await _repeat("recover_tokens", work, log)


async def _tell_alerts(pool: db.Pool, url: SecretStr, http: aiohttp.ClientSession, bell: Wakeup, log: Log) -> None:
    from reactor.webhook import deliver  # noqa: PLC0415  # it imports aiohttp

    await _repeat("webhook", lambda: deliver(pool, url, http=http, log=log), log, bell=bell)


async def _notice_sleep(bells: Sequence[Wakeup]) -> None:
    """A machine that slept has timers behind the wall clock: look at once."""
    apart_s = time.time() - time.monotonic()
    while True:
        await anyio.sleep(1.0)
        before_s, apart_s = apart_s, time.time() - time.monotonic()
        if apart_s - before_s > _SLEPT_S:
            for bell in bells:
                bell.ring("slept")
