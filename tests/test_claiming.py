"""Claiming: twins collapse into one run with the newest payload, nobody claims a job twice, leases run out."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import anyio
import asyncpg
import pytest
from conftest import connect
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from producing import impatient

import reactor
from reactor import db
from reactor.errors import StaleClaim
from reactor.job import Dead, Done, Failed, Snooze
from reactor.jobs import Ahead, Ending, Jobs, complete_jobs

LEASE = timedelta(seconds=30)


@pytest.fixture
def jobs(pool):
    return Jobs(pool, worker="test", lease=LEASE)


async def enqueue(conn, n=0, *, key="post:1", tenant="acme", type_="work", after="0 s", **columns):
    """A waiting job with payload {"n": n}, due `after` from now; returns its id."""
    return await conn.fetchval(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload, run_after, status, attempts) "
        "values ($1, $2, $8, $3, $4, now() + $5::text::interval, $6, $7) returning id",
        type_, tenant, key, {"n": n}, after, columns.get("status", "pending"), columns.get("attempts", 0),
        columns.get("lane", type_),
    )  # fmt: skip


async def row(conn, job_id):
    return await conn.fetchrow("select * from reactor.jobs where id = $1", job_id)


async def suspect(conn, *, key=None, attempts=0, type_="work", tenant="acme"):
    """A waiting job whose lease ran out once."""
    return await conn.fetchval(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, attempts, is_suspect) "
        "values ($1, $2, $1, $3, $4, true) returning id",
        type_, tenant, key, attempts,
    )  # fmt: skip


async def ended_by_minute(conn):
    """(done, dead) as counted when they ended."""
    return tuple(await conn.fetchrow("select coalesce(sum(done), 0), coalesce(sum(dead), 0) from reactor.job_minutes"))


@asynccontextmanager
async def ringing(dsn):
    """A reactor's session that sleeps armed; yields what waits for a ring and returns its payload."""
    payloads, rung = [], anyio.Event()
    listener = await connect(dsn)
    await listener.add_listener("reactor_wake", lambda *args: (payloads.append(args[3]), rung.set()))
    assert await listener.fetchval("select reactor.arm()") == "armed"

    async def heard():
        with anyio.fail_after(10):
            await rung.wait()
        return payloads[0]

    yield heard
    await listener.close()


async def statuses(conn):
    return [r["status"] for r in await conn.fetch("select status from reactor.jobs order by id")]


