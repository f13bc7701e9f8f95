"""What a review and a saboteur found once, each with the behaviour that is right."""

from __future__ import annotations

import anyio
import anyio.to_thread
import pytest
from conftest import command
from proxy import proxy_to
from tending import DAY, HOUR, tended_tokens

from reactor import NeedsReconnect, Unavailable
from reactor.sealing import generate

MINUTE = HOUR / 60
CONTAS = "create table contas (id serial primary key, tenant_id text, ficha text, renova text, ate timestamptz, situacao text)"
ATTACH = "select reactor.attach_tokens('contas', 'google', access_token_column => 'ficha', refresh_token_column => 'renova', expires_at_column => 'ate')"


@pytest.fixture
async def tended(dsn, conn, tmp_path, monkeypatch):
    async with tended_tokens(dsn, conn, tmp_path, monkeypatch) as tended:
        yield tended


async def while_called(tended, tokens, key, integration, change):
    """What came of a refresh during whose call `change` was made."""
    tended.providers.fail(integration, "gate")
    async with anyio.create_task_group() as tasks:
        cares = []

        async def care():
            cares.append(await tokens.refresher.care(key, integration))

        tasks.start_soon(care)
        with anyio.fail_after(30):
            while tended.providers.calls[integration] == 0:
                await anyio.sleep(0.01)
        await change()
        tended.providers.gate.set()
    return cares[0]


class TestWhileTheProviderIsAsked:
    async def test_sealing_the_row_does_not_lose_the_new_token(self, tended):
        key = await tended.connect("x", ends=MINUTE)
        async with tended.opened() as tokens:

            async def seal():
                tended.token_key = generate()[0]
                async with tended.opened() as sealing:
                    await sealing.refresher.care(key, "x")

            care = await while_called(tended, tokens, key, "x", seal)

        assert (care.action, care.state) == ("saved", "active")
        assert tended.providers.calls["x"] == 1
        assert tended.providers.works((await tended.row(key))["access_token"])

    async def test_renaming_the_account_does_not_lose_the_new_token(self, tended):
        key = await tended.connect("x", ends=MINUTE, account="antiga")
        async with tended.opened() as tokens:
            care = await while_called(
                tended, tokens, key, "x", lambda: tended.conn.execute("update tokens set account = 'nova'")
            )
            token = await tokens.ensure_fresh("acme", "x", "nova")

        assert care.action == "saved"
        assert tended.providers.works(token)
        assert tended.providers.calls["x"] == 1


async def test_a_reactor_that_does_not_know_an_integration_leaves_its_plan_alone(tended, monkeypatch):
    tended.toml = tended.providers.toml(tended.folder, acme={"strategy": "oauth2"})
    for name, value in tended.providers.env.items():
        monkeypatch.setenv(name, value)
    key = await tended.connect("acme", ends=2 * HOUR)
    async with tended.opened() as knowing:
        await knowing.refresher.care(key, "acme")
    planned = await tended.token(key)
    async with tended.opened(integrations=None) as ignorant:
        await ignorant.refresher.care(key, "acme")
        late = await ignorant.refresher.care(key, "acme", now=await tended.now() + 3 * HOUR)
        alerts = set(await tended.alerts())
    seen = await tended.token(key)
    async with tended.opened() as knowing:
        care = await knowing.refresher.care(key, "acme", now=await tended.now() + 5 * HOUR)

    assert (seen["state"], seen["can_refresh"], seen["ends_at"]) == ("active", True, planned["ends_at"])
    assert (late.action, alerts) == (
        "wait",
        {"token_unknown_integration", "token_late"},
    )  # it is, and nobody else may be there
    assert care.action == "saved"
    assert await tended.alerts() == {}


async def test_a_child_asks_its_parent_once_and_then_speaks_for_itself_until_the_parent_is_new(tended):
    parent = await tended.connect("facebook", ends=50 * DAY, issued=-2 * DAY)
    child = await tended.connect("facebook_page", account="77")
    refusal = (400, {"error": {"message": "Invalid OAuth access token.", "type": "OAuthException", "code": 190}})
    tended.providers.fail("facebook_page", refusal, refusal)
    async with tended.opened() as tokens:
        await tokens.refresher.care(parent, "facebook")
        await tokens.refresher.care(child, "facebook_page")
        first, asked = await tended.state(child), (await tended.token(parent))["requested_at"]
        await tokens.refresher.care(child, "facebook_page", now=await tended.now() + 2 * HOUR)
        second, alerts = await tended.state(child), set(await tended.alerts())
        await tokens.refresher.care(parent, "facebook")
        woken = (await tended.token(child))["requested_at"]
        await tokens.refresher.care(child, "facebook_page")

    assert first == ("needs_reconnect", "parent")
    assert asked is not None
    assert second[0] == "needs_reconnect"
    assert second[1] != "parent"
    assert alerts == {"token_needs_reconnect"}
    assert woken is not None
    assert await tended.state(child) == ("active", None)
    assert await tended.alerts() == {}


