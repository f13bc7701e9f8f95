"""Claims what fits, runs it, settles it, drains on stop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import asyncpg

from reactor.db import GOING_AWAY, Unreadable
from reactor.errors import Permanent, StaleClaim, Unavailable, delay_s_of
from reactor.job import Bound, Dead, Done, Failed, GivenBack, Job, Outcome, Snooze
from reactor.jobs import Ending, Jobs
from reactor.listener import Listener, Wakeup
from reactor.log import Log

_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 60.0
_BLOCKED_S = 0.5  # a due job whose twin runs in another reactor: nobody will ring for it
_CROWDED_S = 0.2  # jobs wait in a full lane: producers stay silent meanwhile, also about other lanes
_IN_FLIGHT_S = 0.002  # a silent producer is about to commit: look again, and ever more slowly
_MOST_IN_FLIGHT_S = 0.25
_WATCH_S = 1.0  # how often one tries to take the watch over from a reactor that sleeps armed
_RETRY_S = 1.0
_LAST_LOOK_S = 2.0  # what a stop grants a claim under way: a frozen server would never answer it
_CUT_OFF_S = 2.0  # what a call that is cut off may take to let go; one that swallows being cancelled never does
_SETTLE_S = 5.0  # what a stop grants the last settlement beyond the drain
_FORGET_S = 600.0  # a lane given to `enqueue` that has been empty for as long


@dataclass(slots=True)
class _Lane:
    """Jobs that share their places in this reactor and their fate."""

    name: str
    concurrency: int  # the smallest of the types met in it
    calls: int = 0  # started
    running: int = 0  # of these, what does not wait for a place: types may share a lane, and are claimed together
    freed: anyio.Event | None = None  # set for those who wait for a place
    outages: int = 0  # in a row; above 0 the breaker is open, or half open once its rest is over
    opened_at: float = 0.0  # monotonic, as the next
    rests_until: float = 0.0
    used_at: float = 0.0
    well_at: float = float("-inf")

    @property
    def most(self) -> int:
        """The most calls at once: one, while a success has yet to close the breaker."""
        return 1 if self.outages else self.concurrency

    def places(self, now: float) -> int:
        """How many more calls may start."""
        return 0 if self.rests_until > now else max(self.most - self.calls, 0)


@dataclass(slots=True)
class _Stream:
    """The jobs of one type in one lane, as they stand in the table."""

    lane: _Lane
    after: str = ""  # the tenant served last: the next claim goes on from there, and around


@dataclass(frozen=True, slots=True)
class _Rest:
    """What a look that found nothing allows: a sleep, and whether a ring is worth asking for meanwhile."""

    sleep_s: float
    why: str
    may_arm: bool = True


@dataclass(slots=True)
class _Nap:
    """What was answered to arming since something was last claimed."""

    watch: str | None = None  # another reactor's, of which it was told before its last look
    in_flight_s: float = _IN_FLIGHT_S


class Worker:
    """One reactor's loop over the queue.

    Args:
        jobs: The queue.
        handlers: What runs each type; other types are left to other reactors.
        wakeup: Rung by the listener and by everything here that frees a place.
        watch: The listener to sleep on; None polls.
        poll_s: The longest sleep without a look.
        drain_s: How long `stop` lets running handlers finish.
    """

    def __init__(
        self,
        jobs: Jobs,
        handlers: Mapping[str, Bound],
        *,
        wakeup: Wakeup,
        poll_s: float,
        drain_s: float,
        log: Log,
        watch: Listener | None = None,
    ) -> None:
        self._jobs = jobs
        self._handlers = handlers
        self._wakeup = wakeup
        self._watch = watch
        self._poll_s = poll_s
        self._drain_s = drain_s
        self._log = log
        self._lanes: dict[str, _Lane] = {}
        self._streams: dict[str, dict[str, _Stream]] = {type_: {} for type_ in handlers}
        for type_ in handlers:
            self._stream_of(type_, type_)
        self._calls: set[asyncio.Task[None]] = set()
        self._is_cut_off = False  # the drain is over: what is cancelled from now on, we cancelled
        self._running: dict[int, Job] = {}
        self._ended: list[tuple[Job, Outcome, float]] = []
        self._locked: list[tuple[Job, Outcome, float]] = []  # ended, while somebody's transaction holds their rows
        self._locked_until = 0.0  # monotonic: not asked for again before
        self._settle_bell = Wakeup()
        self._sweep_at = 0.0  # monotonic
        self._is_blocked = False  # when last looked, something due waited for another to settle
        self._overdue = 0  # looks in a row at a timer that is over and that nobody can act upon
        self._away: set[str] = set()  # what failed when it last asked Postgres: an outage is one line, not one a second
        self._stopping = False
        self._looking = anyio.CancelScope()
        self._is_drained = anyio.Event()
        self._settled = anyio.Event()
        self.settled_jobs = 0
        self.woken_by: Counter[str] = Counter()
        """How many claims found jobs after each reason to look; a promise kept only by the floor counts as `floor`."""

    def stop(self) -> None:
        """Claim no more, finish what runs, then let `run` return."""
        self._stopping = True
        self._looking.deadline = anyio.current_time() + _LAST_LOOK_S
        self._wakeup.ring("stop")

    async def run(self) -> None:
        """Work until `stop`; then drain. Never raises for an outage, nor for what a handler does."""
        async with self._jobs.at_hand(), anyio.create_task_group() as upkeep:
            upkeep.start_soon(self._settle_loop)
            upkeep.start_soon(self._heartbeat_loop)
            try:
                with self._looking:
                    await self._claim_loop()
                    if self._watch is not None:
                        await self._watch.disarm(hand_over=True)
                await self._wait_for_calls(self._drain_s)
            finally:
                await self._cut_off()
            self._is_drained.set()
            self._settle_bell.ring()
            # The settle loop ends by itself once everything is settled; the others have no reason to.
            with anyio.move_on_after(_SETTLE_S):
                await self._settled.wait()
            upkeep.cancel_scope.cancel()

    @property
    def hangs(self) -> bool:
        """Whether, after `run`, a call goes on that swallowed being cancelled; its jobs are left to their leases."""
        return bool(self._calls)

    async def _wait_for_calls(self, longest_s: float) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=longest_s)

    async def _cut_off(self) -> None:
        """Cancel the calls that still run; after a moment, leave those that do not care to their leases."""
        with anyio.CancelScope(shield=True):
            await asyncio.sleep(0)  # one that never began would not notice, and its jobs not go back
            self._is_cut_off = True
            for call in self._calls:
                call.cancel()
            await self._wait_for_calls(_CUT_OFF_S)
        if self._calls:
            self._log.error("handlers_hang", calls=len(self._calls))

    async def _claim_loop(self) -> None:
        """Look, start what was found, and sleep only where whoever commits a job later is sure to ring.

        The protocol is `reactor.ring` and `reactor.arm` in sql/0002, proven by tests/wake_model.py: the bell is cleared
        before a look, never after; after arming, and after hearing of another's watch, it looks once more; a reactor
        without room never sleeps armed, for then every producer would ring just when load is highest.
        """
        why, nap = "start", _Nap()
        while not self._stopping:
            self._wakeup.clear()
            rest = await self._look(why)
            if rest is None:
                why, nap = "more", _Nap()
                if self._watch is not None:  # only now that the handlers have started
                    await self._watch.disarm(hand_over=False)
            elif self._watch is None or (rest.may_arm and self._watch.is_armed):
                why = await self._sleep(rest)
            elif not rest.may_arm:
                await self._watch.disarm(hand_over=True)
                why = await self._sleep(rest)
            else:
                why = await self._doze(rest, self._watch, nap)

    async def _doze(self, rest: _Rest, watch: Listener, nap: _Nap) -> str:
        """Arm and ask for the look that must follow; where that is refused, sleep as one may without."""
        match await watch.arm():
            case None:
                return await self._sleep(rest)
            case "armed":
                return "armed"
            case "in_flight":
                nap.in_flight_s *= 1.2
                return await self._sleep(_Rest(min(nap.in_flight_s, rest.sleep_s, _MOST_IN_FLIGHT_S), "in_flight"))
            case watched if watched == nap.watch:
                return await self._sleep_unarmed(rest, watch, nap)
            case watched:
                nap.watch = watched
                return "watched"

    async def _sleep(self, rest: _Rest) -> str:
        return self._wakeup.reason if await self._wakeup.wait(rest.sleep_s) else rest.why

    async def _sleep_unarmed(self, rest: _Rest, watch: Listener, nap: _Nap) -> str:
        """Another reactor sleeps armed: rings reach this one too, but should that one die, somebody must take over.

        And should it have been awake meanwhile, there may be jobs of types that it does not handle.
        """
        until = anyio.current_time() + rest.sleep_s
        while (left_s := until - anyio.current_time()) > 0:
            nap_s = min(left_s, _WATCH_S * random.uniform(0.75, 1.25))  # noqa: S311  # jitter
            if await self._wakeup.wait(nap_s):
                return self._wakeup.reason
            if nap_s < left_s and (answer := await watch.arm()) != nap.watch:
                nap.watch = answer
                return "watch"
        return rest.why

    async def _look(self, why: str) -> _Rest | None:
        """Claim and start what fits: None. Where nothing does, what to sleep on."""
        limits, lanes = self._room()
        most = {type_: self._handlers[type_].spec.max_attempts for type_ in limits}
        try:
            if time.monotonic() >= self._sweep_at or why == "slept":
                await self._sweep()
            claimed = await self._jobs.claim(limits, most, lanes)
            if claimed:
                self._away.discard("claim_failed")
                self._overdue = 0
                self.woken_by[why] += 1
                self._start(claimed)
                return None
            ahead = await self._jobs.look_ahead(list(limits), lanes)
        except (Unavailable, asyncpg.PostgresError) as exc:
            self._missed("claim_failed", exc)
            self._sweep_at = 0.0
            return _Rest(_RETRY_S, "retry", may_arm=False)
        self._away.discard("claim_failed")
        self._is_blocked = ahead.is_blocked
        # Another reactor's leases began after its claim, so that no timer of ours knows of them.
        rests = [_Rest(min(self._poll_s, self._jobs.lease.total_seconds()), "floor"), *self._rests_of_lanes()]
        if ahead.due_s is not None:
            self._overdue = min(self._overdue + 1, 9) if ahead.due_s <= 0 else 0
            # Somebody's transaction holds what is overdue, perhaps for long.
            due_s = max(ahead.due_s, 0.001 * 2.0**self._overdue if self._overdue > 1 else 0.0)
            rests.append(_Rest(due_s, "timer"))
            self._sweep_at = min(self._sweep_at, time.monotonic() + due_s)
        if ahead.is_blocked:
            rests.append(_Rest(_BLOCKED_S, "blocked"))
        if ahead.is_crowded:
            rests.append(_Rest(_CROWDED_S, "crowded"))
        first = min(rests, key=lambda rest: rest.sleep_s)
        return _Rest(first.sleep_s, first.why, may_arm=not ahead.is_crowded)

    def _room(self) -> tuple[dict[str, int], dict[str, dict[str, dict[str, int | str]]]]:
        """How many jobs of each type fit in a lane, and the lanes known by now with what fits there."""
        now = time.monotonic()
        limits = {type_: bound.spec.concurrency * bound.spec.batch for type_, bound in self._handlers.items()}
        lanes: dict[str, dict[str, dict[str, int | str]]] = {}
        for type_, streams in self._streams.items():
            batch = self._handlers[type_].spec.batch
            for name, stream in streams.items():
                places = stream.lane.places(now)
                room = places if stream.lane.outages else places * batch
                lanes.setdefault(type_, {})[name] = {"room": room, "after": stream.after}
        return limits, lanes

    def _stream_of(self, type_: str, lane: str) -> _Stream:
        stream = self._streams[type_].get(lane)
        if stream is None:
            spec = self._handlers[type_].spec
            name = spec.lane if spec.lane is not None and lane == type_ else lane
            shared = self._lanes.setdefault(name, _Lane(name, spec.concurrency))
            shared.concurrency = min(shared.concurrency, spec.concurrency)
            stream = self._streams[type_][lane] = _Stream(shared)
        return stream

    def _forget_lanes(self) -> None:
        """A lane may be named after anything, and there is no end to names."""
        before = time.monotonic() - _FORGET_S
        for type_, streams in self._streams.items():
            for name, stream in list(streams.items()):
                lane = stream.lane
                if name != type_ and lane.calls == 0 and lane.outages == 0 and lane.used_at < before:
                    del streams[name]
        used = {stream.lane.name for streams in self._streams.values() for stream in streams.values()}
        self._lanes = {name: lane for name, lane in self._lanes.items() if name in used}

    def _rests_of_lanes(self) -> Iterator[_Rest]:
        """When each lane that rests may be tried again."""
        now = time.monotonic()
        for lane in self._lanes.values():
            if lane.rests_until > now:
                yield _Rest(lane.rests_until - now, "rested")

    async def _sweep(self) -> None:
        """Return to the queue what dead workers held."""
        self._sweep_at = time.monotonic() + self._poll_s
        self._forget_lanes()
        if self._running:  # after an outage, or a sleep of the machine, our own leases come first
            await self._jobs.extend(list(self._running.values()))
        expired = await self._jobs.release_expired()
        counts = Counter((job.type, job.status) for job in expired)
        for (type_, status), jobs in counts.items():
            self._log.warning("lease_expired", type=type_, jobs=jobs, status=status)
        for job in expired:
            if job.status == "dead":
                self._log.error(
                    "job_dead",
                    job_id=job.id,
                    type=job.type,
                    tenant_id=job.tenant_id,
                    attempt=job.attempts,
                    error_code="lease_expired",
                )
            if job.opened_alert is not None:
                self._log.error("alert_opened", cause="dead_jobs", subject=job.opened_alert)

    def _start(self, claimed: Sequence[Job]) -> None:
        together: dict[tuple[str, str], list[Job]] = {}
        for job in claimed:
            self._running[job.id] = job
            if isinstance(job.payload, Unreadable) or isinstance(job.notes, Unreadable):
                self._end([(job, Dead("payload", "its JSON is more than Python can read"))], time.perf_counter())
                continue
            if job.is_suspect:  # out of turn
                self._start_call([job])
            else:
                together.setdefault((job.type, job.lane), []).append(job)
        for (type_, lane), jobs in together.items():
            batch = self._handlers[type_].spec.batch
            for start in range(0, len(jobs), batch):
                self._start_call(jobs[start : start + batch])
            stream = self._streams[type_][lane]
            served = {job.tenant_id for job in jobs}
            stream.after = max({tenant for tenant in served if tenant <= stream.after} or served)

    def _start_call(self, batch: list[Job]) -> None:
        lane = self._stream_of(batch[0].type, batch[0].lane).lane
        lane.calls += 1
        lane.used_at = time.monotonic()
        # Not a task group's: there is one for every job, and what one of them does must never reach the others.
        call = asyncio.get_running_loop().create_task(self._run_call(self._handlers[batch[0].type], lane, batch))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    def _missed(self, event: str, exc: Exception, **fields: object) -> None:
        if event not in self._away:
            self._away.add(event)
            self._log.warning(event, error_code=_code_of(exc), **fields)

    async def _run_call(self, bound: Bound, lane: _Lane, batch: list[Job]) -> None:
        started = time.perf_counter()
        outcomes: list[Outcome] = []
        try:
            while lane.running >= lane.most:
                lane.freed = lane.freed or anyio.Event()
                await lane.freed.wait()
            lane.running += 1
            try:
                outcomes = await self._outcomes_of(bound, lane, batch)
            finally:
                lane.running -= 1
                if lane.freed is not None:
                    lane.freed.set()
                    lane.freed = None
        except asyncio.CancelledError:
            # Cut off before it ended: back to the queue unharmed, unless the handler settled it already.
            outcomes = [job.outcome or GivenBack(reason="drained") for job in batch]
            raise
        except Exception as exc:  # noqa: BLE001  # an exception of the handler's own may raise when it is read
            outcomes = [job.outcome or Failed(type(exc).__name__, _where(exc)) for job in batch]
        finally:
            lane.calls -= 1
            self._wakeup.ring("ended")
            if outcomes:
                self._end(list(zip(batch, outcomes, strict=True)), started)

    async def _outcomes_of(self, bound: Bound, lane: _Lane, batch: list[Job]) -> list[Outcome]:
        """Run the handler and turn every ending into a value.

        A batch that fails as a whole is run again one by one, so that one bad job takes no neighbour down.
        """
        if (rest_s := lane.rests_until - time.monotonic()) > 0:  # since the claim, or since a neighbour's call
            return [job.outcome or Snooze(rest_s, "its lane rests") for job in batch]
        returned, problem = await self._call(bound, batch)
        if isinstance(problem, Unavailable):
            return self._open(lane, batch, problem)
        self._close(lane)
        if problem is None:
            ending = _ending_of(returned)
            return [job.outcome or ending for job in batch]
        if isinstance(problem, StaleClaim):  # settling will find the token changed, and say so
            return [job.outcome or GivenBack(reason="the claim was lost") for job in batch]
        failed = _ending_after(problem)
        if len(batch) == 1:
            return [batch[0].outcome or failed]
        self._log.error(
            "batch_failed", type=batch[0].type, error_code=failed.code, error=failed.message, jobs=len(batch)
        )
        for job in batch:
            if job.outcome is None:  # kept on the job, should the drain cut off the rest
                [job.outcome] = await self._outcomes_of(bound, lane, [job])
        return [job.outcome or failed for job in batch]

    async def _call(self, bound: Bound, batch: list[Job]) -> tuple[object, BaseException | None]:
        """What the handler returned, or what went wrong; the one broad catch of this program."""
        if self._is_cut_off:
            raise asyncio.CancelledError
        timeout = asyncio.timeout(bound.spec.timeout_s)
        try:
            async with timeout:
                return await bound.call(batch if bound.spec.batch > 1 else batch[0]), None
        except BaseException as exc:
            if self._is_cut_off:  # whatever the handler made of that
                raise asyncio.CancelledError from exc
            if (task := asyncio.current_task()) is not None:
                while task.cancelling():  # not by us: by code of the handler's
                    task.uncancel()
            if timeout.expired():
                return None, _TooSlow(f"longer than {bound.spec.timeout_s:g} s")
            heart = _heart_of(exc)
            if _is_postgres_away(heart):
                return None, Unavailable("Postgres went away under the handler", code="postgres")
            return None, heart

    def _open(self, lane: _Lane, batch: Sequence[Job], exc: Unavailable) -> list[Outcome]:
        """A dependency is away: its jobs snooze, and their lane rests a little longer each time."""
        if exc.retry_after_s is not None:
            delay_s = max(_FIRST_PAUSE_S, exc.retry_after_s)  # "at once", for ever, would spin
        else:
            longest_s = min(_FIRST_PAUSE_S * 2.0**lane.outages, _MOST_PAUSE_S)
            delay_s = longest_s * random.uniform(0.75, 1.0)  # noqa: S311  # jitter
        now = time.monotonic()
        if exc.code != "postgres" and lane.rests_until <= now:  # while Postgres is away nothing is claimed anyway
            if lane.outages == 0:
                lane.opened_at = now
                self._log.warning("lane_opened", lane=lane.name, error_code=exc.code)
            lane.outages = min(lane.outages + 1, 16)
        lane.rests_until = max(lane.rests_until, now + delay_s)
        return [job.outcome or Snooze(delay_s, f"{exc.code}: {exc}") for job in batch]

    def _close(self, lane: _Lane) -> None:
        lane.well_at = time.monotonic()
        if lane.outages and lane.rests_until <= time.monotonic():  # not by a call that began before the outage
            lane.outages = 0
            self._log.info("lane_closed", lane=lane.name)

    def _end(self, endings: Sequence[tuple[Job, Outcome]], started: float) -> None:
        elapsed_ms = (time.perf_counter() - started) * 1000
        self._ended += [(job, _sound(outcome), elapsed_ms) for job, outcome in endings]
        self._settle_bell.ring()

    async def _settle_loop(self) -> None:
        """Settle whatever has ended since the last time, in one statement."""
        delay_s = 0.1
        while True:
            self._settle_bell.clear()
            batch, self._ended = self._ended, []
            if batch or self._locked:
                try:
                    batch += await self._freed()
                    settled = await self._settle(batch) if batch else {}
                except (Unavailable, asyncpg.PostgresError) as exc:
                    # The leases still hold, or will run out: either way nothing is lost.
                    self._missed("settle_failed", exc, jobs=len(batch))
                    self._ended[:0] = batch
                    await anyio.sleep(delay_s)
                    delay_s = min(delay_s * 2, _RETRY_S)
                    continue
                self._away.discard("settle_failed")
                delay_s = 0.1
                self.settled_jobs += len(batch)
                for job, _, _ in batch:
                    if self._running.get(job.id) is job:  # and not a later claim of the same one
                        del self._running[job.id]
                if settled or self._is_blocked:
                    self._wakeup.ring("settled")  # there may be new timers; a twin or suspect may be next
                self._tell(batch, settled)
            elif self._is_drained.is_set():
                self._settled.set()
                return
            if not self._ended and (self._locked or not self._is_drained.is_set()):
                await self._settle_bell.wait(_RETRY_S if self._locked else self._poll_s)

    async def _freed(self) -> list[tuple[Job, Outcome, float]]:
        """Of what had to wait for somebody's transaction, what need not any more."""
        if not self._locked or time.monotonic() < self._locked_until:
            return []
        self._locked_until = time.monotonic() + _RETRY_S
        held = await self._jobs.held_elsewhere([job for job, _, _ in self._locked])
        freed = [ended for ended in self._locked if ended[0].id not in held]
        self._locked = [ended for ended in self._locked if ended[0].id in held]
        return freed

    async def _settle(self, batch: list[tuple[Job, Outcome, float]]) -> dict[int, Ending]:
        """Settle them all; one that cannot be stored fails by itself, one whose row is held is left for later."""
        try:
            return await self._jobs.settle([(job, outcome) for job, outcome, _ in batch])
        except asyncpg.LockNotAvailableError:  # somebody's transaction holds a row: the others need not wait
            held = await self._jobs.held_elsewhere([job for job, _, _ in batch])
            self._locked += [ended for ended in batch if ended[0].id in held]
            self._locked_until = time.monotonic() + _RETRY_S
            batch[:] = [ended for ended in batch if ended[0].id not in held]
            return await self._settle(batch) if batch else {}
        except (asyncpg.DataError, asyncpg.ProgramLimitExceededError, RecursionError, ValueError, TypeError) as exc:
            if len(batch) == 1:
                job, _, elapsed_ms = batch[0]
                batch[0] = job, Failed(type(exc).__name__, "what the handler returned cannot be stored"), elapsed_ms
                return await self._jobs.settle([(job, batch[0][1])])
        settled: dict[int, Ending] = {}
        parts = [[ended] for ended in batch]
        for part in parts:
            settled |= await self._settle(part)
        batch[:] = [ended for part in parts for ended in part]
        return settled

    def _tell(self, batch: Sequence[tuple[Job, Outcome, float]], settled: Mapping[int, Ending]) -> None:
        """A line for each failure, and one for all the jobs of a type that ended well, or in another way, together."""
        lines: dict[tuple[str, ...], list[tuple[Job, float]]] = {}
        for job, outcome, elapsed_ms in batch:
            ending = settled.get(job.id)
            if ending is None:
                key: tuple[str, ...] = ("job_done", job.type)
            elif ending.status is None:
                key = ("job_done" if job.completes_itself else "claim_lost", job.type)
            elif isinstance(outcome, Snooze) and ending.status == "pending":
                key = ("job_snoozed", job.type, outcome.reason)
            else:
                event = "job_dead" if ending.status == "dead" else "job_failed"
                code = "snoozed_too_long" if isinstance(outcome, Snooze) else getattr(outcome, "code", "")
                key = (event, job.type, code, getattr(outcome, "message", ""), str(job.id))  # a line each
            lines.setdefault(key, []).append((job, elapsed_ms))
        for (event, type_, *about), ended in lines.items():
            jobs = [job for job, _ in ended]
            fields: dict[str, object] = {"type": type_, "jobs": len(jobs)}
            fields["duration_ms"] = round(max(elapsed_ms for _, elapsed_ms in ended), 1)
            if len(jobs) == 1:
                fields |= {"job_id": jobs[0].id, "tenant_id": jobs[0].tenant_id, "attempt": jobs[0].attempts}
            fields |= dict(zip(("reason",) if event == "job_snoozed" else ("error_code", "error"), about, strict=False))
            instants = [at for job in jobs if job.id in settled and (at := settled[job.id].run_after) is not None]
            if instants and event != "job_dead":
                fields["next_run_after"] = min(instants).isoformat()
            level = {"job_done": logging.INFO, "job_snoozed": logging.INFO, "job_dead": logging.ERROR}
            self._log.log(level.get(event, logging.WARNING), event, **fields)
        for ending in settled.values():
            if ending.opened_alert is not None:
                self._log.error("alert_opened", cause="dead_jobs", subject=ending.opened_alert)

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

    def lanes(self, away_s: float) -> tuple[list[str], list[str]]:
        """The lanes whose dependency has been away for that long, and those seen in order within that time."""
        since = time.monotonic() - away_s
        away = [lane.name for lane in self._lanes.values() if lane.outages and lane.opened_at < since]
        return away, [lane.name for lane in self._lanes.values() if not lane.outages and lane.well_at > since]


