"""Settling: a table of endings, one row each: what the handler did, and the job afterwards."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from conftest import connect, eventually, make_settings, running_reactor

from reactor.errors import Permanent, StaleClaim, Unavailable
from reactor.job import Dead, Done, Failed, GivenBack, Handler, Job, Settled, Snooze
from reactor.jobs import Ending, Jobs, complete_jobs
from reactor.listener import Wakeup
from reactor.loading import bind
from reactor.log import get_log
from reactor.worker import Worker

CANARY = "canário-7f3a"


@asynccontextmanager
async def working(pool, handlers, *, poll_s=0.2, drain_s=5.0, lease_s=30.0, worker="test", instance=""):
    """A worker over the pool with these handlers; drained on the way out."""
    log = get_log()
    table = {type_: value if isinstance(value, Handler) else Handler(value) for type_, value in handlers.items()}
    jobs = Jobs(pool, worker=worker, lease=timedelta(seconds=lease_s), instance=instance)
    worker = Worker(
        jobs, bind(table, {"pool": pool, "log": log}), wakeup=Wakeup(), poll_s=poll_s, drain_s=drain_s, log=log
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        yield worker
        worker.stop()


async def enqueue(conn, n=0, *, key=None, type_="work", max_attempts=5, attempts=0, tenant="acme"):
    return await conn.fetchval(
        "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload, max_attempts, attempts) values ($1, $2, $1, $3, $4, $5, $6) returning id",
        type_, tenant, key, {"n": n}, max_attempts, attempts,
    )  # fmt: skip


async def row(conn, job_id):
    return await conn.fetchrow(
        "select *, extract(epoch from run_after - now())::float8 as due_s from reactor.jobs where id = $1", job_id
    )


async def ended(conn, *ids):
    """The jobs' rows as they were when each of them had been claimed and settled for the first time."""
    rows = {}

    async def check():
        settled = await conn.fetch(
            "select *, extract(epoch from run_after - now())::float8 as due_s from reactor.jobs "
            "where id = any ($1) and locked_at is not null and status <> 'running'",
            [job_id for job_id in ids if job_id not in rows],
        )
        rows.update((r["id"], r) for r in settled)
        return len(rows) == len(ids)

    await eventually(check, timeout_s=20)
    return [rows[job_id] for job_id in ids]


@dataclass
class Case:
    """What the handler does with the job, and what becomes of it."""

    name: str
    returns: object = None
    raises: object = None
    status: str = "done"
    attempts: int = 1
    error: str | None = None
    result: dict | None = None
    due_s: tuple[float, float] | None = None
    hangs: bool = False
    event: str = "job_done"
    fields: dict = field(default_factory=dict)


CASES = [
    Case("returns_none"),
    Case("returns_a_dict", returns={"posts": 3}, result={"posts": 3}),
    Case("returns_what_jsonb_refuses", returns={"nul\0": "a\0b", "nan": float("nan"), "half": "\ud83d"}, result={"nul": "ab", "nan": None, "half": "�"}),
    Case("returns_no_json", returns={"at": datetime(2026, 1, 1, tzinfo=UTC)}, result={"result_error": "$.at: datetime is not JSON"}),
    Case(
        "returns_a_snooze", returns=Snooze(100), status="pending", attempts=0, error="snoozed: snoozed", due_s=(90, 100), event="job_snoozed",
    ),
    Case(
        "raises_unavailable", raises=Unavailable("the printer is away", code="printer"), status="pending", attempts=0,
        error="snoozed: printer: the printer is away", due_s=(-60, 0.6), event="job_snoozed",
    ),
    Case(
        "raises_unavailable_with_retry_after", raises=Unavailable("busy", retry_after_s=100), status="pending", attempts=0,
        error="snoozed: unavailable: busy", due_s=(90, 100), event="job_snoozed",
    ),
    Case(
        "is_asked_to_wait_a_week", raises=Unavailable("busy", retry_after_s=7 * 86400), status="pending", attempts=0,
        error="snoozed: unavailable: busy", due_s=(86300, 86400), event="job_snoozed",
    ),
    Case(
        "is_asked_to_wait_no_number", raises=Unavailable("busy", retry_after_s=float("nan")), status="pending", attempts=0,
        error="snoozed: unavailable: busy", due_s=(-60, 0.6), event="job_snoozed",
    ),
    Case(
        "raises_unavailable_in_a_task_group", raises=ExceptionGroup("tasks", [ExceptionGroup("inner", [Unavailable("busy", retry_after_s=100)])]),
        status="pending", attempts=0, error="snoozed: unavailable: busy", due_s=(90, 100), event="job_snoozed",
    ),
    Case(
        "raises_permanent", raises=Permanent("no such account", code="gone"), status="dead", error="gone: no such account", event="job_dead",
        fields={"error_code": "gone"},
    ),
    Case("raises_permanent_with_nul", raises=Permanent("a\0b", code="gone"), status="dead", error="gone: ab", event="job_dead"),
    Case(
        "raises_a_bug", raises=ValueError(CANARY), status="failed", error="ValueError: at test_settling.py:", due_s=(54, 66), event="job_failed",
        fields={"error_code": "ValueError", "attempt": 1},
    ),
    Case(
        "raises_a_bug_beside_an_outage", raises=ExceptionGroup("tasks", [Unavailable("busy"), KeyError(CANARY)]), status="failed",
        error="KeyError: at ", due_s=(54, 66), event="job_failed",
    ),
    Case("raises_its_own_timeout", raises=TimeoutError(CANARY), status="failed", error="TimeoutError: at test_settling.py:", due_s=(54, 66), event="job_failed"),
    Case("exits_the_program", raises=SystemExit(3), status="failed", error="SystemExit: at test_settling.py:", due_s=(54, 66), event="job_failed"),
    Case("waits_for_a_cancelled_task", raises=asyncio.CancelledError(), status="failed", error="CancelledError: at test_settling.py:", due_s=(54, 66), event="job_failed"),
    Case("hangs", hangs=True, status="failed", error="timeout: longer than 0.3 s", due_s=(54, 66), event="job_failed", fields={"error_code": "timeout"}),
]  # fmt: skip


