"""Waking: producers ring only while a reactor sleeps, and no promise is ever left to the floor."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import anyio
import asyncpg
import pytest
from conftest import POSTGRES, connect, drained, eventually, make_settings
from producing import warnings_of
from servers import own_cluster
from wake_model import Protocol, World, check

from reactor import db, worker
from reactor.app import reactor
from reactor.job import Handler
from reactor.jobs import Jobs
from reactor.listener import Listener, Wakeup
from reactor.loading import bind
from reactor.log import get_log
from reactor.worker import Worker

OURS = Protocol()
TWO_TYPES = World(handles=((0,), (1,)), enqueues=(0, 1), transactions=(1, 1))
ISOLATIONS = ("read committed", "repeatable read", "serializable")
WRITES = {
    "trigger": "insert into posts (tenant_id, body) values ('acme', 'oi')",
    "enqueue": "select reactor.enqueue('work', '{}', 'acme')",
}
IS_WATCHED = (
    "select exists (select from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock' and granted and objsubid = 2 "
    "and objid = 2 and database = (select oid from pg_database where datname = current_database()))"
)


# --- the protocol, in every order of its steps


class TestModel:
    # 45,578, 151,431, 48,891, 43,273 and 77,124 states.
    @pytest.mark.parametrize(
        ("protocol", "world"),
        [
            # Without a fault nobody even has to try again: what is due is found at once.
            pytest.param(replace(OURS, retries=False), World(transactions=(2, 1)), id="calm"),
            pytest.param(OURS, World(faults=("crash",)), id="one-crashes"),
            pytest.param(OURS, World(faults=("stop",), transactions=(2, 1)), id="one-stops"),
            pytest.param(OURS, World(faults=("deaf",), transactions=(1, 1)), id="one-listener-is-lost"),
            pytest.param(OURS, replace(TWO_TYPES, transactions=(2, 1)), id="each-handles-another-type"),
        ],
    )
    def test_in_no_order_of_its_steps_is_a_promise_left_to_the_floor(self, protocol, world):
        verdict = check(protocol, world)

        assert verdict.trace is None
        assert verdict.states > 10_000  # it did look around

    @pytest.mark.parametrize(
        ("wrong", "world"),
        [
            pytest.param({"clears_before_look": False}, World(), id="bell-cleared-after-the-look"),
            pytest.param({"looks_after_arming": False}, World(), id="no-look-after-arming"),
            pytest.param({"looks_after_refusal": False}, TWO_TYPES, id="no-look-after-hearing-of-another-watch"),
            pytest.param({"crowded_puts_down": False, "tells_watches_apart": False}, World(), id="full-and-armed"),
            pytest.param(
                {"crowded_puts_down": False, "retries": False}, World(), id="full-and-armed-even-for-a-second"
            ),
            pytest.param({"hands_over": False, "retries": False}, World(), id="nobody-hands-over"),
            pytest.param({"hands_over_later": False, "retries": False}, World(), id="hands-over-only-what-it-holds"),
            pytest.param({"retries": False}, World(faults=("crash",)), id="sleeper-beside-another-does-not-retry"),
            pytest.param({"tells_watches_apart": False}, TWO_TYPES, id="retries-without-telling-watches-apart"),
            pytest.param({"settling_rings": False}, World(faults=("stop",)), id="jobs-given-back-in-silence"),
            pytest.param({"has_lock": False}, World(), id="a-flag-in-a-table"),
        ],
    )
    def test_the_wrong_protocols_are_found_out(self, wrong, world):
        verdict = check(replace(OURS, **wrong), world)

        assert verdict.trace is not None


# --- the same on real connections


class Ear:
    """A session that counts the rings."""

    def __init__(self, conn):
        self._conn = conn
        self._rings = 0
        self._fence = anyio.Event()

    def hear(self, *_args):
        self._rings += 1

    async def rings(self):
        """How often it has rung for what was committed by now, since the last time somebody asked."""
        self._fence = anyio.Event()
        await self._conn.execute("notify fence")  # notifications come in the order of the commits
        with anyio.fail_after(10):
            await self._fence.wait()
        rings, self._rings = self._rings, 0
        return rings


@pytest.fixture
async def ear(dsn):
    conn = await connect(dsn)
    ear = Ear(conn)
    await conn.add_listener("reactor_wake", ear.hear)
    await conn.add_listener("fence", lambda *_: ear._fence.set())
    yield ear
    await conn.close()


@pytest.fixture
async def sessions(dsn):
    """Opens sessions that end with the test."""
    opened = []

    async def session():
        opened.append(await connect(dsn))
        return opened[-1]

    yield session
    for conn in opened:
        conn.terminate()


@asynccontextmanager
async def sessions_on(cluster, count):
    opened = [await connect(cluster.dsn) for _ in range(count)]
    try:
        yield opened
        await opened[0].execute("delete from reactor.jobs")
    finally:
        for conn in opened:
            conn.terminate()


async def arm(session):
    return await session.fetchval("select reactor.arm()")


async def look(conn):
    return await conn.fetchval("select count(*) from reactor.jobs where status = 'pending'")


SCRIPTS = {
    "insert": ["insert", "commit"],
    "snapshot taken first": ["select count(*) from posts", "insert", "commit"],
    "two inserts": ["insert", "insert", "commit"],
    "in a savepoint": ["savepoint s", "insert", "release s", "commit"],
    "rolled back to a savepoint": ["savepoint s", "insert", "rollback to s", "commit"],
    "insert, and another rolled back": ["insert", "savepoint s", "insert", "rollback to s", "commit"],
    "a rolled back one, and an insert": ["savepoint s", "insert", "rollback to s", "insert", "commit"],
    "rolled back": ["insert", "rollback"],
}


def kept(script):
    """Which steps are inserts that will be committed."""
    if script[-1] == "rollback":
        return []
    steps, since = [], 0
    for i, step in enumerate(script):
        if step == "savepoint s":
            since = len(steps)
        elif step == "rollback to s":
            del steps[since:]
        elif step == "insert":
            steps.append(i)
    return steps


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("write", WRITES)
async def test_whenever_a_reactor_arms_a_job_is_seen_or_rung_for_or_known_to_come(
    write, script, isolation, conn, ear, sessions
):
    steps, told = SCRIPTS[script], Counter()
    for armed_at in range(len(steps) + 1):
        producer, sleeper = await sessions(), await sessions()
        await conn.execute("delete from reactor.jobs")
        await producer.execute(f"begin isolation level {isolation}")
        for i in range(len(steps) + 1):
            if i == armed_at:
                answer, seen = await arm(sleeper), await look(conn)
            if i < len(steps):
                await producer.execute(WRITES[write] if steps[i] == "insert" else steps[i])
        rung = await ear.rings()

        jobs = await look(conn)
        assert jobs == len(kept(steps))
        assert answer == "in_flight" or jobs == seen or rung == 1, (armed_at, answer)
        # And it rings for nothing else, nor more than once a transaction.
        assert rung == (answer == "armed" and any(i >= armed_at for i in kept(steps)))
        told[answer, bool(seen), bool(rung)] += 1
        for session in (producer, sleeper):
            await session.close()

    if kept(steps) == [i for i, step in enumerate(steps) if step == "insert"]:
        assert set(told) == {("armed", False, True), ("in_flight", False, False), ("armed", True, False)}


async def test_of_two_producers_in_any_order_no_job_is_missed(conn, ear, sessions):
    orders = {tuple(order) for order in itertools.permutations(["first", "first", "second", "second", "arm"])}
    for order in orders:
        producers, sleeper = {"first": await sessions(), "second": await sessions()}, await sessions()
        await conn.execute("delete from reactor.jobs")
        inserted, committed, rings_from = set(), set(), set()
        for step in order:
            if step == "arm":
                silent = inserted - committed
                answer, seen = await arm(sleeper), await look(conn)
            elif step in inserted:
                await producers[step].execute("commit")
                committed.add(step)
            else:
                await producers[step].execute("begin")
                await producers[step].execute(WRITES["trigger"])
                inserted.add(step)
                if "arm" in order[: order.index(step)]:
                    rings_from.add(step)
        rung = await ear.rings()

        assert answer == ("in_flight" if silent else "armed"), order
        assert answer == "in_flight" or seen + rung == 2, order
        for session in (*producers.values(), sleeper):
            await session.close()


async def test_a_producer_rings_exactly_while_a_reactor_sleeps(conn, ear, sessions):
    sleeper = await sessions()
    heard = []
    for _ in range(3):
        await conn.execute(WRITES["trigger"])
        heard.append(await ear.rings())
        assert await arm(sleeper) == "armed"
        await conn.execute(WRITES["trigger"])
        await conn.execute(WRITES["enqueue"])
        heard.append(await ear.rings())
        await sleeper.execute("select reactor.disarm(false)")

    assert heard == [0, 2, 0, 2, 0, 2]


async def test_a_statement_of_many_rows_rings_once(conn, ear, sessions):
    await arm(await sessions())

    await conn.execute("insert into posts (tenant_id, body) select 'acme', 'oi' from generate_series(1, 1000)")

    assert await ear.rings() == 1


async def test_handing_over_rings_and_the_next_may_arm(ear, sessions):
    first, second = await sessions(), await sessions()
    assert await arm(first) == "armed"
    watched = await arm(second)

    await first.execute("select reactor.disarm(true)")

    assert watched.startswith("watched")
    assert await ear.rings() == 1
    assert await arm(second) == "armed"


async def test_one_watch_is_told_from_the_next(sessions):
    first, second, third = [await sessions() for _ in range(3)]
    await arm(third)
    await third.execute("select reactor.disarm(false)")
    await arm(first)
    told = [await arm(second) for _ in range(3)]
    await first.execute("select reactor.disarm(false)")
    await arm(first)
    told_later = await arm(second)

    assert len(set(told)) == 1
    assert told[0].startswith("watched")
    assert told_later not in told


async def test_a_sleeper_whose_session_ends_leaves_producers_silent_and_its_place_to_another(conn, ear, sessions):
    first, second = await sessions(), await sessions()
    await arm(first)
    pid = await first.fetchval("select pg_backend_pid()")

    await conn.execute("select pg_terminate_backend($1, 10000)", pid)
    await conn.execute(WRITES["trigger"])

    assert await ear.rings() == 0
    assert await arm(second) == "armed"
    assert await look(conn) == 1


async def test_a_look_at_who_sleeps_is_in_no_producers_way(conn, sessions):
    """Arming and disarming without a pause, beside a producer to whom any wait is an error."""
    done = anyio.Event()

    async def toggle(sleeper):
        while not done.is_set():
            if await arm(sleeper) == "armed":
                await sleeper.execute("select reactor.disarm(false)")

    async def produce(producer):
        await producer.execute("set lock_timeout = '5ms'")
        async with warnings_of(producer) as heard:
            for _ in range(200):
                await producer.execute(WRITES["trigger"])
                await producer.execute(WRITES["enqueue"])
        assert heard == []

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(toggle, await sessions())
            await produce(await sessions())  # one: two that ring wait for each other's commit
            done.set()

    assert await look(conn) == 400


@pytest.mark.parametrize(("ending", "rings"), [("done", 0), ("dead", 0), ("failed", 1), ("snoozed", 1), ("expired", 1)])
async def test_a_job_that_comes_back_is_rung_for_as_a_new_one_is(ending, rings, conn, ear, sessions):
    await conn.execute(WRITES["enqueue"])
    [job] = await conn.fetch("select * from reactor.claim_jobs('{work}', '{1}', 'test', '1 min')")
    await arm(await sessions())

    await conn.execute(
        "select reactor.settle_jobs(array[$1::bigint], array[$2::uuid], array[$3])",
        job["id"],
        job["claim_token"],
        ending,
    )

    assert await ear.rings() == rings


async def test_a_retried_job_is_rung_for(conn, ear, sessions):
    await conn.execute(WRITES["enqueue"])
    await conn.execute("update reactor.jobs set status = 'dead'")
    await arm(await sessions())

    await conn.execute("select reactor.retry_jobs()")

    assert await ear.rings() == 1


# --- what needs a server of its own


@pytest.fixture(scope="module")
def cluster(server):
    """Prepared transactions, and where Postgres has the setting, the smallest queue of notifications."""
    options = ["max_prepared_transactions=10"] + (["max_notify_queue_pages=64"] if POSTGRES >= 17 else [])
    with own_cluster(server.programs) as cluster:
        cluster.stop("fast")
        cluster.start(*options)
        anyio.run(lambda: db.migrate(cluster.dsn, with_tables=True))
        yield cluster


async def test_a_source_attached_without_notify_takes_prepared_transactions(cluster):
    async with sessions_on(cluster, 2) as (conn, sleeper):
        await conn.execute("select reactor.attach('posts', 'post', '{body}', notify => false)")
        await conn.execute("delete from reactor.jobs")
        assert await arm(sleeper) == "armed"

        await conn.execute(f"begin; {WRITES['trigger']}; prepare transaction 'p'")
        before = await look(sleeper)
        await conn.execute("commit prepared 'p'")

        assert (before, await look(sleeper)) == (0, 1)


async def test_otherwise_postgres_refuses_to_prepare_while_a_reactor_sleeps_and_one_that_is_silent_is_waited_for(
    cluster,
):
    async with sessions_on(cluster, 2) as (conn, sleeper):
        await conn.execute("select reactor.attach('posts', 'post', '{body}')")
        await conn.execute("delete from reactor.jobs")
        assert await arm(sleeper) == "armed"
        with pytest.raises(asyncpg.FeatureNotSupportedError, match="LISTEN, UNLISTEN, or NOTIFY"):
            await conn.execute(f"begin; {WRITES['trigger']}; prepare transaction 'p'")
        await conn.execute("rollback")
        await sleeper.execute("select reactor.disarm(false)")

        await conn.execute(f"begin; {WRITES['trigger']}; prepare transaction 'p'")
        prepared = await arm(sleeper)
        await conn.execute("commit prepared 'p'")

        assert prepared == "in_flight"
        assert await arm(sleeper) == "armed"
        assert await look(sleeper) == 1


@pytest.mark.skipif(POSTGRES < 17, reason="the queue of notifications is 8 GB there")
async def test_a_queue_of_notifications_that_is_full_fails_no_producer(cluster):
    async with sessions_on(cluster, 3) as (conn, sleeper, stuck):
        await conn.execute("delete from reactor.jobs")
        await stuck.execute("listen anything")
        await stuck.execute("begin; select 1")  # it takes no notification until this ends
        assert await arm(sleeper) == "armed"
        usage = "select pg_notification_queue_usage()"
        while await conn.fetchval(usage) < 0.95:
            await conn.execute("select pg_notify('anything', repeat('x', 7000))")

        async with warnings_of(conn) as warned:
            for _ in range(300):  # each would take its place in the queue
                await conn.execute(WRITES["trigger"])
                await conn.execute(WRITES["enqueue"])
        await sleeper.execute("select reactor.disarm(true)")

        assert warned == []
        assert await look(conn) == 600


# --- reactors


class Bell(Wakeup):
    """A doorbell that knows whether somebody sleeps on it for long."""

    def __init__(self):
        super().__init__()
        self.is_slept_on = False
        self.naps = 0

    async def wait(self, timeout_s):
        self.naps += 1
        self.is_slept_on = timeout_s > 0.5 and not self._rung.is_set()
        try:
            return await super().wait(timeout_s)
        finally:
            self.is_slept_on = False


class Gated(Listener):
    """Stops around its first putting down of the watch for a claim, with the handlers started."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.has_started, self.may_disarm, self.has_disarmed, self.may_look = (anyio.Event() for _ in range(4))

    async def disarm(self, *, hand_over):
        if hand_over or not self.is_armed or self.has_started.is_set():
            return await super().disarm(hand_over=hand_over)
        self.has_started.set()
        await self.may_disarm.wait()
        await super().disarm(hand_over=hand_over)
        self.has_disarmed.set()
        await self.may_look.wait()


