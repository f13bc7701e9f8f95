"""Goes through a source's rows page by page and enqueues what its triggers should have, but did not."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from reactor.db import Pool, fetch
from reactor.log import Log

_PAGE = 1000


async def source_ids(pool: Pool) -> list[int]:
    """The attached sources whose table still exists, in order.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    rows = await fetch(pool, "select id from reactor.sources where reactor.is_readable(id) order by id")
    return [row["id"] for row in rows]


async def reconcile(pool: Pool, source: int, *, progress: Callable[[int], None] = lambda _rows: None) -> dict[str, int]:
    """Bring one source's jobs to what its rows owe; each page is a transaction of its own.

    `progress` hears how many rows were looked at; of a tenant's last page, how many were enqueued.

    Returns:
        Counts: `enqueued` (rows missing or changed), `orphans` (memories whose row is gone), `truncated` (memories
        removed after a TRUNCATE), `triggers_placed` (partitions found without triggers).

    Raises:
        Unavailable: Postgres is out of reach.
        asyncpg.PostgresError: RX002 when the table's own row level security hides rows from the worker.
    """
    [[placed]] = await fetch(pool, "select reactor.reconcile_triggers($1)", source)
    found = {"enqueued": 0, "orphans": 0, "truncated": 0, "triggers_placed": placed}
    [start] = await fetch(pool, "select * from reactor.start_reconcile($1)", source)
    truncated_at = start["truncated_at"]
    for [tenant_id] in await fetch(pool, "select t from reactor.source_tenants($1) t order by t", source):
        if truncated_at is not None:
            [[count]] = await fetch(
                pool, "select reactor.remove_truncated($1, $2, $3)", source, tenant_id, truncated_at
            )
            found["truncated"] += count
        after: str | None = None
        while True:
            [page] = await fetch(
                pool, "select * from reactor.reconcile_page($1, $2, $3, $4)", source, tenant_id, after, _PAGE
            )
            found["enqueued"] += page["enqueued"]
            after = page["last"]
            progress(page["enqueued"] if after is None else _PAGE)
            if after is None:
                break
        [[count]] = await fetch(pool, "select reactor.reconcile_orphans($1, $2)", source, tenant_id)
        found["orphans"] += count
    await fetch(
        pool, "select reactor.end_reconcile($1, $2, $3, $4)", source, start["unseen"], truncated_at, start["buries_all"]
    )
    return found


async def count_rows(pool: Pool, source: int) -> int:
    """How many rows a source's table has, "when" aside: nothing beside the look that follows."""
    [[relation]] = await fetch(pool, "select relation::text from reactor.sources where id = $1", source)
    [[rows]] = await fetch(pool, f"select count(*) from {relation}")  # quoted by Postgres
    count: int = rows
    return count


async def open_missed_changes_alert(pool: Pool, source: int, found: dict[str, int], *, log: Log) -> None:
    """An alert while rows are found that a trigger should have brought; resolved by the first look that finds none."""
    subject = f"source {source}"
    if found["enqueued"] + found["orphans"]:  # a new partition alone is routine
        [[is_new]] = await fetch(pool, "select reactor.open_alert('missed_changes', $1, $2)", subject, found)
        if is_new:
            log.error("alert_opened", cause="missed_changes", source=source, **found)
    else:
        [[was_open]] = await fetch(pool, "select reactor.resolve_alert('missed_changes', $1)", subject)
        if was_open:
            log.info("alert_resolved", cause="missed_changes", source=source)


async def prune(pool: Pool, keep: timedelta) -> int:
    """Delete what ended longer ago than `keep`, a thousand of a kind at a time; returns how many.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    pruned = 0
    while True:
        count: int
        [[count]] = await fetch(pool, "select reactor.prune($1, $2)", keep, _PAGE)
        pruned += count
        if count < _PAGE:
            return pruned