def handler_of(case):
    async def work(jobs):
        for job in jobs if isinstance(jobs, list) else [jobs]:
            if job.payload["n"] == 0:
                continue  # a healthy neighbour
            if case.hangs:
                await anyio.sleep_forever()
            if case.raises is not None:
                raise case.raises
            if not isinstance(jobs, list):
                return case.returns
            job.outcome = case.returns if isinstance(case.returns, Snooze) else Done(case.returns)
        return None

    return work


def as_expected(job, case):
    assert (case.name, job["status"], job["attempts"], job["result"]) == (
        case.name,
        case.status,
        case.attempts,
        case.result,
    )
    assert (job["last_error"] or "").startswith(case.error or "")
    assert (job["last_error"] is None) == (case.error is None)
    if case.due_s is not None:
        assert case.due_s[0] <= job["due_s"] <= case.due_s[1]
    assert CANARY not in (job["last_error"] or "")
    assert (job["locked_by"], job["lease_until"], job["claim_token"]) == (None, None, None)


class TestEndings:
    async def test_a_job_by_itself_ends_as_its_row_of_the_table_says(self, conn, pool, events):
        ids = {case.name: await enqueue(conn, 1, key="k", type_=case.name) for case in CASES}

        async with working(pool, {case.name: Handler(handler_of(case), timeout_s=0.3) for case in CASES}, poll_s=30):
            rows = await ended(conn, *ids.values())

        for case, job in zip(CASES, rows, strict=True):
            as_expected(job, case)
            event, *_ = [event for event in events.named(case.event) if event["type"] == case.name]
            assert event | {"job_id": job["id"], "tenant_id": "acme"} | case.fields == event
            assert event["duration_ms"] >= 0
        assert CANARY not in events.text

    async def test_a_job_in_a_batch_ends_the_same_and_takes_no_neighbour_down(self, conn, pool, events):
        cases = [case for case in CASES if case.attempts or case.returns]  # an outage is the whole batch's
        ids = [await enqueue(conn, n, key=f"k{i}", type_=case.name) for case in cases for i, n in enumerate([0, 1, 0])]

        async with working(
            pool, {case.name: Handler(handler_of(case), batch=10, timeout_s=0.3) for case in cases}, poll_s=30
        ):
            rows = await ended(conn, *ids)

        for case, (before, job, after) in zip(cases, zip(rows[::3], rows[1::3], rows[2::3], strict=True), strict=True):
            as_expected(job, case)
            assert [(good["status"], good["attempts"]) for good in (before, after)] == [("done", 1)] * 2, case.name
        assert CANARY not in events.text


