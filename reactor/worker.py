"""Claims what fits, runs it, settles it, drains on stop."""

from __future__ import annotations

import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import asyncpg

from reactor.errors import Permanent, StaleClaim, Unavailable
from reactor.job import Dead, Done, Failed, Handler, HandlerFunction, Job, Outcome, Settled, Snooze
from reactor.jobs import Ending, Jobs
from reactor.listener import Wakeup
from reactor.log import Log

_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 60.0
_MOST_RETRY_AFTER_S = 86_400.0
_BLOCKED_S = 0.5  # a due job whose twin runs in another reactor: nobody will ring for it
_RETRY_S = 1.0
_LAST_LOOK_S = 2.0  # what a stop grants a claim under way: a frozen server would never answer it
_SETTLE_S = 5.0  # what a stop grants the last settlement beyond the drain


@dataclass(frozen=True, slots=True)
class Bound:
    """A handler with its resources filled in."""

    spec: Handler
    call: HandlerFunction


class Worker:
    """One reactor's loop over the queue.

    Args:
        jobs: The queue.
        handlers: What runs each type; other types are left to other reactors.
        wakeup: Rung by the listener and by everything here that frees a place.
        poll_s: The longest sleep without a look.
        drain_s: How long `stop` lets running handlers finish.
    """

    def __init__(
        self, jobs: Jobs, handlers: Mapping[str, Bound], *, wakeup: Wakeup, poll_s: float, drain_s: float, log: Log
    ) -> None:
        self._jobs = jobs
        self._handlers = handlers
        self._wakeup = wakeup
        self._poll_s = poll_s
        self._drain_s = drain_s
        self._log = log
        self._calls: Counter[str] = Counter()  # running calls by type
        self._running: dict[int, Job] = {}
        self._ended: list[tuple[Job, Outcome, float]] = []
        self._settle_bell = Wakeup()
        self._outages: Counter[str] = Counter()  # in a row, by lane
        self._paused_until: dict[str, float] = {}  # monotonic, by lane
        self._away: set[str] = set()  # what failed when it last asked Postgres: an outage is one line, not one a second
        self._stopping = False
        self._looking = anyio.CancelScope()
        self._is_drained = anyio.Event()
        self._settled = anyio.Event()

    def stop(self) -> None:
        """Claim no more, finish what runs, then let `run` return."""
        self._stopping = True
        self._looking.deadline = anyio.current_time() + _LAST_LOOK_S
        self._wakeup.ring()

    async def run(self) -> None:
        """Work until `stop`; then drain. Never raises for an outage."""
        async with anyio.create_task_group() as upkeep:
            upkeep.start_soon(self._settle_loop)
            upkeep.start_soon(self._heartbeat_loop)
            async with anyio.create_task_group() as calls:
                with self._looking:
                    while not self._stopping:
                        self._wakeup.clear()  # before the look, never after
                        sleep_s = await self._look(calls)
                        if sleep_s > 0 and not self._stopping:
                            await self._wakeup.wait(sleep_s)
                calls.cancel_scope.deadline = anyio.current_time() + self._drain_s
            self._is_drained.set()
            self._settle_bell.ring()
            # The settle loop ends by itself once everything is settled; the heartbeat has no reason to.
            with anyio.move_on_after(_SETTLE_S):
                await self._settled.wait()
            upkeep.cancel_scope.cancel()

    async def _look(self, calls: anyio.abc.TaskGroup) -> float:
        """Claim and start what fits; returns how many seconds there is nothing more to do."""
        limits = self._room()
        if not limits:
            return min(self._poll_s, self._pause_s())
        most = {type_: self._handlers[type_].spec.max_attempts for type_ in limits}
        due_s: float | None = None
        try:
            if "claim_failed" in self._away and self._running:  # after an outage our own leases come first
                await self._jobs.extend(list(self._running.values()))
            claimed = await self._jobs.claim(limits, most)
            if not claimed:
                due_s = await self._jobs.next_due_s(list(limits))
                if due_s == 0.0:  # it became due between the two statements, or is blocked
                    claimed = await self._jobs.claim(limits, most)
                    due_s = _BLOCKED_S
        except (Unavailable, asyncpg.PostgresError) as exc:
            self._missed("claim_failed", exc)
            return _RETRY_S
        self._away.discard("claim_failed")
        if not claimed:
            return min(self._poll_s, self._pause_s(), due_s if due_s is not None else self._poll_s)
        for type_ in limits:
            spec = self._handlers[type_].spec
            mine = [job for job in claimed if job.type == type_]
            trusted = [job for job in mine if not job.is_suspect]
            batches = [[job] for job in mine if job.is_suspect]
            batches += [trusted[start : start + spec.batch] for start in range(0, len(trusted), spec.batch)]
            for batch in batches:
                self._running.update((job.id, job) for job in batch)
                self._calls[type_] += 1
                calls.start_soon(self._run_call, self._handlers[type_], batch)
        return 0.0

    def _missed(self, event: str, exc: Exception, **fields: object) -> None:
        if event not in self._away:
            self._away.add(event)
            self._log.warning(event, error_code=_code_of(exc), **fields)

    def _room(self) -> dict[str, int]:
        """How many jobs of each type fit now."""
        now = time.monotonic()
        return {
            type_: places * bound.spec.batch
            for type_, bound in self._handlers.items()
            if (places := bound.spec.concurrency - self._calls[type_]) > 0
            and self._paused_until.get(bound.spec.lane or type_, 0.0) <= now
        }

    def _pause_s(self) -> float:
        """Seconds until a paused lane may be tried again."""
        now = time.monotonic()
        return min((until - now for until in self._paused_until.values() if until > now), default=self._poll_s)

    async def _run_call(self, bound: Bound, batch: list[Job]) -> None:
        type_ = batch[0].type
        started = time.perf_counter()
        try:
            outcomes = await self._outcomes_of(bound, batch)
        except anyio.get_cancelled_exc_class():
            # Drained before it ended: back to the queue unharmed, unless the handler settled it already.
            self._end([(job, job.outcome or Snooze(0, "drained")) for job in batch], started)
            raise
        finally:
            self._calls[type_] -= 1
            self._wakeup.ring()
        self._end(list(zip(batch, outcomes, strict=True)), started)

    async def _outcomes_of(self, bound: Bound, batch: list[Job]) -> list[Outcome]:
        """Run the handler and turn every ending into a value.

        A batch that fails as a whole is run again one by one, so that one bad job takes no neighbour down.
        """
        lane = bound.spec.lane or batch[0].type
        returned, problem = await _call(bound, batch)
        if problem is None:
            self._outages.pop(lane, None)
            return [job.outcome or _ending_of(returned) for job in batch]
        if isinstance(problem, Unavailable):
            return self._pause(lane, batch, problem)
        if isinstance(problem, StaleClaim):  # settling will find the token changed, and say so
            return [job.outcome or Snooze(0, "the claim was lost") for job in batch]
        ending = _ending_after(problem)
        if isinstance(ending, Failed) and not isinstance(problem, _TooSlow):
            self._log.error(
                "handler_error", type=batch[0].type, error_code=ending.code, at=ending.message, jobs=len(batch)
            )
        if len(batch) == 1:
            return [batch[0].outcome or ending]
        outcomes: list[Outcome] = []
        for job in batch:
            rest_s = self._paused_until.get(lane, 0.0) - time.monotonic()  # since one of its neighbours, perhaps
            if job.outcome is None and rest_s <= 0:
                outcomes += await self._outcomes_of(bound, [job])
            else:
                outcomes.append(job.outcome or Snooze(rest_s, "its lane is paused"))
        return outcomes

    def _pause(self, lane: str, batch: Sequence[Job], exc: Unavailable) -> list[Outcome]:
        """A dependency is away: its jobs snooze, and their lane rests a little longer each time."""
        if exc.retry_after_s is not None:
            delay_s = min(
                max(_FIRST_PAUSE_S, exc.retry_after_s), _MOST_RETRY_AFTER_S
            )  # "at once", for ever, would spin
        else:
            longest_s = min(_FIRST_PAUSE_S * 2.0 ** self._outages[lane], _MOST_PAUSE_S)
            delay_s = longest_s * random.uniform(0.75, 1.0)  # noqa: S311  # jitter
        if exc.code != "postgres":  # while Postgres is away nothing is claimed anyway
            self._outages[lane] = min(self._outages[lane] + 1, 16)
        self._paused_until[lane] = max(self._paused_until.get(lane, 0.0), time.monotonic() + delay_s)
        return [job.outcome or Snooze(delay_s, f"{exc.code}: {exc}") for job in batch]

    def _end(self, endings: Sequence[tuple[Job, Outcome]], started: float) -> None:
        elapsed_ms = (time.perf_counter() - started) * 1000
        self._ended += [(job, outcome, elapsed_ms) for job, outcome in endings]
        self._settle_bell.ring()

    async def _settle_loop(self) -> None:
        """Settle whatever has ended since the last time, in one statement."""
        delay_s = 0.1
        while True:
            self._settle_bell.clear()
            batch, self._ended = self._ended, []
            if batch:
                try:
                    settled = await self._jobs.settle([(job, outcome) for job, outcome, _ in batch])
                except (Unavailable, asyncpg.PostgresError) as exc:
                    # The leases still hold, or will run out: either way nothing is lost.
                    self._missed("settle_failed", exc, jobs=len(batch))
                    self._ended[:0] = batch
                    await anyio.sleep(delay_s)
                    delay_s = min(delay_s * 2, _RETRY_S)
                    continue
                self._away.discard("settle_failed")
                delay_s = 0.1
                for job, _, _ in batch:
                    if self._running.get(job.id) is job:  # and not a later claim of the same one
                        del self._running[job.id]
                self._tell(batch, settled)
            elif self._is_drained.is_set():
                self._settled.set()
                return
            else:
                await self._settle_bell.wait(self._poll_s)

    def _tell(self, batch: Sequence[tuple[Job, Outcome, float]], settled: Mapping[int, Ending]) -> None:
        alike: dict[
            tuple[str, float, str | None], list[Job]
        ] = {}  # a batch's successes are one line, and so is its rest
        for job, outcome, elapsed_ms in batch:
            ending = settled.get(job.id)
            if isinstance(outcome, Settled) or (isinstance(outcome, Done) and ending is not None):
                alike.setdefault((job.type, elapsed_ms, None), []).append(job)
            elif isinstance(outcome, Snooze) and ending is not None:
                alike.setdefault((job.type, elapsed_ms, outcome.reason), []).append(job)
            else:
                self._tell_one(job, outcome, elapsed_ms, ending)
        for (type_, elapsed_ms, reason), jobs in alike.items():
            fields: dict[str, object] = {"type": type_, "jobs": len(jobs), "duration_ms": round(elapsed_ms, 1)}
            if len(jobs) == 1:
                fields |= {"job_id": jobs[0].id, "tenant_id": jobs[0].tenant_id, "attempt": jobs[0].attempts}
            if reason is None:
                self._log.info("job_done", **fields)
            else:
                next_run_after = min(settled[job.id].run_after for job in jobs).isoformat()
                self._log.info("job_snoozed", reason=reason, next_run_after=next_run_after, **fields)

    def _tell_one(self, job: Job, outcome: Outcome, elapsed_ms: float, ending: Ending | None) -> None:
        log = self._log.bind(
            job_id=job.id,
            type=job.type,
            tenant_id=job.tenant_id,
            attempt=job.attempts,
            duration_ms=round(elapsed_ms, 1),
        )
        code, message = getattr(outcome, "code", None), getattr(outcome, "message", None)
        if ending is None:
            log.warning("claim_lost")
        elif ending.status == "dead":
            log.error("job_dead", error_code=code, error=message)
            if ending.opened_alert is not None:
                self._log.error("alert_opened", cause="dead_jobs", subject=ending.opened_alert)
        else:
            log.warning("job_failed", error_code=code, error=message, next_run_after=ending.run_after.isoformat())

    async def _heartbeat_loop(self) -> None:
        while True:
            await anyio.sleep(self._jobs.lease.total_seconds() / 3)
            if self._running:
                try:
                    await self._jobs.extend(list(self._running.values()))
                except (Unavailable, asyncpg.PostgresError) as exc:
                    self._missed("heartbeat_failed", exc)  # the next beat tries again, well before the lease ends
                else:
                    self._away.discard("heartbeat_failed")


