"""Listening: what is rung is heard, whatever happens to the connection; where it cannot be, that is said, and the floor serves."""

from __future__ import annotations

import random
import signal
import time
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace

import anyio
import asyncpg
import pytest
from conftest import POSTGRES, connect, drained, eventually, make_settings, reactor_process, running_reactor
from proxy import proxy_to
from servers import own_cluster
from test_worker import Output

from reactor import db
from reactor.listener import Listener, Wakeup
from reactor.log import get_log

KILL = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database()"
WATCHERS = "select count(*) from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock' and database = (select oid from pg_database where datname = current_database()) and objid = 2"
REFUSALS = {
    "starting up": "57P03", "shutting down": "57P01", "too many connections": "53300", "wrong password": "28P01",
    "not allowed": "28000", "no such database": "3D000", "pooler without server": "08P01",
}  # fmt: skip


class Ear:
    """A listener at work, and what it told."""

    def __init__(self, dsn, channels=("reactor_wake",), **options):
        self.heard, self.ready, self.lost = [], 0, 0
        hears = {
            channel: lambda payload, channel=channel: self.heard.append((channel, payload)) for channel in channels
        }
        self.listener = Listener(
            dsn,
            hears,
            log=get_log(),
            on_ready=self._count_ready,
            on_lost=self._count_lost,
            **options,
        )

    def _count_ready(self):
        self.ready += 1

    def _count_lost(self):
        self.lost += 1

    async def was(self, *, ready=0, lost=0):
        """Return once it was ready and lost so often."""
        await eventually(lambda: self.ready >= ready and self.lost >= lost)

    async def hears(self, conn):
        """Return once it hears a ring of `conn`'s."""
        self.heard.clear()
        await conn.execute("select pg_notify('reactor_wake', '')")
        await eventually(lambda: self.heard)


@asynccontextmanager
async def listening(dsn, *, ready=1, **options):
    options = {"beat_s": 30.0} | options
    async with anyio.create_task_group() as tasks:
        ear = Ear(dsn, **options)
        tasks.start_soon(ear.listener.run)
        await ear.was(ready=ready)
        yield ear
        tasks.cancel_scope.cancel()


async def says(conn, state):
    """Return once `reactor status` says so."""
    await eventually(lambda: conn.fetchval("select reactor.status()->>'listener' = $1", state))


