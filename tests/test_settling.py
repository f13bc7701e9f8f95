"""Settling: a table of endings, one row each: what the handler did, and the job afterwards."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import anyio
import pytest
from conftest import eventually

from reactor.errors import Permanent, StaleClaim, Unavailable
from reactor.job import Dead, Done, Failed, Handler, Job, Snooze
from reactor.jobs import Jobs
from reactor.listener import Wakeup
from reactor.loading import bind
from reactor.log import get_log
from reactor.worker import Worker

CANARY = "canário-7f3a"


@asynccontextmanager
async def working(pool, handlers, *, poll_s=0.2, drain_s=5.0, lease_s=30.0, worker="test"):
    """A worker over the pool with these handlers; drained on the way out."""
    log = get_log()
    table = {type_: value if isinstance(value, Handler) else Handler(value) for type_, value in handlers.items()}
    jobs = Jobs(pool, worker=worker, lease=timedelta(seconds=lease_s))
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
            await eventually(lambda: _true(len(calls) >= 3))

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
            await eventually(lambda: _true(events.named("claim_lost")))

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


async def _true(value):
    return value


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
        assert len(events.named("job_dead")) == 3
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
                seen.append(await conn.fetchval("select notes from reactor.jobs where id = $1", job.id))
                raise Unavailable("away", retry_after_s=0)

        job_id = await enqueue(conn)
        async with working(pool, {"work": work}):
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))

        noted = {"upload": "started", "upload_id": 7}
        assert seen == [(f"reactor-{job_id}", {}, 1), noted, (f"reactor-{job_id}", noted, 1)]

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


async def test_many_endings_of_every_sort_settle_in_one_statement(conn, pool):
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

    settled = await jobs.settle(list(zip(claimed, outcomes, strict=True)))

    assert [settled[job.id].status for job in claimed] == [
        "done",
        "done",
        "pending",
        "failed",
        "failed",
        "dead",
        "dead",
        "done",
    ]
    assert [settled[job.id].opened_alert for job in claimed] == [None] * 6 + ["work d", None]
    assert 5 < (await row(conn, claimed[4].id))["due_s"] <= 7


def test_a_job_without_a_worker_has_nowhere_to_keep_notes():
    job = Job(1, "work", "acme", {}, 1, 5, None, "work", 1, None)

    with pytest.raises(RuntimeError, match="not claimed"):
        anyio.run(job.note, {})
