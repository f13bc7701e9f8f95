"""The scheduled look: what ended long ago is pruned, and alerts of dead jobs close once there are none."""

from __future__ import annotations

from conftest import drained, make_settings, running_reactor


async def test_what_ended_longer_ago_than_the_retention_is_pruned_and_the_rest_stays(dsn, conn):
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, status, updated_at) select 'old', '', 'x', s, now() - interval '8 days' "
        "from unnest('{done,done,dead}'::text[]) s"
    )
    await conn.execute("insert into reactor.jobs (type, tenant_id, lane, status) values ('new', '', 'x', 'done')")
    await conn.execute(
        "insert into reactor.rejected (source, reason, created_at) values (1, 'id', now() - interval '8 days'), (1, 'id', now())"
    )

    async with running_reactor(make_settings(database_url=dsn)):
        await conn.execute("select reactor.enqueue('reconcile', '{}', '')")
        await drained(conn)

    assert await conn.fetchval(
        "select array_agg(type || ' ' || status order by type) from reactor.jobs where lane = 'x'"
    ) == ["new done", "old dead"]
    assert await conn.fetchval("select count(*) from reactor.rejected") == 1


async def test_the_counts_of_minutes_longer_ago_than_a_day_go_and_more_than_one_step_of_jobs_does(dsn, conn):
    await conn.execute(
        "insert into reactor.job_minutes (minute, backend, done, dead) "
        "select now() - h * interval '1 hour', 0, 1, 0 from unnest('{23,26,200}'::int[]) h"
    )
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, status, updated_at) "
        "select 'old', '', 'x', 'done', now() - interval '8 days' from generate_series(1, 2500)"
    )

    async with running_reactor(make_settings(database_url=dsn)):
        job = await conn.fetchval("select reactor.enqueue('reconcile', '{}', '')")
        await drained(conn)

    assert await conn.fetchval("select count(*) from reactor.jobs where lane = 'x'") == 0
    assert (await conn.fetchval("select result from reactor.jobs where id = $1", job))["pruned"] == 2500
    assert await conn.fetchval("select count(*) from reactor.job_minutes where backend = 0") == 1


async def test_an_alert_of_dead_jobs_closes_by_itself_once_they_were_dealt_with(dsn, conn):
    async with running_reactor(make_settings(database_url=dsn)):
        job = await conn.fetchval("""select reactor.enqueue('sync_row', '{"source": "wrong"}', 'acme')""")
        await drained(conn)
        assert await conn.fetchval("select array_agg(cause) from reactor.alerts where resolved_at is null") == [
            "dead_jobs"
        ]

        await conn.execute("select reactor.enqueue('reconcile', '{}', '')")
        await drained(conn)
        assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 1

        await conn.execute("delete from reactor.jobs where id = $1", job)
        await conn.execute("select reactor.enqueue('reconcile', '{}', '')")
        await drained(conn)

    assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 0


async def test_a_source_that_cannot_be_compared_does_not_stop_the_look_at_the_others(dsn, conn):
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'bolo')")
    await conn.execute("alter table posts drop column body")
    await conn.execute("insert into chat_messages (tenant_id, content) values ('acme', 'olá')")
    await conn.execute("delete from reactor.jobs")

    async with running_reactor(make_settings(database_url=dsn)):
        job = await conn.fetchval("select reactor.enqueue('reconcile', '{}', '', max_attempts => 1)")
        await drained(conn)

    assert await conn.fetchval("select content from reactor.recent('acme')") == "olá"
    assert await conn.fetchval("select status from reactor.jobs where id = $1", job) == "dead"
