"""What an agent imports: microseconds when warm, [] while Postgres is away, never an exception for an outage."""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from asyncio import Task, create_task, wait
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
import asyncpg
from pgvector import HalfVector

from reactor import db
from reactor.cache import LRUCache, recall_key
from reactor.embedded import address_of
from reactor.embedder import Embedder
from reactor.errors import Misuse, Permanent, Unavailable
from reactor.listener import Listener, Wakeup
from reactor.log import get_log, shows
from reactor.models import Embedders
from reactor.notes import Notes, checked_metadata, checked_tenant, checked_text, new_note
from reactor.settings import Settings, load_settings
from reactor.text import QUERY_CHARACTERS, clean, normalise_query

Degraded = Literal["postgres", "deadline", "lexical"]
T = TypeVar("T")
_EMBED_SHARE = 0.6  # of the deadline; after it the question is answered by its words
_CONNECT_S = 10.0  # what a connection may take that no search waits for: over a far network more than a deadline
_FLUSH_S = 5.0
_BEAT_S = 30.0  # between two canaries: entries also live by TTL
_MOST_TENANTS = 10_000  # whose versions one process remembers
_QUESTION_VECTORS = 1000
_MOST_FLIGHTS = 100  # searches and embeddings under way at once; beyond them questions are answered by their words


@dataclass(slots=True)
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
    """Hits, best first, the caller's own. `degraded` says why the answer may be less than the truth.

    "postgres": the database is out of reach; "deadline": it took too long; both come with no hits.
    "lexical": the question could not be embedded in time, so it was answered by its words alone.
    """

    def __init__(self, hits: Iterable[Hit] = (), degraded: Degraded | None = None) -> None:
        super().__init__(hits)
        self.degraded = degraded


_Answer: TypeAlias = tuple[Sequence[Hit], Degraded | None]  # shared by its askers, so nobody's own


@dataclass(frozen=True, slots=True)
class _Question:
    tenant_id: str
    query: str | None  # None: the newest
    normalised: str | None
    k: int
    kinds: tuple[str, ...] | None
    metadata: dict[str, Any] | None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def filters(self) -> tuple[object, ...]:
        """As reactor.recall() takes them."""
        return self.k, self.kinds, self.since, self.until, self.metadata


@dataclass(slots=True, eq=False)
class _Known:
    """What was last read or heard of a tenant's memories."""

    version: int = -1  # the highest; -1: none yet
    model: str | None = None  # what its vectors are in; None: the target, as far as we know