class TestTwins:
    async def test_the_lowest_id_runs_with_the_newest_payload_and_the_highest_id_as_its_version(self, conn, jobs):
        first, second, third = [await enqueue(conn, n) for n in (1, 2, 3)]

        claimed = await jobs.claim({"work": 10})

        assert [(job.id, job.payload, job.version) for job in claimed] == [(first, {"n": 3}, third)]
        assert await statuses(conn) == ["running", "done", "done"]
        assert (await row(conn, second))["result"] == {"merged_into": first}
        assert (await row(conn, third))["result"] == {"merged_into": first}

    async def test_a_thousand_twins_are_one_run(self, conn, jobs):
        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload) "
            "select 'work', 'acme', 'work', 'post:1', jsonb_build_object('n', n) from generate_series(1, 1000) n"
        )

        claimed = await jobs.claim({"work": 5})

        assert [job.payload for job in claimed] == [{"n": 1000}]
        assert Counter(await statuses(conn)) == {"running": 1, "done": 999}

    async def test_a_twin_that_is_not_due_yet_is_absorbed_by_one_that_is(self, conn, jobs):
        later = await enqueue(conn, 1, after="1 hour")
        due = await enqueue(conn, 2)
        latest = await enqueue(conn, 3, after="1 hour")

        [job] = await jobs.claim({"work": 10})

        assert (job.id, job.payload, job.version) == (due, {"n": 3}, latest)
        assert (await row(conn, later))["result"] == {"merged_into": due}

    async def test_twins_none_of_which_is_due_wait(self, conn, jobs):
        await enqueue(conn, after="1 hour")
        await enqueue(conn, after="1 s")

        assert await jobs.claim({"work": 10}) == []

    async def test_a_failed_twin_and_a_newer_pending_one_are_one_run(self, conn, jobs):
        failed = await enqueue(conn, 1, status="failed", attempts=2, after="1 hour")
        pending = await enqueue(conn, 2)

        [job] = await jobs.claim({"work": 10})

        assert (job.id, job.payload, job.attempts) == (pending, {"n": 2}, 1)
        assert (await row(conn, failed))["status"] == "done"

    async def test_a_due_failed_twin_goes_first_and_keeps_its_count_of_attempts(self, conn, jobs):
        failed = await enqueue(conn, 1, status="failed", attempts=2)
        await enqueue(conn, 2)

        [job] = await jobs.claim({"work": 10})

        assert (job.id, job.payload, job.attempts) == (failed, {"n": 2}, 3)

    async def test_an_edit_during_the_run_waits_for_it_and_then_runs_by_itself(self, conn, jobs):
        await enqueue(conn, 1)
        [first] = await jobs.claim({"work": 10})
        edit = await enqueue(conn, 2)

        meanwhile = await jobs.claim({"work": 10})
        await jobs.settle([(first, Done())])
        [second] = await jobs.claim({"work": 10})

        assert meanwhile == []
        assert (second.id, second.payload, second.version) == (edit, {"n": 2}, edit)

    @pytest.mark.parametrize("ending", [Failed("x", "y"), Snooze(3600)])
    async def test_an_edit_during_a_run_that_will_be_tried_again_runs_now_and_absorbs_the_other_attempt(
        self, conn, jobs, ending
    ):
        first_id = await enqueue(conn, 1)
        [first] = await jobs.claim({"work": 10})
        edit = await enqueue(conn, 2)
        await jobs.settle([(first, ending)])

        [second] = await jobs.claim({"work": 10})
        await jobs.settle([(second, Done())])

        assert (second.id, second.payload) == (edit, {"n": 2})
        assert (await row(conn, first_id))["result"] == {"merged_into": edit}
        assert await statuses(conn) == ["done", "done"]

    async def test_a_dead_twin_neither_blocks_nor_is_absorbed(self, conn, jobs):
        dead = await enqueue(conn, 1)
        [job] = await jobs.claim({"work": 10})
        await jobs.settle([(job, Dead("x", "y"))])
        edit = await enqueue(conn, 2)

        [job] = await jobs.claim({"work": 10})

        assert job.id == edit
        assert (await row(conn, dead))["status"] == "dead"

    async def test_jobs_without_a_key_are_never_twins(self, conn, jobs):
        ids = [await enqueue(conn, n, key=None) for n in range(3)]

        claimed = await jobs.claim({"work": 10})

        assert sorted((job.id, job.version) for job in claimed) == [(i, i) for i in ids]

    async def test_the_same_key_of_another_tenant_or_type_is_no_twin(self, conn, jobs):
        await enqueue(conn, 1)
        await enqueue(conn, 2, tenant="other")
        await enqueue(conn, 3, key="post:2")
        await enqueue(conn, 4, type_="elsewhere")

        claimed = await jobs.claim({"work": 10, "elsewhere": 10})

        assert sorted(job.payload["n"] for job in claimed) == [1, 2, 3, 4]

    async def test_an_edit_whose_transaction_is_still_open_at_the_claim_runs_after_it(self, conn, jobs, dsn):
        await enqueue(conn, 1)
        author = await connect(dsn)
        transaction = author.transaction()
        await transaction.start()
        edit = await enqueue(author, 2)

        [first] = await jobs.claim({"work": 10})
        await transaction.commit()
        blocked = await jobs.claim({"work": 10})
        await jobs.settle([(first, Done())])
        [second] = await jobs.claim({"work": 10})
        await author.close()

        assert first.payload == {"n": 1}
        assert blocked == []
        assert second.id == edit

    async def test_an_older_twin_that_is_committed_late_takes_nothing_back(self, conn, jobs, dsn):
        first_id = await enqueue(conn, 1)
        slow = await connect(dsn)
        transaction = slow.transaction()
        await transaction.start()
        late = await enqueue(slow, 2)
        newest = await enqueue(conn, 3)
        [first] = await jobs.claim({"work": 10})
        await jobs.settle([(first, Failed("x", "y"))])
        await transaction.commit()
        await slow.close()

        [second] = await jobs.claim({"work": 10})  # the late one: the other waits for its next attempt

        assert (second.id, second.payload, second.version) == (late, {"n": 3}, newest)
        assert (await row(conn, first_id))["result"] == {"merged_into": late}

    @given(
        jobs_of=st.lists(
            st.tuples(st.sampled_from("ab"), st.sampled_from(["k", "l", None]), st.booleans(), st.booleans()),
            min_size=1,
            max_size=12,
        )
    )
    @hypothesis_settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    async def test_whatever_waits_every_key_runs_once_and_everything_ends(self, conn, jobs, jobs_of):
        await conn.execute("truncate reactor.jobs")
        for n, (tenant, key, is_due, has_failed) in enumerate(jobs_of):
            await enqueue(
                conn,
                n,
                tenant=tenant,
                key=key,
                after="-1 s" if is_due else "1 hour",
                status="failed" if has_failed else "pending",
            )

        claimed = await jobs.claim({"work": 100})

        keyed = Counter((job.tenant_id, job.dedupe_key) for job in claimed if job.dedupe_key)
        due = {(t, k) for t, k, is_due, _ in jobs_of if is_due and k}
        assert set(keyed) == due
        assert set(keyed.values()) <= {1}
        assert sum(job.dedupe_key is None for job in claimed) == sum(
            k is None and is_due for _, k, is_due, _ in jobs_of
        )
        for job in claimed:
            if job.dedupe_key:
                assert job.payload["n"] == max(
                    n for n, (t, k, _, _) in enumerate(jobs_of) if (t, k) == (job.tenant_id, job.dedupe_key)
                )
        await jobs.settle([(job, Done()) for job in claimed])
        waiting = await conn.fetch("select tenant_id, dedupe_key from reactor.jobs where status <> 'done'")
        assert len(waiting) == sum(not is_due and (k is None or (t, k) not in due) for t, k, is_due, _ in jobs_of)