class TestListener:
    async def test_what_is_sent_on_each_channel_is_heard_with_its_payload(self, conn, dsn):
        async with listening(dsn, channels=("reactor_wake", "reactor_versions")) as ear:
            await conn.execute("select pg_notify('reactor_wake', ''), pg_notify('reactor_versions', 'abc:1')")
            await eventually(lambda: len(ear.heard) == 2)

        assert set(ear.heard) == {("reactor_wake", ""), ("reactor_versions", "abc:1")}

    async def test_a_connection_that_is_killed_is_made_again_and_hears_again(self, conn, dsn, events):
        async with listening(dsn) as ear:
            for round_ in range(3):
                await conn.execute(KILL)
                await ear.was(ready=round_ + 2)
            await ear.hears(conn)

        assert ear.lost == 3
        assert len(events.named("listener_lost")) == 3
        assert len(events.named("listener_ready")) == 4

    @pytest.mark.parametrize("ways", [("up",), ("down",), ("up", "down")], ids="+".join)
    async def test_a_cut_cable_is_noticed_and_the_session_left_behind_does_not_keep_the_watch(
        self, conn, dsn, events, ways
    ):
        async with proxy_to(dsn) as proxy, listening(proxy.dsn, beat_s=0.1, patience_s=1.0) as ear:
            assert await ear.listener.arm() == "armed"
            proxy.cut(*ways)
            await ear.was(lost=1)
            assert (ear.listener.state, ear.listener.is_armed) == ("down", False)
            assert ways == ("down",) or await conn.fetchval(WATCHERS) == 1  # a zombie, which hears of nothing

            proxy.mend()

            await ear.was(ready=2)
            await eventually(lambda: conn.fetchval(f"select ({WATCHERS}) = 0"))
            assert await ear.listener.arm() == "armed"
            await ear.hears(conn)

        assert len(events.named("listener_lost")) == 1

    async def test_a_connection_that_comes_back_ends_no_session_but_its_own_former_one(self, conn, dsn):
        other = await connect(dsn)
        await other.execute("set application_name = 'memory-reactor listener'")
        async with listening(dsn) as ear:
            await conn.execute(f"{KILL} and pid <> $1", other.get_server_pid())
            await ear.was(ready=2)
            assert await other.fetchval("select 1") == 1
        await other.close()

    @pytest.mark.parametrize("sqlstate", REFUSALS.values(), ids=REFUSALS)
    async def test_a_server_that_refuses_is_told_once_and_listened_to_once_it_accepts(
        self, conn, dsn, events, sqlstate
    ):
        async with proxy_to(dsn) as proxy:
            proxy.refuses = sqlstate
            async with listening(proxy.dsn, ready=0) as ear:
                await eventually(lambda: len(proxy.attempts) >= 3)
                assert ear.listener.state == "down"
                proxy.refuses = None
                await ear.was(ready=1)
                await ear.hears(conn)

        assert ear.lost == 0
        [told] = events.named("listener_lost")
        assert told["reason"].startswith("Postgres is out of reach")

    async def test_while_refused_for_long_it_asks_ever_more_seldom_and_no_two_listeners_in_step(self, conn, dsn):
        async with proxy_to(dsn) as proxy, proxy_to(dsn) as beside:
            proxy.refuses = beside.refuses = "57P03"
            async with listening(proxy.dsn, ready=0) as ear, listening(beside.dsn, ready=0):
                await eventually(lambda: min(len(proxy.attempts), len(beside.attempts)) >= 6)
                gaps, others = [
                    [after - before for before, after in zip(p.attempts, p.attempts[1:], strict=False)]
                    for p in (proxy, beside)
                ]
                proxy.refuses = None
                await ear.was(ready=1)

        assert gaps[4] > 2 * gaps[0]
        assert max(abs(gap - other) for gap, other in zip(gaps, others, strict=False)) > 0.02

    async def test_a_connection_cut_while_it_is_being_made_is_given_up(self, conn, dsn, monkeypatch):
        monkeypatch.setattr("reactor.listener._SETUP_S", 0.5)
        async with proxy_to(dsn) as proxy:

            def cut_at_the_second(_first):
                if proxy.links > 1:
                    proxy.cut("up", "down")
                return False

            proxy.refuses, proxy.refuses_if = "", cut_at_the_second
            async with listening(proxy.dsn, ready=0) as ear:
                await eventually(lambda: ear.listener.reason)
                assert ear.listener.state == "down"
                proxy.refuses = None
                proxy.mend()
                await ear.was(ready=1)
                await ear.hears(conn)

    async def test_while_its_canary_has_no_connection_it_does_not_pass_as_listening(self, conn, dsn):
        async with proxy_to(dsn) as proxy:
            proxy.refuses, proxy.refuses_if = "53300", lambda _first: proxy.links > 1
            async with listening(proxy.dsn, ready=0) as ear:
                await eventually(lambda: len(proxy.attempts) >= 4)
                assert (ear.ready, ear.listener.state, await ear.listener.arm()) == (0, "down", None)
                proxy.refuses = None
                await ear.was(ready=1)

    async def test_a_loop_that_was_blocked_for_longer_than_its_patience_loses_nothing(self, dsn, events):
        async with listening(dsn, beat_s=0.0, patience_s=0.3) as ear:
            for _ in range(12):
                await anyio.sleep(random.random() * 0.01)
                time.sleep(0.5)
            assert (ear.ready, ear.lost) == (1, 0)
            assert await ear.listener.arm() == "armed"

        assert events.named("listener_lost") == []

    async def test_a_busy_worker_and_the_canary_share_the_session_without_a_clash(self, conn, dsn, events):
        async with listening(dsn, beat_s=0.0) as ear:
            for _ in range(300):
                assert await ear.listener.arm() == "armed"
                await ear.listener.disarm(hand_over=False)
            assert await conn.fetchval(WATCHERS) == 0

        assert events.named("listener_lost") == []


