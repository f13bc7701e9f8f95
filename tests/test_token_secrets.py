"""No secret stands anywhere but in the producer's row: canary tokens, planted everywhere, are looked for in all we keep."""

from __future__ import annotations

import subprocess
from datetime import timedelta

import anyio
import pytest
from conftest import connect, eventually, reactor_process
from providers import Providers
from tending import DAY, HOUR, tended_tokens
from test_worker import Output

from reactor.refresher import TokenKey
from reactor.sealing import generate, seal
from reactor.strategy import Credential, Request
from reactor.tokens import FreshToken

MINUTE = timedelta(minutes=1)
PLAIN = "access_token", "refresh_token"

# A strategy of somebody's own, which quotes the token in every mistake it makes.
CARELESS = """
from reactor.strategy import Request, Strategy

def refresh(credential, integration):
    if credential.account == "asking":
        raise RuntimeError(f"cannot use {credential.access_token} {credential.refresh_token}")
    return Request("POST", f"{integration.base_url}/token", form={"grant_type": "refresh_token",
        "refresh_token": credential.refresh_token}, basic=integration.client())

def read(answer):
    raise ValueError(f"cannot read {answer.body!r}")

STRATEGY = Strategy(refresh=refresh, read=read, rotates=True)
"""
REFUSE = """
create function refuse() returns trigger language plpgsql as $$ begin raise exception 'no % for %, %', new.access_token, new, old; end $$;
create trigger refuse before update of access_token on tokens for each row when (new.account = 'refused') execute function refuse();
"""


@pytest.fixture
async def tended(dsn, conn, tmp_path, monkeypatch):
    async with tended_tokens(dsn, conn, tmp_path, monkeypatch) as tended:
        yield tended


def env(tended, **more):
    keyed = {} if tended.token_key is None else {"REACTOR_TOKEN_KEY": tended.token_key}
    return {
        "REACTOR_HOME": str(tended.folder / "home"),
        "REACTOR_INTEGRATIONS": str(tended.toml),
        "VOYAGE_API_KEY": "none",
        "REACTOR_VOYAGE_BASE_URL": "http://127.0.0.1:9",
        **keyed,
        **tended.providers.env,
        **more,
    }


async def everything_we_keep(conn) -> str:
    """Every column of every row of every table of ours, as text."""
    tables = await conn.fetch(
        "select oid::regclass::text from pg_class where relnamespace = 'reactor'::regnamespace and relkind in ('r', 'p')"
    )
    return "\n".join(
        [str(await conn.fetchval(f"select string_agg(t::text, e'\\n') from {table} t")) for (table,) in tables]
    )


def dumped(server, dsn, *options) -> str:
    return subprocess.run(
        [server.programs / "pg_dump", *options, dsn], check=True, capture_output=True, text=True
    ).stdout


def journal_of(tended) -> bytes:
    return b"".join(path.read_bytes() for path in (tended.folder / "home" / "journal").iterdir() if path.is_file())


