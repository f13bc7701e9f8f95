"""The SQL job functions as typed calls: only they change a job's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, assert_never
from uuid import UUID

from reactor.db import Connection, Pool, reaching
from reactor.errors import StaleClaim
from reactor.job import Dead, Done, Failed, Job, Outcome, Settled, Snooze
from reactor.text import clean, clean_json

_ACQUIRE_S = 10.0
_STATEMENT_S = 10.0  # a server that was frozen or unplugged says nothing: a worker that stops must not wait for it


@dataclass(frozen=True, slots=True)
class Ending:
    """What a settled job became: its status and, where it will run again, when."""

    status: str
    run_after: datetime
    opened_alert: str | None  # the subject of a new alert, on one of the jobs that died of it


class Jobs:
    """One worker's view of the queue.

    Args:
        pool: As the schema's owner.
        worker: The name written into `locked_by`.
        lease: How long a claim holds without a heartbeat.
    """

    def __init__(self, pool: Pool, *, worker: str, lease: timedelta) -> None:
        self._pool = pool
        self._worker = worker
        self.lease = lease

    async def _fetch(self, query: str, *args: Any) -> list[Any]:
        with reaching():
            async with self._pool.acquire(timeout=_ACQUIRE_S) as conn:
                return await conn.fetch(query, *args, timeout=_STATEMENT_S)

    async def claim(
        self, limits: Mapping[str, int], most_attempts: Mapping[str, int | None] | None = None
    ) -> list[Job]:
        """Lease up to `limits[type]` due jobs of each type, oldest first; [] when nothing is due.

        `most_attempts[type]`, where there is one, becomes the jobs' `max_attempts`.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        rows = await self._fetch(
            "select * from reactor.claim_jobs($1, $2, $3, $4, $5)",
            list(limits),
            list(limits.values()),
            self._worker,
            self.lease,
            [(most_attempts or {}).get(type_) for type_ in limits],
        )
        return [
            Job(
                id=row["id"],
                type=row["type"],
                tenant_id=row["tenant_id"],
                payload=row["payload"],
                attempts=row["attempts"],
                max_attempts=row["max_attempts"],
                dedupe_key=row["dedupe_key"],
                lane=row["lane"],
                version=row["version"],
                claim_token=row["claim_token"],
                notes=row["notes"],
                is_suspect=row["is_suspect"],
                _note=self._note,
            )
            for row in rows
        ]

    async def settle(self, endings: Sequence[tuple[Job, Outcome]]) -> dict[int, Ending]:
        """End jobs, each its own way; a job whose claim has passed to another worker is missing from the answer.

        Raises:
            Unavailable: Postgres is out of reach; nothing was settled.
        """
        rows: list[tuple[int, UUID, str, dict[str, Any] | None, str | None, float | None]] = []
        for job, outcome in endings:
            match outcome:
                case Done(result):
                    rows.append((job.id, job.claim_token, "done", _storable(result), None, None))
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
            "select * from reactor.settle_jobs($1, $2, $3, $4, $5, $6)",
            *(list(column) for column in zip(*rows, strict=True)),
        )
        return {row["id"]: Ending(row["status"], row["run_after"], row["opened_alert"]) for row in settled}

    async def extend(self, jobs: Sequence[Job]) -> set[int]:
        """Heartbeat: extend the leases still held; returns the ids of those that are."""
        rows = await self._fetch(
            "select * from reactor.extend_leases($1, $2, $3)",
            [job.id for job in jobs],
            [job.claim_token for job in jobs],
            self.lease,
        )
        return {row[0] for row in rows}

    async def next_due_s(self, types: Sequence[str]) -> float | None:
        """Seconds until the next waiting job of these types is due, by the database's clock; None when none waits."""
        rows = await self._fetch("select reactor.next_due_s($1)", list(types))
        due: float | None = rows[0][0]
        return due

    async def enqueue(
        self,
        type_: str,
        payload: dict[str, Any],
        tenant_id: str = "",
        *,
        key: str | None = None,
        lane: str | None = None,
    ) -> int:
        """Add one job, due now; returns its id."""
        rows = await self._fetch(
            "select reactor.enqueue_job($1, $2, $3, $4, null, $5, 5)", type_, payload, tenant_id, key, lane
        )
        job_id: int = rows[0][0]
        return job_id

    async def _note(self, job: Job, note: dict[str, Any]) -> None:
        rows = await self._fetch("select reactor.note_job($1, $2, $3)", job.id, job.claim_token, clean_json(note))
        if not rows[0][0]:
            raise StaleClaim(f"job {job.id} was claimed by another worker")


def _storable(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """A handler's result as jsonb takes it; where it is none, what is wrong with it: the work itself is done."""
    try:
        storable: dict[str, Any] | None = clean_json(result)
    except (TypeError, ValueError) as exc:
        return {"result_error": clean(str(exc))}
    return storable


async def hold_claims(conn: Connection, jobs: Sequence[Job]) -> list[Job]:
    """The jobs whose claim still holds, locked until the transaction of `conn` ends; write nothing for the others."""
    rows = await conn.fetch(
        "select * from reactor.hold_claims($1, $2)", [job.id for job in jobs], [job.claim_token for job in jobs]
    )
    held = {row[0] for row in rows}
    return [job for job in jobs if job.id in held]


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
