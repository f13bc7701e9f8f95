"""A provider that hangs, floods or refuses everybody delays its own tokens only, and an outage revokes nobody."""

from __future__ import annotations

from datetime import timedelta

import pytest
from conftest import eventually, running_reactor
from tending import DAY, HOUR, tended_tokens
from voyage_stub import voyage_stub

MINUTE = timedelta(minutes=1)
LOST_ROOM = 8  # of a lane: the concurrency of handlers/tokens.py


@pytest.fixture
async def tended(dsn, conn, tmp_path, monkeypatch):
    async with tended_tokens(dsn, conn, tmp_path, monkeypatch) as tended:
        yield tended


async def connect_many(tended, integration, count, *, ends=MINUTE, **columns):
    """So many tenants with a token each that is due."""
    return [await tended.connect(integration, tenant=f"t{n}", ends=ends, **columns) for n in range(count)]


async def versions(tended, integration):
    return [
        row[0]
        for row in await tended.conn.fetch("select version from reactor.tokens where integration = $1", integration)
    ]


async def states(tended, integration):
    rows = await tended.conn.fetch(
        "select state, count(*) from reactor.tokens where integration = $1 group by 1", integration
    )
    return dict(rows)


SICKNESSES = {
    "it hangs": "hang",
    "it floods with 429": (429, {"error": "rate_limited"}, {"Retry-After": "3600"}),
    "it answers with a firewall's page": "html:403",
    "it calls a page a success": "html:200",
    "it fails": (503, "upstream connect error"),
    "it closes the connection": "reset_after",
}


class TestOneProviderIsSick:
    @pytest.mark.parametrize("fault", SICKNESSES.values(), ids=SICKNESSES)
    async def test_the_tokens_of_others_and_the_memories_of_posts_are_done_meanwhile(self, tended, fault):
        """It has many tokens, all claimed first; the others' come later (CASES 22, 25)."""
        tended.providers.fail("pinterest", *[fault] * 200)
        await connect_many(tended, "pinterest", 40)

        async with (
            voyage_stub() as stub,
            running_reactor(tended.settings(voyage_api_key=stub.key, voyage_base_url=stub.url)),
        ):
            await eventually(lambda: tended.providers.calls["pinterest"] >= 1)
            others = [
                (await tended.connect(name, ends=MINUTE), name) for name in ("x", "google", "tiktok", "gohighlevel")
            ]
            await tended.conn.execute(
                "insert into posts (tenant_id, body) select 'acme', 'Pão de queijo ' || g from generate_series(1, 20) g"
            )

            async def all_are_done():
                fresh = [
                    await tended.holds_the_newest(key) and (await tended.row(key))["version"] == 2 for key, _ in others
                ]
                return all(fresh) and await tended.conn.fetchval("select count(*) from reactor.memories") == 20

            await eventually(all_are_done, timeout_s=60)
            calls, done = tended.providers.calls["pinterest"], await versions(tended, "pinterest")

        assert [tended.providers.calls[name] for _, name in others] == [1, 1, 1, 1]
        assert set(done) <= {1}  # of the sick one nothing was done; the others did not wait for it
        assert calls < 200

    async def test_a_hanging_provider_is_asked_as_often_as_its_lane_has_places(self, tended):
        tended.providers.fail("pinterest", *["hang"] * 200)
        await connect_many(tended, "pinterest", 40)

        async with running_reactor(tended.settings(drain_s=0.1)):
            await eventually(lambda: tended.providers.calls["pinterest"] == LOST_ROOM)
            other = await tended.connect("x", ends=MINUTE)
            await eventually(lambda: tended.providers.calls["x"] == 1)

            async def is_saved():
                return (await tended.row(other))["version"] == 2

            await eventually(is_saved)
            assert tended.providers.calls["pinterest"] == LOST_ROOM
            await tended.providers.__aexit__()  # it lets go of those that hang, so that the drain is short

    async def test_a_429_rests_the_lane_for_as_long_as_it_says(self, tended, events):
        tended.providers.fail("pinterest", *[(429, {}, {"Retry-After": "3600"})] * 100)
        await connect_many(tended, "pinterest", 40)

        async with running_reactor(tended.settings()):
            await eventually(lambda: events.named("lane_opened"))
            other = await tended.connect("x", ends=MINUTE)

            async def is_saved():
                return (await tended.row(other))["version"] == 2

            await eventually(is_saved)

        assert tended.providers.calls["pinterest"] <= LOST_ROOM
        assert [event["lane"] for event in events.named("lane_opened")] == ["tokens:pinterest"]

    async def test_a_single_token_that_always_fails_does_not_hold_up_the_others_of_its_lane(self, tended):
        bad = await tended.connect("oauth2", tenant="bad", ends=MINUTE)
        tended.providers.fail("oauth2", (418, {"tea": True}))

        async with running_reactor(tended.settings()):

            async def has_failed():
                return (await tended.token(bad) or {}).get("failures") == 1

            await eventually(has_failed)
            await connect_many(tended, "oauth2", 30)

            async def all_are_saved():
                return sorted(await versions(tended, "oauth2")) == [1] + [2] * 30

            await eventually(all_are_saved)

        assert (await tended.token(bad))["state"] == "active"
        assert tended.providers.calls["oauth2"] == 31