class TestWakeup:
    async def test_many_rings_are_one(self):
        wakeup = Wakeup()
        for _ in range(3):
            wakeup.ring()

        assert await wakeup.wait(5)
        wakeup.clear()
        assert not await wakeup.wait(0.01)

    async def test_a_ring_before_the_wait_is_not_lost(self):
        wakeup = Wakeup()
        wakeup.clear()
        wakeup.ring()

        with anyio.fail_after(5):
            assert await wakeup.wait(60)

    async def test_the_first_reason_is_kept_until_somebody_looks(self):
        wakeup = Wakeup()
        wakeup.ring("notify")
        wakeup.ring("ended")
        assert wakeup.reason == "notify"
        wakeup.clear()
        wakeup.ring("ended")
        assert wakeup.reason == "ended"

    async def test_every_sleeper_wakes(self):
        wakeup, woken = Wakeup(), []

        async def sleep():
            woken.append(await wakeup.wait(60))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sleep)
                tasks.start_soon(sleep)
                await anyio.wait_all_tasks_blocked()
                wakeup.ring()

        assert woken == [True, True]


# --- the whole reactor ---


async def insert(conn, body, count=1):
    await conn.execute(
        "insert into posts (tenant_id, body) select 'acme', $1 || n from generate_series(1, $2::int) n", body, count
    )


async def bodies(conn):
    return {r["content"] for r in await conn.fetch("select content from reactor.recent('acme', 100)")}


async def test_rows_inserted_while_nobody_listened_are_found_when_it_listens_again(conn, dsn):
    async with running_reactor(make_settings(database_url=dsn, poll_s=60)):
        await insert(conn, "um")
        await drained(conn)
        async with conn.transaction():  # the notification comes with the commit, when the listener is gone
            await insert(conn, "dois")
            await conn.execute(KILL)
        await drained(conn)

    assert await bodies(conn) == {"um1", "dois1"}


async def test_the_floor_finds_what_no_notification_told(conn, dsn):
    await conn.execute("select reactor.attach('posts', 'post', '{body}', notify => false)")
    async with running_reactor(make_settings(database_url=dsn, poll_s=0.3)):
        await insert(conn, "um")
        await drained(conn)

    assert await bodies(conn) == {"um1"}


async def test_a_machine_that_slept_looks_at_once(conn, dsn, monkeypatch):
    await conn.execute("select reactor.attach('posts', 'post', '{body}', notify => false)")
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("reactor.app.time", clock)
    async with running_reactor(make_settings(database_url=dsn, poll_s=600)):
        await says(conn, "listening")

        async def overlooks():
            await insert(conn, "um")
            await anyio.sleep(0.5)
            return await conn.fetchval(
                "select exists (select from reactor.jobs where status = 'pending' and run_after <= now()) "
                "and not exists (select from reactor.jobs where status = 'running')"
            )

        await eventually(overlooks)  # asleep
        clock.time = lambda: time.time() + 3600
        await drained(conn)


async def test_after_a_cut_cable_the_jobs_inserted_meanwhile_run_and_a_timer_is_kept(conn, dsn, monkeypatch, events):
    monkeypatch.setattr("reactor.jobs._STATEMENT_S", 2.0)
    async with proxy_to(dsn) as proxy, running_reactor(make_settings(database_url=proxy.dsn, poll_s=60)):
        await says(conn, "listening")
        await insert(conn, "antes")
        await drained(conn)
        proxy.cut("up", "down")
        await insert(conn, "durante", 20)
        await eventually(lambda: events.named("listener_lost"))
        proxy.mend()
        await drained(conn)
        await eventually(lambda: len(events.named("listener_ready")) == 2)
        await says(conn, "listening")

        await insert(conn, "depois")
        await drained(conn)

    assert len(await bodies(conn)) == 22
    assert len(events.named("listener_lost")) == 1


async def test_status_says_how_a_reactor_hears_by_its_sessions(conn, dsn):
    async def session(application):
        return await asyncpg.connect(dsn, server_settings={"application_name": application})

    await says(conn, "down")
    connecting = await session("memory-reactor listener connecting")
    await says(conn, "down")
    worker = await session("memory-reactor worker")
    await says(conn, "polling")
    listener = await session("memory-reactor listener")
    await says(conn, "listening")
    await listener.close()
    await says(conn, "polling")
    await worker.close()
    await says(conn, "down")
    await connecting.close()


async def check_health(conn, name, *, listener="listening", deaf=False, until="1 min"):
    return [
        tuple(row)
        for row in await conn.fetch(
            "select * from reactor.check_health($1, 'host', $2, 'why', $3, '{}', '{}', '1 h', $4)",
            name,
            listener,
            deaf,
            timedelta(minutes=1) if until == "1 min" else timedelta(0),
        )
    ]