class TestLimits:
    async def test_no_room_claims_nothing(self, conn, jobs):
        await enqueue(conn)

        assert await jobs.claim({"work": 0}) == []
        assert await jobs.claim({}) == []
        assert await statuses(conn) == ["pending"]

    async def test_each_type_is_claimed_up_to_its_own_room_oldest_first(self, conn, jobs):
        for n in range(5):
            await enqueue(conn, n, key=None, after=f"{n - 10} s")
            await enqueue(conn, n, key=None, type_="elsewhere")

        claimed = await jobs.claim({"work": 2, "elsewhere": 3})

        assert Counter(job.type for job in claimed) == {"work": 2, "elsewhere": 3}
        assert sorted(job.payload["n"] for job in claimed if job.type == "work") == [0, 1]

    async def test_a_type_nobody_here_handles_is_left_alone(self, conn, jobs):
        await enqueue(conn, type_="unheard_of")

        assert await jobs.claim({"work": 10}) == []

    async def test_a_handlers_own_number_of_attempts_becomes_the_jobs(self, conn, jobs):
        job_id = await enqueue(conn)

        [job] = await jobs.claim({"work": 10}, {"work": 1})
        await jobs.settle([(job, Failed("x", "y"))])

        assert job.max_attempts == 1
        assert (await row(conn, job_id))["status"] == "dead"


class TestLanes:
    async def test_each_lane_has_the_room_given_for_it_and_an_unknown_one_the_types(self, conn, jobs):
        for lane in ("slow", "full", "new"):
            for _ in range(5):
                await enqueue(conn, key=None, lane=lane)

        claimed = await jobs.claim({"work": 3}, lanes={"work": {"slow": {"room": 1}, "full": {"room": 0}}})

        assert Counter(job.lane for job in claimed) == {"slow": 1, "new": 3}

    async def test_types_that_share_a_lanes_name_have_rooms_of_their_own(self, conn, jobs):
        for type_ in ("a", "b"):
            for _ in range(5):
                await enqueue(conn, key=None, type_=type_, lane="same")

        claimed = await jobs.claim({"a": 3, "b": 3}, lanes={"a": {"same": {"room": 2}}, "b": {"same": {"room": 1}}})

        assert Counter(job.type for job in claimed) == {"a": 2, "b": 1}

    async def test_lanes_by_any_name_are_found(self, conn, jobs):
        names = ["A", "a", "é", "z", "\x01", "\U0010ffff" * 200, 'say "x"', "0"]
        for name in names:
            await enqueue(conn, key=None, lane=name)

        claimed = await jobs.claim({"work": 1})

        assert sorted(job.lane for job in claimed) == sorted(names)

    async def test_a_lane_without_a_name_is_refused(self, conn):
        with pytest.raises(asyncpg.CheckViolationError):
            await enqueue(conn, lane="")


async def flood(conn, tenant, jobs, *, key="null", lane="work"):
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload) "
        f"select 'work', $1, $3, {key}, jsonb_build_object('n', n) from generate_series(1, $2::int) n",
        tenant, jobs, lane,
    )  # fmt: skip


class Turns:
    """A reactor's claims, each going on after the tenant that the last one served, as `Worker` does."""

    def __init__(self, jobs, room):
        self.jobs, self.room, self.after = jobs, room, ""

    async def claim(self):
        claimed = await self.jobs.claim({"work": 1}, lanes={"work": {"work": {"room": self.room, "after": self.after}}})
        if served := {job.tenant_id for job in claimed}:
            self.after = max({tenant for tenant in served if tenant <= self.after} or served)
        return claimed