class Hesitant(Listener):
    """Stops before it arms for the first time, having looked."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.is_about_to_arm, self.may_arm = anyio.Event(), anyio.Event()

    async def arm(self):
        if self.state == "listening":
            self.is_about_to_arm.set()
            await self.may_arm.wait()
        return await super().arm()


class Slow(Jobs):
    """Stops once in mid look, after a claim that found nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stops_if = lambda: False
        self.has_claimed_nothing, self.may_look_ahead = anyio.Event(), anyio.Event()

    async def look_ahead(self, *args):
        if self.stops_if():
            self.has_claimed_nothing.set()
            await self.may_look_ahead.wait()
        return await super().look_ahead(*args)


class Reacting:
    """A worker on a listener of its own."""

    def __init__(self, pool, dsn, handlers, *, kind=Listener, queue=Jobs, drain_s=5.0, name="test"):
        self.bell = Bell()
        self.queue = queue(pool, worker=name, lease=timedelta(seconds=30))
        self.listener = kind(
            dsn,
            {"reactor_wake": lambda _payload: self.bell.ring("notify")},
            log=get_log(),
            on_ready=lambda: self.bell.ring("listener"),
            on_lost=lambda: self.bell.ring("listener"),
            application=name,
        )
        self.worker = Worker(
            self.queue,
            bind(handlers, {"pool": pool}),
            wakeup=self.bell,
            watch=self.listener,
            poll_s=600.0,
            drain_s=drain_s,
            log=get_log(),
        )

    async def asleep(self):
        async def check():
            return self.listener.state == "listening" and self.bell.is_slept_on

        await eventually(check)

    @property
    def woken_by(self):
        """Without the looks that only go on from a claim."""
        return {why: n for why, n in self.worker.woken_by.items() if why != "more"}


