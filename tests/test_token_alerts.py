"""No key dies unseen: what is said of a token and when, to whom, in which words, and that it ends by itself.

Where CASES 22-48 are tested:
  22, 25 test_token_lanes (a sick provider); 23, 28, 29, 31, 34 test_tokens; 24, 30, 32, 36 test_token_lanes;
  26, 39-45 test_token_races and test_token_crashes; 27 here (LinkedIn without a refresh token); 33 test_token_secrets (a
  strategy that raises); 35-38, 46 test_answers, and here end to end; 47 test_strategies and test_providers (X by Basic);
  48 test_token_crashes (a clock an hour off)
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from tending import DAY, HOUR, tended_tokens

MINUTE = timedelta(minutes=1)
SECOND = timedelta(seconds=1)


@pytest.fixture
async def tended(dsn, conn, tmp_path, monkeypatch):
    async with tended_tokens(dsn, conn, tmp_path, monkeypatch) as tended:
        yield tended


@pytest.fixture
async def tokens(tended):
    async with tended.opened() as tokens:
        yield tokens


class TestAnEndThatOnlyAPersonCanMove:
    """Told at 14, 7, 3 and 1 days and on the day, each once."""

    @pytest.mark.parametrize(
        ("integration", "columns"),
        [
            ("static_key", {}),
            ("linkedin", {"refresh_token": None}),
            ("gohighlevel_pit", {"account": "loja"}),
            ("evolution", {"account": "loja"}),
        ],
    )
    async def test_what_cannot_be_refreshed(self, tended, tokens, events, integration, columns):
        """CASES 27: LinkedIn without a refresh token, said ahead and in words."""
        key = await tended.connect(integration, ends=30 * DAY, **columns)
        await tokens.refresher.care(key, integration)
        ends_at = (await tended.token(key))["ends_at"]
        told = []
        for days in (20, 14, 13, 7, 6, 3, 2, 1, 0.5):
            for _ in range(2):  # the second look of a day has nothing to add
                await tokens.refresher.sweep(ends_at - days * DAY)
            told.append((await tended.alerts()).get("token_expiring", {}).get("threshold"))
        news = len(events.named("alert_opened"))
        before = (await tended.alerts())["token_expiring"]

        await tokens.refresher.sweep(ends_at)

        assert told == [None, "14", "14", "7", "7", "3", "3", "1", "1"]
        assert news == 4
        assert before["who"] == "account owner"
        assert (before["tenant_id"], before["integration"]) == ("acme", integration)
        assert set(await tended.alerts()) == {"token_expired"}
        assert await tended.state(key) == ("expired", "its time is up")

    async def test_the_webhook_owes_each_once(self, tended, tokens):
        key = await tended.connect("static_key", ends=30 * DAY)
        await tokens.refresher.care(key, "static_key")
        ends_at = (await tended.token(key))["ends_at"]
        news = []
        for days in (14, 14, 7, 7, 3, 3, 1, 1):
            await tokens.refresher.sweep(ends_at - days * DAY)
            news.append(await tended.conn.fetchval("select news from reactor.alerts"))
            await tended.conn.execute("update reactor.alerts set told = news")

        assert len(set(news)) == 4
        assert news[0::2] == news[1::2]

    async def test_a_refresh_token_s_own_end_while_the_access_token_is_refreshed_all_the_time(self, tended, tokens):
        """LinkedIn's real deadline: 365 d from the consent."""
        key = await tended.connect(
            "linkedin", ends=50 * DAY, issued=-10 * DAY, refresh_expires_at=await tended.now() + 10 * DAY
        )
        await tokens.refresher.care(key, "linkedin")
        first = (await tended.alerts())["token_expiring"]
        deadline = (await tended.token(key))["deadline_at"]
        thresholds = []
        for days in (6, 2, 1, 0):
            await tokens.refresher.sweep(deadline - days * DAY)
            thresholds.append((await tended.alerts())["token_expiring"]["threshold"])

        assert first["threshold"] == "14"
        assert thresholds == ["7", "3", "1", "0"]
        assert await tended.state(key) == ("active", None)

    async def test_a_new_token_ends_it(self, tended, tokens, events):
        key = await tended.connect("static_key", ends=2 * DAY)
        await tokens.refresher.care(key, "static_key")
        said = set(await tended.alerts())
        fresh = tended.providers.seed("static_key")["access_token"]
        await tended.conn.execute("update tokens set access_token = $1, expires_at = now() + interval '90 days'", fresh)

        await tokens.refresher.care(key, "static_key")

        assert said == {"token_expiring"}
        assert await tended.alerts() == {}
        assert [event["cause"] for event in events.named("alert_resolved")] == ["token_expiring"]

    async def test_an_expired_one_is_well_again_by_a_new_token(self, tended, tokens):
        key = await tended.connect("static_key", ends=-DAY)
        await tokens.refresher.care(key, "static_key")
        said = set(await tended.alerts())
        fresh = tended.providers.seed("static_key")["access_token"]
        await tended.conn.execute("update tokens set access_token = $1, expires_at = null", fresh)

        care = await tokens.refresher.care(key, "static_key")

        assert said == {"token_expired"}
        assert (care.action, care.state) == ("probed", "active")
        assert await tended.alerts() == {}

    async def test_what_is_refreshed_by_itself_is_told_to_nobody(self, tended, tokens):
        key = await tended.connect("instagram", ends=10 * DAY, issued=-50 * DAY)
        await tokens.refresher.care(key, "instagram")

        assert await tended.alerts() == {}