async def through_everything(tended, server):
    """A reactor process lives through success, refusals, outages, mistakes and a table that refuses. Returns its log and
    the payloads that were notified."""
    handlers = tended.folder / "handlers"
    (handlers / "token_refresh").mkdir(parents=True)
    (handlers / "token_refresh" / "careless.py").write_text(CARELESS)
    tended.toml = tended.providers.toml(
        tended.folder,
        careless={"strategy": "oauth2", "base_url": f"{tended.providers.url}/careless"},
        slow={"strategy": "oauth2", "timeout_s": 0.5},
        page={"strategy": "oauth2"},
        bad_address={"strategy": "oauth2", "token_url": "http://nowhere.invalid/CANARY-in-no-log"},
    )
    head, table, tail = tended.toml.read_text().partition("[careless]")
    tended.toml.write_text(head + table + tail.replace('"oauth2"', '"careless"', 1))
    await tended.conn.execute(REFUSE)
    payloads = []
    listener = await connect(tended.dsn)
    for channel in ("reactor_wake", "reactor_alerts", "reactor_schedules"):
        await listener.add_listener(channel, lambda *said: payloads.append(said[-1]))
    tended.providers.fail("slow", "hang", "hang", "hang")
    tended.providers.fail("page", "html:200", "html:403", "truncated")
    tended.providers.fail("tiktok", (400, {"error": "invalid_grant", "error_description": "CANARY-echo is revoked"}))
    tended.providers.fail("pinterest", (418, {"error": "CANARY-word", "error_description": "CANARY-echo"}))
    tended.providers.fail(
        "facebook", (400, {"error": {"message": "CANARY-echo", "code": 190, "type": "OAuthException"}})
    )
    keys = {}
    with reactor_process(tended.dsn, **env(tended, REACTOR_HANDLERS=str(handlers))) as process:
        output = Output(process)
        await output.saw("started", timeout_s=60)
        for name, account in (
            ("x", ""), ("instagram", ""), ("tiktok", ""), ("pinterest", ""), ("facebook", ""), ("slow", ""), ("page", ""),
            ("bad_address", ""), ("careless", "asking"), ("careless", "reading"), ("google", "refused"), ("static_key", ""),
        ):  # fmt: skip
            keys[name, account] = await tended.connect(name, account=account, ends=MINUTE, issued=-2 * DAY)
        wanted = {
            ("slow", ""),
            ("page", ""),
            ("bad_address", ""),
            ("pinterest", ""),
            ("careless", "asking"),
            ("tiktok", ""),
            ("facebook", ""),
        }

        async def all_have_happened():
            failed = await tended.conn.fetch(
                "select integration, account from reactor.tokens where last_error is not null"
            )
            saved = await tended.conn.fetchval(
                "select count(*) from reactor.tokens where integration in ('x', 'instagram') and version = 2"
            )
            # What the table refuses: the new token, or, with a key, to be sealed.
            refused = await tended.conn.fetchval("select count(*) from reactor.tokens where trouble = 'not_saved'")
            return wanted <= {tuple(row) for row in failed} and saved == 2 and refused == 2

        await eventually(all_have_happened, timeout_s=60)
        process.terminate()
        await output.exited()
    await listener.close()
    return keys, output.text, payloads


class TestSealed:
    @pytest.fixture
    def tended(self, tended):
        tended.token_key = generate()[0]
        return tended

    async def test_no_canary_is_anywhere(self, tended, server):
        _, log, payloads = await through_everything(tended, server)

        kept = await everything_we_keep(tended.conn)
        await tended.conn.execute(
            "delete from tokens where account = 'refused'"
        )  # its own trigger keeps it from being sealed
        dump = dumped(server, tended.dsn)
        assert "CANARY" not in log
        assert set(payloads) <= {""}
        assert "CANARY" not in kept
        assert b"CANARY" not in journal_of(tended)
        assert "CANARY" not in dump
        assert "hpke1." in dump  # they are there, sealed
        assert "strategy_RuntimeError" in log

    async def test_the_plain_columns_are_emptied_at_once_and_the_token_is_the_same(self, tended):
        key = await tended.connect("x", ends=2 * HOUR)
        granted = tuple([(await tended.row(key))[name] for name in PLAIN])

        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "x")
            row, token = await tended.row(key), await tokens.ensure_fresh("acme", "x")

        assert tuple(row[name] for name in PLAIN) == (None, None)
        assert granted[0] == token
        assert (await tended.token(key))["version"] == 1
        assert len(await tended.due()) == 1
        assert tended.providers.calls["x"] == 0

    async def test_a_refreshed_one_never_stands_in_plain_text(self, tended):
        key = await tended.connect("x", ends=MINUTE)
        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "x")
            token = await tokens.ensure_fresh("acme", "x")

        row = await tended.row(key)
        assert tuple(row[name] for name in PLAIN) == (None, None)
        assert tended.providers.newest(token)[0] == token

    async def test_a_producer_that_holds_only_the_public_key_seals_it_itself(self, tended):
        tended.token_key, public = generate()
        granted = tended.providers.seed("x")
        bound = {"tenant_id": "acme", "integration": "x", "account": ""}
        sealed = {f"sealed_{name}": seal(public, value, purpose=name, **bound) for name, value in granted.items()}
        key = await tended.connect("x", ends=MINUTE, access_token=None, refresh_token=None, **sealed)

        async with tended.opened() as tokens:
            care = await tokens.refresher.care(key, "x")
            token = await tokens.ensure_fresh("acme", "x")

        assert care.action == "saved"
        assert tended.providers.newest(token)[0] == token

    @pytest.mark.parametrize(
        "bound",
        [
            {"tenant_id": "beta", "integration": "x", "account": ""},
            {"tenant_id": "acme", "integration": "google", "account": ""},
            {"tenant_id": "acme", "integration": "x", "account": "other"},
        ],
        ids=["tenant", "integration", "account"],
    )
    async def test_what_is_sealed_for_another_does_not_open_and_is_said(self, tended, bound):
        tended.token_key, public = generate()
        sealed = {f"sealed_{name}": seal(public, "CANARY", purpose=name, **bound) for name in PLAIN}
        key = await tended.connect("x", ends=MINUTE, access_token=None, refresh_token=None, **sealed)

        async with tended.opened() as tokens:
            care = await tokens.refresher.care(key, "x")

        row = await tended.row(key)
        assert care.state == "active"
        assert set(await tended.alerts()) == {"token_key_missing"}
        assert (row["sealed_access_token"], row["sealed_refresh_token"]) == tuple(sealed.values())
        assert tended.providers.calls["x"] == 0
        assert len(await tended.due()) == 1

    async def test_without_the_key_it_is_said_nothing_is_destroyed_and_all_is_well_when_it_is_back(self, tended):
        key = await tended.connect("x", ends=20 * MINUTE)
        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "x")
        kept, tended.token_key = tended.token_key, None
        before = dict(await tended.row(key))

        async with tended.opened() as tokens:
            due = (await tended.token(key))["next_at"]
            await tokens.refresher.care(key, "x", now=due)
        said, after, next_at = (
            set(await tended.alerts()),
            dict(await tended.row(key)),
            (await tended.token(key))["next_at"],
        )
        tended.token_key = kept
        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "x", now=next_at)
            token = await tokens.ensure_fresh("acme", "x")

        assert said == {"token_key_missing"}
        assert (await tended.token(key))["lost_answers"] == 0
        assert before == after
        assert await tended.alerts() == {}
        assert tended.providers.newest(token)[0] == token

    async def test_the_key_is_rotated_while_two_reactors_run(self, tended):
        """old; new,old in one and then the other; new alone."""
        old, new = generate()[0], generate()[0]
        tended.token_key = old
        key = await tended.connect("x", ends=2 * HOUR)
        async with tended.opened() as first:
            await first.refresher.care(key, "x")
            granted = await first.ensure_fresh("acme", "x")
            tended.token_key = f"{old},{new}"  # first all must be able to open what the new one seals
            async with tended.opened(home=tended.folder / "other") as second:
                tended.token_key = f"{new},{old}"
                async with tended.opened() as third:
                    assert await third.refresher.reconcile(7 * DAY) == 1
                    await third.refresher.care(key, "x")
                    assert await third.refresher.reconcile(7 * DAY) == 0
                    assert await second.ensure_fresh("acme", "x") == granted
        tended.token_key = new
        async with tended.opened() as last:
            assert await last.ensure_fresh("acme", "x") == granted

        assert (await tended.token(key))["version"] == 1
        assert tended.providers.calls["x"] == 0