@asynccontextmanager
async def reacting(*args, **kwargs):
    one = Reacting(*args, **kwargs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.listener.run)
        async with anyio.create_task_group() as working:
            working.start_soon(one.worker.run)
            yield one
            one.worker.stop()
        tasks.cancel_scope.cancel()


class Stage:
    """A handler whose jobs wait until told to end."""

    def __init__(self):
        self.ran = []
        self.may_end = anyio.Event()

    async def play(self, job):
        self.ran.append(job.id)
        await self.may_end.wait()

    def handles(self, *types, places=1):
        async def play(job):
            await self.play(job)

        return {type_: Handler(play, concurrency=places) for type_ in types}

    async def plays(self, *ids):
        async def check():
            return set(ids) <= set(self.ran)

        await eventually(check, timeout_s=15)


async def rung(one):
    return one.bell._rung.is_set()


async def naps(one):
    """Whether it has looked again and again."""
    return one.bell.naps > 20


async def logged(events, name):
    return events.named(name)


async def enqueue(conn, type_="work", after_s=0.0):
    return await conn.fetchval(
        "select reactor.enqueue($1, '{}', 'acme', run_after => now() + make_interval(secs => $2))", type_, after_s
    )


async def test_a_job_wakes_the_sleeper_and_while_it_works_producers_are_rung_for_only_as_long_as_it_has_room(
    conn, dsn, pool, ear
):
    stage, heard = Stage(), []
    async with reacting(pool, dsn, stage.handles("work")) as one:
        await one.asleep()
        await ear.rings()
        await stage.plays(await enqueue(conn))
        heard.append(await ear.rings())
        await one.asleep()  # full, but nothing waits
        ids = [await enqueue(conn)]
        await eventually(lambda: conn.fetchval(f"select not ({IS_WATCHED.removeprefix('select ')})"))
        heard.append(await ear.rings())
        ids += [await enqueue(conn) for _ in range(10)]
        heard.append(await ear.rings())
        stage.may_end.set()
        await stage.plays(*ids)
        await drained(conn)

    assert heard == [1, 2, 0]  # the job; the next one, and the watch handed over; silence
    assert one.woken_by["notify"] == 1
    assert one.woken_by.keys() <= {"notify", "ended", "crowded"}


