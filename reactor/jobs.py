"""The SQL job functions as typed calls: only they change a job's state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from reactor.db import Connection, Line, Pool, reaching
from reactor.errors import StaleClaim
from reactor.job import Dead, Done, Failed, GivenBack, Job, Outcome, Settled, Snooze
from reactor.text import clean, clean_json

_STATEMENT_S = 10.0  # a server that was frozen or unplugged says nothing: who stops must not wait for it

Lanes = Mapping[str, Mapping[str, Mapping[str, int | str]]]
"""By type and lane: `room`, the jobs that fit there, and `after`, the tenant served last."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What a job became. `status` None: its claim had passed to another worker, so nothing was changed."""

    status: str | None
    run_after: datetime | None = None
    opened_alert: str | None = None  # the subject of a new alert, on one of the jobs that died of it


@dataclass(frozen=True, slots=True)
class Expired:
    """A job whose lease ran out, and what it became."""

    id: int
    type: str
    tenant_id: str
    attempts: int
    status: str
    opened_alert: str | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a worker that found nothing to claim may sleep on.

    `due_s`: the next timer in seconds by the database's clock, None when there is none. `is_crowded`: ready jobs wait
    in lanes without room. `is_blocked`: some wait although there is room, for a twin to end.
    """

    due_s: float | None
    is_crowded: bool
    is_blocked: bool


class Jobs:
    """One worker's view of the queue.

    Args:
        pool: As the schema's owner.
        worker: The name written into `locked_by`.
        lease: How long a claim holds without a heartbeat.
        instance: What tells this database from others, in every job's key.
        snooze_limit: A job that has only snoozed for longer than this is dead.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        worker: str,
        lease: timedelta,
        instance: str = "",
        snooze_limit: timedelta = timedelta(days=7),
    ) -> None:
        self._pool = pool
        self._claims, self._endings = (Line(pool, statement_s=_STATEMENT_S) for _ in range(2))
        self.worker = worker
        self.lease = lease
        self.instance = instance
        self._snooze_limit = snooze_limit

    @asynccontextmanager
    async def at_hand(self) -> AsyncIterator[None]:
        """Keep a connection for claims and one for settling, each used by one task at a time."""
        lines = (self._claims, self._endings)
        for line in lines:
            line.is_kept = True
        try:
            yield
        finally:
            for line in lines:
                line.is_kept = False
                await line.let_go()

    async def _fetch(self, query: str, *args: Any, line: Line | None = None) -> list[Any]:
        with reaching():
            return await (line or Line(self._pool, statement_s=_STATEMENT_S)).fetch(query, *args)

    async def claim(
        self,
        limits: Mapping[str, int],
        most_attempts: Mapping[str, int | None] | None = None,
        lanes: Lanes | None = None,
    ) -> list[Job]:
        """Lease up to `limits[type]` due jobs in each lane of each type, tenants in turn; [] when nothing is due.

        `lanes` says where the room is another. `most_attempts[type]`, where there is one, becomes their `max_attempts`.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        rows = await self._fetch(
            "select * from reactor.claim_jobs($1, $2, $3, $4, $5, $6)",
            list(limits),
            list(limits.values()),
            self.worker,
            self.lease,
            [(most_attempts or {}).get(type_) for type_ in limits],
            lanes or {},
            line=self._claims,
        )
        return [Job(*(*row[:10], row[10] or {}, row[11], None, self)) for row in rows]

    async def settle(self, endings: Sequence[tuple[Job, Outcome]]) -> dict[int, Ending]:
        """End jobs, each its own way; the answer leaves out those that are done.

        Raises:
            Unavailable: Postgres is out of reach; nothing was settled.
        """
        rows: list[tuple[int, UUID, str, dict[str, Any] | None, str | None, float | None]] = []
        for job, outcome in endings:
            match outcome:
                case Done(result):
                    rows.append((job.id, job.claim_token, "done", result and _storable(result), None, None))
                case GivenBack(reason=reason):
                    rows.append((job.id, job.claim_token, "given_back", None, clean(f"given back: {reason}"), 0.0))
                case Snooze(delay_s, reason):
                    rows.append((job.id, job.claim_token, "snoozed", None, clean(f"snoozed: {reason}"), delay_s))
                case Failed(code, message, retry_after_s):
                    rows.append((job.id, job.claim_token, "failed", None, clean(f"{code}: {message}"), retry_after_s))
                case Dead(code, message):
                    rows.append((job.id, job.claim_token, "dead", None, clean(f"{code}: {message}"), None))
                case Settled():
                    continue
                case _:
                    assert_never(outcome)
        if not rows:
            return {}
        settled = await self._fetch(
            "select * from reactor.settle_jobs($1, $2, $3, $4, $5, $6, $7)",
            *(list(column) for column in zip(*rows, strict=True)),
            self._snooze_limit,
            line=self._endings,
        )
        return {row["id"]: Ending(row["status"], row["run_after"], row["opened_alert"]) for row in settled}

    async def held_elsewhere(self, jobs: Sequence[Job]) -> set[int]:
        """The ids of those whose rows somebody's transaction holds at this moment."""
        held = "select id from reactor.jobs where id = any ($1) except all select id from (%s) free"
        free = "select id from reactor.jobs where id = any ($1) for update skip locked"
        return {row[0] for row in await self._fetch(held % free, [job.id for job in jobs], line=self._endings)}

    async def release_expired(self) -> list[Expired]:
        """Return jobs whose lease ran out to the queue, as suspects; what each became."""
        return [Expired(*row) for row in await self._fetch("select * from reactor.release_expired_jobs()")]

    async def extend(self, jobs: Sequence[Job]) -> set[int]:
        """Heartbeat: extend the leases still held; returns the ids of those that are."""
        rows = await self._fetch(
            "select * from reactor.extend_leases($1, $2, $3)",
            [job.id for job in jobs],
            [job.claim_token for job in jobs],
            self.lease,
        )
        return {row[0] for row in rows}

    async def look_ahead(self, types: Sequence[str], lanes: Lanes | None = None) -> Ahead:
        """What may be slept on, once `claim` of the same types and lanes found nothing."""
        [row] = await self._fetch(
            "select * from reactor.look_ahead($1, $2)", list(types), lanes or {}, line=self._claims
        )
        return Ahead(*row)

    async def note(self, job: Job, note: dict[str, Any]) -> None:
        """See `Job.note`."""
        rows = await self._fetch("select reactor.note_job($1, $2, $3)", job.id, job.claim_token, clean_json(note))
        if not rows[0][0]:
            raise StaleClaim(f"job {job.id} was claimed by another worker")

    async def complete(self, job: Job, conn: Connection, result: dict[str, Any] | None) -> bool:
        """See `Job.complete`."""
        return bool(await complete_jobs(conn, [(job, result and clean_json(result))]))


def _storable(result: dict[str, Any]) -> dict[str, Any]:
    """A handler's result as jsonb takes it; where it is none, what is wrong with it: the work itself is done."""
    try:
        storable: dict[str, Any] = clean_json(result)
    except (TypeError, ValueError) as exc:
        return {"result_error": clean(str(exc))}
    return storable


async def complete_jobs(conn: Connection, results: Sequence[tuple[Job, dict[str, Any] | None]]) -> list[int]:
    """Settle jobs as done in the handler's own transaction, their claims locked until it ends; the ids of those held.

    Write nothing for the others; set `job.outcome = Settled()` once it committed.
    """
    rows = await conn.fetch(
        "select * from reactor.complete_jobs($1, $2, $3)",
        [job.id for job, _ in results],
        [job.claim_token for job, _ in results],
        [result for _, result in results],
    )
    return [row[0] for row in rows]
