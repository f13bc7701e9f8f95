"""A year of a thousand tokens, in minutes: each is refreshed before it ends, or somebody hears of it."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import anyio
from conftest import make_settings
from providers import Providers
from wires import DAY_S, HOUR_S, WIRES

from reactor import db
from reactor.errors import Unavailable
from reactor.journal import Journal
from reactor.loading import load_strategies
from reactor.log import get_log
from reactor.refresher import ParentFails, Refresher, TokenKey
from reactor.strategy import Credential, load_integrations

YEAR = timedelta(days=365)
LIVES = {"tiktok": (DAY_S, 365 * DAY_S)}
PROBE_EVERY_S = 30 * DAY_S  # a thousand keys asked daily would be all of the test
AT_ONCE = 8

# How many of each, how long before the year's end they connect, and how far apart the looks are from then on: a token
# of an hour tells in a day what one of sixty days tells in a year.
PHASES = (
    (
        YEAR,
        timedelta(hours=6),
        {
            "instagram": 145,
            "threads": 125,
            "facebook": 125,
            "facebook_page": 30,
            "linkedin": 210,
            "linkedin without refresh": 100,
            "pinterest": 50,
            "gohighlevel_pit": 80,
            "evolution": 20,
            "stevo": 15,
            "static_key": 15,
        },
    ),
    (timedelta(days=10), timedelta(hours=1), {"gohighlevel": 20, "gohighlevel_location": 25, "tiktok": 29}),
    (timedelta(days=1), timedelta(minutes=2), {"x": 4, "google": 2, "youtube": 2, "oauth2": 3}),
)
ENDLESS = {"facebook_page", "evolution", "stevo", "static_key"}
UNREFRESHED = {"linkedin without refresh", "gohighlevel_pit"}

# Whatever is said about a token, when: alerts themselves are dated by the real clock.
TELLING = """
create table clock (now timestamptz);
insert into clock values (null);
create table told (subject text, cause text, threshold text, at timestamptz default null);
create function tell() returns trigger language plpgsql security definer set search_path = public as $$
begin
    if tg_op = 'INSERT' or new.detail -> 'threshold' is distinct from old.detail -> 'threshold' then
        insert into told select new.subject, new.cause, new.detail ->> 'threshold', now from clock;
    end if;
    return null;
end $$;
create trigger tell after insert or update on reactor.alerts for each row execute function tell();
create index on told (at);
create index on tokens (expires_at);
create index on reactor.jobs (run_after) where type = 'refresh_token' and status in ('pending', 'failed');
"""
# A token that ended, while nobody hears of it.
UNSEEN = """
select w.integration, w.id, w.expires_at, r.state from tokens w left join reactor.tokens r on r.source_id = w.id::text and r.tenant_id = w.tenant_id
where w.expires_at <= $1 and not exists (select from reactor.alerts a
    where a.resolved_at is null and a.tenant_id = w.tenant_id and (a.subject = reactor.token_subject(r)
        -- Of one that stopped with its parent, the parent's alert speaks.
        or r.state_reason = 'parent' and a.subject in (select reactor.token_subject(p) from reactor.tokens p
            where p.tenant_id = r.tenant_id and p.integration = split_part(r.integration, '_', 1))))
"""
DUE = """
select distinct (payload ->> 'source')::int as source, tenant_id, payload ->> 'id' as id, lane from reactor.jobs
where type = 'refresh_token' and status in ('pending', 'failed') and run_after <= $1 order by 3
"""
NEXT = """
select least((select min(run_after) from reactor.jobs where type = 'refresh_token' and status in ('pending', 'failed')),
    (select min(alert_at) from reactor.tokens), (select min(expires_at) from tokens where expires_at > $1))