class TestTenants:
    @pytest.mark.parametrize("room", [1, 2, 3, 10, 100])
    async def test_a_flood_of_50000_delays_another_tenants_single_job_by_one_claim_at_most(self, conn, jobs, room):
        await flood(conn, "b-flood", 50_000)
        turns = Turns(jobs, room)
        for _ in range(3):
            assert len(await turns.claim()) == room

        for tenant in ("a", "z", ""):
            await enqueue(conn, tenant=tenant, key=None)
            claims = [await turns.claim() for _ in range(2)]
            assert tenant in {job.tenant_id for claimed in claims for job in claimed}

    @pytest.mark.parametrize("room", [1, 3, 7, 20])
    async def test_with_more_tenants_than_room_the_turn_goes_around_and_nobody_starves(self, conn, jobs, room):
        tenants = [f"t{n:02}" for n in range(20)]
        for tenant in tenants:
            await flood(conn, tenant, 30)
        turns = Turns(jobs, room)

        served = Counter([job.tenant_id for _ in range(20) for job in await turns.claim()])

        assert sum(served.values()) == 20 * room
        assert set(served) == set(tenants)
        assert max(served.values()) - min(served.values()) <= 1

    @pytest.mark.parametrize("room", [1, 2])
    async def test_a_tenant_whose_jobs_all_wait_for_their_twins_holds_nobody_up(self, conn, jobs, room):
        for tenant in ("a", "b", "c"):
            await enqueue(conn, tenant=tenant, key="k")
        assert len(await jobs.claim({"work": 10})) == 3
        for tenant in ("a", "b", "c"):
            await flood(conn, tenant, 20, key="'k'")
        await flood(conn, "d", 3)
        turns = Turns(jobs, room)
        turns.after = "a"

        claimed = [job.tenant_id for _ in range(4) for job in await turns.claim()]

        assert claimed == ["d"] * 3

    async def test_what_one_tenant_leaves_of_the_room_goes_to_the_others(self, conn, jobs):
        await flood(conn, "a", 1)
        await flood(conn, "b", 50)
        turns = Turns(jobs, 10)

        claimed = [job.tenant_id for _ in range(2) for job in await turns.claim()]

        assert claimed.count("a") == 1
        assert claimed.count("b") >= 10

    async def test_tenants_of_any_name_take_part(self, conn, jobs):
        tenants = ["", "\x01", " ", "%", "A", "a", "ação", "~", "\uffff", "\U0010ffff" * 200, "日本"]
        for tenant in tenants:
            await flood(conn, tenant, 3)
        turns = Turns(jobs, 2)

        served = [job.tenant_id for _ in range(17) for job in await turns.claim()]

        assert set(served[: len(tenants) + 1]) == set(tenants)
        assert Counter(served) == dict.fromkeys(tenants, 3)


class TestCost:
    """What a claim reads, in 8 kB pages, however much waits and whatever the statistics say."""

    @pytest.mark.parametrize("tenants", [10, 1000])
    async def test_a_claim_at_a_thousand_tenants_reads_what_it_returns(self, conn, tenants):
        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane, dedupe_key) "
            "select 'work', 't' || n % $1, 'work', 'k' || n from generate_series(1, 20000) n",
            tenants,
        )
        await conn.execute("vacuum analyze reactor.jobs")

        pages, claimed = await pages_of_claims(conn, room=100)

        assert claimed == 100
        assert pages < 100 * 60

    @pytest.mark.parametrize("statistics", ["none", "of an empty table", "of history only", "right"])
    async def test_neither_history_nor_what_is_for_later_nor_wrong_statistics_slow_a_claim(self, conn, statistics):
        async def fill():
            await conn.execute(
                "insert into reactor.jobs (type, tenant_id, lane, status, run_after, updated_at, dedupe_key) "
                "select 'work', 't' || n % 50, 'work', s.status, now() + s.after, now(), 'k' || n "
                "from (values ('done', '0'::interval), ('pending', '1 hour')) s (status, after), generate_series(1, 100000) n"
            )

        await flood(conn, "a", 400, key="'w' || n")
        if statistics == "of an empty table":
            await conn.execute("delete from reactor.jobs")
            await conn.execute("vacuum analyze reactor.jobs")
            await flood(conn, "a", 400, key="'w' || n")
        alone, _ = await pages_of_claims(conn, room=20)

        if statistics == "of history only":
            await conn.execute("alter table reactor.jobs set (autovacuum_enabled = off)")
            await conn.execute("update reactor.jobs set status = 'done'")
            await conn.execute("vacuum analyze reactor.jobs")
            await flood(conn, "a", 400, key="'w' || n")
        await fill()
        if statistics == "right":
            await conn.execute("vacuum analyze reactor.jobs")
        beside, claimed = await pages_of_claims(conn, room=20)

        assert claimed == 20
        assert beside < alone * 1.5 + 60  # trees of one more level, and their first pages


async def pages_of_claims(conn, *, room):
    """The pages that a claim reads once its plans are made, and how many jobs it returned."""
    for _ in range(8):
        plan = await conn.fetchval(
            "explain (analyze, buffers, format json) "
            f"select * from reactor.claim_jobs('{{work}}', '{{{room}}}', 'test', '1 hour')"
        )
        [top] = plan if isinstance(plan, list) else json.loads(plan)
    pages = top["Plan"]["Shared Hit Blocks"] + top["Plan"]["Shared Read Blocks"]
    return pages, top["Plan"]["Actual Rows"]