async def test_a_job_committed_between_the_look_and_arming_is_found(conn, dsn, pool, ear):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work"), kind=Hesitant) as one:
        await one.listener.is_about_to_arm.wait()
        job = await enqueue(conn)
        silent = await ear.rings()
        one.listener.may_arm.set()
        await stage.plays(job)
        await drained(conn)

    assert silent == 0
    assert one.woken_by == {"armed": 1}


async def test_a_ring_heard_in_mid_look_asks_for_another_look(conn, dsn, pool):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work"), queue=Slow) as one:
        one.queue.stops_if = lambda: one.listener.is_armed
        await one.queue.has_claimed_nothing.wait()
        job = await enqueue(conn)
        await eventually(lambda: rung(one))
        one.queue.may_look_ahead.set()
        await stage.plays(job)
        await drained(conn)

    assert one.woken_by == {"notify": 1}


async def test_a_job_written_before_the_look_and_committed_long_after_is_waited_for_awake(conn, dsn, pool, ear):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work"), kind=Hesitant) as one:
        await one.listener.is_about_to_arm.wait()
        async with conn.transaction():
            job = await enqueue(conn)
            one.listener.may_arm.set()
            await eventually(lambda: naps(one))
        await stage.plays(job)
        silent = await ear.rings()
        await drained(conn)

    assert silent == 0
    assert one.woken_by == {"in_flight": 1}