"""


@dataclass
class Kept:
    """One token as this test knows it."""

    key: TokenKey
    integration: str
    kind: str
    account: str
    since: datetime
    is_renewed: bool  # by a person, on the day before it ends
    is_broken: bool = False  # it was in a state that needs somebody
    renewals: list[datetime] = field(default_factory=list)


class Year:
    """A clock that everybody here goes by, from now on; and what the reactor would do as it moves."""

    def __init__(self, conn, pool, start: datetime) -> None:
        self.conn, self.pool = conn, pool
        self.start = self.now = start
        self.kept: dict[str, Kept] = {}
        self.calls: Counter[str] = Counter()
        self.refresher: Refresher
        self.providers: Providers
        self.random = random.Random(7)

    def clock(self) -> float:
        return self.now.timestamp()

    async def connect(self, kind: str, number: int) -> None:
        """An account that a person connected at some time before now: all ages are among them."""
        integration = kind.partition(" ")[0]
        tenant, account = f"t{number}", f"{kind}-{number}".replace(" ", "-")
        life = self.life(integration)
        left_s = 15 * DAY_S if kind in UNREFRESHED else self.margin(integration)
        age_s = 0 if life is None else self.random.random() * (life - left_s)
        granted = self.providers.seed(integration, tenant, account, age_s=age_s)
        if kind in UNREFRESHED:
            granted["refresh_token"] = None
        issued = self.now - timedelta(seconds=age_s)
        row = await self.conn.fetchval(
            "insert into tokens (tenant_id, integration, account, access_token, refresh_token, issued_at, expires_at, refresh_expires_at, metadata) "
            """values ($1, $2, $3, $4, $5, $6, $7, $8, '{"company_id": "acme"}') returning id""",
            tenant,
            integration,
            account,
            granted["access_token"],
            granted["refresh_token"],
            issued,
            None if life is None else issued + timedelta(seconds=life),
            issued + timedelta(days=365) if granted["refresh_token"] and integration == "linkedin" else None,
        )
        key = TokenKey(self.source, tenant, str(row))
        self.kept[key.source_id] = Kept(key, integration, kind, account, self.now, number % 2 == 0)

    def life(self, integration: str) -> float | None:
        return LIVES.get(integration, WIRES[integration].lives_s)[0]

    def margin(self, integration: str) -> float:
        life = self.life(integration)
        margin = self.integrations[integration].margin_s
        return 0.0 if life is None or margin is None else min(margin, life / 2)

    async def parent(self, child: Credential, integration) -> Credential:
        """As `Tokens` finds it, by this clock."""
        query = "select * from tokens where tenant_id = $1 and integration = $2"
        row = await self.pool.fetchrow(query, child.tenant_id, integration.parent)
        if row is None:
            raise ParentFails("missing")
        key = TokenKey(self.source, child.tenant_id, str(row["id"]))
        await self.refresher.care(key, integration.parent, wanted_s=600, now=self.now)
        row = await self.pool.fetchrow(query, child.tenant_id, integration.parent)
        if row["state"] != "active":
            raise ParentFails(row["state"])
        if row["expires_at"] <= self.now:
            raise Unavailable("the parent is late", code="parent_late")
        return Credential(child.tenant_id, integration.parent, row["account"], row["access_token"])

    async def pass_until(self, end: datetime, tick: timedelta) -> None:
        """What happens until then, looked at by ticks, at which there is something to do or to say."""
        last = None
        while (ahead := await self.conn.fetchval(NEXT, self.now)) is not None and ahead <= end:
            ticks = -((self.start - ahead) // tick)
            self.now = max(self.now, min(self.start + tick * ticks, end))
            assert self.now != last, f"{ahead} comes again and again"
            last = self.now
            await self.conn.execute("update clock set now = $1", self.now)
            await self.conn.execute("select reactor.sweep_tokens($1)", self.now)
            await self.look_after()
            unseen = await self.conn.fetch(UNSEEN, self.now)
            assert unseen == [], f"ended unseen by {self.now - self.start}"
            await self.renew()
        self.now = end

    async def look_after(self) -> None:
        """Do every job that is due."""
        for _ in range(20):
            due = await self.conn.fetch(DUE, self.now)
            if not due:
                return
            limit = anyio.CapacityLimiter(AT_ONCE)
            async with anyio.create_task_group() as tasks:
                for job in due:
                    tasks.start_soon(self.look, job, limit)
        raise AssertionError("what is due stays due")

    async def look(self, job, limit) -> None:
        async with limit:
            await self.before(job)
            key = TokenKey(job["source"], job["tenant_id"], job["id"])
            care = await self.refresher.care(key, job["lane"].removeprefix("tokens:"), now=self.now)
        self.calls[job["id"]] += care.action == "saved"
        self.kept[job["id"]].is_broken |= care.state not in {None, "active"}

    async def before(self, job) -> None:
        """For whoever has faults to inject."""

    async def renew(self) -> None:
        """Half of the people who hear that a day is left connect their account again."""
        told = await self.conn.fetch("""
            select r.source_id, r.version from told t join reactor.tokens r on t.subject = reactor.token_subject(r)
            where t.at = (select now from clock) and t.cause = 'token_expiring' and t.threshold = '1'""")
        for row in told:
            kept = self.kept[row["source_id"]]
            if not kept.is_renewed:
                continue
            granted = self.providers.seed(kept.integration, kept.key.tenant_id, kept.account)
            refreshes = kept.kind not in UNREFRESHED
            await self.conn.execute(
                "update tokens set access_token = $2, refresh_token = $3, issued_at = $4, expires_at = $5, refresh_expires_at = $6 where id = $1",
                int(kept.key.source_id),
                granted["access_token"],
                granted["refresh_token"] if refreshes else None,
                self.now,
                self.now + timedelta(seconds=self.life(kept.integration) or 0),
                self.now + YEAR if refreshes else None,
            )
            kept.renewals.append(self.now)
            kept.is_broken |= refreshes  # by hand
        if told:
            await self.look_after()
            open_ = await self.conn.fetch("""
                select r.source_id from reactor.alerts a join reactor.tokens r on a.subject = reactor.token_subject(r) where a.resolved_at is null""")
            cured = {row["source_id"] for row in told if self.kept[row["source_id"]].is_renewed}
            assert cured.isdisjoint(row[0] for row in open_)


@asynccontextmanager
async def a_year(year_class, dsn, conn, folder, monkeypatch, *, timeout_s=15.0, **options):
    """A year about to begin, before providers that go by its clock."""
    await conn.execute(TELLING)
    async with db.create_pool(dsn, application="test", size=AT_ONCE + 2, resets=False) as pool:
        year = year_class(conn, pool, await conn.fetchval("select date_trunc('minute', now())"))
        year.source = await conn.fetchval("select id from reactor.token_sources")
        async with Providers(clock=year.clock, lives=LIVES, **options) as year.providers:
            path = year.providers.toml(
                folder, **{name: {"probe_every_s": PROBE_EVERY_S, "timeout_s": timeout_s} for name in WIRES}
            )
            for name, value in year.providers.env.items():
                monkeypatch.setenv(name, value)
            settings = make_settings(integrations=path)
            strategies = load_strategies(settings.handlers)
            year.integrations = load_integrations(path, strategies)
            journal = Journal(folder / "journal", None)
            year.refresher = Refresher(
                pool,
                strategies=strategies,
                integrations=year.integrations,
                keys=None,
                journal=journal,
                parents=year.parent,
                log=get_log(),
            )
            yield year
            journal.close()


class Calm(Year):
    """In which every provider answers."""

    async def live(self, phases) -> datetime:
        """The year of these tokens, each phase until the next begins. Returns its end."""
        end = self.start + YEAR
        for place, (before_end, tick, counts) in enumerate(phases):
            self.now = end - before_end
            for kind, number in counts.items():
                for n in range(number):
                    await self.connect(kind, n)
            await self.pass_until(end - (phases[place + 1][0] if place + 1 < len(phases) else timedelta(0)), tick)
        return end

    async def alerts_of(self, kind: str) -> dict[str, list[tuple[str, str | None]]]:
        """By token, what was said of it, in order."""
        rows = await self.conn.fetch("""
            select r.source_id, t.cause, t.threshold from told t join reactor.tokens r on t.subject = reactor.token_subject(r)
            order by t.at, t.ctid""")
        said: dict[str, list[tuple[str, str | None]]] = {
            kept.key.source_id: [] for kept in self.kept.values() if kept.kind == kind
        }
        for row in rows:
            if row["source_id"] in said:
                said[row["source_id"]].append((row["cause"], row["threshold"]))
        return said

    def busy(self, end: datetime):
        """Those that were refreshed all their time here: calls made, and the fewest that their margins allow."""
        for kept in self.kept.values():
            life = self.life(kept.integration)
            if life is not None and kept.kind not in UNREFRESHED and not kept.is_broken:
                lived_s = (end - kept.since).total_seconds()
                yield kept, self.calls[kept.key.source_id], lived_s / (life - self.margin(kept.integration))


COUNTDOWN = [("token_expiring", days) for days in ("14", "7", "3", "1")]


async def test_a_year_of_a_thousand_tokens(dsn, conn, tmp_path, monkeypatch):
    async with a_year(Calm, dsn, conn, tmp_path, monkeypatch) as year:
        end = await year.live(PHASES)

        assert len(year.kept) == 1000
        assert {kept.integration for kept in year.kept.values()} == set(WIRES)

        # Each as rarely as its margin allows.
        wasteful, made, least = {}, Counter(), Counter()
        for kept, calls, minimum in year.busy(end):
            made[kept.integration] += calls
            least[kept.integration] += minimum
            if calls > minimum * 1.05 + 1:  # one more where its year began just before one
                wasteful[kept.account] = (calls, minimum)
        assert wasteful == {}
        assert len(least) == 12
        assert {name: (made[name], least[name]) for name in least if made[name] > 1.05 * least[name]} == {}

        # What only a person renews is told five times, and is well once it was renewed.
        for kind in UNREFRESHED:
            for row, said in (await year.alerts_of(kind)).items():
                kept = year.kept[row]
                heard = said[: len(said) // 4 * 4] if kept.is_renewed else said
                assert heard == (
                    COUNTDOWN * len(kept.renewals) if kept.is_renewed else [*COUNTDOWN, ("token_expired", None)]
                ), kept
                assert not kept.is_renewed or len(kept.renewals) >= 3
        for kind in ENDLESS:
            assert set(map(tuple, (await year.alerts_of(kind)).values())) == {()}

        # Nothing is held that the reactor takes for good and its provider does not.
        dead = [
            row["integration"]
            for row in await conn.fetch("select integration, access_token from tokens where state = 'active'")
            if not year.providers.works(row["access_token"])
        ]
        assert dead == []


GRACE = dict.fromkeys(("x", "tiktok", "pinterest", "gohighlevel"), "grace")


class Stormy(Calm):
    """One call in six fails, each in one of the ways in which calls do."""

    FAULTS = (
        (503, "<html>Bad Gateway</html>"),
        (500, {"error": "invalid_grant"}),
        (429, {}, {"Retry-After": "120"}),
        "hang",
        "reset_before",
        "reset_after",
        "truncated",
        "html",
    )

    async def before(self, job) -> None:
        if self.random.random() < 1 / 6:
            self.providers.fail(job["lane"].removeprefix("tokens:"), self.random.choice(self.FAULTS))


async def test_whatever_way_calls_fail_no_token_ends_unseen(dsn, conn, tmp_path, monkeypatch):
    phases = (
        (timedelta(days=120), timedelta(hours=1), {"instagram": 8, "facebook": 6, "linkedin": 6, "pinterest": 10}),
        (timedelta(days=12), timedelta(minutes=5), {"gohighlevel": 6, "gohighlevel_location": 6, "tiktok": 6}),
        (timedelta(days=1), timedelta(minutes=1), {"x": 6, "google": 3, "oauth2": 3}),
    )
    async with a_year(Stormy, dsn, conn, tmp_path, monkeypatch, timeout_s=0.5, rotation=GRACE, grace_s=HOUR_S) as year:
        await year.live(phases)

        ended = Counter(row[0] for row in await conn.fetch("select status from reactor.token_attempts"))
        assert min(ended["failed"], ended["lost"], ended["saved"]) > 10
        assert await conn.fetchval("select count(*) from tokens where state = 'active'") >= 54
