"""A handler that makes its job done in the transaction of its own writes: both happen, or neither does."""

from __future__ import annotations

from datetime import timedelta

import pytest
from conftest import eventually
from test_settling import enqueue, row, working

from reactor.errors import StaleClaim
from reactor.jobs import Jobs


@pytest.fixture
async def ledger(conn):
    """What handlers write: the ids of the jobs they completed."""
    await conn.execute("create table ledger (job bigint primary key)")

    async def written():
        return [r["job"] for r in await conn.fetch("select job from ledger order by job")]

    return written


async def write(job, pool, *, fails_inside=False, fails_after=False):
    async with pool.acquire() as conn, conn.transaction():
        await conn.execute("insert into ledger values ($1)", job.id)
        await job.complete(conn, {"written": job.payload["n"]})
        if fails_inside:
            raise ValueError
    if fails_after:
        raise ValueError


async def test_what_it_wrote_and_the_job_are_committed_together(conn, pool, ledger, events):
    async def work(job, *, pool):
        await write(job, pool)

    job_id = await enqueue(conn, 7)
    async with working(pool, {"work": work}):
        await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))
        await eventually(async_(lambda: events.named("job_done")))

    assert await ledger() == [job_id]
    assert (await row(conn, job_id))["result"] == {"written": 7}
    assert not events.named("claim_lost")


async def test_a_rollback_takes_the_completion_with_it_and_the_attempt_failed(conn, pool, ledger):
    async def work(job, *, pool):
        await write(job, pool, fails_inside=True)

    job_id = await enqueue(conn, 7)
    async with working(pool, {"work": work}):
        await eventually(lambda: conn.fetchval("select status = 'failed' from reactor.jobs where id = $1", job_id))

    assert await ledger() == []
    assert (await row(conn, job_id))["result"] is None


async def test_what_goes_wrong_after_the_commit_changes_nothing(conn, pool, ledger, events):
    async def work(job, *, pool):
        await write(job, pool, fails_after=True)

    job_id = await enqueue(conn, 7)
    async with working(pool, {"work": work}):
        await eventually(async_(lambda: events.named("job_done")))

    assert (await row(conn, job_id))["status"] == "done"
    assert (await row(conn, job_id))["attempts"] == 1
    assert await ledger() == [job_id]
    assert not events.named("claim_lost")


async def test_a_late_worker_can_complete_nothing(conn, pool, ledger):
    await enqueue(conn, 7)
    slow, quick = (Jobs(pool, worker=name, lease=timedelta(seconds=s)) for name, s in (("slow", 0), ("quick", 30)))
    [late] = await slow.claim({"work": 1})
    await quick.release_expired()
    [job] = await quick.claim({"work": 1})

    with pytest.raises(StaleClaim):
        await write(late, pool)
    assert await ledger() == []

    await write(job, pool)
    assert await ledger() == [job.id]


def async_(check):
    async def checked():
        return check()

    return checked
