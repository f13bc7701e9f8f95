"""Composition: opens the resources, binds the handlers, runs the loops in one task group."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import anyio
import asyncpg

from reactor import db
from reactor.embedder import Embedder
from reactor.errors import Misuse, Unavailable
from reactor.jobs import Jobs
from reactor.listener import Listener, Wakeup
from reactor.loading import bind, load_handlers, wanted_by
from reactor.log import Log, get_log
from reactor.models import Embedders
from reactor.settings import Settings
from reactor.worker import Worker

_CLOSE_S = 2.0
_SWITCH_S = (
    0.0005  # beside the local model's thread every answer of Postgres waits this long for the interpreter, not 5 ms
)


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
        pool = await db.create_pool(dsn, application="memory-reactor worker", size=settings.pool_size)
        stack.push_async_callback(_close, pool)
        embedders = Embedders(settings)
        stack.push_async_callback(embedders.aclose)
        if embedders.target is None:
            raise Misuse(
                "there is nothing to embed with: set VOYAGE_API_KEY, "
                "or pip install 'memory-reactor[embedded]' for the local model"
            )
        resources: dict[str, Any] = {
            "pool": pool,
            "embedder": embedders.target,
            "embedders": embedders,
            "http": None,
            "log": log,
            "settings": settings,
        }
        if any("http" in wanted_by(type_, handler, resources) for type_, handler in handlers.items()):
            import aiohttp  # noqa: PLC0415  # 10 MB that only a handler who asks for it pays

            resources["http"] = await stack.enter_async_context(aiohttp.ClientSession())
        bound = bind(handlers, resources)
        await _wait_for_schema(pool, log)
        jobs = Jobs(pool, worker=f"{socket.gethostname()}:{os.getpid()}", lease=timedelta(seconds=settings.lease_s))
        wakeup = Wakeup()
        worker = Worker(jobs, bound, wakeup=wakeup, poll_s=settings.poll_s, drain_s=settings.drain_s, log=log)
        listener = Listener(dsn, {"reactor_wake": lambda _payload: wakeup.ring()}, log=log, on_ready=wakeup.ring)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run)
            tasks.start_soon(_warm, embedders.target)
            tasks.start_soon(_schedule_reconcile, pool, settings.reconcile_s, log)
            log.info("started", model=embedders.target.model, handlers=sorted(bound))
            yield worker
            tasks.cancel_scope.cancel()


async def _close(pool: db.Pool) -> None:
    with anyio.move_on_after(_CLOSE_S):  # a server that has gone says nothing; the pool then drops its connections
        await pool.close()


async def _wait_for_schema(pool: db.Pool, log: Log) -> None:
    """Return once Postgres answers and its schema is ours.

    Raises:
        Misuse: The schema is missing or of another release.
    """
    delay_s = 0.5
    while True:
        try:
            with db.reaching():
                async with pool.acquire(timeout=10.0) as conn:
                    await db.check_schema(conn)
                    return
        except Unavailable as exc:
            log.warning("postgres_awaited", error_code=exc.code, reason=str(exc))
            await anyio.sleep(delay_s)
            delay_s = min(delay_s * 2, 10.0)


async def _warm(embedder: Embedder) -> None:
    """Load the model now, so that the first row need not wait for it; a failure is left to that row."""
    with suppress(Unavailable):
        await embedder.warm()


async def _schedule_reconcile(pool: db.Pool, every_s: float, log: Log) -> None:
    """Owe a look at every source `every_s` from now; jobs owed already absorb each other."""
    while True:
        try:
            with db.reaching():
                async with pool.acquire(timeout=10.0) as conn:
                    await conn.execute(
                        "select reactor.enqueue_job('reconcile', '{}', '', 'all', now() + $1, 'upkeep', 5) "
                        "where not exists (select from reactor.jobs where tenant_id = '' and type = 'reconcile' "
                        "and dedupe_key = 'all' and status in ('pending', 'failed'))",
                        timedelta(seconds=every_s),
                    )
        except (Unavailable, asyncpg.PostgresError) as exc:
            log.warning("schedule_failed", error_code=getattr(exc, "code", type(exc).__name__))
            await anyio.sleep(min(every_s, 60.0))
        else:
            await anyio.sleep(every_s)
