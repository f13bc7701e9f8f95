"""Drives the steps of a refresh: claim, call once, journal, save. The rules on time and state: sql/0007_tokens.sql.

Between any two of its steps this process may die. What is left then: an attempt in the database, which names host and
process; the answer in that host's journal, if there was one. Whoever comes next finds them, and goes on from there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Protocol

import anyio
import anyio.to_thread
import asyncpg

from reactor import answers, db
from reactor.errors import Misuse, Permanent, Unavailable
from reactor.journal import Journal
from reactor.log import Log
from reactor.sealing import KeyMissing, Keys, Purpose, SealBroken, key_id_of
from reactor.strategy import Answer, Credential, Fresh, Integration, Reading, Request, Strategy, Verdict

if TYPE_CHECKING:
    import aiohttp

_MARGIN_S = 15.0  # of an attempt's deadline over its call: to write the answer down and save it
_CONNECT_S = 5.0
_MOST_BODY = 256 * 1024
_SAVE_S = 600.0  # how long an answer is held up for a database that is away; then the journal keeps it
_CLOSE_S = 20.0
_WORK_S = 300.0  # of a look at all tokens; a connection that is half open says nothing
_AT_ONCE = 4  # connections: rows that somebody holds must not take them all from the other handlers
_LONGEST_REST_S = 60.0  # of a lane, for what one token was told: the token itself waits as long as it was
_OF_ONE_TOKEN = {"meta_17", "meta_32", "meta_613"}  # limits of one account: the others are well
_PURPOSES: tuple[Purpose, Purpose] = ("access_token", "refresh_token")
_UNSEALABLE = Reading(Verdict.UNKNOWN, "unsealable")
_PASSING_STATES = {"40", "53", "55", "57"}  # deadlocks, no resources, locks, timeouts and shutdowns
_SILENT = {"timeout", "reset"}  # lost answers that tell of the provider, not of the token
# What the transaction of a look at all tables has opened or closed.
_BROKEN = """
select case when resolved_at is null then 'alert_opened' else 'alert_resolved' end as event, cause, subject
from reactor.alerts where cause = 'token_table_broken' and now() in (opened_at, resolved_at)
"""
_REFUSED_S = 60.0  # until an answer that cannot be saved is tried again
_LOOKS = 8  # more than any row needs: seal, integration, parent, an attempt or two left behind


class ParentFails(Exception):  # said between modules, never to a user
    """The token that another is derived from cannot be had; its own alert says why."""


class Parents(Protocol):
    """Where the token comes from that another is derived from."""

    async def __call__(self, child: Credential, integration: Integration) -> Credential:
        """The parent, fresh.

        Raises:
            ParentFails: There is none, or it needs a person.
            Unavailable: Not now.
        """


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A row with a token in it."""

    source: int
    tenant_id: str
    source_id: str