class _TooSlow(Exception):
    """The handler took longer than its timeout."""


async def _call(bound: Bound, batch: list[Job]) -> tuple[object, BaseException | None]:
    """What the handler returned, or what went wrong; the one broad catch of this program."""
    scope = anyio.CancelScope()
    try:
        with anyio.fail_after(bound.spec.timeout_s) as scope:
            return await bound.call(batch if bound.spec.batch > 1 else batch[0]), None
    except anyio.get_cancelled_exc_class() as exc:
        if anyio.current_effective_deadline() == -math.inf:
            raise
        return None, exc  # nobody cancelled us: a task that the handler waited for was
    except (Exception, SystemExit) as exc:  # noqa: BLE001
        if isinstance(exc, TimeoutError) and scope.cancelled_caught:
            return None, _TooSlow(f"longer than {bound.spec.timeout_s:g} s")
        return None, _heart_of(exc)


def _heart_of(exc: BaseException) -> BaseException:
    """What a group of exceptions is about: a bug before an outage, and the only one of a kind by itself."""
    leaves = list(_leaves_of(exc))
    return next((leaf for leaf in leaves if not isinstance(leaf, Unavailable)), leaves[0])


def _leaves_of(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves_of(inner)
    else:
        yield exc


def _code_of(exc: Exception) -> str:
    if isinstance(exc, Unavailable):
        return exc.code
    return f"{type(exc).__name__} {getattr(exc, 'sqlstate', '')}".strip()


def _ending_of(returned: object) -> Outcome:
    if isinstance(returned, Snooze):
        return returned
    return Done(returned if isinstance(returned, dict) else None)


def _ending_after(problem: BaseException) -> Failed | Dead:
    if isinstance(problem, Permanent):
        return Dead(problem.code, str(problem))
    if isinstance(problem, _TooSlow):
        return Failed("timeout", str(problem))
    return Failed(type(problem).__name__, _where(problem))


def _where(exc: BaseException) -> str:
    """Where it happened and Postgres's code for it, without the message: messages quote rows."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename.endswith(".py")]
    at = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{exc.sqlstate} at {at}" if isinstance(exc, asyncpg.PostgresError) else f"at {at}"