async def test_a_job_committed_before_another_reactor_armed_is_found_by_the_one_that_comes_too_late_to(
    conn, dsn, pool, ear
):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("play"), kind=Hesitant, name="second") as second:
        await second.listener.is_about_to_arm.wait()
        job = await enqueue(conn, "play")
        silent = await ear.rings()
        async with reacting(pool, dsn, stage.handles("work"), name="first") as first:
            await first.asleep()
            second.listener.may_arm.set()
            await stage.plays(job)
            await drained(conn)

    assert silent == 0
    assert second.woken_by == {"watched": 1}


async def test_a_reactor_that_finds_itself_crowded_after_a_claim_hands_over_to_one_that_slept_beside_it(
    conn, dsn, pool, ear, monkeypatch
):
    monkeypatch.setattr(worker, "_WATCH_S", 600.0)  # so that nothing but a ring can wake it
    busy, idle = Stage(), Stage()
    async with reacting(pool, dsn, busy.handles("work"), kind=Gated, name="first") as first:
        await first.asleep()
        await enqueue(conn)
        await first.listener.has_started.wait()
        async with reacting(pool, dsn, idle.handles("work"), name="second") as second:
            await second.asleep()
            first.listener.may_disarm.set()
            await first.listener.has_disarmed.wait()
            await ear.rings()
            job = await enqueue(conn)
            silent = await ear.rings()
            first.listener.may_look.set()
            await idle.plays(job)
            for stage in (busy, idle):
                stage.may_end.set()
            await drained(conn)

    assert silent == 0
    assert second.woken_by == {"notify": 1}