class Memory:
    """Open it once a process with `Memory.open`, and share it between tasks."""

    def __init__(self, settings: Settings, pool: db.Pool, embedders: Embedders) -> None:
        self._pool = pool
        self._embedders = embedders
        self._log = get_log()
        self._deadline_s = settings.search_deadline_s
        self._capacity, self._ttl_s = settings.cache_capacity, settings.cache_ttl_s
        self._vectors = LRUCache(capacity=max(self._capacity, _QUESTION_VECTORS), timeout=None)
        self._notes = Notes(pool, log=self._log)
        self._flights: dict[str, Task[Any]] = {}  # what is being looked up or embedded, however many asked for it
        self._is_away = False
        self._away = Wakeup()
        self.outcomes: Counter[str] = Counter()  # of searches since open: hit, miss, degraded
        self._forget()

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Memory]:
        """A memory on the database `dsn` (DATABASE_URL, or the embedded server, unless given).

        Never fails because Postgres is down: searches are then empty and say so, and recover by themselves.

        Raises:
            Misuse: The environment, or `dsn`, is wrong.
            Unavailable: The embedded server does not start.
        """
        settings = settings or load_settings()
        if dsn is None:
            dsn = await address_of(settings)
        if not dsn.startswith(("postgresql://", "postgres://")):
            raise Misuse("the database address is not a postgresql://... one")
        async with AsyncExitStack() as stack:
            pool = db.create_pool(
                dsn,
                application="memory-reactor reader",
                size=settings.pool_size,
                statement_cache_size=0,  # any pooler will do
            )
            await pool
            stack.callback(pool.terminate)
            embedders = Embedders(settings)
            stack.push_async_callback(embedders.aclose)
            memory = cls(settings, pool, embedders)
            # Tasks of our own, so that no cancel scope spans the caller's code.
            loops, writer = create_task(memory._run_loops(dsn)), create_task(memory._notes.run())
            try:
                yield memory
            finally:
                with anyio.CancelScope(shield=True):
                    await memory._close(loops, writer)

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
            since: Only from this instant on (inclusive). One without a zone is local time, as in `datetime`.
            until: Only before this instant.
            metadata: Only memories whose metadata contains this.

        Returns:
            Within `REACTOR_SEARCH_DEADLINE_S`, whatever Postgres and the provider do; see `Hits.degraded`.

        Raises:
            ValueError, TypeError: The tenant or an argument is not what it should be.
        """
        text = clean(checked_text("query", query)[: 2 * QUERY_CHARACTERS])[:QUERY_CHARACTERS]
        return await self._recall(
            _Question(
                checked_tenant(tenant_id),
                text,
                normalise_query(text),
                _clamp(k),
                _kinds(kinds),
                checked_metadata(metadata),
                _instant("since", since),
                _instant("until", until),
            )
        )

    async def recent(
        self,
        tenant_id: str,
        k: int = 10,
        *,
        kinds: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Hits:
        """The tenant's newest source rows, newest first, each with its whole stored text; otherwise as `search`."""
        return await self._recall(
            _Question(checked_tenant(tenant_id), None, None, _clamp(k), _kinds(kinds), checked_metadata(metadata))
        )

    async def _recall(self, question: _Question) -> Hits:
        if question.normalised == "" or question.kinds == ():
            return Hits()
        started = time.perf_counter()
        key = self._key(question, self._known(question.tenant_id).version)
        hits: Sequence[Hit] | None = await self._cache.get(key)
        degraded: Degraded | None = None
        outcome = "hit"
        if hits is None:
            hits, degraded = await self._join_flight(question, key, started)
            outcome = "degraded" if degraded else "miss"
        self.outcomes[outcome] += 1
        if degraded:
            self._log.warning("recall_degraded", tenant_id=question.tenant_id, reason=degraded)
        if shows(logging.INFO):
            self._log.info(
                "recall",
                tenant_id=question.tenant_id,
                outcome=outcome,
                n=len(hits),
                latency_ms=round((time.perf_counter() - started) * 1000, 3),
                hit_rate=round(self.outcomes["hit"] / self.outcomes.total(), 4),
            )
        return Hits(_own(hits), degraded)

    def _key(self, question: _Question, version: int) -> str:
        what = "recent" if question.query is None else "search"
        return recall_key(question.tenant_id, what, question.normalised, *question.filters, version)

    async def _join_flight(self, question: _Question, key: str, started: float) -> _Answer:
        """Wait for the one search of this key, under the caller's own deadline."""
        if self._is_away:
            return (), "postgres"
        flight = self._fly(key, lambda: self._look_up(question))
        await wait([flight], timeout=self._deadline_s - (time.perf_counter() - started))
        if not flight.done():
            self._away.ring()  # is it away? one slow search says nothing about the others
            return (), "deadline"
        return ((), "postgres") if flight.cancelled() else flight.result()  # cancelled: we were closed

    def _fly(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> Task[T]:
        """The task that does `work`, or the one that is doing it already. No caller's cancellation ends it."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = create_task(work())
            flight.add_done_callback(lambda ended: self._land(key, ended))
        return flight

    def _land(self, key: str, flight: Task[Any]) -> None:
        del self._flights[key]
        if not flight.cancelled() and (error := flight.exception()) is not None:  # a bug: whoever waits gets it, too
            self._log.error("recall_failed", error_code=type(error).__name__)

    async def _look_up(self, question: _Question) -> _Answer:
        known = self._known(question.tenant_id)
        embed_by = time.perf_counter() + self._deadline_s * _EMBED_SHARE
        for _ in range(2):  # again where the tenant's vectors turn out to be in another model
            embedder = None
            with suppress(Unavailable):  # then the question is answered by its words
                embedder = self._embedders.of_model(known.model)
            vector = await self._vector(embedder, question, embed_by)
            try:
                rows = await self._fetch(question, vector, embedder)
            except Unavailable as exc:
                self._away.ring()
                if exc.code == "deadline":
                    return (), "deadline"
                self._is_away = True
                return (), "postgres"
            version, model = rows[0]["version"], rows[0]["model"]
            asked = known.model if embedder is None else embedder.model
            if question.query is None or model is None or model == asked:
                break
            known.model = model
        hits = tuple(Hit(*row[2:]) for row in rows if row["memory_id"] is not None)  # after version and model
        if question.query is not None and vector is None:
            return hits, "lexical"
        # An answer older than what was heard meanwhile is not kept. Where news may have been missed (the tenant was
        # forgotten since), what is known now is another object, and still knows of no version.
        if version >= known.version:
            known.version = version
            await self._cache.set(self._key(question, version), hits)
        return hits, None

    async def _vector(self, embedder: Embedder | None, question: _Question, embed_by: float) -> HalfVector | None:
        """The question's vector, remembered by model and wording; None when the model does not answer in time.

        A late one is still remembered, for the next time.
        """
        if embedder is None or question.query is None:
            return None
        key = recall_key(question.tenant_id, embedder.model, question.normalised)
        vector: HalfVector | None = await self._vectors.get(key)
        if vector is None and len(self._flights) <= _MOST_FLIGHTS:  # more would only queue up behind a slow provider
            query = question.query
            flight = self._fly(key, lambda: self._embed(embedder, query, key))
            await wait([flight], timeout=embed_by - time.perf_counter())
            vector = flight.result() if flight.done() else None
        return vector

    async def _embed(self, embedder: Embedder, query: str, key: str) -> HalfVector | None:
        try:
            vector = HalfVector(await embedder.embed_query(query))
        except (Unavailable, Permanent):
            return None
        await self._vectors.set(key, vector)
        return vector

    async def _fetch(
        self, question: _Question, vector: HalfVector | None, embedder: Embedder | None
    ) -> list[asyncpg.Record]:
        """One statement; at least one row, which holds the version and the model.

        Raises:
            Unavailable: Postgres is out of reach, or slower than the deadline.
        """
        try:
            # Longer than its askers wait: what came too late for them, a connection above all, is there for the next.
            async with db.borrowed(self._pool, self._deadline_s, connect_s=_CONNECT_S) as conn:
                return await conn.fetch(
                    "select * from reactor.recall($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                    question.tenant_id,
                    question.query,
                    vector,
                    embedder.model if embedder is not None else None,
                    *question.filters,
                )
        except asyncpg.QueryCanceledError as exc:  # the role's statement_timeout
            raise Unavailable("Postgres canceled a search", code="deadline") from exc

    # --- writing ---

    async def remember(
        self, tenant_id: str, text: str, *, kind: str = "note", metadata: Mapping[str, Any] | None = None
    ) -> int:
        """Write a note of the tenant's down and return its id; it can be recalled once the reactor has embedded it.

        Raises:
            Unavailable: Postgres is out of reach, or did not answer within 5 s.
            ValueError, TypeError: The text is blank, or an argument is not what it should be.
        """
        return await self._notes.write(new_note(tenant_id, text, kind, metadata))

    def remember_soon(
        self, tenant_id: str, text: str, *, kind: str = "note", metadata: Mapping[str, Any] | None = None
    ) -> bool:
        """`remember` in the background: returns at once and never raises. False when the note was lost.

        At most 1,000 notes wait; one too many, or a wrong one, is counted in `notes_lost` and logged. Closing the
        memory writes what waits, for up to 5 s.
        """
        try:
            note = new_note(tenant_id, text, kind, metadata)
        except Exception as exc:  # noqa: BLE001  # whatever a mapping of the caller's own may raise
            self._notes.lose(1, type(exc).__name__)
            return False
        return self._notes.write_soon(note)

    @property
    def notes_lost(self) -> int:
        """How many notes given to `remember_soon` were lost since open."""
        return self._notes.lost

    # --- behind it ---

    async def _run_loops(self, dsn: str) -> None:
        listener = Listener(
            dsn,
            {"reactor_versions": self._hear},
            log=self._log,
            on_ready=self._forget,
            application="memory-reactor reader listener",
            beat_s=_BEAT_S,
        )
        async with anyio.create_task_group() as loops:
            for loop in (listener.run, self._reach_loop, self.warm):
                loops.start_soon(self._keep, loop)

    async def _keep(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """A loop that dies of a bug takes no other with it, and is heard of."""
        try:
            await loop()
        except Exception as exc:  # noqa: BLE001  # there is no caller to raise it in
            self._log.error("memory_loop_died", loop=loop.__qualname__, error_code=type(exc).__name__)

    async def _close(self, loops: Task[None], writer: Task[None]) -> None:
        """Write what waits, then end every task of ours."""
        self._notes.close()
        await wait([writer], timeout=_FLUSH_S)
        ours = [loops, writer, *self._flights.values()]
        for task in ours:
            task.cancel()
        await wait(ours)
        self._notes.give_up()

    def _known(self, tenant_id: str) -> _Known:
        """What we know of a tenant; from here on its news are heard."""
        name = _hash(tenant_id)
        known = self._tenants.get(name)
        if known is None:
            known = self._tenants[name] = _Known()
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        else:
            self._tenants.move_to_end(name)
        return known

    def _hear(self, payload: str) -> None:
        for pair in payload.split(","):
            name, _, version = pair.partition(":")
            known = self._tenants.get(name)
            if known is not None and version.isdecimal():
                known.version = max(known.version, int(version))

    def _forget(self) -> None:
        """Start anew: what was sent while nobody listened is lost, so nothing cached before passes as current."""
        self._tenants: OrderedDict[str, _Known] = OrderedDict()  # by hash, as they are called in notifications
        self._cache = LRUCache(capacity=self._capacity, ttl=self._ttl_s, timeout=None)

    async def _reach_loop(self) -> None:
        """Connect before the first search does; while Postgres is away, ask for it, so that no search has to."""
        while True:
            delay_s, timeout_s = 0.2, self._deadline_s
            while not await self._reaches(timeout_s):
                self._is_away = True
                await anyio.sleep(delay_s)
                delay_s, timeout_s = min(delay_s * 2, 2.0), _CONNECT_S
            self._is_away = False
            await self._away.wait(3600.0)
            self._away.clear()

    async def _reaches(self, timeout_s: float) -> bool:
        """Whether Postgres answers. Every idle connection is asked: any may be half-open, and is dropped then."""
        answers: list[bool] = []

        async def ask() -> None:
            try:
                async with db.borrowed(self._pool, timeout_s) as conn:
                    await conn.execute("select 1")
            except Unavailable:
                return
            except Exception as exc:  # noqa: BLE001  # what is wrong, the next search raises in its caller
                self._log.error("memory_cannot_connect", error_code=type(exc).__name__)
            answers.append(True)

        async with anyio.create_task_group() as asking:
            for _ in range(max(1, self._pool.get_idle_size())):
                asking.start_soon(ask)
        return any(answers)


def _own(hits: Sequence[Hit]) -> list[Hit]:
    """Copies that a caller may change."""
    return [
        Hit(h.memory_id, h.kind, h.source_id, h.content, h.score, h.occurred_at, _own_json(h.metadata)) for h in hits
    ]


def _own_json(value: Any) -> Any:
    if type(value) is dict:
        return {name: _own_json(item) for name, item in value.items()}
    if type(value) is list:
        return [_own_json(item) for item in value]
    return value


def _clamp(k: int) -> int:
    return min(max(operator.index(k), 1), 100)


def _kinds(kinds: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(kinds, str):
        raise TypeError("kinds is a list of kinds, not one text")
    return None if kinds is None else tuple(sorted({clean(checked_text("kinds", kind)) for kind in kinds}))


def _instant(name: str, value: datetime | None) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise TypeError(f"{name} is a datetime, not {type(value).__name__}")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{name} is beyond the calendar") from None


@lru_cache(maxsize=_MOST_TENANTS)
def _hash(tenant_id: str) -> str:
    return hashlib.sha256(tenant_id.encode()).hexdigest()
