"""Goes through a source's rows page by page and enqueues what its triggers should have, but did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reactor.db import Pool, reaching
from reactor.log import Log

_PAGE = 1000


async def source_ids(pool: Pool) -> list[int]:
    """The attached sources whose table still exists, in order.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    rows = await _fetch(
        pool,
        "select id from reactor.sources s where detached_at is null "
        "and exists (select from pg_class c where c.oid = s.relation) order by id",
    )
    return [row["id"] for row in rows]


async def reconcile(pool: Pool, source: int, *, progress: Callable[[int], None] = lambda _rows: None) -> dict[str, int]:
    """Bring one source's jobs to what its rows owe; each page is a transaction of its own.

    Returns:
        Counts: `enqueued` (rows missing or changed), `orphans` (memories whose row is gone), `truncated` (memories
        removed after a TRUNCATE), `triggers_placed` (partitions found without triggers).

    Raises:
        Unavailable: Postgres is out of reach.
        asyncpg.PostgresError: RX002 when the table's own row level security hides rows from the worker.
    """
    [[placed]] = await _fetch(pool, "select reactor.reconcile_triggers($1)", source)
    found = {"enqueued": 0, "orphans": 0, "truncated": 0, "triggers_placed": placed}
    unseen = await _fetch(pool, "select unseen::text[] as unseen from reactor.sources where id = $1", source)
    truncations = await _fetch(
        pool, "select max(version) as version from reactor.tombstones where tenant_id = '' and source = $1", source
    )
    truncated_at = truncations[0]["version"]
    for row in await _fetch(pool, "select t from reactor.source_tenants($1) t order by t", source):
        tenant_id = row["t"]
        if truncated_at is not None:
            [[count]] = await _fetch(
                pool, "select reactor.remove_truncated($1, $2, $3)", source, tenant_id, truncated_at
            )
            found["truncated"] += count
        after: str | None = None
        while True:
            [page] = await _fetch(
                pool, "select * from reactor.reconcile_page($1, $2, $3, $4)", source, tenant_id, after, _PAGE
            )
            found["enqueued"] += page["enqueued"]
            progress(page["enqueued"])
            after = page["last"]
            if after is None:
                break
        [[count]] = await _fetch(pool, "select reactor.reconcile_orphans($1, $2)", source, tenant_id)
        found["orphans"] += count
    await _fetch(
        pool,
        "with seen as (update reactor.sources set unseen = array(select u from unnest(unseen) u where not u::text = any ($2)) "
        "where id = $1) delete from reactor.tombstones where tenant_id = '' and source = $1 and version <= $3",
        source,
        unseen[0]["unseen"] if unseen else [],
        truncated_at or 0,
    )
    await _fetch(pool, "select reactor.ring()")
    return found


async def count_rows(pool: Pool, source: int) -> int:
    """About how many rows a source's table has, by the planner's statistics."""
    [[rows]] = await _fetch(
        pool,
        "select coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint from reactor.sources s, "
        "lateral reactor.relations_of(s.relation) r join pg_class c on c.oid = r and c.relkind = 'r' where s.id = $1",
        source,
    )
    count: int = rows
    return count


async def open_missed_changes_alert(pool: Pool, source: int, found: dict[str, int], *, log: Log) -> None:
    """An alert while rows are found that a trigger should have brought; resolved by the first look that finds none."""
    missed = found["enqueued"] + found["orphans"]
    if missed or found["triggers_placed"]:
        [[is_new]] = await _fetch(
            pool, "select reactor.open_alert('missed_changes', 'source ' || $1::text, $2)", str(source), found
        )
        if is_new:
            log.error("alert_opened", cause="missed_changes", source=source, **found)
    else:
        [[was_open]] = await _fetch(pool, "select reactor.resolve_alert('missed_changes', 'source ' || $1::text)", str(source))
        if was_open:
            log.info("alert_resolved", cause="missed_changes", source=source)


async def _fetch(pool: Pool, query: str, *args: Any) -> list[Any]:
    with reaching():
        async with pool.acquire(timeout=10.0) as conn:
            return await conn.fetch(query, *args)