class TestTwoReactors:
    async def test_twenty_rounds_of_two_claiming_at_once_never_share_a_job_or_a_key(self, conn, dsn):
        one, two = [await connect(dsn) for _ in range(2)]
        claim = "select id, dedupe_key from reactor.claim_jobs('{work}', '{40}', $1, '30 s')"
        for _ in range(20):
            await conn.execute("truncate reactor.jobs")
            await conn.execute(
                "insert into reactor.jobs (type, tenant_id, lane, dedupe_key) "
                "select 'work', 'acme', 'work', case when n % 4 > 0 then 'post:' || n % 17 end from generate_series(1, 200) n order by random()"
            )
            answers = []

            async def go(c, name, answers=answers):
                answers.append(await c.fetch(claim, name))

            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(go, one, "one")
                    tasks.start_soon(go, two, "two")

            ids = [r["id"] for answer in answers for r in answer]
            keys = [r["dedupe_key"] for answer in answers for r in answer if r["dedupe_key"]]
            assert len(ids) == len(set(ids)) > 0
            assert len(keys) == len(set(keys))
        await one.close()
        await two.close()

    async def test_what_somebody_has_locked_is_passed_over_without_waiting(self, conn, jobs, dsn):
        locked, free = await enqueue(conn, key="a"), await enqueue(conn, key="b")
        operator = await connect(dsn)
        transaction = operator.transaction()
        await transaction.start()
        await operator.fetch("select from reactor.jobs where id = $1 for update", locked)

        with anyio.fail_after(10):
            claimed = await jobs.claim({"work": 10})
        await transaction.rollback()
        await operator.close()

        assert [job.id for job in claimed] == [free]

    async def test_a_heartbeat_never_waits_for_a_handler_that_holds_its_claims(self, conn, jobs, pool):
        ids = [await enqueue(conn, key=None) for _ in range(2)]
        claimed = sorted(await jobs.claim({"work": 10}), key=lambda job: job.id)

        async with pool.acquire() as handler, handler.transaction():
            await complete_jobs(handler, [(claimed[0], None)])
            with anyio.fail_after(10):
                extended = await jobs.extend(claimed)

        assert extended == {ids[1]}


class TestIsolation:
    """Producers of any isolation level, and a database whose default is a strict one."""

    @pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
    async def test_producers_beside_a_busy_queue_never_wait_deadlock_or_fail_to_serialize_and_nothing_is_lost(
        self, conn, dsn, isolation
    ):
        await conn.execute("create table log (id int, tenant_id text, body text)")  # no key of its own to wait for
        await conn.execute("select reactor.attach('log', 'log', '{body}', time_column => null)")
        await conn.execute("delete from reactor.jobs")
        is_over, written = anyio.Event(), 0

        async def produce(name, keys):
            nonlocal written
            async with impatient(dsn) as producer:
                await producer.execute(f"set default_transaction_isolation = '{isolation}'")
                for n in range(80):
                    async with producer.transaction():
                        # By place: two serializable producers that read by one index fail each other without us, too.
                        place = await producer.fetchval(
                            "insert into posts (tenant_id, body) values ('acme', $1) returning ctid", name
                        )
                        for key in keys:
                            await producer.execute("insert into log values ($1, 'acme', $2)", key, f"{name} {n}")
                        place = await producer.fetchval(
                            "update posts set body = body || '!' where ctid = $1 returning ctid", place
                        )
                        if n % 2:
                            await producer.execute("delete from posts where ctid = $1", place)
                    written += len(keys) + 2 + n % 2

        async def work(pool, name):
            jobs, forgetful = [Jobs(pool, worker=name, lease=timedelta(seconds=s)) for s in (30, 0)]
            for n in itertools.count():
                claimed = await jobs.claim({"sync_row": 7})
                if is_over.is_set() and not await pool.fetchval(
                    "select count(*) from reactor.jobs where status <> 'done'"
                ):
                    return
                outcomes = [Done(), Failed("x", "y", 0), Dead("x", "y"), Snooze(0)]
                await jobs.settle(
                    [(job, Done() if is_over.is_set() else outcomes[i % 4]) for i, job in enumerate(claimed)]
                )
                await pool.fetch("select * from reactor.prune('0', 10)")
                await pool.fetch("select * from reactor.retry_jobs()")
                if n % 5 == 0:
                    await forgetful.claim({"sync_row": 3})
                    await forgetful.release_expired()

        with anyio.fail_after(60):
            async with db.create_pool(dsn, application="test", size=4) as pool, anyio.create_task_group() as reactors:
                for name in ("one", "two"):
                    reactors.start_soon(work, pool, name)
                async with anyio.create_task_group() as producers:
                    for n in range(4):
                        keys = list(range(5)) if n % 2 else list(range(4, -1, -1))
                        producers.start_soon(produce, f"p{n}", keys)
                is_over.set()

        done, _ = await ended_by_minute(conn)
        assert done == written

    @pytest.mark.parametrize("level", ["repeatable read", "serializable"])
    async def test_a_reactor_whose_role_defaults_to_a_stricter_level_claims_and_settles_all_the_same(
        self, conn, dsn, level
    ):
        await conn.execute(
            f"alter database {await conn.fetchval('select current_database()')} set default_transaction_isolation = '{level}'"
        )
        await flood(conn, "acme", 600, key="'k' || n % 300")

        async def work(pool, name):
            jobs = Jobs(pool, worker=name, lease=timedelta(seconds=30))
            while claimed := await jobs.claim({"work": 11}):
                await jobs.extend(claimed)
                async with reactor.tenant(pool, "acme") as c:
                    await complete_jobs(c, [(job, None) for job in claimed[:3]])
                await jobs.settle([(job, Done()) for job in claimed[3:]])

        with anyio.fail_after(60):
            async with (
                db.create_pool(dsn, application="test", size=6, resets=False) as queue,
                db.create_pool(dsn, application="test", size=6) as pool,
                anyio.create_task_group() as tasks,
            ):
                for n in range(4):
                    tasks.start_soon(work, pool if n % 2 else queue, str(n))

        assert Counter(await statuses(conn)) == {"done": 600}

    async def test_a_session_that_a_pooler_may_give_to_somebody_else_keeps_its_level(self, conn, dsn):
        await conn.execute(
            f"alter database {await conn.fetchval('select current_database()')} set default_transaction_isolation = 'serializable'"
        )

        async with db.create_pool(dsn, application="test", size=1, statement_cache_size=0) as pool:
            assert await pool.fetchval("show default_transaction_isolation") == "serializable"


