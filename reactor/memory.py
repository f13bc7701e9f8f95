"""The read path an agent imports: microseconds when warm, [] while Postgres is away, never an exception for an outage."""

from __future__ import annotations

import hashlib
import logging
import time
from asyncio import Task, create_task, wait
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import anyio
import asyncpg
from pgvector import HalfVector

from reactor import db
from reactor.cache import LRUCache, recall_key
from reactor.embedder import Embedder
from reactor.errors import Misuse, Permanent, Unavailable
from reactor.listener import Listener, Wakeup
from reactor.models import Embedders
from reactor.log import get_log, shows
from reactor.settings import Settings, load_settings
from reactor.text import clean, clean_json, is_blank, normalise_query

Degraded = Literal["postgres", "deadline", "lexical"]
_EMBED_SHARE = 0.6  # of the deadline; after it the question is answered by its words
_MOST_TENANTS = 10_000  # whose versions one process remembers
_KEY_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Hit:
    """One source row's best memory. `score` is in 0..1 and comparable within one answer only."""

    memory_id: int
    kind: str
    source_id: str
    content: str
    score: float
    occurred_at: datetime
    metadata: dict[str, Any]


class Hits(list[Hit]):
    """Hits, best first. `degraded` says why the answer may be less than the truth.

    "postgres": the database is out of reach; "deadline": it took too long; both come with no hits.
    "lexical": the question could not be embedded in time, so it was answered by its words alone.
    """

    def __init__(self, hits: Iterable[Hit] = (), degraded: Degraded | None = None) -> None:
        super().__init__(hits)
        self.degraded = degraded


@dataclass(slots=True)
class _Flight:
    """One search under way, however many asked for it."""

    done: anyio.Event
    hits: Hits | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Question:
    tenant_id: str
    query: str | None  # None: the newest
    k: int
    kinds: tuple[str, ...] | None
    since: datetime | None
    until: datetime | None
    metadata: dict[str, Any] | None


@dataclass(slots=True)
class _Statistics:
    """Counts since open."""

    hits: int = 0
    misses: int = 0
    degraded: int = 0

    @property
    def hit_rate(self) -> float:
        asked = self.hits + self.misses + self.degraded
        return self.hits / asked if asked else 0.0


