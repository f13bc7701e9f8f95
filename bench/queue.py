"""The queue's contestants, one a process: `python -m bench.queue NAME DSN` prints one number or a list of them as JSON.

`raw` is the least that could be done with asyncpg: claim, call nothing, update to done. `pgqueuer` is run as its own
benchmark runs it. Ours is the whole reactor's worker: leases, tenants in turn, results kept, settled one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import asyncpg

from reactor import db
from reactor.job import Bound, Handler, Job
from reactor.jobs import Jobs
from reactor.listener import Listener, Wakeup
from reactor.log import get_log
from reactor.worker import Worker

JOBS = 20_000
BATCH = 500
LATENCIES = 200

RAW_TABLE = """
    create table jobs (id bigint generated always as identity primary key, kind text not null,
        payload jsonb not null default '{}', state text not null default 'pending', priority smallint not null default 0,
        run_at timestamptz not null default now(), attempts int not null default 0, lease_until timestamptz, worker text,
        dedupe_key text, finished_at timestamptz) with (fillfactor = 70);
    create index on jobs (priority, run_at, id) where state = 'pending';
    create index on jobs (lease_until) where state = 'running';
    create unique index on jobs (dedupe_key) where state in ('pending', 'running');
    create function ring() returns trigger language plpgsql as $$ begin perform pg_notify('jobs', ''); return null; end $$;
    create trigger ring after insert on jobs for each statement execute function ring();
"""
RAW_CLAIM = """
    with due as materialized (
        select id from jobs where state = 'pending' and run_at <= now() order by priority, run_at, id limit $1
        for update skip locked)
    update jobs j set state = 'running', attempts = attempts + 1, lease_until = now() + interval '60 s', worker = 'w1'
    from due where j.id = due.id returning j.id, j.kind, j.payload, j.attempts
