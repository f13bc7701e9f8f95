"""History is cheap: what ended long ago costs neither a claim nor a look nor `status`, and goes in small steps."""

from __future__ import annotations

import json
from datetime import timedelta

import anyio
import pytest
from conftest import connect

from reactor.job import Done
from reactor.jobs import Jobs

ENDED = 300_000


async def owe(conn, jobs, *, after="0 s"):
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, run_after) "
        "select 'work', 't' || n % 20, 'work', gen_random_uuid(), now() + $2::text::interval from generate_series(1, $1::int) n",
        jobs,
        after,
    )


async def live_through(conn, jobs):
    """A past: most of it done, some dead."""
    await conn.execute("alter table reactor.jobs set (autovacuum_enabled = off)")
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, status, created_at, run_after, updated_at, result) "
        "select 'work', 't' || n % 20, 'work', 'h' || n, case when n % 1000 = 0 then 'dead' else 'done' end, t, t, t, '{}' "
        "from generate_series(1, $1) n, lateral (select now() - n * '1 s'::interval as t) at",
        jobs,
    )


async def explained(conn, query):
    """The plan's nodes, outermost first."""
    [[text]] = await conn.fetch(f"explain (analyze, buffers, format json) {query}")
    nodes = [(json.loads(text) if isinstance(text, str) else text)[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    return nodes


async def pages(conn, query):
    """How many 8 kB pages the query reads once plans and caches are warm."""
    for _ in range(7):
        [top, *_] = await explained(conn, query)
    return top["Shared Hit Blocks"] + top["Shared Read Blocks"]


LOOKS = {
    "claim": "select * from reactor.claim_jobs('{work}', '{20}', 'test', '1 hour')",
    "look ahead": "select * from reactor.look_ahead('{work}')",
    "sweep": "select * from reactor.release_expired_jobs()",
    "status": "select reactor.status()",
}


async def test_a_long_history_costs_a_claim_a_look_a_sweep_and_status_nothing(conn):
    await owe(conn, 500)
    await owe(conn, 500, after="1 hour")
    await conn.execute("vacuum analyze reactor.jobs")
    without = {name: await pages(conn, query) for name, query in LOOKS.items()}

    await conn.execute("update reactor.jobs set status = 'done' where status in ('pending', 'running')")
    await live_through(conn, ENDED)
    await owe(conn, 500)
    await owe(conn, 500, after="1 hour")
    await conn.execute("vacuum analyze reactor.jobs")
    beside = {name: await pages(conn, query) for name, query in LOOKS.items()}

    levels = 60  # trees of a few levels more, a page for each descent
    assert {name: read for name, read in beside.items() if read > without[name] * 1.2 + levels} == {}


@pytest.mark.parametrize("waiting", ["now", "later"])
async def test_many_that_wait_are_counted_by_status_from_an_index_alone(conn, waiting):
    await live_through(conn, ENDED)
    await owe(conn, 50_000, after="0 s" if waiting == "now" else "1 hour")
    await conn.execute("vacuum analyze reactor.jobs")

    body = await conn.fetchval("select prosrc from pg_proc where oid = 'reactor.status'::regproc")
    nodes = [node for node in await explained(conn, body) if node.get("Relation Name") == "jobs"]

    assert await conn.fetchval("select (reactor.status() ->> 'pending')::int") == 50_000
    counts = [node for node in nodes if node["Actual Rows"] >= 1000]
    assert [node["Node Type"] for node in counts] == ["Index Only Scan"]
    assert counts[0]["Heap Fetches"] < 100
    assert not [node for node in nodes if "Seq Scan" in node["Node Type"]]


@pytest.mark.parametrize("after", ["0 s", "1 hour"])
async def test_200000_waiting_do_not_slow_a_claim(conn, after):
    await owe(conn, 20_000)
    few = await pages(conn, LOOKS["claim"])
    ahead = await pages(conn, LOOKS["look ahead"])

    await conn.execute("update reactor.jobs set status = 'done' where status = 'running'")
    await owe(conn, 200_000, after=after)

    assert await pages(conn, LOOKS["claim"]) < few * 1.2 + 60
    assert await pages(conn, LOOKS["look ahead"]) < ahead * 1.2 + 60


async def test_pruning_takes_small_steps_and_reads_what_it_deletes(conn):
    await live_through(conn, ENDED)
    await conn.execute("vacuum analyze reactor.jobs")

    [step, *_] = await explained(conn, "select reactor.prune('1 hour', 100)")
    [nothing, *_] = await explained(conn, "select reactor.prune('30 days', 100)")

    assert await conn.fetchval("select count(*) from reactor.jobs") == ENDED - 100
    assert await conn.fetchval("select count(*) from reactor.jobs where status = 'dead'") == ENDED // 1000
    assert step["Shared Hit Blocks"] + step["Shared Read Blocks"] < 100 * 30
    assert nothing["Shared Hit Blocks"] + nothing["Shared Read Blocks"] < 500


async def test_under_a_held_snapshot_every_job_still_runs_once(conn, pool, dsn):
    backup = await connect(dsn)
    snapshot = backup.transaction(isolation="repeatable_read")
    await snapshot.start()
    await backup.fetchval("select count(*) from reactor.jobs")
    jobs, ran = Jobs(pool, worker="test", lease=timedelta(seconds=30)), []

    with anyio.fail_after(120):
        for n in range(8):
            await owe(conn, 500, after=f"-{n} s")
            while claimed := await jobs.claim({"work": 50}):
                await jobs.settle([(job, Done()) for job in claimed])
                ran += [job.id for job in claimed]
    await snapshot.rollback()
    await backup.close()

    assert len(ran) == len(set(ran)) == 4000
    status = await conn.fetchval("select reactor.status()")
    assert (status["pending"], status["running"], status["done_24h"]) == (0, 0, 4000)


async def test_status_counts_to_a_hundred_thousand_and_estimates_beyond(conn):
    put = "insert into reactor.jobs (type, tenant_id, lane, run_after) select 't', '', 't', now() + interval '1 day' from generate_series(1, %s)"
    await conn.execute(put % 99_000)
    exact = (await conn.fetchval("select reactor.status()"))["pending"]
    await conn.execute(put % 41_000)
    await conn.execute("vacuum analyze reactor.jobs")

    estimate = (await conn.fetchval("select reactor.status()"))["pending"]

    assert exact == 99_000
    assert 126_000 < estimate < 154_000  # a tenth off at most