async def test_a_job_written_while_a_reactor_of_other_types_was_awake_is_found_by_the_one_that_slept_beside_it(
    conn, dsn, pool, ear
):
    busy, idle = Stage(), Stage()
    async with reacting(pool, dsn, busy.handles("work"), kind=Gated, name="first") as first:
        await first.asleep()
        await enqueue(conn)
        await first.listener.has_started.wait()
        async with reacting(pool, dsn, idle.handles("play"), name="second") as second:
            await second.asleep()
            first.listener.may_disarm.set()
            await first.listener.has_disarmed.wait()
            await ear.rings()
            job = await enqueue(conn, "play")
            silent = await ear.rings()
            first.listener.may_look.set()
            await idle.plays(job)
            for stage in (busy, idle):
                stage.may_end.set()
            await drained(conn)

    assert silent == 0
    assert second.woken_by == {"watch": 1}


async def test_what_a_stopping_reactor_gives_back_is_taken_by_the_sleeper_at_once(conn, dsn, pool):
    cut, ends = Stage(), Stage()
    ends.may_end.set()
    async with reacting(pool, dsn, ends.handles("work"), name="second") as second:
        await second.asleep()
        async with reacting(pool, dsn, cut.handles("work", "hold"), drain_s=0.2, name="first"):
            await eventually(
                lambda: conn.fetchval(
                    "select count(*) = 2 from pg_stat_activity where application_name in ('first', 'second')"
                )
            )
            job = await enqueue(conn, "hold")
            await cut.plays(job)
            await conn.execute("update reactor.jobs set type = 'work'")  # which the other handles, too
        await ends.plays(job)
        await drained(conn)

    assert second.woken_by == {"notify": 1}


async def test_a_timer_is_slept_to_and_a_job_for_earlier_than_that_wakes_the_sleeper(conn, dsn, pool):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work")) as one:
        later = await enqueue(conn, after_s=3.0)
        await one.asleep()
        sooner = await enqueue(conn, after_s=0.8)
        await stage.plays(sooner, later)
        await drained(conn)

    assert stage.ran == [sooner, later]
    assert one.woken_by == {"timer": 2}
    early = await conn.fetch("select from reactor.jobs where locked_at < run_after")
    assert early == []


async def test_the_death_of_an_armed_reactor_is_noticed_by_the_one_that_slept_beside_it(conn, dsn, pool, ear):
    stage, life = Stage(), anyio.CancelScope()
    stage.may_end.set()
    first = Reacting(pool, dsn, stage.handles("work"), name="first")

    async def live():
        with life:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.listener.run)
                tasks.start_soon(first.worker._claim_loop)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(live)
        await first.asleep()
        async with reacting(pool, dsn, stage.handles("work"), name="second") as second:
            await second.asleep()
            life.cancel()
            job = await enqueue(conn)
            await stage.plays(job)
            await drained(conn)

    # As its lock was not yet gone; or was, before the job or after it.
    assert second.woken_by in ({"notify": 1}, {"watch": 1}, {"armed": 1})