"""
RAW_DONE = (
    "update jobs set state = 'done', finished_at = now(), lease_until = null where id = any ($1) and state = 'running'"
)


async def fresh(dsn: str, name: str) -> str:
    conn = await asyncpg.connect(dsn)
    await conn.execute(f"drop database if exists {name} with (force)")
    await conn.execute(f"create database {name}")
    await conn.close()
    return dsn.replace("/reactor?", f"/{name}?")


async def raw(dsn: str) -> float:
    conn = await asyncpg.connect(await fresh(dsn, "bench_raw"))
    await conn.execute(RAW_TABLE)
    await conn.execute(
        "insert into jobs (kind, payload, dedupe_key) select 'noop', jsonb_build_object('i', i), 'k' || i from generate_series(1, $1) i",
        JOBS,
    )
    for maintain in ("vacuum analyze jobs", "checkpoint"):
        await conn.execute(maintain)
    claim, done = await conn.prepare(RAW_CLAIM), await conn.prepare(RAW_DONE)
    began, count = time.perf_counter(), 0
    while rows := await claim.fetch(BATCH):
        count += len(rows)
        await done.fetch([row["id"] for row in rows])
    rate = JOBS / (time.perf_counter() - began)
    assert count == JOBS
    await conn.close()
    return rate


async def pgqueuer(dsn: str) -> float:
    from pgqueuer import PgQueuer, types
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    dsn = await fresh(dsn, "bench_pgqueuer")
    conn = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(conn))
    await queries.install()
    await queries.enqueue(["noop"] * JOBS, [b""] * JOBS, [0] * JOBS)
    for maintain in ("vacuum analyze", "checkpoint"):
        await conn.execute(maintain)
    count = 0

    async def dequeue() -> None:
        manager = PgQueuer(AsyncpgDriver(await asyncpg.connect(dsn)))

        @manager.entrypoint("noop")
        async def noop(_job: object) -> None:
            nonlocal count
            count += 1

        await manager.run(batch_size=100, mode=types.QueueExecutionMode.drain)

    began = time.perf_counter()
    await asyncio.gather(*(dequeue() for _ in range(3)))
    rate = JOBS / (time.perf_counter() - began)
    assert count == JOBS
    assert await conn.fetchval("select count(*) from pgqueuer") == 0
    await conn.close()
    return rate


async def drain(dsn: str, handler: Handler, *, jobs: int = JOBS, tenants: int = 20, keyed: bool = True) -> float:
    dsn = await fresh(dsn, "bench_ours")
    await db.migrate(dsn)
    conn = await asyncpg.connect(dsn)
    await conn.execute(
        "insert into reactor.jobs (type, lane, tenant_id, payload, dedupe_key) "
        "select 'noop', 'noop', 't' || i % $2, jsonb_build_object('i', i), case when $3 then 'k' || i end from generate_series(1, $1) i",
        jobs,
        tenants,
        keyed,
    )
    for maintain in ("vacuum analyze reactor.jobs", "checkpoint"):
        await conn.execute(maintain)
    async with db.create_pool(dsn, application="bench", size=4, resets=False) as pool:
        for _ in range(2):
            async with pool.acquire() as one, pool.acquire() as two:
                await asyncio.gather(one.execute("select 1"), two.execute("select 1"))
        queue = Jobs(pool, worker="bench", lease=timedelta(seconds=30))
        worker = Worker(
            queue, {"noop": Bound(handler, handler.function)}, wakeup=Wakeup(), poll_s=5, drain_s=5, log=get_log()
        )
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            while worker.settled_jobs < jobs:
                await anyio.sleep(0.002)
            rate = jobs / (time.perf_counter() - began)
            worker.stop()
    assert await conn.fetchval("select count(*) from reactor.jobs where status = 'done'") == jobs
    await conn.close()
    return rate


async def ours_batched(dsn: str) -> float:
    async def noop(_jobs: list[Job]) -> None:
        pass

    return await drain(dsn, Handler(noop, batch=BATCH, concurrency=1))


async def ours_single(dsn: str) -> float:
    async def noop(_job: Job) -> None:
        pass

    return await drain(dsn, Handler(noop, concurrency=BATCH))


async def ours_sleeping(dsn: str) -> float:
    async def nap(_job: Job) -> None:
        await anyio.sleep(0.01)

    return await drain(dsn, Handler(nap, concurrency=BATCH))


# --- how long from a commit to the handler's start, one job at a time beside an idle reactor ---


async def produce(dsn: str, statement: str) -> None:
    """Commits one job every 50 ms or so; prints when each was acknowledged, by CLOCK_MONOTONIC."""
    conn = await asyncpg.connect(dsn)
    prepared = await conn.prepare(statement)
    acknowledged = []
    for number in range(LATENCIES):
        await asyncio.sleep(0.05 * random.uniform(0.5, 1.5))
        await prepared.fetch(number)
        acknowledged.append(time.monotonic_ns())
    print(json.dumps(acknowledged))
    await conn.close()


async def latencies(dsn: str, statement: str, started: dict[int, int]) -> list[float]:
    """Milliseconds of each job, in order of size."""
    producer = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.queue", "produce", dsn, statement, stdout=subprocess.PIPE
    )
    out, _ = await producer.communicate()
    while len(started) < LATENCIES:
        await asyncio.sleep(0.05)
    return sorted((started[i] - at) / 1e6 for i, at in enumerate(json.loads(out)))


async def raw_latency(dsn: str) -> list[float]:
    dsn = await fresh(dsn, "bench_raw")
    conn, listening = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    await conn.execute(RAW_TABLE)
    rung, started = asyncio.Event(), {}
    await listening.add_listener("jobs", lambda *_: rung.set())
    claim, done = await conn.prepare(RAW_CLAIM), await conn.prepare(RAW_DONE)

    async def work() -> None:
        while True:
            rung.clear()
            if rows := await claim.fetch(100):
                for row in rows:
                    started[json.loads(row["payload"])["i"]] = time.monotonic_ns()
                await done.fetch([row["id"] for row in rows])
            else:
                await rung.wait()

    worker = asyncio.ensure_future(work())
    statement = "insert into jobs (kind, payload) values ('noop', jsonb_build_object('i', $1::int))"
    took = await latencies(dsn, statement, started)
    worker.cancel()
    return took


async def pgqueuer_latency(dsn: str) -> list[float]:
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgDriver
    from pgqueuer.queries import Queries

    dsn = await fresh(dsn, "bench_pgqueuer")
    await Queries(AsyncpgDriver(await asyncpg.connect(dsn))).install()
    manager, started = PgQueuer(AsyncpgDriver(await asyncpg.connect(dsn))), {}

    @manager.entrypoint("noop")
    async def noop(job: Any) -> None:
        started[int(job.payload)] = time.monotonic_ns()

    worker = asyncio.ensure_future(manager.run(batch_size=10))
    await asyncio.sleep(1)
    statement = "insert into pgqueuer (priority, entrypoint, payload, status, execute_after) values (0, 'noop', convert_to($1::int::text, 'UTF8'), 'queued', now())"
    took = await latencies(dsn, statement, started)
    manager.shutdown.set()
    await worker
    return took


@asynccontextmanager
async def at_work(dsn: str, handlers: dict[str, Handler]) -> AsyncIterator[Worker]:
    """A worker that sleeps on its listener, as in `reactor run`."""
    async with db.create_pool(dsn, application="memory-reactor worker", size=4, resets=False) as pool:
        queue, wakeup = Jobs(pool, worker=str(os.getpid()), lease=timedelta(seconds=30)), Wakeup()
        heard = {"reactor_wake": lambda _payload: wakeup.ring("notify")}
        listener = Listener(dsn, heard, log=get_log(), on_ready=wakeup.ring)
        bound = {type_: Bound(handler, handler.function) for type_, handler in handlers.items()}
        worker = Worker(queue, bound, wakeup=wakeup, watch=listener, poll_s=5, drain_s=1, log=get_log())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run)
            tasks.start_soon(worker.run)
            while not listener.is_armed and listener.state != "listening":
                await anyio.sleep(0.01)
            yield worker
            worker.stop()
            tasks.cancel_scope.deadline = anyio.current_time() + 5
            await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()


async def ours_latency(dsn: str) -> list[float]:
    dsn, started = await fresh(dsn, "bench_ours"), {}
    await db.migrate(dsn)

    async def noop(job: Job) -> None:
        started[job.payload["i"]] = time.monotonic_ns()

    async with at_work(dsn, {"noop": Handler(noop)}):
        await anyio.sleep(1)
        return await latencies(dsn, "select reactor.enqueue('noop', jsonb_build_object('i', $1::int), 'acme')", started)


# --- reactors of their own for what the producers feel, and for many at once ---


async def serve(dsn: str, kind: str) -> None:
    """A reactor whose handler does nothing (`busy`), or never ends (`full`); says ready, then what it settled."""

    async def handle(_jobs: list[Job]) -> None:
        if kind == "full":
            await anyio.sleep_forever()

    handlers = {"sync_row": Handler(handle, batch=BATCH, concurrency=1, lane="memory"), "other": Handler(handle)}
    async with at_work(dsn, handlers) as worker:
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        print(worker.settled_jobs, flush=True)
    os._exit(0)  # a handler that never ends is not waited for


async def main(name: str, *args: str) -> None:
    answer = await globals()[name](*args)
    if answer is not None:
        print(json.dumps(answer))


if __name__ == "__main__":
    if sys.argv[1].startswith(("raw", "pgqueuer")):  # as fast as they can be
        import uvloop

        uvloop.run(main(*sys.argv[1:]))
    else:
        anyio.run(main, *sys.argv[1:])