class TestProbes:
    async def test_a_key_that_is_refused_is_dead_and_alive_again_when_it_is_replaced(self, tended, tokens, events):
        key = await tended.connect("static_key")
        await tokens.refresher.care(key, "static_key")
        tended.providers.revoke((await tended.row(key))["access_token"])

        care = await tokens.refresher.care(key, "static_key", now=(await tended.token(key))["next_at"])
        said = (await tended.alerts())["token_key_dead"]
        await tended.conn.execute(
            "update tokens set access_token = $1", tended.providers.seed("static_key")["access_token"]
        )
        await tokens.refresher.care(key, "static_key")

        assert (care.action, care.state) == ("refused", "key_dead")
        assert said["who"] == "operator"
        assert "acme/static_key" in said["do"]["en"]
        assert "acme/static_key" in said["do"]["pt"]
        assert await tended.alerts() == {}
        assert [event["error_code"] for event in events.named("token_refresh_failed")] == [care.code]

    async def test_a_session_that_is_down_is_another_alert_and_ends_by_itself(self, tended, tokens):
        key = await tended.connect("evolution", account="loja")
        tended.providers.states["loja"] = "close"
        care = await tokens.refresher.care(key, "evolution")
        said = await tended.alerts()

        tended.providers.states["loja"] = "open"
        again = await tokens.refresher.care(key, "evolution", now=(await tended.token(key))["next_at"])

        assert (care.state, care.code) == ("session_down", "state_close")
        assert set(said) == {"token_session_down"}
        assert said["token_session_down"]["who"] == "account owner"
        assert "QR" in said["token_session_down"]["do"]["pt"]
        assert (again.action, again.state) == ("probed", "active")
        assert await tended.alerts() == {}

    async def test_a_key_that_died_is_not_a_session_that_is_down(self, tended, tokens):
        key = await tended.connect("stevo", account="loja")
        tended.providers.revoke((await tended.row(key))["access_token"])

        care = await tokens.refresher.care(key, "stevo")

        assert care.state == "key_dead"
        assert set(await tended.alerts()) == {"token_key_dead"}

    @pytest.mark.parametrize("answer", ["html:403", (503, "away"), "reset_after", (429, {}), (418, {})])
    async def test_what_says_nothing_of_the_key_does_not_kill_it(self, tended, tokens, answer):
        key = await tended.connect("evolution", account="loja")
        tended.providers.fail("evolution", answer)

        care = await tokens.refresher.care(key, "evolution")

        assert care.state == "active"
        assert await tended.alerts() == {}
        assert (await tended.token(key))["next_at"] <= await tended.now() + HOUR

    async def test_a_private_integration_token_is_probed_daily_and_told_of_ahead(self, tended, tokens):
        key = await tended.connect("gohighlevel_pit", account="loja", ends=5 * DAY)
        began = await tended.now()
        await tokens.refresher.care(key, "gohighlevel_pit")
        await tended.tend(tokens, key, "gohighlevel_pit", until=began + 3.5 * DAY)

        assert tended.providers.probes["gohighlevel_pit"] == 4
        assert (await tended.alerts())["token_expiring"]["threshold"] == "3"


