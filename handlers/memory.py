"""Keeps memories true to their source rows: reads the current row, embeds what is new in it, writes it under the claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import anyio
import numpy as np
from pgvector import HalfVector

from reactor.db import Connection, Pool, tenant
from reactor.embedder import Embedder
from reactor.errors import Permanent
from reactor.job import Dead, Handler, Job, Settled, Snooze
from reactor.jobs import complete_jobs, hold_claims
from reactor.models import Embedders
from reactor.text import Chunk, chunk, is_blank

Vector = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class _Row:
    """One source row of one tenant, between reading and writing it."""

    source_id: str
    jobs: list[Job]
    version: int
    kind: str = ""
    content: str = ""
    occurred_at: datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    row_hash: bytes = b""
    chunks: list[Chunk] = field(default_factory=list)
    vectors: list[Vector | HalfVector | None] = field(default_factory=list)
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


async def sync_rows(jobs: list[Job], *, pool: Pool, embedders: Embedders) -> None:
    """Bring the memories of the jobs' source rows to what the rows say now.

    Payload: {"source": int, "id": str}
    Safe to repeat: every write holds the job's claim and replaces only what a lower version wrote.
    No connection is held while texts are embedded; the whole batch is embedded together.

    Raises:
        Unavailable: Postgres or the embedding service is out of reach.
    """
    groups = _group(jobs)
    for group in groups:
        await _read(group, pool, embedders)
    await _embed(groups)
    for group in groups:
        await _write(group, pool)


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
    ids = list(group.rows)
    async with tenant(pool, group.tenant_id) as conn:
        source = await conn.fetchrow("select embed, language from reactor.sources where id = $1", group.source)
        if source is None:
            for row in group.rows.values():
                row.result = {"absent": True}
            return
        group.language = source["language"]
        if source["embed"] != "none":
            group.settles_model = source["embed"] == "provider"
            model = await conn.fetchval("select model from reactor.tenants where tenant_id = $1", group.tenant_id)
            group.embedder = embedders.of_model(model) if group.settles_model else embedders.local()
        current = await conn.fetch("select * from reactor.source_rows($1, $2, $3)", group.source, group.tenant_id, ids)
        tombstones = await conn.fetch(
            "select source_id, max(version) as version from reactor.tombstones "
            "where tenant_id = $1 and source = $2 and source_id = any ($3) group by source_id",
            group.tenant_id,
            group.source,
            ids,
        )
        stored = await conn.fetch(
            "select source_id, row_hash, model, content <> '' as has_content from reactor.memories "
            "where tenant_id = $1 and source = $2 and source_id = any ($3) and chunk = 0",
            group.tenant_id,
            group.source,
            ids,
        )
        buried = {record["source_id"]: record["version"] for record in tombstones}
        known = {record["source_id"]: record for record in stored}
        model = group.embedder.model if group.embedder is not None else None
        for record in current:
            row = group.rows[record["source_id"]]
            row.kind, row.content, row.metadata = record["kind"], record["content"], record["metadata"]
            row.occurred_at, row.row_hash = record["occurred_at"], record["row_hash"]
            old = known.get(row.source_id)
            if (
                old is not None
                and old["row_hash"] == row.row_hash
                and row.source_id not in buried
                and (old["model"] == model or not old["has_content"])
            ):
                row.result = {"unchanged": True}
        for row in group.rows.values():
            if row.row_hash:
                continue
            if row.source_id in buried:
                row.version = max(row.version, buried[row.source_id])
            else:
                # Only a tombstone proves a removal: what we merely cannot see (a policy of the table's own) stays.
                row.result = {"absent": True}
        changed = [row for row in group.rows.values() if row.result is None and row.row_hash]
        for row in changed:
            row.chunks = [Chunk("", 0)] if is_blank(row.content) else await _chunks(row.content)
        await _reuse_vectors(conn, group, changed, model)


async def _chunks(content: str) -> list[Chunk]:
    if len(content) < 100_000:  # noqa: PLR2004  # a millisecond or so
        return chunk(content)
    return await anyio.to_thread.run_sync(chunk, content)


async def _reuse_vectors(conn: Connection, group: _Group, rows: Sequence[_Row], model: str | None) -> None:
    """A chunk whose text is already embedded is not embedded again."""
    have: dict[tuple[str, str], HalfVector] = {}
    if model is not None:
        stored = await conn.fetch(
            "select source_id, content, embedding from reactor.memories "
            "where tenant_id = $1 and source = $2 and source_id = any ($3) and model = $4",
            group.tenant_id,
            group.source,
            [row.source_id for row in rows],
            model,
        )
        have = {(record["source_id"], record["content"]): record["embedding"] for record in stored}
    for row in rows:
        row.vectors = [have.get((row.source_id, piece.content)) for piece in row.chunks]


async def _embed(groups: Sequence[_Group]) -> None:
    """One call an embedder for everything in the batch that has no vector yet."""
    wanted: defaultdict[str, list[tuple[_Row, int]]] = defaultdict(list)
    by_model: dict[str, Embedder] = {}
    for group in groups:
        if group.embedder is None:
            continue
        by_model[group.embedder.model] = group.embedder
        for row in group.rows.values():
            if row.result is None:
                wanted[group.embedder.model] += [
                    (row, place)
                    for place, piece in enumerate(row.chunks)
                    if row.vectors[place] is None and not is_blank(piece.content)
                ]
    for model, places in wanted.items():
        answer = await by_model[model].embed_documents([row.chunks[place].content for row, place in places])
        for index, (row, place) in enumerate(places):
            row.vectors[place] = answer.vectors[index]
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
    model = group.embedder.model if group.embedder is not None else None
    async with tenant(pool, group.tenant_id) as conn:
        held = {job.id for job in await hold_claims(conn, [job for row in rows for job in row.jobs])}
        rows = [row for row in rows if any(job.id in held for job in row.jobs)]
        written = [row for row in rows if row.result is None]
        if written:
            if group.settles_model and any(vector is not None for row in written for vector in row.vectors):
                used = await conn.fetchval("select reactor.model_of($1, $2)", group.tenant_id, model)
                if used != model:  # another reactor gave this new tenant another model meanwhile
                    for row in rows:
                        for job in row.jobs:
                            job.outcome = Snooze(0, "the tenant's model changed")
                    return
            await _replace(conn, group, written, model)
        results = [(job, row.result or _evidence(row)) for row in rows for job in row.jobs if job.id in held]
        await complete_jobs(conn, results)
    for job, _ in results:
        job.outcome = Settled()


def _evidence(row: _Row) -> dict[str, Any]:
    if not row.row_hash:
        return {"removed": True}
    return {"chunks": len(row.chunks), "embedded": row.embedded} if row.content else {"blank": True}


async def _replace(conn: Connection, group: _Group, rows: Sequence[_Row], model: str | None) -> None:
    pieces = [
        (
            number + 1,  # Postgres counts array elements from 1
            place,
            piece.overlap,
            row.kind,
            piece.content,
            _half(vector),
            model if vector is not None else None,
            row.metadata,
            row.occurred_at,
            row.row_hash,
        )
        for number, row in enumerate(rows)
        for place, (piece, vector) in enumerate(zip(row.chunks, row.vectors, strict=True))
    ]
    columns = list(zip(*pieces, strict=True)) if pieces else [()] * 10
    row_of, chunks, overlaps, kinds, contents, vectors, models, metadata, occurred, hashes = (list(c) for c in columns)
    await conn.execute(
        "select reactor.replace_memories($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::text::regconfig, $11, $12, $13, $14, $15)",
        group.tenant_id,
        group.source,
        [row.source_id for row in rows],
        [row.version for row in rows],
        row_of,
        chunks,
        overlaps,
        kinds,
        contents,
        group.language,
        vectors,
        models,
        metadata,
        occurred,
        hashes,
    )


def _half(vector: Vector | HalfVector | None) -> HalfVector | None:
    return vector if vector is None or isinstance(vector, HalfVector) else HalfVector(vector)


HANDLERS = {"sync_row": Handler(sync_rows, batch=128, concurrency=2, lane="memory", timeout_s=900)}
