"""Finds what bypassed the triggers, on a schedule and after a TRUNCATE of a partition."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg

from reactor.db import Pool
from reactor.job import Handler, Job
from reactor.log import Log
from reactor.settings import Settings
from reactor.sources import open_missed_changes_alert, prune, reconcile, source_ids


async def reconcile_sources(job: Job, *, pool: Pool, log: Log, settings: Settings) -> dict[str, Any]:
    """Compare sources with their memories and enqueue what is owed; the scheduled look also prunes what is old.

    Payload: {} for every source, or {"source": int, "expected": bool}. A backfill and a truncated partition are
    expected to show rows; any other look that finds some raises an alert, since a trigger should have been first.

    Raises:
        Unavailable: Postgres is out of reach.
        asyncpg.PostgresError: After all the others: a source cannot be compared (a column is gone, rows are hidden).
    """
    only = job.payload.get("source")
    total = {"enqueued": 0, "orphans": 0, "truncated": 0, "triggers_placed": 0}
    failures: list[asyncpg.PostgresError] = []
    for source in await source_ids(pool):
        if only is not None and source != only:
            continue
        try:
            found = await reconcile(pool, source)
        except asyncpg.PostgresError as exc:
            log.error("reconcile_failed", source=source, error_code=exc.sqlstate)
            failures.append(exc)
            continue
        for name, count in found.items():
            total[name] += count
        if not job.payload.get("expected"):
            await open_missed_changes_alert(pool, source, found, log=log)
    if only is None:
        total["pruned"] = await prune(pool, timedelta(days=settings.job_retention_d))
    if failures:
        raise failures[0]
    return total


HANDLERS = {"reconcile": Handler(reconcile_sources, concurrency=1, lane="upkeep", timeout_s=3600)}
