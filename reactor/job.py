"""Job, the ways a run can end, and the Handler type."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from reactor.errors import StaleClaim

_LONGEST_DELAY_S = 366 * 86_400.0


class Queue(Protocol):
    """What a job needs of the queue it was claimed from."""

    instance: str

    async def note(self, job: Job, note: dict[str, Any]) -> None:
        """See `Job.note`."""

    async def complete(self, job: Job, conn: Any, result: dict[str, Any] | None) -> bool:
        """See `Job.complete`; False when the claim is lost."""


@dataclass(slots=True)
class Job:
    """One claimed row of `reactor.jobs`, as a handler sees it.

    `version` is the highest job id this claim absorbed: a write that carries it replaces only a lower or equal one.
    """

    id: int
    type: str
    tenant_id: str
    payload: dict[str, Any]
    attempts: int
    max_attempts: int
    dedupe_key: str | None
    lane: str
    version: int
    claim_token: UUID
    notes: dict[str, Any] = field(default_factory=dict)
    is_suspect: bool = False
    """An earlier claim ran out: perhaps this job killed its worker, so it shares its call with no other."""
    outcome: Outcome | None = None
    """Set by a batched handler for jobs that end differently from their batch."""
    _queue: Queue | None = field(default=None, repr=False)
    completes_itself: bool = False
    """`complete` was called: then a claim that is gone when the worker settles was the handler's own to end."""

    @property
    def key(self) -> str:
        """The same for every attempt of this job, and of no other job in any database: fit for an Idempotency-Key."""
        return f"reactor-{self._claimed_from().instance}-{self.id}"

    async def note(self, note: dict[str, Any]) -> None:
        """Merge `note` into the job's notes, committed at once; the next attempt reads it in `job.notes`.

        Raises:
            TypeError: The note is not JSON.
            StaleClaim: The lease passed to another worker.
            Unavailable: Postgres is out of reach.
        """
        await self._claimed_from().note(self, note)
        self.notes |= note

    async def complete(self, conn: Any, result: dict[str, Any] | None = None) -> None:
        """Make the job done in the transaction of `conn`: done if and only if the handler's own writes in it are.

        Raises:
            StaleClaim: The lease passed to another worker: let the transaction roll back.
        """
        if not await self._claimed_from().complete(self, conn, result):
            raise StaleClaim(f"job {self.id} was claimed by another worker")
        self.completes_itself = True

    def _claimed_from(self) -> Queue:
        if self._queue is None:
            raise RuntimeError("this job was not claimed by a worker: it has neither a key nor a place for notes")
        return self._queue


@dataclass(frozen=True, slots=True)
class Done:
    """The job is finished; `result` is the evidence kept with it."""

    result: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not now: run again after `delay_s` seconds. Spends no attempt; ends dead after doing only this for a week."""

    delay_s: float
    reason: str = "snoozed"

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= _LONGEST_DELAY_S:  # here the handler's own line is to blame
            raise ValueError("delay_s must be between 0 and a year")


@dataclass(frozen=True, slots=True)
class GivenBack(Snooze):
    """Not its own wish: cut off, or its claim in doubt. Due at once, as if it had not been claimed."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt failed; the next waits for the backoff, or `retry_after_s` when the other side named it."""

    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Dead:
    """Given up: needs a person."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Settled:
    """The handler settled the job itself, in the transaction of its own writes."""


Outcome = Done | Snooze | Failed | Dead | Settled
HandlerFunction = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Handler:
    """How jobs of one type are run.

    Args:
        function: `async def f(job, *, pool, ...)`, or `f(jobs, ...)` with `batch` > 1. It receives by keyword what its
            signature names of the resources. It returns None or a dict (done, kept as `result`) or a `Snooze`;
            raises `Unavailable` (snoozed, no attempt spent), `Permanent` (dead), anything else (failed, tried again).
        batch: The most jobs handed over in one call.
        concurrency: The most calls at once in one lane of one reactor; of types that share a lane, the smallest counts.
        lane: Jobs of one lane share these places and their fate: one that is slow, full or away does not touch
            another. The lane given to `enqueue`, else this one, else the type's own name.
        timeout_s: A call that takes longer is cancelled and fails.
        max_attempts: Overrides the job's own number.
    """

    function: HandlerFunction
    batch: int = 1
    concurrency: int = 4
    lane: str | None = None
    timeout_s: float = 300.0
    max_attempts: int | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """A handler with its resources filled in."""

    spec: Handler
    call: HandlerFunction