class TestOutages:
    async def test_the_whole_batch_snoozes_and_spends_no_attempt(self, conn, pool):
        ids = [await enqueue(conn, n) for n in range(4)]

        async def work(jobs):
            raise Unavailable("away", retry_after_s=100)

        async with working(pool, {"work": Handler(work, batch=10)}):
            rows = await ended(conn, *ids)

        assert {(job["status"], job["attempts"]) for job in rows} == {("pending", 0)}

    async def test_a_paused_lane_is_not_asked_again_before_its_time_and_others_do_not_notice(self, conn, pool):
        calls = []

        async def away(job):
            calls.append(job.id)
            raise Unavailable("away", retry_after_s=100)

        async def fine(job):
            calls.append(job.type)

        first = await enqueue(conn, type_="away")
        async with working(pool, {"away": away, "fine": fine}) as worker:
            await ended(conn, first)
            second, other = await enqueue(conn, type_="away"), await enqueue(conn, type_="fine")
            worker._wakeup.ring()
            await ended(conn, other)

        assert calls == [first, "fine"]
        assert (await row(conn, second))["status"] == "pending"

    async def test_a_provider_that_says_try_at_once_for_ever_is_not_asked_without_a_pause(self, conn, pool):
        calls = []

        async def away(job):
            calls.append(await conn.fetchval("select clock_timestamp()"))
            raise Unavailable("away", retry_after_s=0)

        await enqueue(conn)
        async with working(pool, {"work": away}, poll_s=30):
            await eventually(lambda: len(calls) >= 3)

        assert calls[2] - calls[0] >= timedelta(seconds=0.9)

    async def test_a_lane_rests_longer_after_each_outage_in_a_row(self, conn, pool):
        async def away(job):
            raise Unavailable("away")

        rests = []
        for _ in range(5):
            await enqueue(conn)
        async with working(pool, {"work": Handler(away, concurrency=1)}, poll_s=30):
            for _ in range(3):
                before = len(rests)
                rests.append(0.0)

                async def rest(before=before):
                    rests[before] = await conn.fetchval(
                        "select max(extract(epoch from run_after - updated_at)::float8) from reactor.jobs where last_error is not null"
                    )
                    return rests[before] is not None and (before == 0 or rests[before] > rests[before - 1] * 1.4)

                await eventually(rest)

        assert rests == sorted(rests)
        assert 1.4 < rests[2] <= 2.1

    async def test_it_recovers_by_itself_without_a_ring(self, conn, pool):
        outcomes = iter([Unavailable("away"), Unavailable("away"), None])

        async def work(job):
            outcome = next(outcomes)
            if outcome is not None:
                raise outcome
            return {"at": "last"}

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}, poll_s=30):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))

        job = await row(conn, job_id)
        assert (job["attempts"], job["result"]) == (1, {"at": "last"})

    async def test_one_by_one_stops_at_the_first_sign_of_an_outage(self, conn, pool):
        asked = []

        async def work(jobs):
            if len(jobs) > 1:
                raise ValueError
            asked.append(jobs[0].id)
            raise Unavailable("away", retry_after_s=100)

        ids = [await enqueue(conn, n) for n in range(20)]
        async with working(pool, {"work": Handler(work, batch=50, concurrency=1)}):
            rows = await ended(conn, *ids)

        assert len(asked) == 1
        assert {(job["status"], job["attempts"]) for job in rows} == {("pending", 0)}


class TestStaleClaims:
    async def test_a_handler_whose_claim_was_lost_writes_nothing_and_its_result_is_dropped(self, conn, pool, events):
        async def work(job):
            await conn.execute(
                "update reactor.jobs set claim_token = gen_random_uuid(), lease_until = now() + interval '1 hour', locked_by = 'other' where id = $1",
                job.id,
            )
            await job.note({"step": 1})  # raises StaleClaim

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            await eventually(lambda: events.named("claim_lost"))

        job = await row(conn, job_id)
        assert (job["status"], job["locked_by"], job["notes"], job["result"]) == ("running", "other", {}, None)

    async def test_a_stale_claim_raised_by_mistake_gives_the_job_back(self, conn, pool):
        calls = []

        async def work(job):
            calls.append(job)
            if len(calls) == 1:
                raise StaleClaim

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))

        assert (await row(conn, job_id))["attempts"] == 1


