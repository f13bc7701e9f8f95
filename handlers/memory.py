"""Keeps memories true to their source rows: reads the current row, embeds what is new, writes it under the claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import asyncpg
from pgvector import HalfVector

from reactor.db import Connection, Pool, tenant
from reactor.embedder import Embedder
from reactor.errors import Permanent, Unavailable
from reactor.job import Dead, Handler, Job, Settled, Snooze
from reactor.jobs import complete_jobs
from reactor.models import Embedders
from reactor.settings import LOCAL_MODEL
from reactor.text import Chunk, chunk, is_blank

_NO_EMBEDDER_S = 300.0
_LONG_CHUNKS = 64  # about 90,000 characters
# Each asked-for row as it stands, its tombstone, and what is remembered of it, from one snapshot. In one statement: a
# full batch of many tenants waits for round trips more than for anything else here. No row: there is no such source.
_ROWS = """
    with source as materialized (
        select s.id, s.embed, s.language, (select t.model from reactor.tenants t where t.tenant_id = $2) as model,
            (select max(t.version) from reactor.tombstones t where t.tenant_id = '' and t.source = $1) as truncated_at
        from reactor.sources s
        where s.id = $1 and reactor.is_readable($1)
    ), current as materialized (
        select r.* from source s, lateral reactor.source_rows(s.id, $2, $3) r
    )
    select i.id, s.embed, s.language, s.model, s.truncated_at,
        r.kind, r.content, r.occurred_at::text as occurred_at, r.metadata::text as metadata, r.row_hash,
        m.row_hash as old_hash, m.model as old_model, m.version as old_version, m.content <> '' as had_content,
        (select max(t.version) from reactor.tombstones t
         where t.tenant_id = $2 and t.source = $1 and t.source_id = i.id) as buried_at
    from unnest($3::text[]) as i (id)
    cross join source s
    left join current r on r.source_id = i.id
    left join reactor.memories m on m.tenant_id = $2 and m.source = $1 and m.source_id = i.id and m.chunk = 0
"""


@dataclass(slots=True)
class _Row:
    """One source row of one tenant, between reading and writing it."""

    source_id: str
    jobs: list[Job]
    version: int
    kind: str = ""
    content: str = ""
    occurred_at: str | None = None  # as Postgres writes it: its years and its numbers are more than Python's
    metadata: str = "{}"
    row_hash: bytes = b""
    chunks: list[Chunk] = field(default_factory=list)
    vectors: list[HalfVector | None] = field(default_factory=list)
    embedded: int = 0
    refused: Permanent | None = None
    result: dict[str, Any] | None = None  # set: nothing to write


@dataclass(slots=True)
class _Group:
    """The rows of one tenant and source in a batch: read in one transaction, written in another."""

    tenant_id: str
    source: int
    rows: dict[str, _Row]
    language: str = "simple"
    embedder: Embedder | None = None
    settles_model: bool = False  # whether the tenant's model is the one these vectors are made with
    failure: Exception | None = None  # set: nothing of this group is written

    @property
    def model(self) -> str | None:
        return None if self.embedder is None else self.embedder.model


async def sync_rows(jobs: list[Job], *, pool: Pool, embedders: Embedders) -> None:
    """Bring the memories of the jobs' source rows to what the rows say now.

    Payload: {"source": int, "id": str}
    Safe to repeat: every write holds the job's claim and replaces only what a lower version wrote.
    No connection is held while texts are embedded; the whole batch is embedded together. What goes wrong with one
    tenant or model is raised only once the others are written.

    Raises:
        Unavailable: Postgres or the embedding service is out of reach.
    """
    groups = _group(jobs)
    for group in groups:
        await _try(group, _read(group, pool, embedders))
    long = [_split_off_long_rows(group) for group in groups]
    for part in (groups, long):  # a book in the batch does not keep its neighbours waiting
        await _embed([group for group in part if group.failure is None])
        for group in part:
            if group.failure is None:
                await _try(group, _write(group, pool))
    groups += long
    failures = [group.failure for group in groups if group.failure is not None]
    failures.sort(key=lambda exc: not isinstance(exc, Unavailable))  # in an outage nothing else can be told
    if failures:
        raise failures[0]


async def _try(group: _Group, step: Coroutine[Any, Any, None]) -> None:
    try:
        await step
    except Exception as exc:  # noqa: BLE001  # raised by sync_rows
        group.failure = exc


def _split_off_long_rows(group: _Group) -> _Group:
    """Take the rows of very many chunks out of a group; returns them as one of their own."""
    long = {source_id: row for source_id, row in group.rows.items() if len(row.chunks) > _LONG_CHUNKS}
    group.rows = {source_id: row for source_id, row in group.rows.items() if source_id not in long}
    return replace(group, rows=long)


def _group(jobs: Sequence[Job]) -> list[_Group]:
    """By tenant and source, tenants in order: two reactors lock tenants' rows in the same order."""
    groups: dict[tuple[str, int], _Group] = {}
    for job in jobs:
        source, source_id = job.payload.get("source"), job.payload.get("id")
        if not isinstance(source, int) or not isinstance(source_id, str):
            job.outcome = Dead("payload", 'the payload is not {"source": int, "id": str}')
            continue
        group = groups.setdefault((job.tenant_id, source), _Group(job.tenant_id, source, {}))
        row = group.rows.setdefault(source_id, _Row(source_id, [], 0))
        row.jobs.append(job)
        row.version = max(row.version, job.version)
    return [groups[key] for key in sorted(groups)]


