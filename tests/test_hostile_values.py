"""Values that Postgres keeps and Python cannot read, rows that somebody holds: each hurts itself alone."""

from __future__ import annotations

import pytest
from conftest import connect, eventually, running_reactor
from test_settling import enqueue, row, working

from reactor.log import get_log
from reactor.memory import Memory
from reactor.schedules import fire_due

TOO_MUCH = {"a number of thousands of digits": "9" * 5000, "too deep": "[" * 3000 + "]" * 3000}


@pytest.mark.parametrize("value", TOO_MUCH.values(), ids=TOO_MUCH.keys())
async def test_a_payload_that_python_cannot_read_is_dead_and_its_neighbours_run(conn, pool, value):
    async def work(_job):
        return {"ran": True}

    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, payload) values ('work', 'a', 'work', $1::text::jsonb)",
        f'{{"n": {value}}}',
    )
    bad = await conn.fetchval("select max(id) from reactor.jobs")
    good = await enqueue(conn, 1)
    async with working(pool, {"work": work}):
        await eventually(
            lambda: conn.fetchval("select count(*) = 2 from reactor.jobs where status in ('done', 'dead')")
        )

    assert (await row(conn, good))["result"] == {"ran": True}
    assert (await row(conn, bad))["last_error"] == "payload: its JSON is more than Python can read"


@pytest.mark.parametrize("value", TOO_MUCH.values(), ids=TOO_MUCH.keys())
async def test_metadata_that_python_cannot_read_is_left_out_of_a_hit(conn, dsn, settings, value):
    await conn.execute(
        "create table odds (id int primary key, tenant_id text, body text, meta jsonb, created_at timestamptz default now())"
    )
    await conn.execute("select reactor.attach('odds', 'post', '{body}', metadata_columns => '{meta}')")
    await conn.execute(
        "insert into odds values (1, 'acme', 'pão da casa', $1::text::jsonb), (2, 'acme', 'pão da tia', '{\"n\": 1}')",
        f'{{"n": {value}}}',
    )
    async with running_reactor(settings):
        await eventually(lambda: conn.fetchval("select coalesce(sum(memories), 0) = 2 from reactor.tenants"))

    async with Memory.open(dsn, settings=settings) as memory:
        hits = {hit.source_id: hit.metadata for hit in await memory.recent("acme")}

    assert hits == {"1": {}, "2": {"n": 1}}


async def test_a_row_that_somebody_holds_keeps_no_other_job_from_settling(conn, pool, dsn):
    operator = await connect(dsn)
    transaction = operator.transaction()
    ids = [await enqueue(conn, n) for n in range(20)]

    async def work(job):
        if job.id == ids[0]:
            await transaction.start()
            await operator.execute("select from reactor.jobs where id = $1 for update", job.id)

    async with working(pool, {"work": work}):
        await eventually(lambda: conn.fetchval("select count(*) = 19 from reactor.jobs where status = 'done'"))
        assert await conn.fetchval("select status from reactor.jobs where id = $1", ids[0]) == "running"
        await transaction.rollback()
        await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", ids[0]))
    await operator.close()


async def test_a_running_job_that_an_operator_ended_stays_as_the_operator_left_it(conn, pool, events):
    async def work(job):
        await conn.execute("update reactor.jobs set status = 'dead' where id = $1", job.id)

    job_id = await enqueue(conn)
    async with working(pool, {"work": work}):

        async def said():
            return events.named("claim_lost")

        await eventually(said)

    assert (await row(conn, job_id))["status"] == "dead"


async def test_a_schedule_that_cannot_be_enqueued_is_said_and_the_others_tick(conn, pool, events):
    await conn.execute(
        "insert into reactor.schedules (name, type, cron) values ('bad', 'work', '* * * * *'), ('good', 'work', '* * * * *')"
    )
    await fire_due(pool, log=get_log())
    await conn.execute("alter table reactor.jobs add check (dedupe_key <> 'schedule:bad')")
    await conn.execute("""
        create function refuse() returns trigger language plpgsql as 'begin raise exception ''no'' using errcode = ''22023''; end';
        create trigger refuse before insert on reactor.jobs for each row when (new.dedupe_key = 'schedule:bad') execute function refuse()""")
    await conn.execute("update reactor.schedules set next_at = now() - interval '5 s'")

    await fire_due(pool, log=get_log())

    assert [r["dedupe_key"] for r in await conn.fetch("select dedupe_key from reactor.jobs where type = 'work'")] == [
        "schedule:good"
    ]
    assert await conn.fetchval("select error from reactor.schedules where name = 'bad'") == "no"
    assert events.named("alert_opened")[0]["subject"] == "bad"


async def test_a_role_that_a_handler_took_is_not_the_next_ones(conn, pool):
    async def work(job, *, pool):
        async with pool.acquire() as mine:
            before = await mine.fetchval("select current_user")
            await mine.execute("set role pg_monitor")
            return {"before": before}

    ids = [await enqueue(conn, n) for n in range(15)]
    async with working(pool, {"work": work}):
        await eventually(lambda: conn.fetchval("select count(*) = 15 from reactor.jobs where status = 'done'"))

    assert {(await row(conn, job_id))["result"]["before"] for job_id in ids} == {
        await conn.fetchval("select current_user")
    }