class TestTimers:
    async def test_the_next_timer_is_told_by_the_databases_clock(self, conn, jobs):
        await enqueue(conn, after="90 s", key="a")
        await enqueue(conn, after="2 hours", key="b")

        ahead = await jobs.look_ahead(["work"])

        assert 80 < ahead.due_s <= 90
        assert not ahead.is_crowded
        assert not ahead.is_blocked

    async def test_nothing_waiting_is_no_timer(self, jobs):
        assert await jobs.look_ahead(["work"]) == Ahead(None, False, False)

    async def test_what_has_come_due_since_the_claim_is_due_in_no_time(self, conn, jobs):
        await enqueue(conn, after="1 hour")
        await conn.execute("update reactor.jobs set run_after = now(), updated_at = now() - interval '1 hour'")

        ahead = await jobs.look_ahead(["work"])

        assert ahead.due_s == 0
        assert len(await jobs.claim({"work": 1})) == 1

    async def test_the_end_of_somebodys_lease_is_a_timer_too(self, conn, jobs):
        await enqueue(conn)
        await jobs.claim({"work": 1})

        ahead = await jobs.look_ahead(["work", "elsewhere"])

        assert 20 < ahead.due_s <= 30

    async def test_a_lease_that_ran_out_under_a_handlers_own_transaction_is_asked_about_once_a_second(
        self, conn, jobs, pool
    ):
        await enqueue(conn)
        claimed = await jobs.claim({"work": 1})
        await conn.execute("update reactor.jobs set lease_until = now() - interval '1 s'")

        async with pool.acquire() as handler, handler.transaction():
            await complete_jobs(handler, [(job, None) for job in claimed])
            released = await jobs.release_expired()
            ahead = await jobs.look_ahead(["work"])

        assert released == []
        assert 0.5 < ahead.due_s <= 1

    async def test_jobs_in_a_lane_without_room_are_told_from_jobs_that_wait_for_a_twin(self, conn, jobs):
        await enqueue(conn, key="a")
        await jobs.claim({"work": 1})
        no_room = {"work": {"work": {"room": 0, "after": ""}}}

        nothing = await jobs.look_ahead(["work"], no_room)
        await enqueue(conn, key="a")
        twin, crowd = await jobs.look_ahead(["work"]), await jobs.look_ahead(["work"], no_room)

        assert [(a.is_crowded, a.is_blocked) for a in (nothing, twin, crowd)] == [
            (False, False),
            (False, True),
            (True, False),
        ]