async def _read(group: _Group, pool: Pool, embedders: Embedders) -> None:
    async with tenant(pool, group.tenant_id) as conn:
        records = await conn.fetch(_ROWS, group.source, group.tenant_id, list(group.rows))
        if not records:
            for row in group.rows.values():
                row.result = {"absent": True}
            return
        group.language = records[0]["language"]
        if not _choose_embedder(group, records[0]["embed"], records[0]["model"], embedders):
            return
        for record in records:
            _compare(group, group.rows[record["id"]], record)
        changed = [row for row in group.rows.values() if row.result is None and row.row_hash]
        known = {record["id"] for record in records if record["old_hash"] is not None}
        have = await _vectors_had(conn, group, [row.source_id for row in changed if row.source_id in known])
    for row in changed:
        row.chunks = [Chunk("", 0)] if is_blank(row.content) else await _chunks(row.content)
        row.vectors = [have.get((row.source_id, piece.content)) for piece in row.chunks]


def _choose_embedder(group: _Group, embed: str, model: str | None, embedders: Embedders) -> bool:
    """The tenant's own model, or the target. False: it cannot be had here, and this tenant's jobs wait for it alone."""
    if embed == "none":
        return True
    group.settles_model = embed == "provider"
    try:
        group.embedder = embedders.of_model(model if group.settles_model else LOCAL_MODEL)
    except Unavailable as exc:
        for row in group.rows.values():
            for job in row.jobs:
                job.outcome = Snooze(_NO_EMBEDDER_S, f"{exc.code}: {exc}")
        group.rows = {}
        return False
    return True


def _compare(group: _Group, row: _Row, record: asyncpg.Record) -> None:
    """What is to be done about a row, from how it stands, its tombstone and its memory."""
    truncated_at: int = record["truncated_at"] or 0
    removed_at = max(truncated_at, record["buried_at"] or 0)
    if record["row_hash"] is None:
        if removed_at:
            row.version = max(row.version, removed_at)
        else:
            # Only a tombstone proves a removal: what we merely cannot see (a policy of the table's own) stays.
            row.result = {"absent": True}
        return
    row.kind, row.content, row.metadata = record["kind"], record["content"], record["metadata"]
    row.occurred_at, row.row_hash = record["occurred_at"], record["row_hash"]
    is_written = (
        record["old_hash"] == row.row_hash and record["buried_at"] is None and record["old_version"] >= truncated_at
    )
    if is_written and (record["old_model"] == group.model or not record["had_content"]):
        row.result = {"unchanged": True}


async def _chunks(content: str) -> list[Chunk]:
    if len(content) < 100_000:  # noqa: PLR2004  # a millisecond or so
        return chunk(content)
    return await anyio.to_thread.run_sync(chunk, content)