class _TooSlow(Exception):
    """The handler took longer than its timeout."""


def _heart_of(exc: BaseException) -> BaseException:
    """What a group of exceptions is about: a bug before an outage, and that before what was cancelled for it."""
    leaves = [leaf for leaf in _leaves_of(exc) if not isinstance(leaf, asyncio.CancelledError)] or [exc]
    return next((leaf for leaf in leaves if not isinstance(leaf, Unavailable)), leaves[0])


def _is_postgres_away(exc: BaseException) -> bool:
    """Whether a handler lost its connection, or got none: no fault of its own."""
    if isinstance(exc, asyncpg.InterfaceError):
        return "connection is closed" in str(exc)
    if isinstance(exc, OSError) and not isinstance(exc, TimeoutError):  # some file's or service's, or asyncpg's
        frames = traceback.extract_tb(exc.__traceback__)
        return any(Path(asyncpg.__file__).parent in Path(frame.filename).parents for frame in frames)
    return isinstance(exc, GOING_AWAY)


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


def _sound(outcome: object) -> Outcome:
    """What a handler set as `job.outcome`, if it is one."""
    if isinstance(outcome, Failed):
        return replace(outcome, retry_after_s=delay_s_of(outcome.retry_after_s))
    if not isinstance(outcome, Outcome):
        return Failed("outcome", f"{type(outcome).__name__} is no way for a job to end")
    return outcome


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