class TestPlain:
    """Without a key: each place where a token stands all the same."""

    async def test_it_stands_in_the_producers_table_and_nowhere_else(self, tended, server):
        keys, log, payloads = await through_everything(tended, server)

        kept = await everything_we_keep(tended.conn)
        dump = dumped(server, tended.dsn, "--exclude-table-data=public.tokens")
        assert "CANARY" not in log
        assert set(payloads) <= {""}
        assert "CANARY" not in kept
        assert "CANARY" not in dump
        assert tended.providers.works((await tended.row(keys["x", ""]))["access_token"])

    async def test_an_answer_that_waits_in_the_journal_is_plain_there_and_only_its_owner_may_read_it(self, tended):
        await tended.conn.execute(REFUSE)
        key = await tended.connect("google", account="refused", ends=MINUTE)

        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "google")

        [kept] = (tended.folder / "home" / "journal").glob("*.answer")
        assert kept.stat().st_mode & 0o777 == 0o600
        assert kept.parent.stat().st_mode & 0o777 == 0o700

    async def test_an_attached_table_holds_plain_text_with_a_key_too(self, tended):
        tended.token_key = generate()[0]
        await tended.conn.execute(
            "create table config (id int primary key, tenant_id text, token text, ends timestamptz)"
        )
        source = await tended.conn.fetchval(
            "select reactor.attach_tokens('config', 'instagram', access_token_column => 'token', expires_at_column => 'ends')"
        )
        token = tended.providers.seed("instagram")["access_token"]
        await tended.conn.execute("insert into config values (1, 'acme', $1, now() + interval '5 days')", token)

        async with tended.opened() as tokens:
            await tokens.refresher.care(TokenKey(source, "acme", "1"), "instagram")

        assert tended.providers.works(await tended.conn.fetchval("select token from config"))