async def test_of_two_reactors_on_a_host_the_one_that_hears_does_not_hide_the_one_that_does_not(conn):
    assert await check_health(conn, "a", listener="polling") == []
    assert await check_health(conn, "a", listener="polling", deaf=True) == [("alert_opened", "listener_lost", "host")]
    assert await check_health(conn, "b") == []
    assert await check_health(conn, "a", listener="polling", deaf=True) == []
    assert await check_health(conn, "a") == [("alert_resolved", "listener_lost", "host")]


async def test_a_reactor_that_died_deaf_is_forgotten_with_its_alert(conn):
    await check_health(conn, "a", listener="polling", deaf=True, until="now")
    await says(conn, "down")
    assert await check_health(conn, "b") == [("alert_resolved", "listener_lost", "host")]


async def test_a_listener_lost_for_long_is_an_alert_until_it_is_back(conn, dsn, monkeypatch, events):
    monkeypatch.setattr("reactor.app._DEAF_S", 0.5)
    open_alerts = "select count(*) from reactor.alerts where cause = 'listener_lost' and resolved_at is null"
    async with proxy_to(dsn) as proxy, running_reactor(make_settings(database_url=proxy.dsn)):
        await says(conn, "listening")
        assert await conn.fetchval(open_alerts) == 0
        proxy.refuses, proxy.refuses_if = "53300", lambda first: b"listener" in first
        await conn.execute(KILL)
        await says(conn, "polling")
        await insert(conn, "um")
        await drained(conn)
        await eventually(lambda: conn.fetchval(f"select ({open_alerts}) = 1"))
        detail = await conn.fetchval("select detail from reactor.alerts where cause = 'listener_lost'")
        proxy.refuses = None
        await eventually(lambda: conn.fetchval(f"select ({open_alerts}) = 0"))
        await says(conn, "listening")

    assert detail == {"listener": "down", "reason": "Postgres is out of reach (it has no connection left)"}
    assert [e["cause"] for e in events.named("alert_opened")] == ["listener_lost"]
    assert [e["cause"] for e in events.named("alert_resolved")] == ["listener_lost"]
    await says(conn, "down")


# --- a server of this file's own, to stop, freeze and fill ---


@pytest.fixture(scope="module")
def cluster(server):
    with own_cluster(server.programs) as cluster:
        anyio.run(lambda: db.migrate(cluster.dsn, with_tables=True))
        yield cluster


@pytest.fixture
async def fresh(cluster):
    """The cluster, running, with nothing remembered and nothing owed."""
    conn = await connect(cluster.dsn)
    await conn.execute("delete from reactor.alerts; delete from posts")
    async with running_reactor(make_settings(database_url=cluster.dsn)):
        await drained(conn)
    await conn.execute("delete from reactor.jobs")
    await conn.close()
    return cluster


async def off_loop(work, *args):
    await anyio.to_thread.run_sync(work, *args)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_a_restart_of_the_server_is_outlived_and_listened_through(fresh, mode, events):
    async with running_reactor(make_settings(database_url=fresh.dsn, poll_s=60)):
        await eventually(lambda: events.named("listener_ready"))
        for round_ in range(2):
            await off_loop(fresh.stop, mode)
            await eventually(lambda round_=round_: len(events.named("listener_lost")) == round_ + 1)
            await off_loop(fresh.start)
            conn = await connect(fresh.dsn)
            await insert(conn, f"depois de {round_}: ")
            await drained(conn)
            await eventually(lambda round_=round_: len(events.named("listener_ready")) == round_ + 2)
            await says(conn, "listening")
            await insert(conn, f"e {round_}: ")
            await drained(conn)
            assert len(await bodies(conn)) == 2 * (round_ + 1)
            await conn.close()


async def test_a_standby_is_waited_for_until_it_is_promoted_at_start_and_later(fresh, events):
    async def become_standby():
        await off_loop(fresh.stop, "fast")
        await off_loop((fresh.data / "standby.signal").touch)
        await off_loop(fresh.start)

    async def promote():
        await off_loop(fresh.run, "pg_ctl", "-w", "-D", str(fresh.data), "promote")

    await become_standby()
    async with anyio.create_task_group() as tasks:

        async def run():
            async with running_reactor(make_settings(database_url=fresh.dsn)):
                await anyio.sleep_forever()

        tasks.start_soon(run)
        await eventually(lambda: events.named("postgres_awaited"))
        await promote()
        await eventually(lambda: events.named("listener_ready"))
        await become_standby()
        await eventually(lambda: events.named("listener_lost"))
        await promote()
        conn = await connect(fresh.dsn)
        await insert(conn, "um")
        await drained(conn)
        await eventually(lambda: len(events.named("listener_ready")) == 2)
        await says(conn, "listening")
        await conn.close()
        tasks.cancel_scope.cancel()

    assert [e["reason"] for e in events.named("postgres_awaited")] == ["Postgres is out of reach (it is a standby)"]


