"""`Tokens.ensure_fresh`: a fresh token for whoever publishes, or a clear reason why there is none."""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime, timedelta
from typing import Literal, Self

import anyio
import asyncpg

from reactor import db
from reactor.embedded import address_of
from reactor.errors import Misuse, NeedsReconnect, Permanent, Unavailable
from reactor.journal import Journal
from reactor.loading import load_strategies
from reactor.log import Log, get_log
from reactor.reads import APPLICATION, Reads
from reactor.refresher import Care, ParentFails, Refresher, TokenKey
from reactor.sealing import KeyMissing, Keys, SealBroken
from reactor.settings import Settings, load_settings
from reactor.strategy import Credential, Integration, load_integrations

_READ_S = 10.0
_PAUSE_S = (0.05, 0.5)  # between two looks at a refresh that another process makes
_POOL_SIZE = 5
_PASSING = {"held", "superseded", "closed", "gone"}  # of somebody else's making: look again
_USABLE = {"active", "app_error"}  # states in which an access token that has not ended still works


class SeveralAccounts(ValueError):
    """The tenant has several accounts of the integration, and none was named."""


class FreshToken(str):
    """An access token, with what is known of it. Its repr does not show it."""

    __slots__ = ("account", "expires_at", "version")

    account: str
    expires_at: datetime | None
    version: int

    @classmethod
    def of(cls, value: str, *, account: str, expires_at: datetime | None, version: int) -> Self:
        """`value` with its circumstances."""
        token = cls(value)
        token.account, token.expires_at, token.version = account, expires_at, version
        return token

    def __repr__(self) -> str:
        return f"FreshToken(account={self.account!r}, expires_at={self.expires_at}, version={self.version})"