async def _vectors_had(conn: Connection, group: _Group, ids: list[str]) -> dict[tuple[str, str], HalfVector]:
    """By row and text: a chunk whose text is already embedded is not embedded again."""
    if group.model is None or not ids:
        return {}
    stored = await conn.fetch(
        "select source_id, content, embedding from reactor.memories "
        "where tenant_id = $1 and source = $2 and source_id = any ($3) and model = $4",
        group.tenant_id,
        group.source,
        ids,
        group.model,
    )
    return {(record["source_id"], record["content"]): record["embedding"] for record in stored}


async def _embed(groups: Sequence[_Group]) -> None:
    """One call an embedder for everything in the batch that has no vector yet."""
    by_model: defaultdict[str, list[_Group]] = defaultdict(list)
    for group in groups:
        if group.embedder is not None:
            by_model[group.embedder.model].append(group)
    for theirs in by_model.values():
        wanted = [
            (row, place)
            for group in theirs
            for row in group.rows.values()
            if row.result is None
            for place, piece in enumerate(row.chunks)
            if row.vectors[place] is None and not is_blank(piece.content)
        ]
        if not wanted:
            continue
        embedder = theirs[0].embedder
        assert embedder is not None  # noqa: S101  # for the type checker
        number_of: dict[str, int] = {}  # equal chunks are embedded once
        numbers = [number_of.setdefault(row.chunks[place].content, len(number_of)) for row, place in wanted]
        try:
            answer = await embedder.embed_documents(list(number_of))
        except Exception as exc:  # noqa: BLE001  # raised by sync_rows
            for group in theirs:
                group.failure = exc
            continue
        for index, (row, place) in zip(numbers, wanted, strict=True):
            vector = answer.vectors[index]
            if vector is not None:
                row.vectors[place] = HalfVector(vector)
                row.embedded += 1
            row.refused = row.refused or answer.refused.get(index)


async def _write(group: _Group, pool: Pool) -> None:
    """One transaction: check the claims, replace the memories, settle."""
    for row in group.rows.values():
        if row.refused is not None:
            for job in row.jobs:
                job.outcome = Dead(row.refused.code, str(row.refused))
    rows = [row for row in group.rows.values() if row.refused is None]
    if not rows:
        return
    results = [(job, row.result or _evidence(row)) for row in rows for job in row.jobs]
    async with tenant(pool, group.tenant_id) as conn:
        held = set(await complete_jobs(conn, results))  # first: it locks the claims, and undoes itself with the rest
        rows = [row for row in rows if row.result is None and held.intersection(job.id for job in row.jobs)]
        if rows:
            await _replace(conn, group, rows)
    for job, _ in results:
        if job.id in held:
            job.outcome = Settled()


def _evidence(row: _Row) -> dict[str, Any]:
    if not row.row_hash:
        return {"removed": True}
    return {"chunks": len(row.chunks), "embedded": row.embedded} if row.chunks[0].content else {"blank": True}


async def _replace(conn: Connection, group: _Group, rows: Sequence[_Row]) -> None:
    pieces = [
        (
            number + 1,  # Postgres counts array elements from 1
            place,
            piece.overlap,
            row.kind,
            piece.content,
            vector,
            group.model if vector is not None else None,
            row.metadata,
            row.occurred_at,
            row.row_hash,
        )
        for number, row in enumerate(rows)
        for place, (piece, vector) in enumerate(zip(row.chunks, row.vectors, strict=True))
    ]
    columns = [list(column) for column in zip(*pieces, strict=True)] or [[] for _ in range(10)]
    # The model last, for whoever writes a tenant's memories locks its row in reactor.tenants last.
    used = await conn.fetchval(
        "with replaced as materialized (select reactor.replace_memories($1, $2, $3, $4, $5, $6, $7, $8, $9, "
        "$10::text::regconfig, $11, $12, $13::text[]::jsonb[], $14::text[]::timestamptz[], $15)) "
        "select case when $16 then reactor.model_of($1, $17) else $17 end from replaced",
        group.tenant_id,
        group.source,
        [row.source_id for row in rows],
        [row.version for row in rows],
        *columns[:5],
        group.language,
        *columns[5:],
        group.settles_model and any(vector is not None for row in rows for vector in row.vectors),
        group.model,
    )
    if used != group.model:
        raise Unavailable("another reactor gave this new tenant another model", code="model_changed")


HANDLERS = {"sync_row": Handler(sync_rows, batch=128, concurrency=4, lane="memory", timeout_s=900)}
