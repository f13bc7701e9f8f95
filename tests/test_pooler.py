"""Behind a pooler: one that pools transactions is found out, said once and polled through without a clash; one of sessions is no hindrance."""

from __future__ import annotations

import re
import signal

import anyio
import asyncpg
import pytest
from conftest import connect, drained, eventually, make_settings, reactor_process, running_reactor
from proxy import proxy_to
from servers import pgbouncer
from test_listening import insert, listening, says
from test_worker import Output

from reactor import Memory

pytestmark = pytest.mark.needs("pgbouncer")
PREPARED = re.compile(rb"__asyncpg_stmt_\w+")
HANDLERS = '''
"""Jobs that use whatever a session could get wrong."""

import anyio
import asyncpg

from reactor import db
from reactor.job import Handler


async def mixed(job, *, pool):
    await job.note({"seen": job.attempts})
    async with db.tenant(pool, job.tenant_id) as conn:
        assert await conn.fetchval("select reactor.scope()") == job.tenant_id
        await anyio.sleep(0.002)
        assert await conn.fetchval("select reactor.scope()") == job.tenant_id
        assert await conn.fetchval("select $1::int + $2::int", job.id, 1) == job.id + 1
    async with pool.acquire() as conn:
        assert await conn.fetchval("select $1::text || $2::text", "a", job.tenant_id) == "a" + job.tenant_id
    return {"notes": job.notes}


async def batched(jobs, *, pool):
    await pool.execute("select pg_sleep(0.001)")


HANDLERS = {"mixed": Handler(mixed, concurrency=8), "batched": Handler(batched, batch=20, concurrency=2)}
'''
FAULTS = (
    "claim_failed", "settle_failed", "heartbeat_failed", "upkeep_failed", "handler_error", "job_failed", "job_dead",
    "job_snoozed", "lease_expired", "claim_lost",
)  # fmt: skip


@pytest.fixture
def handlers(tmp_path):
    (tmp_path / "mixed.py").write_text(HANDLERS)
    return tmp_path


@pytest.fixture
async def transactions(server, dsn):
    """pgbouncer over three connections that change hands with every transaction."""
    async with pgbouncer(server, dsn, size=3) as pooled:
        yield pooled


@pytest.fixture
async def no_locks(conn):
    """Counts the session locks anybody asked for."""
    await conn.execute("""
        create sequence public.asked;
        alter function reactor.arm() rename to arm_itself;
        create function reactor.arm() returns text language sql as $$ select nextval('public.asked'); select reactor.arm_itself() $$;
    """)

    async def count():
        return await conn.fetchval("select case when is_called then last_value else 0 end from public.asked")

    return count


async def test_through_a_transaction_pooler_it_is_said_once_and_everything_runs_by_the_floor(
    conn, transactions, handlers, no_locks, events, monkeypatch
):
    monkeypatch.setattr("reactor.listener._POLLING_RETRY_S", 0.5)
    monkeypatch.setattr("reactor.app._SCHEDULES_S", 0.5)
    async with proxy_to(transactions) as proxy:
        settings = make_settings(
            database_url=proxy.dsn, poll_s=0.1, lease_s=1, reconcile_s=1, handlers=handlers, pool_size=8
        )
        async with running_reactor(settings):
            await eventually(lambda: events.named("listener_lost"))
            await says(conn, "polling")
            await conn.execute(
                "insert into reactor.schedules (name, type, cron, tenant_id) values ('tick', 'mixed', '* * * * *', 'acme')"
            )
            await eventually(lambda: conn.fetchval("select next_at is not null from reactor.schedules"))
            await conn.execute("update reactor.schedules set next_at = now() - interval '1 s'")
            for round_ in range(5):
                await conn.execute(
                    "select reactor.enqueue(t, '{}', 'tenant ' || n % 7, null, now(), 'lane ' || n % 3) "
                    "from generate_series(1, 60) n, unnest('{mixed,batched}'::text[]) t"
                )
                await insert(conn, f"{round_}: ", 20)
                await drained(conn)
                assert await conn.fetchval("select reactor.status()->>'listener'") == "polling"
            await eventually(
                lambda: conn.fetchval(
                    "select count(*) > 0 from reactor.jobs where type = 'reconcile' and status = 'done'"
                )
            )
            statements = proxy.sent.count(b"select")

    done = dict(await conn.fetch("select type, count(*) from reactor.jobs where status = 'done' group by 1"))
    assert (done["batched"], done["mixed"] >= 300, done["sync_row"]) == (300, True, 100)
    assert {name: events.named(name) for name in FAULTS if events.named(name)} == {}
    [said] = events.named("listener_lost")
    assert "transaction pooler" in said["reason"]
    assert "session pooler" in said["reason"]
    assert events.named("listener_ready") == []
    assert PREPARED.findall(proxy.sent) == []
    assert await no_locks() == 0
    assert statements > 2000


async def test_nothing_of_ours_stays_in_the_pooler_s_sessions(conn, transactions, monkeypatch, events):
    monkeypatch.setattr("reactor.listener._POLLING_RETRY_S", 0.1)
    async with running_reactor(make_settings(database_url=transactions, poll_s=0.2)):
        await eventually(lambda: events.named("listener_lost"))
        await insert(conn, "um", 5)
        await drained(conn)
        await anyio.sleep(1)  # some more looks whether it listens by now

    sessions = [await connect(transactions) for _ in range(3)]
    for session in sessions:
        await session.execute("begin")  # each has one of the three for itself
    channels = [await session.fetch("select pg_listening_channels()") for session in sessions]
    locks = await conn.fetchval("select count(*) from pg_locks where locktype = 'advisory'")
    for session in sessions:
        await session.close()
    assert [row[0] for rows in channels for row in rows if not row[0].startswith("reactor_canary")] == []
    assert locks == 0