class TestTheApplicationIsRefused:
    """Our client secret is wrong: that is one thing to tell, and no token's fault."""

    async def test_it_is_one_alert_for_fifty_tokens_and_few_calls(self, tended, events):
        tended.providers.fail("pinterest", *[(401, {"error": "invalid_client", "error_description": "no"})] * 200)
        await connect_many(tended, "pinterest", 50)

        async with running_reactor(tended.settings()):

            async def is_said():
                return "app_error" in await tended.alerts()

            await eventually(is_said)
            other = await tended.connect("x", ends=MINUTE)

            async def is_saved():
                return (await tended.row(other))["version"] == 2

            await eventually(is_saved)

        opened = events.named("alert_opened")
        assert [(event["cause"], event["subject"]) for event in opened] == [("app_error", "pinterest")]
        assert set(await tended.alerts()) == {"app_error"}
        assert tended.providers.calls["pinterest"] <= LOST_ROOM
        assert set(await states(tended, "pinterest")) <= {"active", "app_error"}

    async def test_all_are_cured_and_the_alert_ends_when_the_configuration_is_right(self, tended, monkeypatch):
        secret = "REACTOR_TEST_PINTEREST_SECRET"
        monkeypatch.setenv(secret, "wrong")
        keys = await connect_many(tended, "pinterest", 20)
        async with running_reactor(tended.settings()):

            async def is_said():
                return "app_error" in await tended.alerts()

            await eventually(is_said)
        refused, detail = await states(tended, "pinterest"), (await tended.alerts())["app_error"]
        calls = tended.providers.calls["pinterest"]

        monkeypatch.setenv(secret, tended.providers.env[secret])
        for n in range(20):
            await tended.conn.fetch("select * from reactor.request_refresh($1, 'pinterest')", f"t{n}")
        await tended.conn.execute("update reactor.jobs set run_after = now()")  # the quarter of an hour that they rest
        async with running_reactor(tended.settings()):

            async def all_are_saved():
                return all([(await tended.row(key))["version"] == 2 for key in keys])

            await eventually(all_are_saved)
        async with tended.opened() as tokens:
            await tokens.refresher.sweep()  # as each minute

        assert await tended.alerts() == {}
        assert refused["app_error"] >= 1
        assert "client_secret" in detail["do"]["en"]
        assert detail["who"] == "operator"
        assert calls <= LOST_ROOM
        assert all([await tended.holds_the_newest(key) for key in keys])

    async def test_a_setting_that_its_strategy_needs_is_the_applications_too_and_no_call_is_made(self, tended):
        tended.toml = tended.providers.toml(tended.folder, pinterest={"client_id": None, "client_secret_env": None})
        key = await tended.connect("pinterest", ends=MINUTE)

        async with tended.opened() as tokens:
            care = await tokens.refresher.care(key, "pinterest")

        assert (care.state, care.code) == ("app_error", "not_configured")
        assert set(await tended.alerts()) == {"app_error"}
        assert tended.providers.calls["pinterest"] == 0


AWAY = [
    (500, {"error": "invalid_grant"}),  # whatever its body says
    (502, "<html>Bad Gateway</html>"),
    (503, {"error": {"message": "The token is invalid", "code": 190}}),
    (429, {"error": "invalid_grant"}, {"Retry-After": "5"}),
    (408, ""),
    "html",
    "html:404",
    "reset_before",
]