async def test_a_sleeper_whose_session_is_killed_finds_what_was_written_in_that_moment(conn, dsn, pool):
    stage, ids = Stage(), []
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work")) as one:
        for _ in range(5):
            await one.asleep()
            async with conn.transaction():
                ids.append(await enqueue(conn))
                await conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'test' and datname = current_database() and query like '%reactor%' and pid <> pg_backend_pid() and exists (select from pg_locks l where l.pid = pg_stat_activity.pid and locktype = 'advisory')"
                )
            await stage.plays(*ids)
        await drained(conn)

    assert one.woken_by.keys() <= {"listener", "notify", "retry"}


async def test_a_reactor_that_cannot_claim_puts_the_watch_down_and_takes_it_up_again(conn, dsn, pool, ear, events):
    stage = Stage()
    stage.may_end.set()
    async with reacting(pool, dsn, stage.handles("work")) as one:
        await one.asleep()
        await conn.execute("alter function reactor.look_ahead rename to look_away")
        first = await enqueue(conn)
        await stage.plays(first)  # the claim works; the look that follows does not
        await eventually(lambda: logged(events, "claim_failed"))
        await one.asleep()
        await ear.rings()
        second = await enqueue(conn)
        silent = await ear.rings()
        await conn.execute("alter function reactor.look_away rename to look_ahead")
        await stage.plays(second)
        await one.asleep()
        is_watched = await conn.fetchval(IS_WATCHED)
        await drained(conn)

    assert silent == 0
    assert one.woken_by == {"notify": 1, "retry": 1}
    assert is_watched


# --- under load


SOAK_S = 15.0
IS_SOAKED = "select not exists (select from reactor.jobs where type = 'soak' and status <> 'done')"


async def test_under_load_with_a_crash_every_job_is_done_and_none_by_the_floor(conn, dsn, sessions, tmp_path):
    """Two whole reactors whose floor is out of reach, and producers who think, savepoint, roll back and dawdle."""
    (tmp_path / "soak.py").write_text(
        "import random\nimport anyio\nfrom reactor import Handler\n"
        "async def soak(job):\n    await anyio.sleep(random.choice([0, 0, 0.01, 0.1]))\n"
        "HANDLERS = {'soak': Handler(soak, concurrency=2)}\n"
    )
    settings = make_settings(database_url=dsn, poll_s=600.0, lease_s=2.0, handlers=tmp_path)
    dice, promised, workers = random.Random(), [], []

    async def live(scope):
        with scope:
            async with reactor(settings, dsn, log=get_log()) as one:
                workers.append(one)
                await one.run()

    async def produce(until):
        producer = await sessions()
        while anyio.current_time() < until:
            await anyio.sleep(dice.expovariate(8.0))
            transaction = producer.transaction(
                isolation=dice.choice(["read_committed", "repeatable_read", "serializable"])
            )
            await transaction.start()
            kept = []
            if dice.random() < 0.3:
                undone = producer.transaction()
                await undone.start()
                await enqueue(producer, "soak")
                await undone.rollback()
            for _ in range(dice.choice([1, 1, 1, 3])):
                kept.append(await enqueue(producer, "soak", after_s=dice.choice([0.0, 0.0, 0.0, 0.5])))
            await anyio.sleep(dice.choice([0.0, 0.0, 0.005, 0.05, 0.6 if dice.random() < 0.1 else 0.0]))
            if dice.random() < 0.1:
                await transaction.rollback()
            else:
                await transaction.commit()
                promised.extend(kept)

    scopes = [anyio.CancelScope() for _ in range(3)]
    async with anyio.create_task_group() as reactors:
        reactors.start_soon(live, scopes[0])
        reactors.start_soon(live, scopes[1])
        async with anyio.create_task_group() as producers:
            for _ in range(4):
                producers.start_soon(produce, anyio.current_time() + SOAK_S)
            await anyio.sleep(SOAK_S / 3)
            scopes[0].cancel()
            await conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database()"
            )
            await anyio.sleep(SOAK_S / 3)
            reactors.start_soon(live, scopes[2])
        await eventually(lambda: conn.fetchval(IS_SOAKED), timeout_s=60)
        for one in workers:
            one.stop()

    done = {r["id"] for r in await conn.fetch("select id from reactor.jobs where type = 'soak' and status = 'done'")}
    assert done == set(promised)
    woken_by = sum((one.woken_by for one in workers), Counter())
    assert woken_by["notify"] > 0
    assert woken_by["floor"] == 0
    print(len(promised), [dict(one.woken_by) for one in workers])
