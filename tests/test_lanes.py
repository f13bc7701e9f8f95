"""Lanes: jobs that share their places and their fate; what is slow, full or away in one does not touch another."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import anyio
import pytest
from conftest import drained, eventually, make_settings, running_reactor
from hypothesis import given, settings
from hypothesis import strategies as st
from test_settling import ended, row, working

from reactor.errors import Unavailable
from reactor.job import Handler


async def enqueue(conn, type_="work", *, lane=None, tenant="acme", n=0):
    return await conn.fetchval("select reactor.enqueue($1, $2, $3, lane => $4)", type_, {"n": n}, tenant, lane)


class Places:
    """A handler that holds its place until released, and knows how many did so at once."""

    def __init__(self):
        self.inside = Counter()
        self.most = Counter()
        self.started = []
        self.release = anyio.Event()

    async def __call__(self, job):
        self.started.append(job.id)
        for place in (job.lane, "all"):
            self.inside[place] += 1
            self.most[place] = max(self.most[place], self.inside[place])
        await self.release.wait()
        for place in (job.lane, "all"):
            self.inside[place] -= 1


class TestPlaces:
    async def test_the_lane_is_the_one_given_to_enqueue_else_the_handlers_else_the_type(self, conn, pool):
        lanes = {}

        async def work(job):
            lanes[job.type, job.payload["n"]] = job.lane
            raise Unavailable("away", retry_after_s=100)  # the lane's name stands in the log

        own = {"plain": work, "shared": Handler(work, lane="search")}
        async with working(pool, own) as worker:
            for n, (type_, lane) in enumerate(
                [("plain", None), ("shared", None), ("plain", "given"), ("shared", "given2")]
            ):
                await enqueue(conn, type_, lane=lane, n=n)
                worker._wakeup.ring()
            await eventually(lambda: len(lanes) == 4)
            away, _ = worker.lanes(-1)

        assert sorted(away) == ["given", "given2", "plain", "search"]

    async def test_each_lane_of_a_type_has_places_of_its_own(self, conn, pool):
        places = Places()
        for lane in ("a", "b", None):
            for n in range(5):
                await enqueue(conn, lane=lane, n=n)
        async with working(pool, {"work": Handler(places.__call__, concurrency=2)}):
            await eventually(lambda: places.inside["all"] == 6)
            running = await conn.fetch("select lane from reactor.jobs where status = 'running'")
            places.release.set()
            await drained(conn)

        assert Counter(job["lane"] for job in running) == {"a": 2, "b": 2, "work": 2}
        assert places.most == {"a": 2, "b": 2, "work": 2, "all": 6}

    async def test_a_slow_lane_never_blocks_a_fast_one_of_its_own_type_or_another(self, conn, pool):
        slow = Places()

        async def quick(job):
            return {"quick": True}

        async def work(job):
            return await (slow(job) if job.lane == "slow" else quick(job))

        for n in range(50):
            await enqueue(conn, lane="slow", n=n)
        async with working(pool, {"work": Handler(work, concurrency=2), "quick": quick}, poll_s=60):
            await eventually(lambda: slow.inside["slow"] == 2)
            # Nobody rings: producers are silent while a lane is full.
            ids = [await enqueue(conn, lane="fast"), await enqueue(conn), await enqueue(conn, "quick")]
            rows = await ended(conn, *ids)
            assert slow.most["slow"] == 2
            slow.release.set()

        assert {job["status"] for job in rows} == {"done"}

    async def test_two_types_in_one_lane_never_exceed_its_places_together_and_all_run(self, conn, pool):
        places = Places()
        handler = Handler(places.__call__, concurrency=3, lane="shared")
        ids = [
            await enqueue(conn, type_, lane=lane, n=n)
            for n in range(6)
            for type_, lane in (("a", None), ("b", None), ("a", "shared"))
        ]
        async with working(pool, {"a": handler, "b": handler}, lease_s=1) as worker:
            await eventually(lambda: places.inside["all"] == 3)
            waiting = "select min(lease_until) > now() and count(*) > 3 from reactor.jobs where status = 'running'"
            assert await conn.fetchval(waiting)  # the others were claimed, and wait for a place
            claimed_at = await conn.fetchval("select max(locked_at) from reactor.jobs")
            await eventually(
                lambda: conn.fetchval("select clock_timestamp() > $1::timestamptz + interval '2 s'", claimed_at)
            )
            assert await conn.fetchval(waiting)  # longer than their lease, which is kept up
            places.release.set()
            rows = await ended(conn, *ids)

        assert worker.settled_jobs == 18
        assert places.most["all"] == 3
        assert {(job["status"], job["attempts"]) for job in rows} == {("done", 1)}

    async def test_types_of_different_concurrency_share_the_smallest_and_none_starves(self, conn, pool):
        most = inside = 0
        played = []

        async def work(job):
            nonlocal most, inside
            inside += 1
            most = max(most, inside)
            played.append(job.type)
            await anyio.sleep(0)
            inside -= 1

        for n in range(100):
            await enqueue(conn, "many", n=n)
        last = await enqueue(conn, "few")
        table = {
            "many": Handler(work, concurrency=8, lane="shared"),
            "few": Handler(work, concurrency=2, lane="shared"),
        }
        async with working(pool, table):
            await ended(conn, last)
            await drained(conn)

        assert most == 2
        assert played.index("few") < 50

    async def test_lanes_named_after_no_end_of_things_are_forgotten(self, conn, pool, monkeypatch):
        async def work(job):
            return None

        monkeypatch.setattr("reactor.worker._FORGET_S", 0.0)
        async with working(pool, {"work": work}, poll_s=0.1) as worker:
            ids = [await enqueue(conn, lane=f"post-{n}") for n in range(50)]
            await ended(conn, *ids)
            await eventually(lambda: set(worker._lanes) == {"work"})

    @settings(max_examples=12, deadline=None)
    @given(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([None, "x", "y"]), st.booleans()),
            min_size=1,
            max_size=25,
        ),
        st.integers(1, 4),
        st.integers(1, 3),
    )
    def test_whatever_stands_where_every_job_runs_once_within_the_places_of_its_lane(
        self, server, template, jobs, concurrency, batch
    ):
        anyio.run(_runs_once_within_places, server, template, jobs, concurrency, batch)


async def _runs_once_within_places(server, template, jobs, concurrency, batch):
    from conftest import _NUMBERS, connect, db  # noqa: PLC0415  # a database an example

    name = f"lanes{next(_NUMBERS)}"
    server.psql(server.superuser, f"create database {name} template {template}")
    try:
        conn = await connect(server.dsn(name))
        inside, most, runs = Counter(), Counter(), Counter()

        def lane_of(job):
            return "shared" if job.lane in ("a", "b") else job.lane

        async def work(given):
            batch = given if isinstance(given, list) else [given]
            lane = lane_of(batch[0])
            inside[lane] += 1
            most[lane] = max(most[lane], inside[lane])
            runs.update(job.id for job in batch)
            await anyio.sleep(0.001)
            inside[lane] -= 1
            if any(job.payload["n"] and job.attempts == 1 and runs[job.id] == 1 for job in batch):
                raise Unavailable("away", retry_after_s=0)

        table = {
            type_: Handler(work, concurrency=concurrency, batch=batch, lane="shared" if type_ != "c" else None)
            for type_ in "abc"
        }
        for type_, lane, is_away in jobs:
            await conn.fetchval("select reactor.enqueue($1, $2, 'acme', lane => $3)", type_, {"n": int(is_away)}, lane)
        async with db.create_pool(server.dsn(name), application="test", size=5) as pool, working(pool, table):
            await eventually(
                lambda: conn.fetchval("select not exists (select from reactor.jobs where status <> 'done')")
            )
        attempts = await conn.fetch("select attempts from reactor.jobs")
        await conn.close()
        assert max(most.values()) <= concurrency
        assert {r["attempts"] for r in attempts} == {1}
    finally:
        server.psql(server.superuser, f"drop database {name} with (force)")


class TestBreaker:
    async def test_an_outage_rests_its_lane_and_no_other_and_success_closes_it_said_once_each(self, conn, pool, events):
        away, calls = True, []

        async def work(job):
            calls.append((job.lane, job.payload["n"]))
            if away and job.lane == "instagram":
                raise Unavailable("busy", code="instagram")

        for n in range(8):
            await enqueue(conn, lane="instagram", n=n)
        async with working(pool, {"work": Handler(work, concurrency=4)}) as worker:
            await eventually(lambda: calls)
            fine = [await enqueue(conn, lane="facebook", n=n) for n in range(4)]
            worker._wakeup.ring()
            assert {job["status"] for job in await ended(conn, *fine)} == {"done"}
            await eventually(lambda: sum(lane == "instagram" for lane, _ in calls) >= 3)  # two probes failed
            away = False
            await eventually(
                lambda: conn.fetchval("select not exists (select from reactor.jobs where status <> 'done')")
            )

        assert [(e["lane"], e["error_code"]) for e in events.named("lane_opened")] == [("instagram", "instagram")]
        assert [e["lane"] for e in events.named("lane_closed")] == ["instagram"]
        assert await conn.fetchval("select max(attempts) from reactor.jobs") == 1

    async def test_half_open_one_job_probes_alone_whatever_shares_the_lane(self, conn, pool):
        """Also a suspect, which is claimed beside the others, and a type met here for the first time."""
        inside, probes, release = 0, [], anyio.Event()
        first = anyio.Event()

        async def work(job):
            nonlocal inside
            inside += 1
            try:
                if not first.is_set():
                    first.set()
                    raise Unavailable("busy", retry_after_s=0.5)
                probes.append((job.id, inside))
                await release.wait()
            finally:
                inside -= 1

        handler = Handler(work, concurrency=3, lane="shared")
        await enqueue(conn, "a")
        async with working(pool, {"a": handler, "b": handler, "c": Handler(work, concurrency=3)}) as worker:
            await first.wait()
            for n in range(4):
                for type_, lane in (("a", None), ("b", None), ("a", "shared"), ("c", "shared")):
                    await enqueue(conn, type_, lane=lane, n=n)
            await conn.execute(
                "update reactor.jobs set is_suspect = true where id in (select id from reactor.jobs where type = 'b' limit 1)"
            )
            worker._wakeup.ring()
            await eventually(lambda: probes)
            looked = await conn.fetchval("select clock_timestamp()")
            await eventually(
                lambda: conn.fetchval("select clock_timestamp() > $1::timestamptz + interval '0.6 s'", looked)
            )
            probed_alone = list(probes)
            release.set()
            await eventually(
                lambda: conn.fetchval("select not exists (select from reactor.jobs where status <> 'done')")
            )

        assert [at_once for _, at_once in probed_alone] == [1]
        assert len(probes) == 17
        assert max(at_once for _, at_once in probes) > 1  # open again for all
        assert await conn.fetchval("select max(attempts) from reactor.jobs") == 1

    async def test_a_failed_probe_reopens_the_lane_for_longer(self, conn, pool, events):
        at = []

        async def work(job):
            at.append(time.monotonic())
            raise Unavailable("busy")

        for n in range(3):
            await enqueue(conn, n=n)
        async with working(pool, {"work": Handler(work, concurrency=1)}):
            await eventually(lambda: len(at) == 4)

        rests = [after - before for before, after in pairwise(at)]
        assert rests[0] >= 0.37
        assert rests[1] >= 0.75
        assert rests[2] >= 1.5
        assert len(events.named("lane_opened")) == 1

    async def test_the_delay_that_the_other_side_named_is_kept_by_the_whole_lane(self, conn, pool):
        calls = []

        async def work(job):
            calls.append(time.monotonic())
            if len(calls) == 1:
                raise Unavailable("busy", retry_after_s=1.5)

        ids = [await enqueue(conn, n=n) for n in range(3)]
        async with working(pool, {"work": Handler(work, concurrency=1)}, poll_s=0.1):
            await eventually(lambda: calls)
            first = await eventually(
                lambda: conn.fetchrow(
                    "select run_after - updated_at as rest, attempts from reactor.jobs where last_error is not null"
                )
            )
            await eventually(lambda: conn.fetchval("select count(*) = 3 from reactor.jobs where status = 'done'"))

        assert calls[1] - calls[0] >= 1.4
        assert (round(first["rest"].total_seconds(), 1), first["attempts"]) == (1.5, 0)
        assert {(await row(conn, job_id))["attempts"] for job_id in ids} == {1}

    async def test_what_waited_for_a_place_when_its_lane_opened_goes_back_without_a_call(self, conn, pool):
        calls, running, release = [], anyio.Event(), anyio.Event()

        async def work(job):
            calls.append(job.type)
            running.set()
            await release.wait()
            raise Unavailable("busy", retry_after_s=100)

        handler = Handler(work, concurrency=1, lane="shared")
        ids = [await enqueue(conn, "a"), await enqueue(conn, "b")]
        async with working(pool, {"a": handler, "b": handler}):
            await running.wait()
            await eventually(lambda: conn.fetchval("select count(*) = 2 from reactor.jobs where status = 'running'"))
            release.set()
            rows = await ended(conn, *ids)

        assert len(calls) == 1
        assert {(job["status"], job["attempts"]) for job in rows} == {("pending", 0)}
        assert all(job["due_s"] > 90 for job in rows)

    async def test_a_bug_is_no_outage_and_opens_nothing(self, conn, pool, events):
        async def work(jobs):
            raise LookupError

        ids = [await enqueue(conn, n=n) for n in range(3)]
        async with working(pool, {"work": Handler(work, batch=3)}):
            rows = await ended(conn, *ids)

        assert {(job["status"], job["attempts"]) for job in rows} == {("failed", 1)}
        assert events.named("lane_opened") == []
        assert sorted(e["job_id"] for e in events.named("job_failed")) == sorted(
            job["id"] for job in rows
        )  # a line each

    async def test_postgres_itself_away_from_a_handler_is_no_fault_of_its_lane(self, conn, pool, events):
        calls = []

        async def work(job):
            calls.append(job.id)
            if len(calls) == 1:
                raise Unavailable("Postgres is out of reach", code="postgres")

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))

        assert events.named("lane_opened") == []


class TestAlerts:
    @pytest.fixture
    def often(self, monkeypatch):
        monkeypatch.setattr("reactor.app._HEALTH_S", 0.1)
        monkeypatch.setattr("reactor.app._AWAY_S", 0.3)

    @staticmethod
    def open_alerts(conn, cause):
        return conn.fetch("select subject from reactor.alerts where cause = $1 and resolved_at is null", cause)

    async def test_a_lane_that_stays_away_is_an_alert_until_it_answers(self, conn, dsn, tmp_path, often, events):
        (tmp_path / "a.py").write_text(
            "from reactor import Unavailable\nfrom pathlib import Path\n"
            f"async def work(job):\n    if not Path({str(tmp_path / 'well')!r}).exists():\n"
            "        raise Unavailable('busy', code='instagram')\nHANDLERS = {'work': work}"
        )
        async with running_reactor(make_settings(database_url=dsn, handlers=tmp_path)):
            await enqueue(conn, lane="instagram")
            alerts = await eventually(lambda: self.open_alerts(conn, "lane_away"))
            shown = await conn.fetchval("select (reactor.status() ->> 'alerts_open')::int")
            (tmp_path / "well").touch()
            await eventually(
                lambda: conn.fetchval("select resolved_at is not null from reactor.alerts where cause = 'lane_away'")
            )

        assert [alert["subject"] for alert in alerts] == ["instagram"]
        assert shown >= 1
        assert [e["subject"] for e in events.named("alert_opened") if e["cause"] == "lane_away"] == ["instagram"]
        assert [e["subject"] for e in events.named("alert_resolved") if e["cause"] == "lane_away"] == ["instagram"]

    async def test_a_job_of_a_type_that_nobody_handles_is_an_alert_until_it_is_gone(self, conn, dsn, often, events):
        async with running_reactor(make_settings(database_url=dsn, stuck_s=1.0)):
            job_id = await enqueue(conn, "renamed")
            alerts = await eventually(lambda: self.open_alerts(conn, "stuck_jobs"))
            await conn.execute("delete from reactor.jobs where id = $1", job_id)
            await eventually(
                lambda: conn.fetchval("select resolved_at is not null from reactor.alerts where cause = 'stuck_jobs'")
            )

        assert [alert["subject"] for alert in alerts] == ["renamed"]
        assert [e["subject"] for e in events.named("alert_opened") if e["cause"] == "stuck_jobs"] == ["renamed"]
        assert [e["subject"] for e in events.named("alert_resolved") if e["cause"] == "stuck_jobs"] == ["renamed"]

    async def test_a_reactor_that_has_not_tried_a_lane_lately_does_not_call_it_well(self, conn, pool):
        """Else it would close in turn the alert that another opens."""
        release = anyio.Event()

        async def work(job):
            await release.wait()

        await enqueue(conn, lane="instagram")
        async with working(pool, {"work": work}) as worker:
            await eventually(lambda: conn.fetchval("select count(*) = 1 from reactor.jobs where status = 'running'"))
            untried = worker.lanes(300)
            release.set()
            await drained(conn)
            tried, long_ago = worker.lanes(300), worker.lanes(0)

        assert untried == ([], [])
        assert tried == ([], ["instagram"])
        assert long_ago == ([], [])


class TestFairness:
    @pytest.mark.parametrize(("batch", "concurrency"), [(1, 4), (8, 2)])
    async def test_a_single_job_of_another_tenant_waits_for_one_claim_of_the_flood_at_most(
        self, conn, pool, batch, concurrency
    ):
        started, committed = [], None

        async def work(given, *, pool):
            nonlocal committed
            for job in given if isinstance(given, list) else [given]:
                started.append(job.tenant_id)
                if len(started) == 30:  # the flood is under way
                    await pool.execute(
                        "select reactor.enqueue('work', '{}', 'zeta'), reactor.enqueue('work', '{}', 'alfa')"
                    )
                    committed = len(started)
            await anyio.sleep(0)

        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane) select 'work', 'acme', 'work' from generate_series(1, 2000)"
        )
        async with working(pool, {"work": Handler(work, batch=batch, concurrency=concurrency)}):
            await drained(conn)

        assert Counter(started) == {"acme": 2000, "zeta": 1, "alfa": 1}
        # What was claimed before they came, and what is claimed and started beside them.
        assert max(started.index("zeta"), started.index("alfa")) <= committed + 2 * batch * concurrency

    async def test_tenants_that_wait_are_served_in_turn(self, conn, pool):
        started = []

        async def work(job):
            started.append(job.tenant_id)

        tenants = [f"t{n:02}" for n in range(12)]
        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane) select 'work', t, 'work' from unnest($1::text[]) t, generate_series(1, 30)",
            tenants,
        )
        async with working(pool, {"work": Handler(work, concurrency=4)}):
            await drained(conn)

        for first in range(0, len(started) - 60, 12):  # claims of what fits, a share for each that waits
            assert len(set(started[first : first + 24])) == 12