async def test_who_wants_a_token_to_live_longer_than_any_does_not_refresh_it_at_every_call(tended):
    await tended.connect("x", ends=MINUTE, issued=-2 * HOUR)
    async with tended.opened() as tokens:
        for _ in range(3):
            await tokens.ensure_fresh("acme", "x", min_ttl_s=86_400)

    assert tended.providers.calls["x"] == 1


async def test_a_life_of_a_second_is_refreshed_once_a_minute_at_most(tended):
    key = await tended.connect("oauth2", ends=MINUTE)
    tended.providers.lives["oauth2"] = (1.0, None)
    async with tended.opened() as tokens:
        await tokens.refresher.care(key, "oauth2")
        again = await tokens.refresher.care(key, "oauth2")

    assert again.action == "wait"
    assert (await tended.token(key))["next_at"] >= (await tended.now()) + MINUTE * 0.8


async def test_an_issue_date_in_the_future_does_not_put_the_refresh_after_the_end(tended):
    key = await tended.connect("x", ends=HOUR, issued=3 * HOUR)
    async with tended.opened() as tokens:
        await tokens.refresher.care(key, "x")

    token = await tended.token(key)
    assert token["next_at"] < token["ends_at"]


async def test_a_pasted_key_works_without_its_line_end(tended):
    key = await tended.connect("static_key")
    granted = (await tended.row(key))["access_token"]
    await tended.conn.execute("update tokens set access_token = access_token || e'\\r\\n'")
    async with tended.opened() as tokens:
        care = await tokens.refresher.care(key, "static_key")
        token = await tokens.ensure_fresh("acme", "static_key")

    assert (care.action, token) == ("probed", granted)


async def test_a_key_that_no_probe_can_prove_becomes_an_alert(tended):
    key = await tended.connect("static_key")
    tended.providers.fail("static_key", *[(503, {})] * 6)
    async with tended.opened() as tokens:
        for _ in range(5):
            now = (await tended.token(key) or {"next_at": None})["next_at"] or await tended.now()
            await tokens.refresher.care(key, "static_key", now=now)

    assert set(await tended.alerts()) == {"token_unknown_answer"}


async def test_an_access_token_whose_refresh_was_lost_is_given_out_while_it_lives(tended):
    key = await tended.connect("x", ends=5 * MINUTE)
    tended.providers.fail("x", "truncated", "truncated")
    async with tended.opened() as tokens:
        await tokens.refresher.care(key, "x")
        await tokens.refresher.care(key, "x")
        token = await tokens.ensure_fresh("acme", "x")

    assert await tended.state(key) == ("needs_reconnect", "answer_lost")
    assert token == (await tended.row(key))["access_token"]


async def test_a_connection_that_went_silent_is_given_up_at_the_deadline_and_the_next_one_answers(tended, dsn):
    await tended.connect("google", ends=50 * MINUTE)
    async with proxy_to(dsn) as proxy, tended.opened(database_url=proxy.dsn) as tokens:
        for _ in range(2):  # over the connection that is kept
            before = await tokens.ensure_fresh("acme", "google")
        proxy.cut("up", "down")
        with anyio.fail_after(30), pytest.raises(Unavailable):
            await tokens.ensure_fresh("acme", "google", deadline_s=0.5)
        proxy.mend()
        with anyio.fail_after(30):
            after = await tokens.ensure_fresh("acme", "google")

    assert before == after