async def test_the_alert_names_the_pooler_and_resolves_once_it_pools_sessions(
    conn, server, dsn, handlers, monkeypatch, events
):
    monkeypatch.setattr("reactor.app._DEAF_S", 0.5)
    monkeypatch.setattr("reactor.listener._POLLING_RETRY_S", 0.3)
    is_open = "select exists (select from reactor.alerts where cause = 'listener_lost' and resolved_at is null)"
    async with pgbouncer(server, dsn, size=30) as pooled:
        async with running_reactor(make_settings(database_url=pooled, poll_s=0.2)):
            await eventually(lambda: conn.fetchval(is_open))
            detail = await conn.fetchval("select detail from reactor.alerts where cause = 'listener_lost'")
            pooled.pools("session")
            await eventually(lambda: conn.fetchval(f"select not ({is_open})"))
            await says(conn, "listening")
            await insert(conn, "um")
            await drained(conn)

    assert detail["listener"] == "polling"
    assert "transaction pooler" in detail["reason"]
    assert [e["cause"] for e in events.named("alert_resolved")] == ["listener_lost"]


async def test_through_a_session_pooler_it_listens_and_uses_prepared_statements(conn, server, dsn, events):
    async with (
        pgbouncer(server, dsn, mode="session", size=30) as pooled,
        proxy_to(pooled) as proxy,
        running_reactor(make_settings(database_url=proxy.dsn, poll_s=60)),
    ):
        await says(conn, "listening")
        for round_ in range(3):
            await insert(conn, f"{round_}: ", 10)
            await drained(conn)
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'memory-reactor listener'"
        )
        await eventually(lambda: len(events.named("listener_ready")) == 2)
        await insert(conn, "depois", 10)
        await drained(conn)

    assert len(set(PREPARED.findall(proxy.sent))) > 3
    assert len(events.named("listener_lost")) == 1


async def test_a_pooler_that_restarts_is_outlived(conn, server, dsn, events):
    async with pgbouncer(server, dsn, size=3) as pooled:
        async with running_reactor(make_settings(database_url=pooled, poll_s=0.2)):
            await says(conn, "polling")
            for round_ in range(3):
                await insert(conn, f"{round_}: ", 10)
                await anyio.to_thread.run_sync(pooled.restart)
                await drained(conn)


async def test_a_process_behind_a_transaction_pooler_says_down_once_it_has_ended(conn, transactions):
    with reactor_process(transactions, REACTOR_POLL_S="0.3") as process:
        output = Output(process)
        await output.saw("listener_lost")
        await says(conn, "polling")
        process.send_signal(signal.SIGTERM)
        assert await output.exited(timeout_s=60) == 0, output.text
        assert len(output.named("listener_lost")) == 1

    assert await conn.fetchval("select count(*) from reactor.reactors") == 0


async def test_status_asked_through_the_pooler_s_only_connection_says_polling(conn, server, dsn, events):
    async with pgbouncer(server, dsn, size=1) as pooled, running_reactor(make_settings(database_url=pooled, poll_s=60)):
        await eventually(lambda: events.named("listener_lost"))
        await eventually(lambda: conn.fetchval("select count(*) > 0 from reactor.reactors where listener = 'polling'"))
        asking = await asyncpg.connect(
            pooled, statement_cache_size=0, server_settings={"application_name": "memory-reactor"}
        )
        for _ in range(20):
            assert await asking.fetchval("select reactor.status()->>'listener'") == "polling"
        await asking.close()


async def test_a_session_that_the_pooler_hands_back_is_not_taken_for_one_left_behind(conn, server, dsn):
    async with (
        pgbouncer(server, dsn, mode="session", size=2) as pooled,
        proxy_to(pooled) as proxy,
        listening(proxy.dsn, beat_s=0.1) as ear,
    ):
        for round_ in range(3):
            await proxy.close()
            await ear.was(lost=round_ + 1)
            await proxy.open()
            await ear.was(ready=round_ + 2)
            await ear.hears(conn)
        await anyio.sleep(1)  # ten beats

    assert (ear.ready, ear.lost) == (4, 3)


async def test_a_reader_behind_a_transaction_pooler_keeps_what_it_found_no_longer_than_its_ttl(
    conn, transactions, events
):
    settings = make_settings(search_deadline_s=20.0, cache_ttl_s=1.0)
    async with running_reactor(make_settings(database_url=transactions, poll_s=0.1)):
        await insert(conn, "bolo de cenoura ")
        await drained(conn)
        async with Memory.open(transactions, settings=settings) as memory:
            await eventually(lambda: len(events.named("listener_lost")) == 2)  # the reactor's, and the reader's
            assert len(await memory.search("acme", "bolo")) == 1
            await insert(conn, "bolo de milho ")
            await drained(conn)

            async def finds_both():
                return len(await memory.search("acme", "bolo")) == 2

            await eventually(finds_both)

    assert all("transaction pooler" in e["reason"] for e in events.named("listener_lost"))