# What a provider says -> state, code, alerts with who must act, and a word of each sentence. TOKENS section 2, end to end.
ANSWERS = {
    "reconnect: RFC": ("google", (400, {"error": "invalid_grant"}), "needs_reconnect", "token_needs_reconnect", "account owner", "Conecte", "again"),
    "reconnect: a description that is no text (46)": (
        "google", (400, {"error": "invalid_grant", "error_description": {"a": [1]}}), "needs_reconnect", "token_needs_reconnect", "account owner", "revogado", "revoked"),
    "reconnect: X": (
        "x", (400, {"error": "invalid_request", "error_description": "Value passed for the token was invalid."}), "needs_reconnect", "token_needs_reconnect", "account owner", "Conecte", "again"),
    "reconnect: Meta 190": (
        "facebook", (400, {"error": {"code": 190, "error_subcode": 460, "message": "x", "type": "OAuthException"}}), "needs_reconnect", "token_needs_reconnect", "account owner", "Conecte", "again"),
    "permission: Meta 10": (
        "threads", (400, {"error": {"code": 10, "message": "x", "type": "OAuthException"}}), "permission", "token_permission", "account owner", "permissões", "permission"),
    "permission: RFC": ("pinterest", (400, {"error": "invalid_scope"}), "permission", "token_permission", "account owner", "permissões", "permission"),
    "permission: TikTok": ("tiktok", (401, {"error": "scope_not_authorized"}), "permission", "token_permission", "account owner", "permissões", "permission"),
    "suspended": (
        "gohighlevel", (400, {"statusCode": 400, "message": "Location is not active", "error": "Bad Request"}), "suspended", "token_suspended", "account owner", "reative", "activate"),
    "app": ("linkedin", (401, {"error": "invalid_client"}), "app_error", "app_error", "operator", "client_secret", "client_secret"),
}  # fmt: skip