class TestAttempts:
    async def test_the_wait_after_each_failed_attempt_grows_within_ten_percent(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        for attempt, seconds in enumerate([60, 300, 900, 3600, 21600, 21600], start=1):
            ids = [await enqueue(conn, max_attempts=9, attempts=attempt - 1) for _ in range(20)]

            claimed = await jobs.claim({"work": 100})
            await jobs.settle([(job, Failed("x", "y")) for job in claimed])

            waits = [(await row(conn, job_id))["due_s"] for job_id in ids]
            assert all(0.9 * seconds - 10 <= wait <= 1.1 * seconds for wait in waits)
            assert max(waits) - min(waits) > 0.02 * seconds

    async def test_the_last_attempt_leaves_a_dead_job_and_one_alert_a_cause_said_once(self, conn, pool, events):
        async def work(job):
            if job.payload["n"] < 2:
                raise ValueError(CANARY)
            raise KeyError

        ids = [await enqueue(conn, n, attempts=4) for n in (0, 1, 2)]
        async with working(pool, {"work": work}):
            rows = await ended(conn, *ids)

        assert {(job["status"], job["attempts"]) for job in rows} == {("dead", 5)}
        alerts = await conn.fetch(
            "select cause, subject, occurrences from reactor.alerts where resolved_at is null order by subject"
        )
        assert [(a["cause"], a["subject"]) for a in alerts] == [
            ("dead_jobs", "work KeyError"),
            ("dead_jobs", "work ValueError"),
        ]
        assert sum(event["jobs"] for event in events.named("job_dead")) == 3
        assert sorted(e["subject"] for e in events.named("alert_opened")) == ["work KeyError", "work ValueError"]
        assert await conn.fetchval("select (reactor.status() ->> 'alerts_open')::int") == 2

    async def test_an_open_alert_counts_more_of_the_same_in_silence(self, conn, pool, events):
        async def work(job):
            raise Permanent("no", code="gone")

        async with working(pool, {"work": work}):
            await ended(conn, await enqueue(conn))
            await ended(conn, await enqueue(conn))

        assert len(events.named("alert_opened")) == 1
        assert await conn.fetchval("select occurrences from reactor.alerts where cause = 'dead_jobs'") == 2

    async def test_a_handlers_max_attempts_overrides_the_jobs(self, conn, pool):
        async def work(job):
            raise ValueError

        job_id = await enqueue(conn, max_attempts=5)
        async with working(pool, {"work": Handler(work, max_attempts=1)}):
            [job] = await ended(conn, job_id)

        assert (job["status"], job["max_attempts"]) == ("dead", 1)


class TestNotes:
    async def test_a_note_is_committed_at_once_and_the_next_attempt_reads_it_under_the_same_key(self, conn, pool):
        seen = []

        async def work(job):
            seen.append((job.key, dict(job.notes), job.attempts))
            if len(seen) == 1:
                await job.note({"upload": "started"})
                await job.note({"upload_id": 7})
                seen.append(await pool.fetchval("select notes from reactor.jobs where id = $1", job.id))
                raise Unavailable("away", retry_after_s=0)

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}, instance="3f2a"):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))

        noted = {"upload": "started", "upload_id": 7}
        assert seen == [(f"reactor-3f2a-{job_id}", {}, 1), noted, (f"reactor-3f2a-{job_id}", noted, 1)]

    async def test_the_key_tells_this_database_from_every_other(self, conn, dsn, tmp_path):
        (tmp_path / "keys.py").write_text(
            "async def key(job):\n    return {'key': job.key}\n\nHANDLERS = {'key': key}\n"
        )
        job_id = await enqueue(conn, type_="key")

        async with running_reactor(make_settings(database_url=dsn, handlers=tmp_path)):
            [job] = await ended(conn, job_id)

        instance = await conn.fetchval("select id::text from reactor.instance")
        assert job["result"] == {"key": f"reactor-{instance[:8]}-{job_id}"}

    async def test_a_note_that_is_no_json_is_the_handlers_error(self, pool, conn):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        await enqueue(conn)
        [job] = await jobs.claim({"work": 1})

        with pytest.raises(TypeError, match=r"\$\.at"):
            await job.note({"at": datetime.now(UTC)})
        await job.note({"text": "a\0b"})

        assert (await row(conn, job.id))["notes"] == {"text": "ab"}


class TestSnoozing:
    @pytest.mark.parametrize("delay_s", [-1, float("nan"), float("inf"), 1e12])
    def test_a_senseless_delay_is_refused_where_it_is_written(self, delay_s):
        with pytest.raises(ValueError, match="delay_s"):
            Snooze(delay_s)