class TestLeases:
    async def release_at(self, conn, at):
        return await conn.fetch("select * from reactor.release_expired_jobs($1)", at)

    async def claim_at(self, conn, at, limit=10):
        """What another worker's sweep and claim find at that instant."""
        await self.release_at(conn, at)
        return await conn.fetch(
            "select * from reactor.claim_jobs('{work}', $1, 'other', '30 s', p_now => $2)", [limit], at
        )

    async def test_a_job_whose_worker_went_silent_is_claimed_again_with_another_token(self, conn, jobs):
        job_id = await enqueue(conn)
        [first] = await jobs.claim({"work": 1})

        early = await self.claim_at(conn, datetime.now(UTC) + timedelta(seconds=20))
        [second] = await self.claim_at(conn, datetime.now(UTC) + timedelta(seconds=40))

        assert early == []
        assert (second["id"], second["is_suspect"]) == (job_id, True)
        assert (await row(conn, job_id))["locked_by"] == "other"
        assert second["claim_token"] != first.claim_token

    async def test_the_jobs_of_one_claim_share_its_token_and_no_other_claim_has_it(self, conn, jobs):
        for n in range(6):
            await enqueue(conn, key=f"post:{n}")

        claims = [await jobs.claim({"work": 2}) for _ in range(3)]

        assert [len({job.claim_token for job in claim}) for claim in claims] == [1, 1, 1]
        assert len({claim[0].claim_token for claim in claims}) == 3

    async def test_a_heartbeat_keeps_the_claim(self, conn, jobs):
        await enqueue(conn)
        [job] = await jobs.claim({"work": 1})

        await conn.fetch("select reactor.extend_leases($1, $2, '1 hour')", [job.id], [job.claim_token])

        assert await self.claim_at(conn, datetime.now(UTC) + timedelta(minutes=30)) == []

    async def test_a_late_worker_can_neither_settle_nor_extend_nor_note_nor_complete(self, conn, jobs, pool):
        await enqueue(conn)
        [late] = await jobs.claim({"work": 1})
        await self.claim_at(conn, datetime.now(UTC) + timedelta(seconds=40))
        before = await row(conn, late.id)

        settled = [
            await jobs.settle([(late, outcome)])
            for outcome in (Done({"late": True}), Failed("x", "y"), Dead("x", "y"), Snooze(5))
        ]
        extended = await jobs.extend([late])
        async with pool.acquire() as c, c.transaction():
            completed = await complete_jobs(c, [(late, {"late": True})])
        with pytest.raises(StaleClaim):
            await late.note({"step": 1})

        assert settled == [{late.id: Ending(None)}] * 4
        assert (extended, completed) == (set(), [])
        assert await row(conn, late.id) == before
        assert await ended_by_minute(conn) == (0, 0)

    async def test_what_was_settled_once_is_not_settled_again_whatever_the_endings(self, conn, jobs, pool):
        for ending in (Done(), Failed("x", "y"), Dead("x", "y"), Snooze(5)):
            await enqueue(conn, key=None)
            [job] = await jobs.claim({"work": 1})
            await jobs.settle([(job, ending)])
            before = await row(conn, job.id)

            again = [
                await jobs.settle([(job, outcome)])
                for outcome in (Done({"again": True}), Failed("x", "y"), Dead("x", "y"), Snooze(5))
            ]
            async with pool.acquire() as c, c.transaction():
                completed = await complete_jobs(c, [(job, {"again": True})])

            assert again == [{job.id: Ending(None)}] * 4
            assert completed == []
            assert await row(conn, job.id) == before

    async def test_a_lease_that_ends_beside_others_spends_no_attempt_and_alone_it_does(self, conn, jobs):
        first, second, third = [await enqueue(conn, key=f"post:{n}") for n in range(3)]
        await jobs.claim({"work": 3})
        now = datetime.now(UTC)

        alone = [await self.claim_at(conn, now + timedelta(seconds=40 * turn)) for turn in (1, 2, 3)]

        assert [[(job["id"], job["attempts"]) for job in claimed] for claimed in alone] == [
            [(first, 1)],
            [(second, 1)],
            [(third, 1)],
        ]
        assert (await row(conn, first))["status"] == "failed"

    @pytest.mark.parametrize(
        ("is_suspect", "attempts", "became"),
        [
            (False, 4, (4, "pending", None)),
            (True, 3, (4, "failed", None)),
            (True, 4, (5, "dead", "work lease_expired")),
        ],
    )
    async def test_the_sweep_tells_what_a_job_became_and_rings(self, conn, jobs, dsn, is_suspect, attempts, became):
        job_id = await (suspect if is_suspect else enqueue)(conn, attempts=attempts)
        [_] = await jobs.claim({"work": 5})
        await conn.execute("update reactor.jobs set lease_until = now() - interval '1 s'")

        async with ringing(dsn) as heard:
            [released] = await jobs.release_expired()
            await heard()

        assert (released.id, released.attempts, released.status, released.opened_alert) == (job_id, *became)
        assert (await row(conn, job_id))["status"] == released.status

    async def test_a_suspect_that_settles_is_none_any_more(self, conn, jobs):
        await enqueue(conn)
        await jobs.claim({"work": 1})
        await conn.execute("update reactor.jobs set lease_until = now() - interval '1 s'")
        await jobs.release_expired()
        [suspect] = await jobs.claim({"work": 1})

        await jobs.settle([(suspect, Snooze(0))])
        [again] = await jobs.claim({"work": 1})

        assert (suspect.is_suspect, again.is_suspect, again.attempts) == (True, False, 1)

    async def test_one_suspect_of_a_type_runs_at_a_time_beside_the_others(self, conn, jobs):
        suspects = [await suspect(conn, key=key) for key in ("a", "b", None)]
        innocents = [await enqueue(conn, key=f"post:{n}") for n in range(3)]

        claims = [await jobs.claim({"work": 10}) for _ in range(2)]
        runs = []
        for _ in range(3):
            [running] = [job for job in claims[0] if job.is_suspect]
            runs.append(running.id)
            await jobs.settle([(running, Done())])
            claims[0] = await jobs.claim({"work": 10})

        assert claims[1] == []
        assert runs == suspects
        assert await statuses(conn) == ["done"] * 3 + ["running"] * len(innocents)

    async def test_a_twin_that_absorbs_a_suspect_is_one(self, conn, jobs):
        older = await enqueue(conn, 1)
        newer = await suspect(conn, key="post:1")
        await enqueue(conn, key="other")

        claimed = {job.id: job.is_suspect for job in await jobs.claim({"work": 10})}

        assert claimed[older] is True
        assert (await row(conn, newer))["result"] == {"merged_into": older}

    async def test_a_suspect_waits_while_its_lane_has_no_room(self, conn, jobs):
        await suspect(conn)

        assert await jobs.claim({"work": 10}, lanes={"work": {"work": {"room": 0}}}) == []
        assert len(await jobs.claim({"work": 10})) == 1

    async def test_a_job_that_keeps_killing_its_worker_dies_and_takes_no_neighbour_with_it(self, conn, jobs):
        poison, *neighbours = [await enqueue(conn, key=f"post:{n}") for n in range(5)]
        for _ in range(20):
            claimed = await jobs.claim({"work": 10})
            if poison in [job.id for job in claimed]:  # the worker dies before anything is settled
                await conn.execute(
                    "update reactor.jobs set lease_until = now() - interval '1 s' where status = 'running'"
                )
                await jobs.release_expired()
            else:
                await jobs.settle([(job, Done()) for job in claimed])

        statuses = dict(await conn.fetch("select id, status from reactor.jobs"))
        assert statuses == {poison: "dead", **dict.fromkeys(neighbours, "done")}

    async def test_a_suspect_whose_lease_ends_on_the_last_attempt_is_a_dead_job_and_an_alert(self, conn, jobs):
        job_id = await enqueue(conn, attempts=4)
        await jobs.claim({"work": 1})
        now = datetime.now(UTC)

        for turn in (1, 2):
            await self.claim_at(conn, now + timedelta(seconds=40 * turn))

        assert (await row(conn, job_id))["status"] == "dead"
        assert (
            await conn.fetchval("select subject from reactor.alerts where resolved_at is null") == "work lease_expired"
        )

    async def test_a_settled_job_leaves_no_lease_behind(self, conn, jobs):
        await enqueue(conn)
        [job] = await jobs.claim({"work": 1})

        await jobs.settle([(job, Done())])

        after = await row(conn, job.id)
        assert (after["locked_by"], after["lease_until"], after["claim_token"]) == (None, None, None)