@dataclass(frozen=True, slots=True)
class Care:
    """What came of looking after a token.

    Args:
        action: saved, refused, failed, lost, superseded, closed, probed: what became of a call. wait, held, gone: none
            was made; `until` says when the one that another process makes must have ended.
        outage: The provider is away, or refuses everybody: its lane should rest.
        retry_after_s: What the provider asked for, of this token.
    """

    action: str
    state: str | None = None
    reason: str | None = None
    code: str | None = None
    next_at: datetime | None = None
    until: datetime | None = None
    outage: Unavailable | None = None
    retry_after_s: float | None = None

    def evidence(self) -> dict[str, Any]:
        """For the job's result: no secret, no `None`."""
        found = {"action": self.action, "state": self.state, "code": self.code, "next_at": self.next_at}
        return {name: str(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class _Case:
    """One token as the last look at it found it."""

    key: TokenKey
    seen: Mapping[str, Any]
    strategy: Strategy | None
    integration: Integration | None
    now: datetime | None
    began: float = field(default_factory=lambda: time.time())  # noqa: PLW0108  # by this machine's clock, which a sleep does not stop

    @property
    def how(self) -> Strategy:
        assert self.strategy is not None  # noqa: S101  # an integration without one has no call due
        return self.strategy

    @property
    def which(self) -> Integration:
        assert self.integration is not None  # noqa: S101
        return self.integration

    def be_in_time(self) -> None:
        """Nothing, unless this process or its disk stood still since the look: somebody may have taken over.

        Raises:
            _NotSentError: It did.
        """
        if time.time() - self.began > _MARGIN_S:
            raise _NotSentError("late")

    def bound(self) -> dict[str, str]:
        """What its secrets are sealed for."""
        seen = self.seen
        return {"tenant_id": self.key.tenant_id, "integration": seen["integration"], "account": seen["account"]}

    def words(self) -> dict[str, Any]:
        """Its fields of a log event."""
        names = ("integration", "token_id")
        return {"tenant_id": self.key.tenant_id} | {name: self.seen.get(name) for name in names}

    def untouched(self) -> Care:
        seen = self.seen
        return Care(
            seen["action"], seen["state"], seen["state_reason"], next_at=seen["next_at"], until=seen["deadline"]
        )


@dataclass(frozen=True, slots=True)
class _Flight:
    """One look at a token that is under way, and how long it was to be good for."""

    task: asyncio.Task[Care]
    wanted_s: float


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why an answer in the journal was left there, and until when. `code` None: another process is about to save it."""

    until: float
    code: str | None


class _NotSentError(Exception):
    """The provider never saw the request; args: a code."""


class _LostError(Exception):
    """The request went out and no whole answer came back; args: a code."""


class Refresher:
    """Looks after tokens one by one. Calls for one at once join; across processes an attempt in the database decides.

    `now` is for tests that move the clock: everywhere else it is the database's.
    """

    def __init__(
        self,
        pool: db.Pool,
        *,
        strategies: Mapping[str, Strategy],
        integrations: Mapping[str, Integration],
        keys: Keys | None,
        journal: Journal | None,
        parents: Parents,
        log: Log,
        reopen: Callable[[], Journal] | None = None,
    ) -> None:
        self._pool = pool
        self._strategies = strategies
        self._integrations = integrations
        self._keys = keys
        self._journal = journal
        self._at_once = anyio.CapacityLimiter(_AT_ONCE)
        self._opening = anyio.Lock()
        self._reopen = reopen  # a journal that could not be opened: no provider is called without
        self._parents = parents
        self._log = log
        self._flights: dict[TokenKey, _Flight] = {}
        self._calling: set[str] = set()  # attempts of this process that are under way
        self._refused: dict[str, _Refusal] = {}
        self._policies = {
            name: _policy(strategies[one.strategy], one)
            | {"children": [child for child, other in integrations.items() if other.parent == name]}
            for name, one in integrations.items()
        }

    @property
    def host(self) -> str:
        """Whose journal answers go to."""
        return self._journal.host if self._journal is not None else "none"

    async def care(
        self, key: TokenKey, integration: str, *, wanted_s: float | None = None, now: datetime | None = None
    ) -> Care:
        """Look at a token and do what is due; with `wanted_s`, also refresh one that ends sooner than that.

        The work goes on when its caller is cancelled: an answer of the provider is not to be lost.

        Raises:
            Unavailable: Postgres is out of reach; nothing was called.
            Permanent: The row cannot be read or written as it is mapped.
        """
        while (flight := self._flights.get(key)) is not None:
            if (wanted_s or 0.0) <= flight.wanted_s:
                return await asyncio.shield(flight.task)
            await asyncio.wait([flight.task])  # it may find nothing due where we do
        task = asyncio.create_task(self._care(key, integration, wanted_s, now))
        self._flights[key] = _Flight(task, wanted_s or 0.0)
        task.add_done_callback(lambda done: self._landed(key, done))
        return await asyncio.shield(task)

    def _landed(self, key: TokenKey, task: asyncio.Task[Care]) -> None:
        del self._flights[key]
        if not task.cancelled():
            task.exception()  # its caller may have gone

    async def aclose(self) -> None:
        """Let calls in flight land, and close the journal: it has what takes too long, or that can be asked again."""
        tasks = [flight.task for flight in self._flights.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        if self._journal is not None:
            self._journal.close()

    async def recover(self, now: datetime | None = None) -> int:
        """Save the answers in this host's journal, and end the attempts of its dead processes. Returns how many.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        if self._journal is None:
            return 0
        done = 0
        dead = await anyio.to_thread.run_sync(self._journal.dead)
        for attempt in await anyio.to_thread.run_sync(self._journal.entries):
            if attempt not in self._calling:
                done += await self._replay(attempt, now, spares_living=True)
        for row in await self._ask("select * from reactor.live_attempts($1)", self.host):
            is_kept = str(row["attempt"]) in self._refused
            if is_kept or not await anyio.to_thread.run_sync(self._journal.is_alive, row["process"]):
                key = TokenKey(row["source"], row["tenant_id"], row["source_id"])
                try:
                    await self.care(key, row["integration"], now=now)
                except Permanent as exc:  # its table refuses; the others are seen to all the same
                    self._log.error("token_not_saved", tenant_id=row["tenant_id"], error_code=exc.code)
                done += 1
        for process in dead:
            await anyio.to_thread.run_sync(self._journal.bury, process)
        return done

    async def reconcile(self, retention: timedelta) -> int:
        """Give a job to every token that nobody would come back to. Returns how many.

        That is one that bypassed the triggers, lost its job, or is not sealed as it could be. Old attempts go.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        key_id = None if self._keys is None else self._keys.key_id
        async with db.borrowed(self._pool, _WORK_S) as conn, conn.transaction():
            jobs = await conn.fetchval("select reactor.reconcile_tokens($1, $2)", key_id, retention)
            news = await conn.fetch(_BROKEN)
        self._say([dict(row) for row in news])
        return int(jobs)

    async def say_plain(self) -> None:
        """A loud word where tokens could be sealed and are not, for want of a key.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        if self._keys is not None:
            return
        [[is_plain]] = await self._ask("select reactor.holds_plain_tokens()")
        if is_plain:
            self._log.warning(
                "tokens_in_plain_text", hint="`reactor keygen` makes the REACTOR_TOKEN_KEY that seals them"
            )

    async def sweep(self, now: datetime | None = None) -> None:
        """Say what time alone brings, and find what is overdue and has lost its job.

        Raises:
            Unavailable: Postgres is out of reach.
        """
        names = list(self._integrations)
        news = await self._ask("select * from reactor.sweep_tokens($1, $2)", now, names)
        self._say([dict(row) for row in news])

    def is_owed(self) -> bool:
        """Whether this host's journal shows work for `recover`: an answer nobody saves, a process that died."""
        if self._journal is None:
            return False
        now = time.monotonic()
        left = (one for one in self._journal.entries() if one not in self._calling and not self._is_refused(one, now))
        return any(left) or bool(self._journal.dead())

    # The steps.

    async def _care(self, key: TokenKey, name: str, wanted_s: float | None, now: datetime | None) -> Care:
        parent: Credential | None = None
        await self._open_again()
        for _ in range(_LOOKS):
            case = await self._look(key, name, wanted_s=wanted_s, now=now, has_parent=parent is not None)
            match case.seen["action"]:
                case "integration":
                    name = case.seen["integration"]
                case "held":
                    if not await self._take_over(case):
                        return case.untouched()
                case "seal" | "due" as first:
                    got = await (self._seal(case) if first == "seal" else self._parent_of(case))
                    if isinstance(got, Care):
                        return got
                    parent = got
                case "refresh":
                    attempt = str(case.seen["attempt"])
                    self._calling.add(attempt)
                    try:
                        return await self._refresh(case, attempt, parent)
                    finally:
                        self._calling.discard(attempt)
                case "probe":
                    return await self._probe(case)
                case _:  # gone, wait
                    await self._reseal(case)
                    return case.untouched()
        return case.untouched()

    async def _ask(self, query: str, *args: object) -> list[asyncpg.Record]:
        async with db.borrowed(self._pool, _WORK_S) as conn:
            rows: list[asyncpg.Record] = await conn.fetch(query, *args)
            return rows

    @asynccontextmanager
    async def _row_of(self, key: TokenKey) -> AsyncIterator[db.Connection]:
        """A transaction scoped to the row's tenant. What Postgres says of the row is dropped: it may quote its tokens.

        Raises:
            Unavailable: Postgres is out of reach or busy, or somebody's transaction holds the row.
            Permanent: The row cannot be read or written, code `sqlstate_<...>`.
        """
        try:
            async with self._at_once, db.tenant(self._pool, key.tenant_id) as conn:
                yield conn
        except asyncpg.PostgresError as exc:
            if str(exc.sqlstate)[:2] in _PASSING_STATES:
                raise Unavailable("the token's row is held, or Postgres is busy", code="postgres") from None
            raise Permanent("Postgres refuses the token's row", code=f"sqlstate_{exc.sqlstate}") from None

    async def _open_again(self) -> None:
        if self._journal is not None or self._reopen is None:
            return
        async with self._opening:
            if self._journal is None:
                with suppress(Unavailable):
                    self._journal = await anyio.to_thread.run_sync(self._reopen)
                    self._log.info("journal_ready")

    async def _look(
        self, key: TokenKey, name: str, *, wanted_s: float | None, now: datetime | None, has_parent: bool
    ) -> _Case:
        integration = self._integrations.get(name)
        strategy = None if integration is None else self._strategies[integration.strategy]
        needs_parent = strategy is not None and strategy.renews_with == "parent"
        timeout_s = _MARGIN_S + (integration.timeout_s if integration is not None else 0)
        async with self._row_of(key) as conn:
            seen = await conn.fetchrow(
                "select * from reactor.look_at_token($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
                key.source,
                key.tenant_id,
                key.source_id,
                name,
                self._policies.get(name),
                self.host,
                self._journal.process if self._journal is not None else "none",
                timedelta(seconds=timeout_s),
                self._journal is not None and (has_parent or not needs_parent),
                self._keys is not None,
                None if wanted_s is None else timedelta(seconds=wanted_s),
                now,
            )
        assert seen is not None  # noqa: S101  # it returns one row
        self._say(seen["news"])
        return _Case(key, dict(seen), strategy, integration, now)

    async def _parent_of(self, case: _Case) -> Credential | Care:
        """The token that this one is derived from; or what its failure makes of this one."""
        if self._journal is None:
            return Care("failed", outage=Unavailable("the journal cannot be written", code="journal"))
        try:
            return await self._parents(self._credential(case), case.which)
        except ParentFails as exc:
            return await self._settle(case, Reading(Verdict.RECONNECT, str(exc)), verdict="parent")
        except Unavailable as exc:
            return await self._settle(case, Reading(Verdict.TRANSIENT, exc.code))
        except (KeyMissing, SealBroken):
            return await self._settle(case, _UNSEALABLE, verdict="key_missing")

    async def _refresh(self, case: _Case, attempt: str, parent: Credential | None) -> Care:
        started = time.perf_counter()
        try:
            reading = await self._call(case, attempt, parent)
        except (KeyMissing, SealBroken):
            await self._save(case, attempt, Reading(Verdict.TRANSIENT, "unsealable"))
            return await self._settle(case, _UNSEALABLE, verdict="key_missing")
        except Permanent as exc:  # there is an answer, which nobody can read today
            return await self._keep_for_later(case, exc.code)
        # It was the parent's token that we sent: the parent is asked once; after that it is our own fault.
        is_parents = (
            parent is not None and reading.verdict is Verdict.RECONNECT and case.seen["state_reason"] != "parent"
        )
        try:
            saved = await self._save(case, attempt, reading, verdict="parent" if is_parents else None)
        except Permanent as exc:  # a trigger or a column of the table's own refuses it
            return await self._keep_for_later(case, exc.code)
        if parent is not None and is_parents:  # its own refresh will tell what is wrong with it
            async with db.tenant(self._pool, parent.tenant_id) as conn:
                await conn.execute("select reactor.request_token_refresh($1, $2)", parent.tenant_id, parent.integration)
        if reading.verdict is Verdict.APP:
            await self.sweep(case.now)  # it says so once, for all tokens of the integration
        care = _ended(saved, reading)
        is_saved = care.action == "saved"
        self._log.log(
            logging.INFO if is_saved else logging.WARNING,
            "token_refreshed" if is_saved else "token_refresh_failed",
            **case.words(),
            outcome=care.action,
            state=care.state,
            error_code=None if is_saved else reading.code,
            next_run_after=None if care.next_at is None else care.next_at.isoformat(),
            duration_ms=round((time.perf_counter() - started) * 1000, 1),
        )
        return care

    async def _call(self, case: _Case, attempt: str, parent: Credential | None) -> Reading:
        """Ask the provider, once.

        Raises:
            KeyMissing, SealBroken: What the row holds does not open: nobody was asked.
            Permanent: The strategy fails at a success, which is in the journal.
        """
        strategy = case.how
        assert self._journal is not None and strategy.refresh is not None  # noqa: PT018, S101  # else it is not claimed
        try:
            credential = self._credential(case, parent)
            with _strategys():
                request = strategy.refresh(credential, case.which)
            await anyio.to_thread.run_sync(self._journal.reserve, attempt)
            case.be_in_time()
            answer = await _send(request, case.which.timeout_s)
        except Misuse:  # the integration's table lacks what this strategy needs
            return Reading(Verdict.APP, "not_configured")
        except Permanent as exc:  # the row does
            return Reading(Verdict.UNKNOWN, exc.code)
        except Unavailable as exc:
            return Reading(Verdict.TRANSIENT, exc.code)
        except _NotSentError as exc:
            return _unsent(exc)
        except _LostError as exc:
            return Reading(Verdict.AMBIGUOUS, str(exc))
        if answer.status // 100 == 2:  # noqa: PLR2004  # only then may it hold a token: written down before it is read
            await self._write_down(case, attempt, answer)
        return _read(strategy, answer)

    async def _write_down(self, case: _Case, attempt: str, answer: Answer) -> None:
        """The answer is all there is of the new token until the database has it."""
        assert self._journal is not None  # noqa: S101
        entry = {
            "process": self._journal.process,
            "source": case.key.source,
            "tenant_id": case.key.tenant_id,
            "source_id": case.key.source_id,
            "integration": case.which.name,
            "account": case.seen["account"],
            "can_seal": case.seen["can_seal"],
            "status": answer.status,
            "headers": dict(answer.headers),
            "body": base64.b64encode(answer.body).decode(),
        }
        try:
            await anyio.to_thread.run_sync(self._journal.write, attempt, entry)
        except Unavailable as exc:  # then it must do without
            self._log.error("journal_failed", error_code=exc.code)

    async def _save(self, case: _Case, attempt: str, reading: Reading, *, verdict: str | None = None) -> asyncpg.Record:
        """Try the database hard, the provider never. What cannot be saved stays in the journal.

        Raises:
            Unavailable: Postgres has been out of reach for too long.
            Permanent: The row cannot be written.
        """
        fresh = None
        if reading.fresh is not None:
            fresh = self._stored(case, reading.fresh)
        delay_s = 0.1
        give_up_at = anyio.current_time() + _SAVE_S
        while True:
            try:
                async with self._row_of(case.key) as conn:
                    saved = await conn.fetchrow(
                        "select * from reactor.save_token($1, $2, $3, $4, $5, $6, $7)",
                        attempt,
                        verdict or reading.verdict.value,
                        reading.code,
                        fresh,
                        reading.retry_after_s,
                        self._policies[case.which.name],
                        case.now,
                    )
                assert saved is not None  # noqa: S101  # it returns one row
            except Unavailable as exc:
                if anyio.current_time() > give_up_at:
                    raise
                if delay_s == 0.1:  # noqa: PLR2004  # one line an outage
                    self._log.warning("token_save_waits", error_code=exc.code)
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, 5.0)
            else:
                if self._journal is not None:
                    await anyio.to_thread.run_sync(self._journal.forget, attempt)
                self._say(saved["news"])
                return saved

    async def _keep_for_later(self, case: _Case, code: str) -> Care:
        """The row cannot be written: say so, and try again later. A new token is in the journal."""
        self._log.error("token_not_saved", **case.words(), error_code=code)
        return await self._settle(case, Reading(Verdict.UNKNOWN, code), verdict="not_saved")

    async def _probe(self, case: _Case) -> Care:
        strategy = case.how
        assert strategy.probe is not None  # noqa: S101  # look_at_token says so only where there is one
        try:
            credential = self._credential(case)
            with _strategys():
                request = strategy.probe(credential, case.which)
            if request is None:  # there is nothing to ask: as good as it looks
                return await self._settle(case, Reading(Verdict.SUCCESS, "no_probe"))
            answer = await _send(request, case.which.timeout_s)
            with _strategys():
                reading = (strategy.read_probe or answers.read_probe)(answer)
        except (KeyMissing, SealBroken):
            return await self._settle(case, _UNSEALABLE, verdict="key_missing")
        except Misuse:
            reading = Reading(Verdict.APP, "not_configured")
        except Permanent as exc:
            reading = Reading(Verdict.UNKNOWN, exc.code)
        except _NotSentError as exc:
            reading = _unsent(exc)
        except _LostError as exc:
            reading = Reading(Verdict.TRANSIENT, str(exc))
        if reading.verdict is Verdict.KEY_DEAD and strategy.refresh is not None:  # no key, but somebody's consent
            reading = replace(reading, verdict=Verdict.RECONNECT)
        await self._reseal(case)
        return await self._settle(case, reading)

    async def _settle(self, case: _Case, reading: Reading, *, verdict: str | None = None) -> Care:
        async with self._row_of(case.key) as conn:
            settled = await conn.fetchrow(
                "select * from reactor.settle_probe($1, $2, $3, $4, $5, $6, $7)",
                case.seen["token_id"],
                case.seen["version"],
                verdict or reading.verdict.value,
                reading.code,
                reading.retry_after_s,
                self._policies.get(case.seen["integration"]),
                case.now,
            )
        assert settled is not None  # noqa: S101  # it returns one row
        self._say(settled["news"])
        if reading.verdict is Verdict.APP:
            await self.sweep(case.now)
        care = _ended(settled, reading)
        if care.action != "probed":
            self._log.warning(
                "token_refresh_failed",
                **case.words(),
                outcome=verdict or reading.verdict.value,
                state=care.state,
                error_code=reading.code,
            )
        return care

    async def _take_over(self, case: _Case) -> bool:
        """What to do about an attempt that another call, process or host began; False: leave it alone.

        Its answer may be in this host's journal; as long as it only cannot be saved, nobody is asked again. It is lost
        when its process is dead, or when a host that is not this one has had the time that `look_at_token` gives it.
        """
        seen, attempt = case.seen, str(case.seen["attempt"])
        is_late = seen["deadline"] <= seen["seen_at"]
        if seen["host"] == self.host and self._journal is not None:
            if await self._replay(attempt, case.now):
                return True
            if (refusal := self._refused.get(attempt)) is not None and refusal.code != SealBroken.__name__:
                await self._say_kept(case, refusal)
                return False
            if not is_late and await anyio.to_thread.run_sync(self._journal.is_alive, seen["process"]):
                return False
        elif not is_late:
            return False
        if case.integration is None:
            return False
        await self._save(case, attempt, Reading(Verdict.AMBIGUOUS, "attempt_lost"))
        self._log.warning("token_attempt_lost", **case.words(), host=seen["host"])
        return True

    async def _replay(self, attempt: str, now: datetime | None, *, spares_living: bool = False) -> bool:
        """Save an answer that the journal kept; False when it has none that can be read, or be saved.

        `spares_living`: nor one that another process is about to save.
        """
        entry = await self._kept(attempt, spares_living=spares_living)
        if entry is None:
            return False
        integration = self._integrations.get(entry["integration"])
        if integration is None:
            return self._refuse(attempt, "unknown_integration")
        answer = Answer(entry["status"], entry["headers"], base64.b64decode(entry["body"]))
        strategy = self._strategies[integration.strategy]
        key = TokenKey(entry["source"], entry["tenant_id"], entry["source_id"])
        try:
            saved = await self._save(_Case(key, entry, strategy, integration, now), attempt, _read(strategy, answer))
        except Permanent as exc:
            return self._refuse(attempt, exc.code)
        self._refused.pop(attempt, None)
        self._log.info(
            "token_replayed", tenant_id=key.tenant_id, integration=integration.name, outcome=saved["outcome"]
        )
        return True

    async def _kept(self, attempt: str, *, spares_living: bool) -> dict[str, Any] | None:
        journal = self._journal
        assert journal is not None  # noqa: S101
        if self._is_refused(attempt, time.monotonic()):
            return None
        try:
            entry = await anyio.to_thread.run_sync(journal.read, attempt)
        except (KeyMissing, SealBroken) as exc:
            self._refuse(attempt, type(exc).__name__)
            return None
        if entry is None or not spares_living or entry["process"] == journal.process:
            return entry
        if await anyio.to_thread.run_sync(journal.is_alive, entry["process"]):
            self._refuse(attempt)
            return None
        return entry

    def _refuse(self, attempt: str, code: str | None = None) -> Literal[False]:
        """Leave an entry alone for a while; with a code, say so."""
        self._refused[attempt] = _Refusal(time.monotonic() + _REFUSED_S, code)
        if code is not None:
            self._log.error("journal_kept", attempt=attempt, error_code=code)
        return False

    def _is_refused(self, attempt: str, now: float) -> bool:
        refusal = self._refused.get(attempt)
        return refusal is not None and refusal.until > now

    async def _say_kept(self, case: _Case, refusal: _Refusal) -> None:
        if refusal.code is not None:
            verdict = "key_missing" if refusal.code == KeyMissing.__name__ else "not_saved"
            await self._settle(case, Reading(Verdict.UNKNOWN, refusal.code), verdict=verdict)

    # Secrets.

    def _credential(self, case: _Case, parent: Credential | None = None) -> Credential:
        """What the row holds, opened.

        Raises:
            KeyMissing, SealBroken: It does not open.
        """
        seen = case.seen
        access, refresh = (
            seen[purpose] if seen[f"sealed_{purpose}"] is None or seen[purpose] else self._opened(case, purpose)
            for purpose in _PURPOSES  # plain is what a person wrote last
        )
        return Credential(
            case.key.tenant_id,
            seen["integration"],
            seen["account"],
            access or "",
            refresh,
            seen["scope"],
            seen["metadata"] or {},
            parent,
        )

    def _opened(self, case: _Case, purpose: Purpose) -> str:
        sealed: str = case.seen[f"sealed_{purpose}"]
        if self._keys is None:
            raise KeyMissing(key_id_of(sealed))
        return self._keys.open(sealed, **case.bound(), purpose=purpose)

    async def _seal(self, case: _Case) -> Care | None:
        """Seal what the row holds in plain text, and empty its columns; or what it means that the table refuses."""
        try:
            await self._replace(case, {purpose: case.seen[purpose] for purpose in _PURPOSES})
        except Permanent as exc:
            return await self._keep_for_later(case, exc.code)
        return None

    async def _reseal(self, case: _Case) -> None:
        """Seal with the first key what an older one sealed, so that the older one can go."""
        olds = [case.seen[f"sealed_{purpose}"] for purpose in _PURPOSES]
        if self._keys is None or all(old is None or self._keys.is_current(old) for old in olds):
            return
        with suppress(KeyMissing, SealBroken):  # said when it is used
            credential = self._credential(case)
            await self._replace(
                case, {"access_token": credential.access_token or None, "refresh_token": credential.refresh_token}
            )

    async def _replace(self, case: _Case, values: Mapping[Purpose, str | None]) -> None:
        assert self._keys is not None  # noqa: S101
        sealed = [
            case.seen[f"sealed_{purpose}"] if value is None else self._keys.seal(value, **case.bound(), purpose=purpose)
            for purpose, value in values.items()
        ]
        plain = [case.seen[purpose] for purpose in _PURPOSES]
        async with self._row_of(case.key) as conn:
            await conn.execute(
                "select reactor.seal_token($1, $2, $3, $4, $5, $6)",
                case.seen["token_id"],
                case.seen["version"],
                *plain,
                *sealed,
            )

    def _stored(self, case: _Case, fresh: Fresh) -> dict[str, Any]:
        """A success as `save_token` takes it: sealed where there is a key and the table has columns for it."""
        stored: dict[str, Any] = {"is_rotated": fresh.refresh_token is not None}
        for purpose in _PURPOSES:
            value = getattr(fresh, purpose)
            if value is not None and case.seen["can_seal"] and self._keys is not None:
                stored[f"sealed_{purpose}"] = self._keys.seal(value, **case.bound(), purpose=purpose)
            elif value is not None:
                stored[purpose] = value
        for name in ("expires_in_s", "refresh_expires_in_s", "scope"):
            if (value := getattr(fresh, name)) is not None:
                stored[name] = value
        return stored

    def _say(self, news: list[dict[str, Any]] | None) -> None:
        for one in news or ():
            level = logging.ERROR if one["event"] == "alert_opened" else logging.INFO
            self._log.log(level, one["event"], cause=one["cause"], subject=one["subject"])


def _read(strategy: Strategy, answer: Answer) -> Reading:
    """The answer understood.

    Raises:
        Permanent: It is a success, and the strategy fails at it.
    """
    try:
        with _strategys():
            return (strategy.read or answers.read_refresh)(answer)
    except Permanent as exc:
        if answer.status // 100 == 2:  # noqa: PLR2004
            raise
        return Reading(Verdict.UNKNOWN, exc.code)


@contextmanager
def _strategys() -> Iterator[None]:
    """Around the code of a strategy, which may be anybody's: whatever it raises by mistake may quote a token.

    Raises:
        Permanent: It failed, code `strategy_<the error's class>`.
    """
    try:
        yield
    except (Misuse, Permanent, Unavailable):
        raise
    except Exception as exc:  # noqa: BLE001
        raise Permanent("the strategy failed", code=f"strategy_{type(exc).__name__}") from None


def _unsent(exc: _NotSentError) -> Reading:
    code = str(exc)
    return Reading(Verdict.UNKNOWN if code == "bad_request" else Verdict.TRANSIENT, code)  # that is the row's own fault


def _ended(row: asyncpg.Record, reading: Reading) -> Care:
    outage = None
    if reading.verdict is Verdict.APP:
        outage = Unavailable("the provider refuses our application", retry_after_s=_LONGEST_REST_S, code=reading.code)
    elif (reading.verdict is Verdict.TRANSIENT and reading.code not in _OF_ONE_TOKEN) or reading.code in _SILENT:
        rest_s = None if reading.retry_after_s is None else min(reading.retry_after_s, _LONGEST_REST_S)
        outage = Unavailable("the provider is away", retry_after_s=rest_s, code=reading.code)
    return Care(
        row["outcome"],
        row["state"],
        row["state_reason"],
        reading.code,
        row["next_at"],
        None,
        outage,
        reading.retry_after_s,
    )


def _policy(strategy: Strategy, integration: Integration) -> dict[str, Any]:
    """What plan_token needs to know, in seconds."""
    numbers = ("margin_s", "minimum_age_s", "life_s", "refresh_life_s", "probe_every_s")
    return {
        "refreshes": strategy.refresh is not None,
        "renews_with": strategy.renews_with,
        "rotates": bool(integration.rotates),
        "works_expired": strategy.works_expired,
        "probes": strategy.probe is not None,
    } | {name: value for name in numbers if (value := getattr(integration, name)) is not None}


def _sends_once() -> aiohttp.TraceConfig:
    """Refuses a second connection: aiohttp sends a GET again by itself when its first one drops, a fresh one too."""
    import aiohttp  # noqa: PLC0415

    connected = False

    async def connects(*_: object) -> None:
        nonlocal connected
        if connected:
            raise _LostError("reset")
        connected = True

    once = aiohttp.TraceConfig()
    once.on_connection_create_start.append(connects)
    return once


async def _send(request: Request, timeout_s: float) -> Answer:
    """One call on a connection of its own, sent once.

    Raises:
        _NotSentError: The provider never saw it.
        _LostError: It may have.
    """
    import aiohttp  # noqa: PLC0415  # 10 MB that only who refreshes tokens pays

    error: type[Exception] = _LostError
    headers = {"Accept": "application/json", **request.headers}
    if request.basic is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(":".join(request.basic).encode()).decode()
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=timeout,
                trace_configs=[_sends_once()],
            ) as session,
            session.request(
                request.method,
                request.url,
                params=request.params or None,
                data=request.form,
                json=request.json,
                headers=headers,
                allow_redirects=False,
            ) as response,
        ):
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MOST_BODY:
                    raise _LostError("too_long")
            said = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, said, bytes(body))
    # Their words may quote the URL, and Meta's URLs hold tokens: only a code goes on.
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
        code, error = "connect", _NotSentError
    except (aiohttp.InvalidURL, ValueError):
        code, error = "bad_request", _NotSentError
    except TimeoutError:
        code = "timeout"
    except aiohttp.ClientPayloadError:
        code = "truncated"
    except (aiohttp.ClientError, OSError):
        code = "reset"
    raise error(code)