async def test_many_endings_of_every_sort_settle_in_one_statement_and_only_what_is_not_done_is_told(conn, pool):
    jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
    for n in range(8):
        await enqueue(conn, n)
    claimed = sorted(await jobs.claim({"work": 100}), key=lambda job: job.id)
    outcomes = [
        Done(),
        Done({"a": 1}),
        Snooze(5),
        Failed("f", "m"),
        Failed("f", "m", 7.0),
        Dead("d", "m"),
        Dead("d", "n"),
        Done(),
    ]

    told = await jobs.settle(list(zip(claimed, outcomes, strict=True)))

    rows = [await row(conn, job.id) for job in claimed]
    assert [r["status"] for r in rows] == ["done", "done", "pending", "failed", "failed", "dead", "dead", "done"]
    assert told == {
        r["id"]: Ending(r["status"], r["run_after"], "work d" if r["id"] == claimed[6].id else None)
        for r in rows
        if r["status"] != "done"
    }
    assert 5 < rows[4]["due_s"] <= 7


@pytest.mark.parametrize(
    ("delay_s", "waits_s"),
    [
        (7.0, 7),
        (0.0, 0),
        (-5.0, 0),
        (86_400.0, 86_400),
        (1e300, 86_400),
        (float("inf"), 86_400),
        (float("nan"), 86_400),
    ],
)
async def test_whatever_retry_after_a_handler_names_its_neighbours_settle_and_it_waits_a_day_at_most(
    conn, pool, delay_s, waits_s
):
    jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
    ids = [await enqueue(conn, n) for n in range(2)]
    [job, neighbour] = sorted(await jobs.claim({"work": 100}), key=lambda job: job.id)

    await jobs.settle([(job, Failed("x", "y", delay_s)), (neighbour, Done())])

    waited = await conn.fetchval("select run_after - updated_at from reactor.jobs where id = $1", ids[0])
    assert waited == timedelta(seconds=waits_s)
    assert (await row(conn, ids[1]))["status"] == "done"


async def test_an_error_code_of_any_length_settles_and_its_alert_closes(conn, pool):
    jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
    await enqueue(conn)
    [job] = await jobs.claim({"work": 1})
    code = "".join(chr(0x10000 + 37 * n) for n in range(3000))  # does not compress

    told = await jobs.settle([(job, Dead(code, "m"))])
    await conn.execute("select reactor.retry_jobs()")

    assert told[job.id].opened_alert == f"work {code}"[:250]
    assert await open_alerts(conn) == []


class TestHandlersOwnTransactions:
    """`complete_jobs` beside the handler's own writes: both or neither."""

    async def test_the_job_is_done_with_the_handlers_writes_and_the_worker_adds_nothing(self, conn, pool):
        await conn.execute("create table shop (job bigint primary key)")

        async def work(job):
            async with pool.acquire() as c, c.transaction():
                assert await complete_jobs(c, [(job, {"sold": 1})]) == [job.id]
                await c.execute("insert into shop values ($1)", job.id)
            job.outcome = Settled()

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            [job] = await ended(conn, job_id)

        assert (job["status"], job["result"], job["claim_token"], job["lease_until"]) == (
            "done",
            {"sold": 1},
            None,
            None,
        )
        assert [r["job"] for r in await conn.fetch("select job from shop")] == [job_id]
        assert await counted(conn) == (1, 0)

    async def test_a_transaction_that_rolls_back_leaves_the_job_to_its_next_attempt(self, conn, pool):
        async def work(job):
            async with pool.acquire() as c, c.transaction():
                await complete_jobs(c, [(job, {"sold": 1})])
                raise ValueError

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            [job] = await ended(conn, job_id)

        assert (job["status"], job["attempts"], job["result"]) == ("failed", 1, None)
        assert await counted(conn) == (0, 0)

    async def test_a_suspect_completed_there_is_a_suspect_no_more(self, conn, pool):
        job_id = await enqueue(conn)
        await conn.execute("update reactor.jobs set is_suspect = true, snoozed_since = now()")
        [job] = await Jobs(pool, worker="test", lease=timedelta(seconds=30)).claim({"work": 1})

        async with pool.acquire() as c, c.transaction():
            await complete_jobs(c, [(job, None)])

        after = await row(conn, job_id)
        assert (after["status"], after["is_suspect"], after["snoozed_since"]) == ("done", False, None)