class Tokens:
    """Fresh tokens by tenant and integration; `async with Tokens.open(dsn) as tokens`.

    It refreshes in this process when it must, by the same protocol as the reactor, so that publishing does not wait for
    one: at most one call of a provider is under way for a token, whoever makes it.
    """

    def __init__(self, pool: db.Pool, *, settings: Settings, log: Log, reads: Reads | None = None) -> None:
        strategies = load_strategies(settings.handlers)
        self._keys = None if settings.token_key is None else Keys.parse(settings.token_key.get_secret_value())
        open_journal = functools.partial(Journal, settings.home / "journal", self._keys)
        journal: Journal | None = None
        try:
            journal = open_journal()
        except Unavailable as exc:  # tokens that are fresh can be had all the same
            log.error("journal_failed", error_code=exc.code, reason=str(exc))
        self._reads = reads or Reads(pool)
        self._sources: list[asyncpg.Record] = []
        self.refresher = Refresher(
            pool,
            strategies=strategies,
            integrations=load_integrations(settings.integrations, strategies),
            keys=self._keys,
            journal=journal,
            parents=self._parent,
            log=log,
            reopen=open_journal,
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, dsn: str | None = None, *, settings: Settings | None = None) -> AsyncIterator[Tokens]:
        """Tokens of the database at `dsn` (DATABASE_URL, or the embedded server, unless given). Nothing is reached yet.

        Raises:
            Misuse: The environment, the file of integrations or `dsn` is wrong.
            Unavailable: The embedded server does not start.
        """
        settings = settings or load_settings()
        address = dsn or await address_of(settings)
        if not address.startswith(("postgresql://", "postgres://")):
            raise Misuse("the database address is not a postgresql://... one")
        async with AsyncExitStack() as stack:
            # Any pooler may stand between: what changes a token asks nothing of its session.
            pool = await stack.enter_async_context(
                db.create_pool(address, application=APPLICATION, size=_POOL_SIZE, statement_cache_size=0, resets=False)
            )
            reads = Reads(pool, address)
            stack.push_async_callback(reads.aclose)
            tokens = cls(pool, settings=settings, log=get_log(), reads=reads)
            stack.push_async_callback(tokens.aclose)
            yield tokens

    async def aclose(self) -> None:
        """Let refreshes under way end. The pool is its owner's to close."""
        await self.refresher.aclose()

    async def ensure_fresh(
        self,
        tenant_id: str,
        integration: str,
        account: str | None = None,
        min_ttl_s: float = 600.0,
        *,
        deadline_s: float = 30.0,
    ) -> FreshToken:
        """An access token that is good for `min_ttl_s` more seconds: at once if it is, else after one refresh.

        A token whose provider names no end is fresh while nothing says otherwise. One that was just refreshed is
        returned even where its provider gives it less than `min_ttl_s`; so is one that nobody can refresh (yet).

        Args:
            tenant_id: Whose.
            integration: As in the row, or in `attach_tokens`.
            account: Which of several; None: the only one.
            min_ttl_s: Seconds.
            deadline_s: How long to wait for a refresh.

        Raises:
            NeedsReconnect: A person must connect the account (again); `state` and `reason` say why.
            Unavailable: Not now: the provider or Postgres is out of reach, or the deadline has passed.
            SeveralAccounts: There are several, and none was named.
        """
        until = anyio.current_time() + deadline_s
        row = await self._row("glance", tenant_id, integration, account, until)
        if _is_fresh(row, min_ttl_s):  # before any timer is set: a fifth of all this takes
            return self._opened(row)
        with anyio.CancelScope(deadline=until):
            return await self._refreshed(tenant_id, integration, account, min_ttl_s, until)
        raise Unavailable("the token was not refreshed in time", code="deadline")

    async def _refreshed(
        self, tenant_id: str, integration: str, account: str | None, min_ttl_s: float, until: float
    ) -> FreshToken:
        pause_s = _PAUSE_S[0]
        care: Care | None = None
        while True:
            row = await self._row("look", tenant_id, integration, account, until)
            if _is_fresh(row, min_ttl_s):
                return self._opened(row)
            if care is not None and care.action not in _PASSING:
                return self._after(care, row)
            if care is not None:
                await anyio.sleep(pause_s * random.uniform(0.5, 1.5))  # noqa: S311  # jitter
                pause_s = min(pause_s * 2, _PAUSE_S[1])
            key = TokenKey(row["source"], tenant_id, row["source_id"])
            try:
                care = await self.refresher.care(key, integration, wanted_s=min_ttl_s)
            except Permanent as exc:
                raise Unavailable(str(exc), code=exc.code) from None
            if care.action == "gone":  # or its table is detached
                self._sources = []

    def _after(self, care: Care, row: asyncpg.Record) -> FreshToken:
        """What a token that is not as fresh as wanted is good for, once all that could be done was done."""
        lives = row["ends_at"] is None or row["ends_at"] > row["now"]
        which = "/".join(filter(None, (row["tenant_id"], row["integration"], row["account"])))
        if care.action in {"saved", "probed"} and lives and row["state"] in _USABLE:
            return self._opened(row)
        if row["state_reason"] == "answer_lost" and lives and row["ends_at"] is not None and _has_access(row):
            return self._opened(row)  # the refresh is lost; the access it was for still lives
        if row["state"] == "app_error":
            raise Unavailable(f"{which}: the provider refuses our application", retry_after_s=900, code="app_error")
        if row["state"] not in _USABLE:
            reason = row["state_reason"] or row["state"]
            raise NeedsReconnect(f"{which}: {row['state']} ({reason})", state=row["state"], reason=reason)
        if care.action == "wait" and row["failures"] == 0 and lives and _has_access(row):
            return self._opened(row)  # too young to be refreshed, or nobody can
        if care.outage is not None:
            delay_s = care.retry_after_s or care.outage.retry_after_s
            raise Unavailable(f"{which}: {care.outage}", retry_after_s=delay_s, code=care.outage.code)
        raise Unavailable(f"{which} was not refreshed", code=care.code or row["last_error"] or care.action)

    async def _row(
        self, how: Literal["glance", "look"], tenant_id: str, integration: str, account: str | None, until: float
    ) -> asyncpg.Record:
        """The token's row; a look also says how its care goes."""
        rows = await self._rows(how, tenant_id, integration, account, until)
        if not rows:  # it may stand in a table that was attached since
            self._sources = []
            rows = await self._rows(how, tenant_id, integration, account, until)
        if not rows:
            raise NeedsReconnect(
                f"{tenant_id} has no {integration} token", state="missing", reason="nobody connected it"
            )
        if len(rows) > 1:
            raise SeveralAccounts(f"{tenant_id} has several {integration} accounts: say which (account=...)")
        return rows[0]

    async def _rows(
        self, how: str, tenant_id: str, integration: str, account: str | None, until: float
    ) -> list[asyncpg.Record]:
        if not self._sources:
            self._sources = await self._reads.fetch(_SOURCES, until=until)
        found: list[asyncpg.Record] = []
        broken: asyncpg.PostgresError | None = None
        for source in self._sources:
            if source["integration"] not in {None, integration}:
                continue
            try:
                found += await self._reads.fetch(source[how], tenant_id, integration, account, until=until)
            except asyncpg.DataError:  # no tenant of that table could be called so
                continue
            except asyncpg.PostgresError as exc:  # a table that was changed or is locked: the others are well
                broken = exc
        if broken is not None and not found:
            self._sources = []
            raise Unavailable("a table with tokens cannot be read", code=f"sqlstate_{broken.sqlstate}") from None
        return found

    def _opened(self, row: asyncpg.Record) -> FreshToken:
        value = row["access_token"]
        if value is None:
            if self._keys is None:
                raise Unavailable("REACTOR_TOKEN_KEY is not set, and the token is sealed", code="key_missing")
            bound = {name: row[name] for name in ("tenant_id", "integration", "account")}
            try:
                value = self._keys.open(row["sealed_access_token"], **bound, purpose="access_token")
            except (KeyMissing, SealBroken) as exc:
                raise Unavailable(f"the sealed token does not open: {exc}", code="key_missing") from exc
        return FreshToken.of(value, account=row["account"], expires_at=row["ends_at"], version=row["version"])

    async def _parent(self, child: Credential, integration: Integration) -> Credential:
        """See `refresher.Parents`."""
        tenant_id = integration.parent_tenant or child.tenant_id
        named = child.metadata.get("parent_account")
        account = named if isinstance(named, str) else None
        if integration.parent is None:
            raise ParentFails("no_parent")
        try:
            token = await self.ensure_fresh(tenant_id, integration.parent, account)
        except NeedsReconnect as exc:
            raise ParentFails(exc.state) from exc
        except SeveralAccounts as exc:
            raise ParentFails("several_parents") from exc
        return Credential(tenant_id, integration.parent, token.account, str(token))