@dataclass(slots=True)
class _Note:
    tenant_id: str
    text: str
    kind: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Memory:
    """Open it once a process with `Memory.open`, and share it between tasks."""

    def __init__(self, settings: Settings, pool: db.Pool, embedders: Embedders) -> None:
        self._settings = settings
        self._pool = pool
        self._embedders = embedders
        self._log = get_log()
        self._deadline_s = settings.search_deadline_s
        self._cache = LRUCache(capacity=settings.cache_capacity, ttl=settings.cache_ttl_s, timeout=None)
        self._vectors = LRUCache(capacity=max(settings.cache_capacity, 1000), timeout=None)
        self._flights: dict[str, _Flight] = {}
        self._tasks: set[Task[None]] = set()
        self._versions: OrderedDict[str, int] = OrderedDict()  # by tenant's hash: the highest heard or seen
        self._models: dict[str, str] = {}  # tenants whose vectors are in another model than ours
        self._generation = 0  # moves when notifications may have been missed
        self._is_away = False
        self._away = Wakeup()
        self._notes: deque[_Note] = deque()
        self._notes_bell = Wakeup()
        self.notes_lost = 0
        self.statistics = _Statistics()

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Memory]:
        """A memory on the database `dsn` (DATABASE_URL, or the embedded server, unless given).

        Never fails because Postgres is down: searches are then empty and say so, and recover by themselves.

        Raises:
            Misuse: The environment is wrong.
        """
        settings = settings or load_settings()
        if dsn is None:
            dsn = await _default_dsn(settings)
        async with AsyncExitStack() as stack:
            pool = db.create_pool(
                dsn,
                application="memory-reactor reader",
                size=settings.pool_size,
                timeout_s=settings.search_deadline_s,
                statement_cache_size=0,  # any pooler will do
            )
            try:
                await pool
            except ValueError as exc:
                raise Misuse(f"the database address is not one: {type(exc).__name__}") from None
            stack.callback(pool.terminate)
            embedders = Embedders(settings)
            stack.push_async_callback(embedders.aclose)
            memory = cls(settings, pool, embedders)
            # One task owns every loop of ours, so that no cancel scope spans the caller's code.
            loops = create_task(memory._run_loops(dsn))
            loops.add_done_callback(memory._tell_loops_ended)
            try:
                yield memory
            finally:
                with anyio.CancelScope(shield=True):
                    await memory._close(loops)

    async def warm(self) -> None:
        """Load the embedding model now, so that the first search need not; a failure is left to that search."""
        if self._embedders.target is not None:
            with suppress(Unavailable):
                await self._embedders.target.warm()

    # --- reading ---

    async def search(
        self,
        tenant_id: str,
        query: str,
        k: int = 5,
        *,
        kinds: Sequence[str] | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Hits:
        """The tenant's memories nearest to `query`, best first, at most one a source row.

        Args:
            tenant_id: Equality only; nothing of another tenant is ever returned.
            query: Cut to 2,000 characters. A blank one finds nothing.
            k: Clamped to 1..100.
            kinds: Only memories of these kinds; [] finds nothing.
            since: Only from this instant on (inclusive).
            until: Only before this instant.
            metadata: Only memories whose metadata contains this.

        Returns:
            Within `REACTOR_SEARCH_DEADLINE_S`, whatever Postgres and the provider do; see `Hits.degraded`.

        Raises:
            ValueError, TypeError: The tenant or an argument is not what it should be.
        """
        text = clean(query)
        question = _Question(
            _tenant(tenant_id), text, _clamp(k), _kinds(kinds), since, until, clean_json(dict(metadata)) if metadata else None
        )
        normalised = normalise_query(text)
        if not normalised or question.kinds == ():
            return Hits()
        return await self._recall(question, normalised)

    async def recent(
        self, tenant_id: str, k: int = 10, *, kinds: Sequence[str] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Hits:
        """The tenant's newest source rows, newest first, each with its whole stored text; otherwise as `search`."""
        question = _Question(
            _tenant(tenant_id), None, _clamp(k), _kinds(kinds), None, None, clean_json(dict(metadata)) if metadata else None
        )
        if question.kinds == ():
            return Hits()
        return await self._recall(question, None)

    async def _recall(self, question: _Question, normalised: str | None) -> Hits:
        started = time.perf_counter()
        name = _hash(question.tenant_id)
        version = self._versions.setdefault(name, -1)  # from here on we hear of its changes
        key = None
        if version >= 0:
            key = self._key(question, normalised, version)
            cached: list[Hit] | None = await self._cache.get(key)
            if cached is not None:
                self.statistics.hits += 1
                self._tell(question, "hit", len(cached), started)
                return Hits(cached)
        hits = await self._join_flight(question, normalised, key or self._key(question, normalised, -1), started)
        if hits.degraded is None:
            self.statistics.misses += 1
        else:
            self.statistics.degraded += 1
        self._tell(question, "miss" if hits.degraded is None else "degraded", len(hits), started)
        if hits.degraded is not None:
            self._log.warning("recall_degraded", tenant_id=question.tenant_id, reason=hits.degraded)
        return hits

    def _key(self, question: _Question, normalised: str | None, version: int) -> str:
        return recall_key(
            question.tenant_id,
            "recent" if normalised is None else "search",
            query=normalised,
            k=question.k,
            kinds=question.kinds,
            since=question.since,
            until=question.until,
            metadata=question.metadata,
            version=version,
            generation=self._generation,
        )

    async def _join_flight(self, question: _Question, normalised: str | None, key: str, started: float) -> Hits:
        """Wait for the one search of this key, under the caller's own deadline."""
        if self._is_away:
            return Hits(degraded="postgres")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(anyio.Event())
            task = create_task(self._fly(flight, question, normalised, key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        with anyio.move_on_after(self._deadline_s - (time.perf_counter() - started)):
            await flight.done.wait()
            if flight.error is not None:
                raise flight.error
            assert flight.hits is not None  # noqa: S101  # done is set after one of the two
            return Hits(flight.hits, flight.hits.degraded)
        return Hits(degraded="deadline")

    async def _fly(self, flight: _Flight, question: _Question, normalised: str | None, key: str) -> None:
        try:
            flight.hits = await self._look_up(question, normalised)
        except Unavailable:
            self._go_away()
            flight.hits = Hits(degraded="postgres")
        except Exception as exc:  # noqa: BLE001  # a bug: raised in every caller that waits
            flight.error = exc
        finally:
            self._flights.pop(key, None)
            flight.done.set()

    async def _look_up(self, question: _Question, normalised: str | None) -> Hits:
        degraded: Degraded | None = None
        embedder = self._embedder_for(question.tenant_id)
        vector = None
        if normalised is not None:
            vector = await self._vector(embedder, question, normalised)
            degraded = None if vector is not None else "lexical"
        rows = await self._fetch(question, vector, embedder)
        version, model = rows[0]["version"], rows[0]["model"]
        if vector is not None and model is not None and embedder is not None and model != embedder.model:
            # The tenant's vectors are in another model than we asked in: ask again in that one, or by words.
            self._models[question.tenant_id] = model
            embedder = self._embedder_for(question.tenant_id)
            vector = await self._vector(embedder, question, normalised or "")
            degraded = None if vector is not None else "lexical"
            rows = await self._fetch(question, vector, embedder)
            version = rows[0]["version"]
        hits = Hits(
            (
                Hit(
                    row["memory_id"],
                    row["kind"],
                    row["source_id"],
                    row["content"],
                    min(max(row["score"], 0.0), 1.0),
                    row["occurred_at"],
                    row["metadata"],
                )
                for row in rows
                if row["memory_id"] is not None
            ),
            degraded,
        )
        if self._see_version(question.tenant_id, version) and degraded is None:
            await self._cache.set(self._key(question, normalised, version), list(hits))
        return hits

    def _embedder_for(self, tenant_id: str) -> Embedder | None:
        model = self._models.get(tenant_id)
        if model is None:
            return self._embedders.target
        try:
            return self._embedders.of_model(model)
        except Unavailable:
            return None

    async def _vector(self, embedder: Embedder | None, question: _Question, normalised: str) -> HalfVector | None:
        """The question's vector, remembered by model and wording; None when the model does not answer in time."""
        if embedder is None:
            return None
        key = recall_key(question.tenant_id, embedder.model, query=normalised)
        cached: HalfVector | None = await self._vectors.get(key)
        if cached is not None:
            return cached
        try:
            with anyio.fail_after(self._deadline_s * _EMBED_SHARE):
                vector = HalfVector(await embedder.embed_query((question.query or "")[:2000]))
        except (Unavailable, Permanent, TimeoutError):
            return None
        await self._vectors.set(key, vector)
        return vector

    async def _fetch(self, question: _Question, vector: HalfVector | None, embedder: Embedder | None) -> list[asyncpg.Record]:
        """One statement; a connection that does not answer in time is dropped, not waited for.

        Raises:
            Unavailable: Postgres is out of reach, or slower than the deadline.
        """
        with db.reaching(), anyio.fail_after(self._deadline_s):
            conn = await self._pool.acquire(timeout=self._deadline_s)
            try:
                return await conn.fetch(
                    "select * from reactor.recall($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                    question.tenant_id,
                    question.query,
                    vector,
                    embedder.model if embedder is not None else None,
                    question.k,
                    question.kinds,
                    question.since,
                    question.until,
                    question.metadata,
                )
            except BaseException as exc:
                if not isinstance(exc, asyncpg.PostgresError):
                    conn.terminate()
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await self._pool.release(conn)

    # --- writing ---

    async def remember(
        self, tenant_id: str, text: str, *, kind: str = "note", metadata: Mapping[str, Any] | None = None
    ) -> int:
        """Write a note of the tenant's down and return its id; it can be recalled once the reactor has embedded it.

        Raises:
            Unavailable: Postgres is out of reach; nothing was written.
            ValueError: The text is blank, or the tenant no tenant.
        """
        note = _note(tenant_id, text, kind, metadata)
        async with db.tenant(self._pool, note.tenant_id, timeout_s=5.0) as conn:
            note_id: int = await conn.fetchval(_INSERT_NOTE, note.tenant_id, note.kind, note.text, note.metadata)
            return note_id

    def remember_soon(
        self, tenant_id: str, text: str, *, kind: str = "note", metadata: Mapping[str, Any] | None = None
    ) -> bool:
        """`remember` in the background: returns at once and never raises. False when the note was lost.

        At most 1,000 notes wait; one too many, or a wrong one, is counted in `notes_lost` and logged. Closing the memory
        writes what waits, for up to 5 s.
        """
        try:
            note = _note(tenant_id, text, kind, metadata)
        except (ValueError, TypeError) as exc:
            return self._lose(1, type(exc).__name__)
        if len(self._notes) >= _MOST_NOTES:
            return self._lose(1, "buffer_full")
        self._notes.append(note)
        self._notes_bell.ring()
        return True

    def _lose(self, count: int, error_code: str) -> bool:
        self.notes_lost += count
        self._log.error("notes_lost", error_code=error_code, lost=count, lost_in_all=self.notes_lost)
        return False

    async def _write_notes(self) -> None:
        """Write what waits, oldest first.

        Raises:
            Unavailable: Postgres is out of reach; what was not written still waits.
        """
        while self._notes:
            note = self._notes[0]
            async with db.tenant(self._pool, note.tenant_id, timeout_s=5.0) as conn:
                same = [other for other in list(self._notes)[:200] if other.tenant_id == note.tenant_id]
                await conn.executemany(_INSERT_NOTE, [(n.tenant_id, n.kind, n.text, n.metadata) for n in same])
            for written in same:
                self._notes.remove(written)

    # --- the loops behind it ---

    async def _run_loops(self, dsn: str) -> None:
        listener = Listener(
            dsn,
            {"reactor_versions": self._hear},
            log=self._log,
            on_ready=self._forget_versions,
            application="memory-reactor reader",
        )
        async with anyio.create_task_group() as loops:
            loops.start_soon(listener.run)
            loops.start_soon(self._come_back_loop)
            loops.start_soon(self._notes_loop)
            loops.start_soon(self.warm)

    async def _close(self, loops: Task[None]) -> None:
        """Stop the loops, write what waits.

        Raises:
            Exception: A loop had died of a bug; it was logged when it did.
        """
        for task in list(self._tasks):
            task.cancel()
        loops.cancel()
        await wait([loops])
        if self._notes:
            with anyio.move_on_after(5.0), suppress(Unavailable):
                await self._write_notes()
            if self._notes:
                self._lose(len(self._notes), "closed")
        if not loops.cancelled() and (error := loops.exception()) is not None:
            raise error

    def _tell_loops_ended(self, loops: Task[None]) -> None:
        if not loops.cancelled() and (error := loops.exception()) is not None:
            self._log.error("memory_loops_died", error_code=type(error).__name__)

    def _hear(self, payload: str) -> None:
        for pair in payload.split(","):
            name, _, version = pair.partition(":")
            if name in self._versions and version.isdigit():
                self._versions[name] = max(self._versions[name], int(version))

    def _forget_versions(self) -> None:
        """What was sent while nobody listened is lost: nothing cached before may be answered as current."""
        self._generation += 1

    def _see_version(self, tenant_id: str, version: int) -> bool:
        """Remember a version read with an answer; False when a newer one has been heard of meanwhile."""
        name = _hash(tenant_id)
        known = self._versions.get(name, -1)
        self._versions[name] = max(known, version)
        self._versions.move_to_end(name)
        while len(self._versions) > _MOST_TENANTS:
            self._versions.popitem(last=False)
        return version >= known

    def _go_away(self) -> None:
        if not self._is_away:
            self._is_away = True
            self._away.ring()

    async def _come_back_loop(self) -> None:
        """While Postgres is away, ask for it, so that no search has to."""
        while True:
            await self._away.wait(3600.0)
            self._away.clear()
            delay_s = 0.2
            while self._is_away:
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, 2.0)
                with suppress(Unavailable), db.reaching(), anyio.fail_after(self._deadline_s):
                    conn = await self._pool.acquire(timeout=self._deadline_s)
                    try:
                        await conn.execute("select 1")
                        self._is_away = False
                    except BaseException:
                        conn.terminate()
                        raise
                    finally:
                        with anyio.CancelScope(shield=True):
                            await self._pool.release(conn)

    async def _notes_loop(self) -> None:
        delay_s = 0.2
        while True:
            await self._notes_bell.wait(3600.0)
            self._notes_bell.clear()
            try:
                await self._write_notes()
                delay_s = 0.2
            except Unavailable:
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
                self._notes_bell.ring()

    def _tell(self, question: _Question, outcome: str, n: int, started: float) -> None:
        if shows(logging.INFO):
            self._log.info(
                "recall",
                tenant_id=question.tenant_id,
                outcome=outcome,
                n=n,
                latency_ms=round((time.perf_counter() - started) * 1000, 3),
                hit_rate=round(self.statistics.hit_rate, 4),
            )


_MOST_NOTES = 1000
_INSERT_NOTE = "insert into reactor.notes (tenant_id, kind, content, metadata) values ($1, $2, $3, $4) returning id"


async def _default_dsn(settings: Settings) -> str:
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    from reactor.embedded import start  # noqa: PLC0415  # an extra

    server = await anyio.to_thread.run_sync(start, settings.home)
    return server.dsn


def _tenant(tenant_id: str) -> str:
    if not isinstance(tenant_id, str) or not 0 < len(tenant_id) <= _KEY_LENGTH or clean(tenant_id) != tenant_id:
        raise ValueError(f"a tenant is a text of 1 to {_KEY_LENGTH} characters")
    return tenant_id


def _clamp(k: int) -> int:
    return min(max(int(k), 1), 100)


def _kinds(kinds: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(kinds, str):
        raise TypeError("kinds is a list of kinds, not one text")
    return None if kinds is None else tuple(sorted({clean(kind) for kind in kinds}))


def _note(tenant_id: str, text: str, kind: str, metadata: Mapping[str, Any] | None) -> _Note:
    if is_blank(text):
        raise ValueError("there is nothing to remember in a blank text")
    if is_blank(kind):
        raise ValueError("a note needs a kind")
    return _Note(_tenant(tenant_id), clean(text), clean(kind), clean_json(dict(metadata)) if metadata else {})


def _hash(tenant_id: str) -> str:
    return hashlib.sha256(tenant_id.encode()).hexdigest()