class TestAnotherTable:
    @pytest.fixture
    async def contas(self, tended):
        await tended.conn.execute(CONTAS)
        await tended.conn.execute(ATTACH)
        await tended.conn.execute(
            "insert into contas (tenant_id, ficha, ate) values ('beta', 'ficha-1', now() + interval '1 day')"
        )
        return tended

    async def test_that_lost_a_column_is_an_alert_and_stops_no_other(self, contas, events):
        await contas.connect("google", ends=50 * MINUTE)
        async with contas.opened() as tokens:
            await contas.conn.execute("alter table contas rename ficha to outra")
            fresh = await tokens.ensure_fresh("acme", "google")
            with pytest.raises(Unavailable) as broken:
                await tokens.ensure_fresh("beta", "google")
            await contas.conn.execute("delete from reactor.jobs")
            found = await tokens.refresher.reconcile(7 * DAY)
            alerts = await contas.alerts()
            await contas.conn.execute(ATTACH.replace("'ficha'", "'outra'"))
            await tokens.refresher.reconcile(7 * DAY)

        assert contas.providers.works(fresh)
        assert broken.value.code == "sqlstate_42703"
        assert found == 1  # that of the other table
        assert set(alerts) == {"token_table_broken"}
        assert [
            (event["event"], event["cause"], event["subject"])
            for name in ("alert_opened", "alert_resolved")
            for event in events.named(name)
        ] == [
            ("alert_opened", "token_table_broken", "public.contas"),
            ("alert_resolved", "token_table_broken", "public.contas"),
        ]
        assert await contas.alerts() == {}

    async def test_that_somebody_locks_keeps_nobody_waiting(self, contas, dsn):
        await contas.connect("google", ends=50 * MINUTE)
        async with contas.opened() as tokens:
            await tokens.ensure_fresh("acme", "google")
            async with contas.conn.transaction():
                await contas.conn.execute("lock table contas in access exclusive mode")
                with anyio.fail_after(30):
                    fresh = await tokens.ensure_fresh("acme", "google")
                    with pytest.raises(Unavailable) as locked:
                        await tokens.ensure_fresh("beta", "google")

        assert contas.providers.works(fresh)
        assert locked.value.code == "sqlstate_55P03"

    async def test_that_is_detached_has_no_token_from_then_on(self, contas):
        async with contas.opened() as tokens:
            await tokens.ensure_fresh("beta", "google")
            await contas.conn.execute("select reactor.detach_tokens('contas')")
            await contas.conn.execute("update contas set ate = now()")
            with anyio.fail_after(20), pytest.raises(NeedsReconnect) as missing:
                await tokens.ensure_fresh("beta", "google")

        assert missing.value.state == "missing"

    async def test_that_refuses_a_word_on_its_state_is_cared_for_all_the_same(self, tended):
        await tended.conn.execute(CONTAS)
        await tended.conn.execute("alter table contas add check (situacao in ('boa', 'ruim'))")
        source = await tended.conn.fetchval(ATTACH.replace(")", ", state_column => 'situacao')"))
        await tended.conn.execute(
            "insert into contas (tenant_id, ficha, ate, situacao) values ('beta', 'CANARY-1', now() + interval '40 days', 'boa')"
        )
        async with tended.opened() as tokens:
            token = await tokens.ensure_fresh("beta", "google")

        assert token == "CANARY-1"
        assert source > 0
        assert {cause: detail["reason"] for cause, detail in (await tended.alerts()).items()} == {
            "token_not_saved": "sqlstate_23514"
        }

    async def test_may_have_a_per_cent_sign_in_its_names(self, tended):
        await tended.conn.execute('create table "100%" (id serial primary key, tenant_id text, "% ficha" text)')
        await tended.conn.execute(
            "select reactor.attach_tokens('\"100%\"', 'static_key', access_token_column => '% ficha')"
        )
        await tended.conn.execute("insert into \"100%\" (tenant_id, \"% ficha\") values ('acme', 'k')")

        assert [job[:3] for job in await tended.owed()] == [("acme", "1", "tokens:static_key")]


async def test_the_tokens_of_a_table_that_lost_a_column_are_shown_all_the_same(tended):
    key = await tended.connect("x", ends=2 * HOUR)
    async with tended.opened() as tokens:
        await tokens.refresher.care(key, "x")
    plain = await tended.conn.fetchval("select reactor.holds_plain_tokens()")
    await tended.conn.execute("alter table tokens rename access_token to outra")

    shown = await anyio.to_thread.run_sync(lambda: command("tokens", dsn=tended.dsn))

    assert plain is True
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[:3] for line in shown.stdout.splitlines()[1:]] == [["acme", "x", "active"]]