class TestSnoozingForEver:
    async def test_a_job_that_did_nothing_else_for_the_limit_is_dead_with_an_alert(self, conn, pool):
        job_id = await enqueue(conn)
        now = datetime.now(UTC)

        became = [
            await end_at(conn, now + timedelta(days=day), "snoozed", error="snoozed: no quota", delay_s=86_000)
            for day in range(9)
        ]

        assert [b["status"] for b in became] == ["pending"] * 8 + ["dead"]
        assert became[-1]["opened_alert"] == "work snoozed_too_long"
        after = await row(conn, job_id)
        assert (after["last_error"], after["attempts"]) == ("snoozed_too_long: snoozed: no quota", 1)
        assert [entry["error"] for entry in after["history"]] == ["snoozed_too_long: snoozed: no quota"]
        assert await open_alerts(conn) == ["work snoozed_too_long"]
        assert await counted(conn) == (0, 1)

    @pytest.mark.parametrize("between", ["failed", "expired"])
    async def test_any_other_ending_begins_the_time_anew(self, conn, between):
        job_id = await enqueue(conn)
        now = datetime.now(UTC)
        for day in range(7):
            await end_at(conn, now + timedelta(days=day), "snoozed", delay_s=10)

        await end_at(conn, now + timedelta(days=7), between, delay_s=10)
        await end_at(conn, now + timedelta(days=8), "snoozed", delay_s=10)
        became = await end_at(conn, now + timedelta(days=14), "snoozed", delay_s=10)

        assert became["status"] == "pending"
        assert (await row(conn, job_id))["snoozed_since"] == now + timedelta(days=8)

    async def test_the_limit_is_the_workers_to_choose(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30), snooze_limit=timedelta(hours=1))
        await enqueue(conn)
        await conn.execute("update reactor.jobs set snoozed_since = now() - interval '61 minutes'")
        [job] = await jobs.claim({"work": 1})

        told = await jobs.settle([(job, Snooze(5))])

        assert told[job.id].status == "dead"