class TestAStrategyThatRaises:
    """CASES 33: one exception fails one token, and costs nobody a connection."""

    @pytest.fixture
    def opened(self, tended, monkeypatch):
        from reactor.tokens import load_strategies  # noqa: PLC0415

        def careless(point):
            def raises(*_):
                raise RuntimeError("CANARY")

            strategies = dict(load_strategies(None))
            strategies["x"] = type(strategies["x"])(
                **{name: getattr(strategies["x"], name) for name in strategies["x"].__slots__} | {point: raises}
            )
            monkeypatch.setattr("reactor.tokens.load_strategies", lambda _folder: strategies)
            return tended.opened()

        return careless

    async def test_before_it_asks_it_is_an_unknown_answer_and_no_lost_one(self, tended, opened, events):
        key = await tended.connect("x", ends=MINUTE)
        async with opened("refresh") as tokens:
            care = await tokens.refresher.care(key, "x")

        token = await tended.token(key)
        assert (care.action, care.state, care.code) == ("failed", "active", "strategy_RuntimeError")
        assert (token["lost_answers"], tended.providers.calls["x"]) == (0, 0)
        assert "CANARY" not in events.text

    async def test_at_a_success_the_answer_stays_in_the_journal_until_it_is_mended(
        self, tended, opened, monkeypatch, events
    ):
        key = await tended.connect("x", ends=MINUTE)
        async with opened("read") as tokens:
            await tokens.refresher.care(key, "x")
            await tokens.refresher.recover()  # a reactor that starts with it lives
        said = set(await tended.alerts())
        monkeypatch.undo()
        for name, value in tended.providers.env.items():
            monkeypatch.setenv(name, value)
        async with tended.opened() as tokens:
            await tokens.refresher.recover()

        assert said == {"token_not_saved"}
        assert tended.providers.calls["x"] == 1
        assert await tended.holds_the_newest(key)
        assert await tended.alerts() == {}
        assert "CANARY" not in events.text

    @pytest.mark.parametrize("point", ["probe", "read_probe"])
    async def test_at_a_probe_it_says_nothing_of_the_key(self, tended, monkeypatch, point):
        from reactor.tokens import load_strategies  # noqa: PLC0415

        def raises(*_):
            raise RuntimeError("CANARY")

        strategies = dict(load_strategies(None))
        key_strategy = strategies["static_key"]
        strategies["static_key"] = type(key_strategy)(
            **{name: getattr(key_strategy, name) for name in key_strategy.__slots__} | {point: raises}
        )
        monkeypatch.setattr("reactor.tokens.load_strategies", lambda _folder: strategies)
        key = await tended.connect("static_key")
        async with tended.opened() as tokens:
            care = await tokens.refresher.care(key, "static_key")

        assert (care.state, care.code) == ("active", "strategy_RuntimeError")


class TestWords:
    @pytest.mark.parametrize(
        "value",
        [
            FreshToken.of("CANARY", account="a", expires_at=None, version=1),
            Credential("acme", "x", "", "CANARY", "CANARY", metadata={"secret": "CANARY"}),
            Request(
                "GET",
                "https://x/?access_token=CANARY",
                {"t": "CANARY"},
                {"t": "CANARY"},
                {"t": "CANARY"},
                {"h": "CANARY"},
                ("CANARY", "CANARY"),
            ),
        ],
    )
    def test_no_repr_shows_a_secret(self, value):
        assert "CANARY" not in repr(value)
        assert "CANARY" not in repr([value])

    @pytest.mark.parametrize("fault", ["reset_before", "truncated", "html:200", "html:403", "connect"])
    async def test_no_error_of_ensure_fresh_quotes_the_token_or_an_address(self, tended, fault, events):
        """Meta's addresses hold the token, and aiohttp's errors hold addresses."""
        if fault == "connect":
            tended.toml = tended.providers.toml(tended.folder, facebook={"base_url": "http://127.0.0.1:9"})
        else:
            tended.providers.fail("facebook", fault)
        await tended.connect("facebook", ends=MINUTE)

        async with tended.opened() as tokens:
            with pytest.raises(Exception, match="facebook") as caught:
                await tokens.ensure_fresh("acme", "facebook", deadline_s=60)

        said, error = [], caught.value
        while error is not None:
            said.append(repr(error))
            error = error.__cause__ or error.__context__
        assert "CANARY" not in " ".join(said) + events.text
        assert "127.0.0.1" not in " ".join(said)


def test_the_canaries_are_minted_where_these_tests_look_for_them():
    async def mint():
        async with Providers() as providers:
            return providers.seed("x")

    assert all(token.startswith("CANARY") for token in anyio.run(mint).values())