class TestAnOutageRevokesNobody:
    @pytest.mark.parametrize("integration", ["oauth2", "instagram", "x", "pinterest"])
    async def test_whatever_a_provider_says_while_it_is_away(self, tended, integration):
        """CASES 30, 32, 36: nobody is disconnected, and nobody is told to reconnect."""
        keys = await connect_many(tended, integration, len(AWAY), issued=-2 * DAY)
        async with tended.opened() as tokens:
            for key, answer in zip(keys, AWAY, strict=True):
                if answer == "reset_before" and integration in {"x", "pinterest"}:
                    continue  # of one that rotates nobody knows: test_token_crashes.py
                tended.providers.fail(integration, answer)
                care = await tokens.refresher.care(key, integration)
                assert (care.state, care.action) in {("active", "failed"), ("active", "lost")}, answer
                assert care.outage is not None

        assert tended.providers.calls[integration] <= len(AWAY)  # each was sent once
        assert set(await states(tended, integration)) == {"active"}
        assert not {cause for cause in await tended.alerts() if "reconnect" in cause}

    async def test_a_host_that_has_no_address_revokes_nobody(self, tended):
        tended.toml = tended.providers.toml(tended.folder, x={"base_url": "http://nowhere.invalid"})
        key = await tended.connect("x", ends=MINUTE)

        async with tended.opened() as tokens:
            care = await tokens.refresher.care(key, "x")
            token = await tended.token(key)
            calls_before = token["failures"]

        assert (care.action, care.state, care.code) == ("failed", "active", "connect")
        assert (calls_before, token["lost_answers"]) == (1, 0)
        assert care.outage is not None

    async def test_what_was_away_for_a_day_is_fresh_once_it_is_back_and_nothing_is_left_open(self, tended):
        key = await tended.connect("google", ends=MINUTE)
        began = await tended.now()
        tended.providers.fail("google", *[(503, "away")] * 1000)
        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "google")
            await tended.tend(tokens, key, "google", until=began + DAY)
            during = set(await tended.alerts())
            tended.providers._faults["google"].clear()
            await tokens.refresher.care(key, "google", now=(await tended.token(key))["next_at"])

        assert during == {"token_late"}
        assert await tended.alerts() == {}
        assert await tended.holds_the_newest(key)


class TestAFailingTokenIsAskedSeldom:
    """CASES 24: 60,000 calls a day for one connection."""

    @pytest.mark.parametrize(
        ("answer", "most_a_day"),
        [
            ((503, "away"), 24 * 4 + 8),
            ((429, {}), 24 * 4 + 8),
            ((429, {}, {"Retry-After": "0"}), 24 * 4 + 8),
            ((418, {"tea": True}), 8),  # unknown: five tries, then daily
            ((400, {"error": "invalid_grant"}), 1),
            ((400, {"error": "invalid_scope"}), 1),
            ((401, {"error": "invalid_client"}), 24 * 4 + 8),
            ("html:200", 24 + 8),
            ("html:403", 24 * 4 + 8),
            ("truncated", 24 + 8),
        ],
    )
    async def test_in_a_day_it_is_asked_so_often_at_most(self, tended, answer, most_a_day):
        key = await tended.connect("x", ends=HOUR)
        tended.providers.fail("x", *[answer] * 5000)
        began = await tended.now()

        async with tended.opened() as tokens:
            await tokens.refresher.care(key, "x")
            await tended.tend(tokens, key, "x", until=began + DAY, most=4000)

        assert 1 <= tended.providers.calls["x"] <= most_a_day

    async def test_nobody_who_asks_for_a_fresh_token_makes_it_more(self, tended):
        """A publishing pipeline in a loop before a provider that says: not for an hour."""
        tended.providers.fail("x", *[(429, {}, {"Retry-After": "3600"})] * 100)
        await tended.connect("x", ends=MINUTE)

        async with tended.opened() as tokens:
            for _ in range(20):
                with pytest.raises(Exception, match="x"):
                    await tokens.ensure_fresh("acme", "x")

        assert tended.providers.calls["x"] == 1


@pytest.mark.parametrize(
    ("header", "ends", "least_s", "most_s"),
    [
        ("99999999", 3 * DAY, 86400, 86400),
        ("-5", 3 * DAY, 50, 70),
        ("soon", 3 * DAY, 50, 70),
        ("120", 3 * DAY, 120, 120),
        ("99999999", HOUR, 3500, 3540),  # a minute before it ends it is tried once more
    ],
)
async def test_a_providers_delay_is_kept_to_a_day_and_to_the_tokens_life_and_never_shorter_than_the_backoff(
    tended, header, ends, least_s, most_s
):
    key = await tended.connect("x", ends=ends)
    tended.providers.fail("x", (429, {}, {"Retry-After": header}))
    now = await tended.now()
    async with tended.opened() as tokens:
        await tokens.refresher.care(key, "x", wanted_s=4 * 86_400, now=now)
    assert least_s <= ((await tended.token(key))["retry_at"] - now).total_seconds() <= most_s


def test_the_names_here_are_those_of_the_code():
    from reactor.loading import load_handlers  # noqa: PLC0415

    assert load_handlers(None)["refresh_token"].concurrency == LOST_ROOM