class TestHistory:
    async def test_it_keeps_the_last_twenty_failures_each_cut_to_200_characters(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        job_id = await enqueue(conn, max_attempts=99)
        for n in range(25):
            [job] = await jobs.claim({"work": 1})
            await jobs.settle([(job, Failed(f"e{n}", "m" * 500, 0))])

        history = (await row(conn, job_id))["history"]

        assert [entry["attempt"] for entry in history] == list(range(6, 26))
        assert [entry["error"] for entry in history] == [f"e{n}: {'m' * 500}"[:200] for n in range(5, 25)]
        assert [entry["at"] for entry in history] == sorted(entry["at"] for entry in history)

    async def test_neither_done_nor_a_snooze_is_part_of_it(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        job_id = await enqueue(conn)
        for outcome in (Snooze(0), Failed("f", "m", 0), Snooze(0), Done()):
            [job] = await jobs.claim({"work": 1})
            await jobs.settle([(job, outcome)])

        assert [entry["error"] for entry in (await row(conn, job_id))["history"]] == ["f: m"]

    async def test_a_lease_that_ran_out_is_part_of_it(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        job_id = await enqueue(conn)
        await jobs.claim({"work": 1})
        await conn.execute("update reactor.jobs set lease_until = now() - interval '1 s'")
        await jobs.release_expired()

        [entry] = (await row(conn, job_id))["history"]

        assert entry["error"].startswith("lease_expired")


class TestRetrying:
    async def ending_as(self, conn, pool, outcome, **columns):
        """A job that ended so, with that many attempts left to it."""
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        job_id = await enqueue(conn, **columns)
        await jobs.settle([(job, outcome) for job in await jobs.claim({columns.get("type_", "work"): 100})])
        return job_id

    async def retry(self, conn, *, ids=None, type_=None):
        return {r[0] for r in await conn.fetch("select reactor.retry_jobs($1, $2)", ids, type_)}

    async def test_a_dead_job_runs_at_once_with_all_its_attempts_and_its_history(self, conn, pool):
        job_id = await self.ending_as(conn, pool, Dead("gone", "m"), attempts=4)

        retried = await self.retry(conn, ids=[job_id])

        job = await row(conn, job_id)
        assert retried == {job_id}
        assert (job["status"], job["attempts"], job["last_error"]) == ("pending", 0, "gone: m")
        assert [entry.get("error", entry.get("retried")) for entry in job["history"]] == ["gone: m", True]
        async with working(pool, {"work": _nothing}):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))
        assert len((await row(conn, job_id))["history"]) == 2

    async def test_a_failed_job_named_by_its_id_need_not_wait(self, conn, pool):
        job_id = await self.ending_as(conn, pool, Failed("x", "y"))

        assert await self.retry(conn) == set()
        assert await self.retry(conn, ids=[job_id]) == {job_id}
        assert len(await Jobs(pool, worker="test", lease=timedelta(seconds=30)).claim({"work": 1})) == 1

    async def test_by_type_and_all_take_the_dead_only(self, conn, pool):
        one = await self.ending_as(conn, pool, Dead("x", "y"), type_="one")
        other = await self.ending_as(conn, pool, Dead("x", "y"), type_="other")
        await self.ending_as(conn, pool, Failed("x", "y"), type_="one")
        await self.ending_as(conn, pool, Done(), type_="one")

        assert await self.retry(conn, type_="one") == {one}
        assert await self.retry(conn) == {other}
        assert await self.retry(conn) == set()

    async def test_what_runs_or_is_done_or_waits_is_left_alone(self, conn, pool):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        done = await self.ending_as(conn, pool, Done())
        running = await enqueue(conn)
        await jobs.claim({"work": 1})
        pending = await enqueue(conn)

        assert await self.retry(conn, ids=[done, running, pending, 10**12]) == set()

    async def test_the_alert_closes_with_the_last_of_its_dead_jobs(self, conn, pool):
        first = await self.ending_as(conn, pool, Dead("gone", "m"))
        second = await self.ending_as(conn, pool, Dead("gone", "n"))
        await self.ending_as(conn, pool, Dead("other", "m"))

        await self.retry(conn, ids=[first])
        one_left = await open_alerts(conn)
        await self.retry(conn, ids=[second])

        assert one_left == ["work gone", "work other"]
        assert await open_alerts(conn) == ["work other"]

    async def test_it_wakes_a_reactor_that_sleeps(self, conn, pool, dsn):
        job_id = await self.ending_as(conn, pool, Dead("x", "y"))
        rung = anyio.Event()
        listener = await connect(dsn)
        await listener.add_listener("reactor_wake", lambda *_: rung.set())
        assert await listener.fetchval("select reactor.arm()") == "armed"

        await self.retry(conn, ids=[job_id])

        with anyio.fail_after(10):
            await rung.wait()
        await listener.close()

    @pytest.mark.parametrize("newer", ["waits", "runs", "is done", "failed", "is dead"])
    async def test_beside_a_newer_twin_in_any_state_both_end_and_nothing_older_comes_last(self, conn, pool, newer):
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        old = await self.ending_as(conn, pool, Dead("x", "y"), key="k")
        new = await enqueue(conn, 1, key="k")
        claimed = [] if newer == "waits" else await jobs.claim({"work": 1})
        outcome = {"is done": Done(), "failed": Failed("x", "y"), "is dead": Dead("x", "y")}.get(newer)
        if outcome:
            await jobs.settle([(job, outcome) for job in claimed])

        await self.retry(conn, ids=[old])
        runs = []
        for _ in range(3):
            runs += await jobs.claim({"work": 9})
            await jobs.settle([(job, Done()) for job in (*runs, *claimed)])

        [run] = runs
        assert (run.id, run.payload["n"]) == (old, 1 if newer in ("waits", "failed") else 0)
        assert run.version == (new if newer in ("waits", "failed") else old)
        statuses = dict(await conn.fetch("select id, status from reactor.jobs"))
        assert statuses == {old: "done", new: "dead" if newer == "is dead" else "done"}

    async def test_a_failed_job_that_a_reactor_has_just_claimed_is_its_own(self, conn, pool, dsn):
        job_id = await self.ending_as(conn, pool, Failed("x", "y", 0))
        reactor = await connect(dsn)
        async with reactor.transaction(), anyio.create_task_group() as tasks:
            await reactor.fetch("select * from reactor.claim_jobs('{work}', '{1}', 'test', '30 s')")
            answer = []

            async def retry():
                answer.append(await self.retry(conn, ids=[job_id]))

            tasks.start_soon(retry)
            await eventually(
                lambda: pool.fetchval("select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock'")
            )
            await reactor.execute("commit; begin")
        await reactor.close()

        assert answer == [set()]
        assert (await row(conn, job_id))["status"] == "running"


class TestCounts:
    """`done_24h` and `dead_24h` of `reactor status`."""

    async def test_settlers_at_once_count_every_job_once_merged_twins_and_completed_ones_included(
        self, conn, pool, dsn
    ):
        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload) "
            "select 'work', 't' || n % 5, 'work', case when n % 3 = 0 then 'k' || n % 60 end, jsonb_build_object('n', n) "
            "from generate_series(1, 1200) n"
        )

        async def settle_all(name):
            jobs = Jobs(pool, worker=name, lease=timedelta(seconds=30))
            while claimed := await jobs.claim({"work": 13}):
                own, other = claimed[::2], claimed[1::2]
                async with pool.acquire() as c, c.transaction():
                    await complete_jobs(c, [(job, None) for job in own])
                await jobs.settle([(job, Dead("x", "y") if job.payload["n"] % 7 == 0 else Done()) for job in other])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for name in ("one", "two", "three"):
                    tasks.start_soon(settle_all, name)

        done, dead = await conn.fetchrow(
            "select count(*) filter (where status = 'done'), count(*) filter (where status = 'dead') from reactor.jobs"
        )
        status = await conn.fetchval("select reactor.status()")
        assert done + dead == 1200
        assert dead > 0
        assert (status["done_24h"], status["dead_24h"]) == (done, dead)

    async def test_what_ended_longer_ago_than_a_day_is_no_longer_counted(self, conn):
        for hours, ending in ((23, "done"), (25, "done"), (23, "dead"), (25, "dead")):
            await enqueue(conn)
            await conn.execute("update reactor.jobs set run_after = now() - interval '2 d' where status = 'pending'")
            await end_at(conn, datetime.now(UTC) - timedelta(hours=hours), ending, error="x: y")

        status = await conn.fetchval("select reactor.status()")

        assert (status["done_24h"], status["dead_24h"], status["dead"]) == (1, 1, 2)