class TestWhatAProviderSays:
    @pytest.mark.parametrize(
        ("integration", "answer", "state", "cause", "who", "portuguese", "english"), ANSWERS.values(), ids=ANSWERS
    )
    async def test_a_refusal_is_one_alert_for_the_right_person_and_ends_when_cured(
        self, tended, tokens, events, integration, answer, state, cause, who, portuguese, english
    ):
        key = await tended.connect(integration, ends=MINUTE, issued=-2 * DAY)
        tended.providers.fail(integration, answer)

        care = await tokens.refresher.care(key, integration)
        alerts = await tended.alerts()
        health = await tended.conn.fetchrow("select state, who_must_act, last_error_class from reactor.token_health")
        count = (await tended.conn.fetchval("select reactor.status()"))["alerts_open"]
        row = await tended.row(key)
        granted = tended.providers.seed(integration)
        await tended.conn.execute(
            "update tokens set access_token = $1, refresh_token = $2, issued_at = now() - interval '2 days', expires_at = now() + interval '59 days'",
            *granted.values(),
        )
        await tokens.refresher.care(key, integration)
        await tokens.refresher.sweep()

        assert (care.action, care.state) == ("refused", state)
        assert set(alerts) == {cause}
        assert alerts[cause]["who"] == who
        assert portuguese in alerts[cause]["do"]["pt"]
        assert english in alerts[cause]["do"]["en"]
        assert tuple(health) == (state, who, care.code)
        assert (row["state"], row["state_reason"], count) == (state, care.code, 1)
        assert row["refresh_token"] is not None or integration in {"facebook", "threads"}  # nothing is deleted
        assert [event["cause"] for event in events.named("alert_opened")] == [cause]
        assert [event["cause"] for event in events.named("alert_resolved")] == [cause]
        assert await tended.alerts() == {}
        assert (await tended.row(key))["state"] == "active"

    async def test_a_suspended_account_is_asked_again_slowly_and_cured_by_itself(self, tended, tokens):
        key = await tended.connect("gohighlevel", ends=MINUTE)
        began = await tended.now()
        tended.providers.fail(
            "gohighlevel",
            *[(400, {"statusCode": 400, "message": "Location is not active", "error": "Bad Request"})] * 3,
        )
        await tokens.refresher.care(key, "gohighlevel")
        said = set(await tended.alerts())
        await tended.tend(tokens, key, "gohighlevel", until=began + 19 * HOUR)

        assert said == {"token_suspended"}
        assert tended.providers.calls["gohighlevel"] == 4
        assert await tended.alerts() == {}
        assert await tended.holds_the_newest(key)

    async def test_what_nobody_understands_is_tried_five_times_then_said_and_then_daily(self, tended, tokens):
        key = await tended.connect("google", ends=MINUTE)
        tended.providers.fail("google", *[(418, {"tea": True})] * 6)
        said = []
        await tokens.refresher.care(key, "google")
        for _ in range(5):
            said.append("token_unknown_answer" in await tended.alerts())
            before = (await tended.token(key))["last_error_at"]
            await tokens.refresher.care(key, "google", now=(await tended.token(key))["next_at"])
            after = await tended.token(key)
        state, waits = after["state"], after["last_error_at"] - before
        alert = (await tended.alerts())["token_unknown_answer"]
        await tokens.refresher.care(key, "google", now=after["next_at"])

        assert said == [False, False, False, False, True]
        assert state == "active"  # never revoked by guess
        assert waits >= DAY
        assert alert["who"] == "operator"
        assert await tended.alerts() == {}

    async def test_a_refresh_that_is_late_is_said_while_the_token_still_lives(self, tended, tokens):
        key = await tended.connect("pinterest", ends=6 * DAY, issued=-24 * DAY)
        tended.providers.fail("pinterest", *[(503, "away")] * 1000)
        await tokens.refresher.care(key, "pinterest")
        due = (await tended.token(key))["next_at"]
        await tended.tend(tokens, key, "pinterest", until=due + DAY)
        early = set(await tended.alerts())
        await tended.tend(tokens, key, "pinterest", until=due + 4 * DAY)
        late = (await tended.alerts())["token_late"]

        assert early == set()
        assert late["who"] == "operator"
        assert (await tended.token(key))["ends_at"] > due + 4 * DAY

    @pytest.mark.parametrize(
        "body",
        [
            {"access_token": "CANARY-n", "expires_in": "3600"},  # 37
            {"access_token": "CANARY-n", "expires_in": "3600.0", "refresh_token": ""},
            {"access_token": "CANARY-n", "refresh_token": None},  # 38; google's own life of 1 h
        ],
    )
    async def test_a_success_keeps_what_it_does_not_bring(self, tended, tokens, body):
        key = await tended.connect("google", ends=MINUTE, scope="read")
        before = await tended.row(key)
        tended.providers.fail("google", (200, body))

        await tokens.refresher.care(key, "google")

        row, token = await tended.row(key), await tended.token(key)
        assert (row["access_token"], row["refresh_token"], row["scope"]) == (
            "CANARY-n",
            before["refresh_token"],
            "read",
        )
        assert row["expires_at"] == token["issued_at"] + HOUR

    @pytest.mark.parametrize(
        "body", [{"error": "oops"}, {"ok": True}, {"access_token": ""}, {"access_token": 7}, [], "null"]
    )
    async def test_a_200_without_a_token_saves_nothing_and_revokes_nobody(self, tended, tokens, body):
        """CASES 35."""
        key = await tended.connect("google", ends=MINUTE)
        before = dict(await tended.row(key))
        tended.providers.fail("google", (200, body))

        care = await tokens.refresher.care(key, "google")

        assert (care.action, care.state) == ("lost", "active")
        assert dict(await tended.row(key)) | {"updated_at": None} == before | {"updated_at": None}


class TestChildren:
    async def test_a_dead_parent_stops_its_children_and_is_said_once(self, tended, tokens):
        parent = await tended.connect("gohighlevel", ends=MINUTE, metadata={})
        children = [
            await tended.connect(
                "gohighlevel_location", account=f"loc{n}", ends=MINUTE, metadata={"companyId": "c1", "company_id": "c1"}
            )
            for n in range(3)
        ]
        tended.providers.revoke((await tended.row(parent))["refresh_token"])

        for child in children:
            await tokens.refresher.care(child, "gohighlevel_location")

        assert set(await tended.alerts()) == {"token_needs_reconnect"}
        assert await tended.conn.fetchval("select count(*) from reactor.alerts") == 1
        assert {await tended.state(child) for child in children} == {("needs_reconnect", "parent")}