def _has_access(row: asyncpg.Record) -> bool:
    return (row["access_token"] or row["sealed_access_token"]) is not None


def _is_fresh(row: asyncpg.Record, min_ttl_s: float) -> bool:
    ends_at = row["ends_at"]
    lives = ends_at is None or ends_at > row["now"] + timedelta(seconds=min_ttl_s)
    return lives and row["state"] in _USABLE and _has_access(row)


# Two statements a source, found by its index. Both read the row itself: what a person wrote a moment ago counts;
# where it holds its state and end (care writes them there in its own transaction), that is all a glance needs.
_SOURCES = """
select s.integration, s.look, case when s.columns ?& '{state, expires_at}' then format('
        select w.tenant_id, w.integration, w.account, w.access_token, w.sealed_access_token, w.version, w.state,
            clock_timestamp() as now, w.expires_at as ends_at
        from (select %s from %s as t where %s) w
        where coalesce(w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token) is not null
        limit 2',
        s.reads, s.relation, s.is_account) else s.look end as glance
from (
    select *, format('
        select w.tenant_id, w.source_id, w.integration, w.account, w.access_token, w.sealed_access_token, %s as source,
            r.version, coalesce(r.state, ''unseen'') as state, r.state_reason, r.last_error,
            coalesce(r.failures, 0) as failures, clock_timestamp() as now, %s as ends_at
        from (select %s from %s as t where %s) w
        left join reactor.tokens r on r.tenant_id = w.tenant_id and r.source = %s and r.source_id = w.source_id
        where coalesce(w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token) is not null
        limit 2',
        id, case when columns ? 'expires_at' then 'coalesce(w.expires_at, r.ends_at)' else 'r.ends_at' end,
        reads, relation, is_account, id) as look
    from reactor.token_sources) s
where exists (select from pg_class where oid = s.relation) order by s.id
"""