class TestEnqueueing:
    async def test_a_job_from_sql_keeps_every_argument_by_its_name(self, conn):
        job_id = await conn.fetchval(
            "select reactor.enqueue(type => 'publish', payload => '{\"a\": 1}', tenant_id => 'acme', dedupe_key => 'k', "
            "run_after => '2030-01-01', lane => 'instagram', max_attempts => 2)"
        )

        job = await row(conn, job_id)
        assert [job[c] for c in ("type", "payload", "tenant_id", "dedupe_key", "lane", "max_attempts", "status")] == [
            "publish", {"a": 1}, "acme", "k", "instagram", 2, "pending",
        ]  # fmt: skip
        assert job["run_after"].year == 2030

    async def test_the_lane_is_the_type_unless_given(self, conn):
        job_id = await conn.fetchval("select reactor.enqueue('publish', '{}', 'acme')")

        assert (await row(conn, job_id))["lane"] == "publish"

    async def test_a_wrong_argument_is_one_clear_line(self, conn):
        wrong = [
            "'', '{}', 'acme'",
            "'x', '[]', 'acme'",
            "'x', '{}', null",
            "'x', '{}', repeat('x', 201)",
            "repeat('x', 201), '{}', 'acme'",
            "'x', '{}', 'a', repeat('k', 501)",
        ]
        for arguments in wrong:
            with pytest.raises(asyncpg.InvalidParameterValueError, match=r"^a job") as caught:
                await conn.fetchval(f"select reactor.enqueue({arguments})")

            assert "\n" not in str(caught.value)

    async def test_it_rings_a_sleeping_reactor_with_an_empty_payload(self, conn, dsn):
        async with ringing(dsn) as heard:
            await conn.fetchval("select reactor.enqueue('publish', $1, 'acme')", {"secret": "canary"})

            assert await heard() == ""

    async def test_lane_and_key_are_bounded_by_what_an_index_holds(self, conn):
        wide = "".join(chr(0x10000 + 37 * n) for n in range(200))  # four bytes each, and no two alike

        await conn.fetchval("select reactor.enqueue($1, '{}', $2, $3, lane => $4)", wide, wide, wide[:125], wide)

        for arguments in ("'x', '{}', 'a', repeat('ã', 251)", "'x', '{}', 'a', lane => repeat('x', 201)"):
            with pytest.raises(asyncpg.InvalidParameterValueError, match=r"^a job's lane"):
                await conn.fetchval(f"select reactor.enqueue({arguments})")


async def test_more_twins_than_a_claim_can_take_on_are_absorbed_by_several(conn, jobs):
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload) "
        "select 'work', 'acme', 'work', 'k', jsonb_build_object('n', n) from generate_series(1, 50000) n"
    )
    newest = await conn.fetchval("select max(id) from reactor.jobs")

    versions = []
    while claimed := await jobs.claim({"work": 10}):
        [job] = claimed
        versions.append(job.version)
        await jobs.settle([(job, Done())])

    assert len(versions) == 3
    assert versions == sorted(versions)
    assert (job.version, job.payload) == (newest, {"n": 50_000})