async def test_a_server_without_a_connection_left_kills_nothing(fresh, events):
    await off_loop(fresh.stop, "fast")
    await off_loop(fresh.start, "max_connections=20", "superuser_reserved_connections=0", "reserved_connections=0")
    hogs = [await connect(fresh.dsn)]
    async with running_reactor(make_settings(database_url=fresh.dsn)):
        await says(hogs[0], "listening")
        with anyio.fail_after(30):
            while True:
                await hogs[0].execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'memory-reactor%'"
                )
                try:
                    hogs.append(await asyncpg.connect(fresh.dsn))
                except asyncpg.TooManyConnectionsError:
                    break
        await eventually(lambda: events.named("listener_lost"))
        await insert(hogs[0], "um", 5)
        await eventually(lambda: events.named("claim_failed") or events.named("settle_failed"))
        for hog in hogs[1:]:
            await hog.close()
        await drained(hogs[0])
        await says(hogs[0], "listening")
        assert len(await bodies(hogs[0])) == 5
    await hogs[0].close()
    await off_loop(fresh.stop, "fast")
    await off_loop(fresh.start)


@pytest.mark.skipif(POSTGRES < 17, reason="the queue of notifications is 8 GB there")
async def test_a_queue_of_notifications_filled_by_a_forgotten_transaction_loses_no_listener_and_starts_none_deaf_for_ever(
    fresh, events
):
    await off_loop(fresh.stop, "fast")
    await off_loop(fresh.start, "max_notify_queue_pages=64")
    conn, forgotten = await connect(fresh.dsn), await connect(fresh.dsn)
    async with listening(fresh.dsn, beat_s=0.05) as ear:
        await forgotten.execute("listen anything")
        await forgotten.execute("begin; select 1")
        with pytest.raises(asyncpg.ProgramLimitExceededError), anyio.fail_after(60):
            while True:
                await conn.execute("select pg_notify('anything', repeat('x', 7000))")
        await anyio.sleep(1)  # twenty beats
        assert (ear.ready, ear.lost) == (1, 0)
        async with running_reactor(make_settings(database_url=fresh.dsn)):
            await insert(conn, "um")  # nor does a producer fail
            await drained(conn)
            assert len(events.named("listener_ready")) == 1
            await forgotten.close()
            await eventually(lambda: len(events.named("listener_ready")) == 2)
            await ear.hears(conn)

    await conn.close()
    await off_loop(fresh.stop, "fast")
    await off_loop(fresh.start)
    assert ear.lost == 0


@pytest.mark.parametrize("away", ["gone", "frozen", "refusing"])
async def test_sigterm_ends_it_in_time_whatever_has_become_of_the_server(fresh, away):
    async with proxy_to(fresh.dsn) as proxy:
        with reactor_process(proxy.dsn, REACTOR_DRAIN_S="2") as process:
            output = Output(process)
            await output.saw("listener_ready")
            if away == "frozen":
                with fresh.frozen():
                    process.send_signal(signal.SIGTERM)
                    code = await output.exited(timeout_s=60)
            else:
                if away == "refusing":
                    proxy.refuses = "57P03"
                    conn = await connect(fresh.dsn)
                    await conn.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'memory-reactor%'"
                    )
                    await conn.close()
                else:
                    await proxy.close()
                await output.saw("listener_lost")
                process.send_signal(signal.SIGTERM)
                code = await output.exited(timeout_s=60)
                if away == "gone":
                    await proxy.open()

    assert code == 0, output.text
    assert "Traceback" not in output.text
    assert output.named("stopped"), output.text


async def test_sigterm_ends_one_that_waits_for_a_frozen_server(fresh):
    with fresh.frozen(), reactor_process(fresh.dsn) as process:
        output = Output(process)
        await output.saw("postgres_awaited")
        process.send_signal(signal.SIGTERM)
        assert await output.exited(timeout_s=60) == 0, output.text
    assert "Traceback" not in output.text