async def _nothing(job):
    pass


async def end_at(conn, at, ending, *, error=None, delay_s=None):
    """Claim the one job that is due at that instant and end it; returns what it became, None when done."""
    [job] = await conn.fetch("select * from reactor.claim_jobs('{work}', '{9}', 'test', '30 s', p_now => $1)", at)
    return await conn.fetchrow(
        "select * from reactor.settle_jobs($1, $2, $3, null, $4, $5, p_now => $6)",
        [job["id"]],
        [job["claim_token"]],
        [ending],
        [error],
        [delay_s],
        at,
    )


async def open_alerts(conn):
    return [
        r["subject"]
        for r in await conn.fetch("select subject from reactor.alerts where resolved_at is null order by subject")
    ]


async def counted(conn):
    """(done, dead) as counted when they ended."""
    return tuple(await conn.fetchrow("select coalesce(sum(done), 0), coalesce(sum(dead), 0) from reactor.job_minutes"))


def test_a_job_without_a_worker_has_nowhere_to_keep_notes():
    job = Job(1, "work", "acme", {}, 1, 5, None, "work", 1, None)

    with pytest.raises(RuntimeError, match="not claimed"):
        anyio.run(job.note, {})


async def test_an_alert_stays_open_for_a_job_that_dies_while_the_others_are_retried(conn, dsn):
    first, second = [await enqueue(conn, key=str(n)) for n in range(2)]
    claimed = await conn.fetch("select * from reactor.claim_jobs('{work}', '{10}', 'test', '30 s')")
    token = claimed[0]["claim_token"]
    bury = "select * from reactor.settle_jobs(array[$1::bigint], array[$2::uuid], '{dead}', null, '{boom: it}')"
    await conn.execute(bury, first, token)
    settler, operator = await connect(dsn), await connect(dsn)
    dying = settler.transaction()
    await dying.start()
    await settler.execute(bury, second, token)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operator.execute, "select reactor.retry_jobs(array[$1::bigint])", first)
        await eventually(
            lambda: conn.fetchval(
                "select exists (select from pg_locks where not granted and locktype = 'transactionid')"
            )
        )
        await dying.commit()
    await settler.close()
    await operator.close()

    assert (await row(conn, second))["status"] == "dead"
    assert (
        await conn.fetchval("select count(*) from reactor.alerts where cause = 'dead_jobs' and resolved_at is null")
        == 1
    )


async def test_a_job_given_back_by_a_stop_is_as_if_it_had_not_been_claimed(conn, pool):
    jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
    fresh, snoozing = [await enqueue(conn, n) for n in range(2)]
    await conn.execute("update reactor.jobs set snoozed_since = now() - interval '8 d' where id = $1", snoozing)
    await conn.execute("update reactor.jobs set is_suspect = true where id = $1", fresh)

    for _ in range(3):
        await jobs.settle([(job, GivenBack(reason="drained")) for job in await jobs.claim({"work": 2})])

    first, second = [await row(conn, job_id) for job_id in (fresh, snoozing)]
    assert (first["status"], first["attempts"], first["is_suspect"], first["snoozed_since"]) == (
        "pending",
        0,
        True,
        None,
    )
    assert (second["status"], second["attempts"]) == ("pending", 0)  # neither does a stop end what has snoozed for long
    assert second["snoozed_since"] is not None
