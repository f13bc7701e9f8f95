"""A token in a table has one job, due in time; its table is its owner's, and no tenant reaches another's."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import pytest
from conftest import connect, drained, eventually, running_reactor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producing import impatient, warnings_of
from tending import DAY, HOUR, jobs_of, tended_tokens

from reactor import db
from reactor.refresher import TokenKey

MINUTE = timedelta(minutes=1)


@pytest.fixture
async def tended(dsn, conn, tmp_path, monkeypatch):
    async with tended_tokens(dsn, conn, tmp_path, monkeypatch) as tended:
        yield tended


@pytest.fixture
async def tokens(tended):
    async with tended.opened() as tokens:
        yield tokens


async def forget_jobs(conn):
    await conn.execute("delete from reactor.jobs")


ROW = "insert into tokens (tenant_id, integration, access_token) values ($1, $2, 'secret') returning id"


# --- the trigger: one due job in the producer's own transaction


class TestWriting:
    async def test_a_committed_token_has_one_job_due_at_once_and_a_rolled_back_one_has_none(self, conn):
        with pytest.raises(ZeroDivisionError):
            async with conn.transaction():
                await conn.execute(ROW, "acme", "x")
                raise ZeroDivisionError
        row = await conn.fetchval(ROW, "acme", "google")

        [(tenant, id_, lane, due_s)] = await jobs_of(conn)
        assert (tenant, id_, lane) == ("acme", str(row), "tokens:google")
        assert due_s <= 0

    async def test_its_job_carries_no_secret_only_the_place_of_the_row(self, conn):
        row = await conn.fetchval(ROW, "acme", "x")

        source = await conn.fetchval("select id from reactor.token_sources")
        assert await conn.fetchval("select payload from reactor.jobs") == {"source": source, "id": str(row)}

    @pytest.mark.parametrize(
        "change",
        [
            "access_token = 'another'",
            "refresh_token = 'first'",
            "sealed_access_token = 'hpke1.x.y'",
            "expires_at = now()",
            "issued_at = now()",
            "refresh_expires_at = now()",
            "account = 'another'",
            "state = 'needs_reconnect'",
            'metadata = \'{"parent_account": "a"}\'',
            "scope = 'read'",
            "tenant_id = 'beta'",
            "id = 4711",
            "access_token = null",
        ],
    )
    async def test_a_change_of_what_matters_owes_a_look(self, conn, change):
        await conn.execute(ROW, "acme", "x")
        await forget_jobs(conn)

        await conn.execute(f"update tokens set {change}")

        assert {due_s <= 0 for *_, due_s in await jobs_of(conn)} == {True}

    @pytest.mark.parametrize(
        "change",
        ["updated_at = now()", "access_token = access_token", "version = 9", "state_reason = 'x'", "access_token = ''"],
    )
    async def test_a_change_of_anything_else_owes_nothing(self, conn, change):
        await conn.execute(ROW, "acme", "x")
        await forget_jobs(conn)

        await conn.execute(f"update tokens set {change}")

        assert await jobs_of(conn) == []

    async def test_a_changed_tenant_and_a_changed_key_owe_a_look_at_both_places(self, conn):
        first = await conn.fetchval(ROW, "acme", "x")
        await forget_jobs(conn)

        await conn.execute("update tokens set tenant_id = 'beta'")
        moved = await jobs_of(conn)
        await forget_jobs(conn)
        await conn.execute("update tokens set id = 4711")

        assert sorted(job[:2] for job in moved) == [("acme", str(first)), ("beta", str(first))]
        assert sorted(job[:2] for job in await jobs_of(conn)) == sorted([("beta", str(first)), ("beta", "4711")])

    async def test_two_rows_that_swap_their_tokens_are_both_looked_at(self, conn):
        ids = [str(await conn.fetchval(ROW, "acme", name)) for name in ("x", "google")]
        await conn.execute("update tokens set access_token = id::text")
        await forget_jobs(conn)

        await conn.execute("update tokens t set access_token = o.access_token from tokens o where o.id <> t.id")

        assert sorted(job[1] for job in await jobs_of(conn)) == sorted(ids)

    async def test_an_upsert_owes_a_look_where_it_changed_something(self, conn):
        upsert = """insert into tokens (tenant_id, integration, access_token) values ('acme', 'x', $1)
            on conflict (tenant_id, integration, account) do update set access_token = excluded.access_token"""
        await conn.execute(upsert, "first")
        inserted = await jobs_of(conn)
        await forget_jobs(conn)
        await conn.execute(upsert, "first")
        same = await jobs_of(conn)
        await conn.execute(upsert, "second")

        assert (len(inserted), same, len(await jobs_of(conn))) == (1, [], 1)

    async def test_a_reconnect_that_writes_an_empty_refresh_token_keeps_the_old_one(self, conn):
        """CASES 31."""
        await conn.execute(
            "insert into tokens (tenant_id, integration, access_token, refresh_token) values ('acme', 'x', 'a', 'r')"
        )

        await conn.execute("update tokens set access_token = 'a2', refresh_token = ''")

        assert tuple(await conn.fetchrow("select access_token, refresh_token from tokens")) == ("a2", "r")

    async def test_a_row_without_any_secret_is_no_token(self, conn):
        await conn.execute("insert into tokens (tenant_id, integration) values ('acme', 'x')")
        await conn.execute(
            "insert into tokens (tenant_id, integration, access_token, refresh_token) values ('acme', 'google', '', '')"
        )
        await conn.execute("update tokens set scope = 'read'")

        assert await jobs_of(conn) == []
        assert await conn.fetchval("select count(*) from reactor.rejected") == 0

    async def test_a_truncate_owes_a_look_at_all_of_them(self, conn):
        await conn.execute(ROW, "acme", "x")
        await forget_jobs(conn)

        await conn.execute("truncate tokens")

        assert [row[0] for row in await conn.fetch("select type from reactor.jobs")] == ["reconcile_tokens"]

    async def test_a_thousand_tokens_are_one_insert_and_one_notification(self, conn, dsn):
        heard = []
        listener = await connect(dsn)
        await listener.add_listener("reactor_wake", lambda *_: heard.append(1))
        assert await listener.fetchval("select reactor.arm()") == "armed"
        await conn.execute("""
            create table statements (n int);
            create function count_statements() returns trigger language plpgsql security definer as 'begin insert into public.statements values (1); return null; end';
            create trigger count_statements after insert on reactor.jobs for each statement execute function count_statements()""")

        await conn.execute(
            "insert into tokens (tenant_id, integration, access_token) select 't' || g, 'x', 's' from generate_series(1, 1000) g"
        )
        await listener.execute("select 1")
        await listener.close()

        assert await conn.fetchval("select count(*) from statements") == 1
        assert len(await jobs_of(conn)) == 1000
        assert len(heard) <= 1

    async def test_a_copy_owes_as_many_jobs_as_rows(self, conn):
        await conn.copy_records_to_table(
            "tokens",
            records=[(f"t{n}", "x", "s") for n in range(500)],
            columns=["tenant_id", "integration", "access_token"],
        )

        assert len(await jobs_of(conn)) == 500

    @pytest.mark.parametrize(
        ("tenant", "integration"), [("", "x"), ("a" * 201, "x"), ("acme", ""), ("acme", "i" * 191)]
    )
    async def test_a_token_of_nobody_is_rejected_and_its_producer_goes_on(self, conn, tenant, integration):
        await conn.execute(ROW, tenant, integration)

        assert await jobs_of(conn) == []
        assert await conn.fetchval("select reason from reactor.rejected") == "token"

    async def test_one_that_becomes_nobodys_is_rejected_too(self, conn):
        await conn.execute(ROW, "acme", "x")

        await conn.execute("update tokens set tenant_id = ''")
        await conn.execute("update tokens set scope = 'read'")

        assert await conn.fetchval("select count(*) from reactor.rejected") == 2

    async def test_a_trigger_that_fails_warns_and_the_token_is_written(self, conn):
        await conn.execute("alter table reactor.jobs rename to jobs_away")

        async with warnings_of(conn) as heard:
            await conn.execute(ROW, "acme", "x")

        await conn.execute("alter table reactor.jobs_away rename to jobs")
        assert [warning.message.split(" (")[0] for warning in heard] == [
            "reactor: a change of the tokens in public.tokens was not recorded"
        ]
        assert await conn.fetchval("select count(*) from tokens") == 1

    async def test_no_producer_waits_for_a_look_at_another_token_or_for_another_producer(self, tended, dsn, tokens):
        mine, theirs = await tended.connect("x"), await tended.connect("google")
        async with impatient(dsn) as producer, tended.conn.transaction():
            await tended.conn.execute(
                "select * from reactor.look_at_token($1, $2, $3, 'x', '{}', 'h', 'p', '1 min')", *key_of(mine)
            )

            await producer.execute("update tokens set access_token = 'new' where id = $1", int(theirs.source_id))
            await producer.execute(ROW, "beta", "x")


def key_of(key: TokenKey):
    return key.source, key.tenant_id, key.source_id


# --- the plan: what the first look makes of it


class TestPlanning:
    async def test_a_look_leaves_one_job_at_its_margin_before_the_end_up_to_a_tenth_of_it_later(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR, issued=timedelta())

        care = await tokens.refresher.care(key, "x")

        token = await tended.token(key)
        assert care.action == "wait"
        assert await tended.due() == [token["next_at"]]
        assert token["ends_at"] - 15 * MINUTE <= token["next_at"] <= token["ends_at"] - 15 * MINUTE * 0.9

    async def test_many_tokens_that_end_together_are_not_due_together(self, tended, tokens):
        keys = [await tended.connect("x", tenant=f"t{n}", ends=2 * HOUR) for n in range(20)]

        for key in keys:
            await tokens.refresher.care(key, "x")

        due = await tended.due()
        assert len(set(due)) > 15
        assert max(due) - min(due) <= 90 * timedelta(seconds=1) + timedelta(seconds=20)

    async def test_a_token_that_is_too_young_waits_for_its_minimum_age(self, tended, tokens):
        """Instagram's: due by its margin of 20 d, and not 24 h old."""
        key = await tended.connect("instagram", ends=5 * DAY, issued=-HOUR)

        await tokens.refresher.care(key, "instagram")

        token = await tended.token(key)
        assert token["next_at"] >= token["issued_at"] + DAY
        assert tended.providers.calls["instagram"] == 0

    async def test_a_token_whose_refresh_is_asked_for_waits_for_its_minimum_age_too(self, tended, tokens):
        key = await tended.connect("instagram", ends=60 * DAY, issued=-HOUR)
        await tokens.refresher.care(key, "instagram")

        await tended.conn.fetch("select * from reactor.request_refresh('acme', 'instagram')")
        await tokens.refresher.care(key, "instagram")
        token = await tended.token(key)
        calls = tended.providers.calls["instagram"]
        await tokens.refresher.care(key, "instagram", now=token["next_at"])

        assert (calls, token["next_at"]) == (0, token["issued_at"] + DAY)
        assert tended.providers.calls["instagram"] == 1

    async def test_a_margin_is_never_as_long_as_the_life(self, tended, tokens):
        """CASES 28: a margin of 15 min before lives of 10 min would refresh on and on."""
        tended.providers.lives["x"] = (600, None)
        key = await tended.connect("x", ends=10 * MINUTE, issued=timedelta())
        began = await tended.now()
        await tokens.refresher.care(key, "x")

        await tended.tend(tokens, key, "x", until=began + 2 * HOUR)

        assert 12 <= tended.providers.calls["x"] <= 24

    async def test_a_row_whose_own_trigger_keeps_the_old_expiry_is_not_refreshed_on_and_on(self, tended, tokens):
        """CASES 23."""
        await tended.conn.execute("""
            create function keep_expiry() returns trigger language plpgsql as $$ begin new.expires_at := old.expires_at; return new; end $$;
            create trigger keep_expiry before update on tokens for each row execute function keep_expiry()""")
        key = await tended.connect("x", ends=-HOUR)
        began = await tended.now()
        await tokens.refresher.care(key, "x")

        await tended.tend(tokens, key, "x", until=began + HOUR)

        assert tended.providers.calls["x"] <= 12

    async def test_a_refreshable_token_of_unknown_end_is_refreshed_to_learn_it(self, tended, tokens):
        key = await tended.connect("x")

        care = await tokens.refresher.care(key, "x")

        assert (care.action, tended.providers.calls["x"]) == ("saved", 1)
        assert (await tended.row(key))["expires_at"] == (await tended.token(key))["issued_at"] + 2 * HOUR

    async def test_one_of_which_not_even_the_answer_names_an_end_is_not_refreshed_on_and_on(self, tended, tokens):
        tended.providers.lives["oauth2"] = (None, None)
        key = await tended.connect("oauth2")
        began = await tended.now()
        await tokens.refresher.care(key, "oauth2")

        await tended.tend(tokens, key, "oauth2", until=began + 7 * DAY)

        assert tended.providers.calls["oauth2"] == 1
        assert tended.providers.probes["oauth2"] == 6

    async def test_an_expired_token_is_refreshed_now_where_its_provider_does_that(self, tended, tokens):
        """CASES 29."""
        key = await tended.connect("x", ends=-DAY)

        care = await tokens.refresher.care(key, "x")

        assert (care.action, care.state) == ("saved", "active")
        assert await tended.holds_the_newest(key)

    async def test_an_expired_one_that_nobody_can_refresh_is_expired_and_its_owner_is_told(self, tended, tokens):
        key = await tended.connect("linkedin", ends=-DAY, refresh_token=None)

        care = await tokens.refresher.care(key, "linkedin")

        assert care.state == "expired"
        assert (await tended.row(key))["state"] == "expired"
        assert set(await tended.alerts()) == {"token_expired"}
        assert await tended.due() == []

    async def test_a_static_key_is_probed_at_once_and_then_daily(self, tended, tokens):
        key = await tended.connect("static_key")
        began = await tended.now()

        care = await tokens.refresher.care(key, "static_key")
        await tended.tend(tokens, key, "static_key", until=began + 3.5 * DAY)

        assert care.action == "probed"
        assert tended.providers.probes["static_key"] == 4
        assert await tended.alerts() == {}

    async def test_a_token_whose_only_secret_is_a_refresh_token_gets_an_access_token(self, tended, tokens):
        """A migration from elsewhere brings refresh tokens only."""
        key = await tended.connect("x", access_token=None)

        await tokens.refresher.care(key, "x")

        assert tended.providers.works((await tended.row(key))["access_token"])

    async def test_threads_renews_with_the_access_token_and_needs_no_refresh_token(self, tended, tokens):
        """CASES 34."""
        key = await tended.connect("threads", ends=3 * DAY, issued=-57 * DAY)

        care = await tokens.refresher.care(key, "threads")

        assert care.action == "saved"
        assert (await tended.row(key))["expires_at"] > await tended.now() + 59 * DAY

    async def test_an_integration_nobody_knows_is_said_and_cured_by_its_table(self, tended, tokens):
        await tended.conn.execute(ROW, "acme", "orkut")
        row = await tended.conn.fetchval("select id::text from tokens")
        key = TokenKey(tended.source, "acme", row)
        await tokens.refresher.care(key, "orkut")
        alerts = await tended.alerts()

        tended.toml.write_text(tended.toml.read_text() + '[orkut]\nstrategy = "static_key"\n')
        async with tended.opened() as later:
            await later.refresher.care(key, "orkut")

        assert set(alerts) == {"token_unknown_integration"}
        assert await tended.alerts() == {}

    async def test_two_due_jobs_of_a_token_become_one(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        for n in range(3):
            await tended.conn.execute("update tokens set scope = $1", f"s{n}")
        before = len(await tended.due())

        await tokens.refresher.care(key, "x")

        assert (before, len(await tended.due())) == (4, 1)


class TestLooking:
    """What becomes of a token whose row changed."""

    async def test_a_deleted_row_ends_its_alerts_and_nothing_is_kept(self, tended, tokens):
        key = await tended.connect("linkedin", ends=-DAY, refresh_token=None)
        await tokens.refresher.care(key, "linkedin")
        await tended.conn.execute("delete from tokens")

        care = await tokens.refresher.care(key, "linkedin")

        assert care.action == "gone"
        assert await tended.token(key) is None
        assert await tended.alerts() == {}

    async def test_a_row_whose_secrets_are_taken_away_is_forgotten(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")

        await tended.conn.execute("update tokens set access_token = null, refresh_token = null")
        await tokens.refresher.care(key, "x")

        assert await tended.token(key) is None

    async def test_a_row_that_names_no_integration_any_more_is_forgotten(self, conn, tended, tokens):
        await conn.execute("alter table tokens alter integration drop not null")
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")

        await conn.execute("update tokens set integration = null")
        await tokens.refresher.care(key, "x")

        assert await tended.token(key) is None

    async def test_a_row_that_changes_its_integration_is_looked_after_by_the_other_strategy(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")

        granted = tended.providers.seed("google")
        await tended.conn.execute(
            "update tokens set integration = 'google', access_token = $1, refresh_token = $2, expires_at = now() + interval '1 min'",
            *granted.values(),
        )
        await tokens.refresher.care(key, "x")

        assert (tended.providers.calls["x"], tended.providers.calls["google"]) == (0, 1)
        assert await tended.holds_the_newest(key)
        assert [lane for _, _, lane, _ in await tended.owed()] == ["tokens:google"]

    async def test_a_person_who_sets_the_state_back_to_active_asks_for_another_try(self, tended, tokens):
        key = await tended.connect("x", ends=MINUTE)
        tended.providers.fail("x", (400, {"error": "invalid_grant"}))
        await tokens.refresher.care(key, "x")
        refused = (await tended.row(key))["state"], set(await tended.alerts())

        await tended.conn.execute("update tokens set state = 'active'")
        care = await tokens.refresher.care(key, "x")

        assert refused == ("needs_reconnect", {"token_needs_reconnect"})
        assert care.action == "saved"
        assert await tended.alerts() == {}

    async def test_the_version_in_the_row_moves_with_every_new_token_and_never_back(self, tended, tokens):
        key = await tended.connect("x", ends=MINUTE, version=7)
        await tokens.refresher.care(key, "x")
        first = (await tended.row(key))["version"]
        await tended.conn.execute(
            "update tokens set access_token = 'another', version = 1, expires_at = now() + interval '1 h'"
        )
        await tokens.refresher.care(key, "x")

        assert first == 8
        assert (await tended.row(key))["version"] == 9

    async def test_what_is_written_back_rings_no_trigger_of_ours(self, tended, tokens):
        key = await tended.connect("x", ends=MINUTE)

        await tokens.refresher.care(key, "x")

        assert len(await tended.due()) == 1
        assert tended.providers.calls["x"] == 1

    async def test_no_column_that_is_not_named_is_touched(self, tended, tokens):
        await tended.conn.execute("alter table tokens add note text default 'mine', add touched int default 0")
        key = await tended.connect("x", ends=MINUTE)
        before = dict(await tended.row(key))

        await tokens.refresher.care(key, "x")

        after = dict(await tended.row(key))
        ours = {
            "access_token",
            "refresh_token",
            "issued_at",
            "expires_at",
            "refresh_expires_at",
            "scope",
            "version",
            "updated_at",
        }
        assert {name for name in after if after[name] != before[name]} == ours


# --- asking, telling


class TestAsking:
    async def test_a_requested_refresh_is_made_now_and_answers_without_a_token(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")
        before = await tended.token(key)

        [answer] = await tended.conn.fetch("select * from reactor.request_refresh('acme', 'x')")
        [due] = await tended.due()
        await tokens.refresher.care(key, "x")

        assert tuple(answer) == ("", "active", before["ends_at"])
        assert due <= await tended.now()
        assert tended.providers.calls["x"] == 1
        assert await tended.holds_the_newest(key)

    async def test_a_refresh_of_what_nobody_has_answers_no_row(self, conn):
        assert await conn.fetch("select * from reactor.request_refresh('acme', 'x')") == []

    async def test_a_refresh_is_requested_of_every_account_and_of_no_other_tenant(self, tended, tokens):
        for tenant, account in (("acme", "a"), ("acme", "b"), ("beta", "a")):
            key = await tended.connect("x", tenant=tenant, account=account, ends=2 * HOUR)
            await tokens.refresher.care(key, "x")

        accounts = [
            row["account"] for row in await tended.conn.fetch("select * from reactor.request_refresh('acme', 'x')")
        ]

        assert accounts == ["a", "b"]
        assert [job[0] for job in await tended.owed() if job[3] <= 0] == ["acme", "acme"]

    async def test_health_tells_how_a_token_is_and_never_the_token(self, tended, tokens):
        well = await tended.connect("x", ends=2 * HOUR, issued=timedelta())
        ends = await tended.connect("linkedin", ends=10 * DAY, refresh_token=None)
        for key, name in ((well, "x"), (ends, "linkedin")):
            await tokens.refresher.care(key, name)

        first, second = await tended.conn.fetch("select * from reactor.token_health order by token_id")

        assert (first["state"], first["who_must_act"], first["days_left"], first["can_refresh"]) == (
            "active",
            "nobody",
            None,
            True,
        )
        assert first["next_refresh"] == (await tended.token(well))["next_at"]
        assert (second["who_must_act"], round(second["days_left"]), second["can_refresh"]) == (
            "account owner",
            10,
            False,
        )
        assert "CANARY" not in repr([dict(first), dict(second)])


# --- the looks that find what was lost


class TestSweeping:
    async def sweep(self, tended, **ahead):
        return await tended.conn.fetch(
            "select * from reactor.sweep_tokens($1)", await tended.now() + timedelta(**ahead)
        )

    async def test_an_overdue_token_without_a_job_gets_one(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")
        await forget_jobs(tended.conn)

        await self.sweep(tended, hours=1)
        early = await tended.due()
        await self.sweep(tended, hours=3)
        await self.sweep(tended, hours=3)

        assert (early, len(await tended.due())) == ([], 1)

    async def test_a_token_whose_job_is_dead_is_found_too(self, tended, tokens):
        key = await tended.connect("x", ends=2 * HOUR)
        await tokens.refresher.care(key, "x")
        await tended.conn.execute("update reactor.jobs set status = 'dead'")

        await self.sweep(tended, hours=3)

        assert len(await tended.due()) == 1

    async def test_a_reconcile_gives_back_a_lost_job_finds_what_bypassed_the_triggers_and_forgets_what_went_so(
        self, tended, tokens
    ):
        kept, gone = await tended.connect("x", ends=2 * HOUR), await tended.connect("google", ends=2 * HOUR)
        for key, name in ((kept, "x"), (gone, "google")):
            await tokens.refresher.care(key, name)
        await forget_jobs(tended.conn)
        await tended.conn.execute("set session_replication_role = replica")
        await tended.conn.execute("delete from tokens where id = $1", int(gone.source_id))
        restored = await tended.connect("tiktok", ends=2 * HOUR)
        await tended.conn.execute("set session_replication_role = origin")
        before = await tended.due()

        found = await tokens.refresher.reconcile(7 * DAY)
        ids = [row for _, row, *_ in await tended.owed()]
        for key, name in ((kept, "x"), (gone, "google"), (restored, "tiktok")):
            await tokens.refresher.care(key, name)

        assert (before, found) == ([], 3)
        assert sorted(ids) == sorted(key.source_id for key in (kept, gone, restored))
        assert await tended.token(gone) is None
        assert (await tended.token(restored))["integration"] == "tiktok"
        assert await tokens.refresher.reconcile(7 * DAY) == 0

    async def test_what_waits_for_a_person_is_no_lost_job(self, tended, tokens):
        key = await tended.connect("x", ends=MINUTE)
        tended.providers.fail("x", (400, {"error": "invalid_grant"}))
        await tokens.refresher.care(key, "x")

        found = await tokens.refresher.reconcile(7 * DAY)
        await self.sweep(tended, days=30)

        assert (found, await tended.due()) == (0, [])
        assert set(await tended.alerts()) == {"token_needs_reconnect"}

    async def test_every_token_has_a_job_a_live_attempt_or_an_alert(self, tended, tokens):
        """Whatever was said to it (issue, item 1)."""
        answers = [(400, {"error": "invalid_grant"}), (401, {"error": "invalid_client"}), (400, {"error": "invalid_scope"}),
                   (503, "away"), "html:200", (418, {"tea": 1}), "reset_after", (429, {}, {"Retry-After": "60"})]  # fmt: skip
        for n, answer in enumerate(answers):
            key = await tended.connect("x", tenant=f"t{n}", ends=MINUTE)
            tended.providers.fail("x", answer)
            await tokens.refresher.care(key, "x")
        await self.sweep(tended)

        assert (
            await tended.conn.fetch("""
            select t.tenant_id, t.state from reactor.tokens t
            where not exists (select from reactor.jobs j where j.dedupe_key = format('token:%s:%s', t.source, t.source_id) and j.status in ('pending', 'failed'))
                and not exists (select from reactor.token_attempts a where a.token_id = t.id and a.status = 'live')
                and not exists (select from reactor.alerts a where a.resolved_at is null and a.subject in (reactor.token_subject(t), t.integration))""")
            == []
        )

    async def test_old_attempts_go_and_live_ones_stay(self, tended, tokens):
        key = await tended.connect("x", ends=MINUTE)
        await tokens.refresher.care(key, "x")
        await tended.conn.execute("update reactor.token_attempts set ended_at = now() - interval '8 days'")
        await tended.conn.execute("""
            insert into reactor.token_attempts (token_id, tenant_id, from_version, host, process, replays, started_at, deadline)
            values (1, 'acme', 1, 'h', 'p', 0, now() - interval '9 days', now() - interval '9 days')""")

        await tokens.refresher.reconcile(7 * DAY)

        assert [row[0] for row in await tended.conn.fetch("select status from reactor.token_attempts")] == ["live"]


async def test_status_counts_the_tokens_in_each_state(tended, tokens):
    """Random changes, on two connections: the counts that status shows equal a recount."""
    other = await connect(tended.dsn)
    states = ["active", "needs_reconnect", "app_error", "key_dead"]

    async def play(steps):
        await tended.conn.execute("delete from reactor.tokens")
        for kind, number, state, elsewhere in steps:
            conn = other if elsewhere else tended.conn
            if kind == "insert":
                await conn.execute(
                    "insert into reactor.tokens (source, source_id, tenant_id, integration, account, version, fingerprint, state) "
                    "values (1, $1, 'acme', 'x', '', 1, '', $2) on conflict do nothing",
                    str(number),
                    state,
                )
            elif kind == "update":
                await conn.execute("update reactor.tokens set state = $2 where source_id = $1", str(number), state)
            elif kind == "many":
                await conn.execute("update reactor.tokens set state = $1", state)
            elif kind == "delete":
                await conn.execute("delete from reactor.tokens where source_id = $1", str(number))
            else:
                await conn.execute("select reactor.reconcile_tokens(null)")
        recount = dict(await tended.conn.fetch("select state, count(*) from reactor.tokens group by 1"))
        assert (await tended.conn.fetchval("select reactor.status()"))["tokens"] == recount

    step = st.tuples(
        st.sampled_from(["insert", "insert", "update", "many", "delete", "reconcile"]),
        st.integers(1, 5),
        st.sampled_from(states),
        st.booleans(),
    )
    examples = []

    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(step, max_size=12))
    def invent(steps):
        examples.append(steps)

    invent()
    for steps in examples:
        await play(steps)
    await other.close()


# --- a table of the user's own

CONFIG = """
create table "Configuração do Cliente" (
    "Código" uuid primary key default gen_random_uuid(), "Inquilino" uuid not null, "Token do Instagram" text, "Vence em" timestamp,
    "Emitido em" timestamp, "Chave Stevo" varchar, instancia text, anotações text default 'minhas', versao int default 1
)"""
TENANT = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
ATTACH = """
select reactor.attach_tokens('"Configuração do Cliente"', 'instagram', tenant_column => 'Inquilino', id_column => 'Código',
    access_token_column => 'Token do Instagram', issued_at_column => 'Emitido em', expires_at_column => 'Vence em')
"""


@pytest.fixture
async def config(tended):
    await tended.conn.execute(CONFIG)
    return tended


class TestAttaching:
    async def insert(self, tended, *, ends=2 * DAY):
        granted = tended.providers.seed("instagram", TENANT)["access_token"]
        return granted, await tended.conn.fetchval(
            'insert into "Configuração do Cliente" ("Inquilino", "Token do Instagram", "Vence em", "Emitido em") '
            "values ($1, $2, (clock_timestamp() + $3) at time zone 'UTC', (now() - interval '50 days') at time zone 'UTC') returning \"Código\"::text",
            TENANT, granted, ends,
        )  # fmt: skip

    async def test_a_table_with_portuguese_names_uuid_keys_and_times_without_zone_is_refreshed_in_place(
        self, config, tokens
    ):
        source = await config.conn.fetchval(ATTACH)
        granted, id_ = await self.insert(config)

        care = await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        row = await config.conn.fetchrow('select * from "Configuração do Cliente"')
        assert care.action == "saved"
        assert row["Token do Instagram"] != granted
        assert config.providers.works(row["Token do Instagram"])
        in_60_days = (await config.now()).replace(tzinfo=None) + 60 * DAY
        assert abs(row["Vence em"] - in_60_days) < MINUTE
        assert row["anotações"] == "minhas"
        assert await tokens.ensure_fresh(TENANT, "instagram") == row["Token do Instagram"]

    async def test_rows_that_were_there_before_get_a_job_each(self, config, tokens):
        _, id_ = await self.insert(config)

        await config.conn.execute(ATTACH)
        look = await config.conn.fetchval("select type from reactor.jobs where lane = 'upkeep' and run_after <= now()")
        await tokens.refresher.reconcile(7 * DAY)  # as that job does

        assert look == "reconcile_tokens"

        assert [job[:3] for job in await config.owed()] == [(TENANT, id_, "tokens:instagram")]

    async def test_the_session_s_own_time_zone_and_date_style_change_nothing(self, config, tokens):
        source = await config.conn.fetchval(ATTACH)
        _, id_ = await self.insert(config, ends=HOUR)
        database = await config.conn.fetchval("select quote_ident(current_database())")
        await config.conn.execute(f"alter database {database} set timezone = 'America/Sao_Paulo'")
        await config.conn.execute(f"alter database {database} set datestyle = 'SQL, DMY'")
        async with config.opened() as elsewhere:
            await elsewhere.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        expires = await config.conn.fetchval('select "Vence em" from "Configuração do Cliente"')
        assert abs(expires - ((await config.now()).replace(tzinfo=None) + 60 * DAY)) < MINUTE

    async def test_several_integrations_stand_in_one_table(self, config, tokens):
        first = await config.conn.fetchval(ATTACH)
        second = await config.conn.fetchval("""
            select reactor.attach_tokens('"Configuração do Cliente"', 'stevo', tenant_column => 'Inquilino', id_column => 'Código',
                access_token_column => 'Chave Stevo', account_column => 'instancia')""")
        _, id_ = await self.insert(config, ends=40 * DAY)
        key = config.providers.seed("stevo", TENANT, "loja")["access_token"]
        await config.conn.execute('update "Configuração do Cliente" set "Chave Stevo" = $1, instancia = \'loja\'', key)

        cares = [
            await tokens.refresher.care(TokenKey(source, TENANT, id_), name)
            for source, name in ((first, "instagram"), (second, "stevo"))
        ]

        assert [care.action for care in cares] == ["wait", "probed"]
        assert sorted(lane for _, _, lane, _ in await config.owed()) == ["tokens:instagram", "tokens:stevo"]
        assert await config.conn.fetchval("select count(*) from reactor.tokens") == 2

    async def test_the_new_token_and_what_is_kept_of_it_are_saved_together_or_not_at_all(self, config, tokens):
        source = await config.conn.fetchval(ATTACH)
        granted, id_ = await self.insert(config)
        await config.conn.execute(
            "create function fails() returns trigger language plpgsql as 'begin raise exception ''no''; end'"
        )
        await config.conn.execute(
            "create trigger fails before update on reactor.token_attempts for each row when (new.status = 'saved') execute function fails()"
        )

        await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        assert await config.conn.fetchval('select "Token do Instagram" from "Configuração do Cliente"') == granted
        assert await config.conn.fetchval("select version from reactor.tokens") == 1

    async def test_detaching_resolves_its_alerts_and_forgets_it_and_the_table_stays(self, config, tokens):
        source = await config.conn.fetchval(ATTACH)
        granted, id_ = await self.insert(config)
        config.providers.revoke(granted)
        await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")
        alerts = set(await config.alerts())

        detached = await config.conn.fetchval("select reactor.detach_tokens('\"Configuração do Cliente\"')")
        await tokens.refresher.reconcile(7 * DAY)
        jobs = await config.owed()
        await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        assert (alerts, detached) == ({"token_needs_reconnect"}, True)
        assert [job[1] for job in jobs] == [id_]
        assert await config.alerts() == {}
        assert await config.conn.fetchval("select count(*) from reactor.tokens") == 0
        assert await config.conn.fetchval('select "Token do Instagram" from "Configuração do Cliente"') == granted
        assert (
            await config.conn.fetchval(
                "select count(*) from pg_trigger where tgrelid = '\"Configuração do Cliente\"'::regclass"
            )
            == 0
        )
        assert await config.conn.fetchval("select reactor.detach_tokens('\"Configuração do Cliente\"')") is False

    async def test_a_dropped_table_leaves_nothing_behind(self, config, tokens):
        source = await config.conn.fetchval(ATTACH)
        _, id_ = await self.insert(config, ends=40 * DAY)
        await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        await config.conn.execute('drop table "Configuração do Cliente"')
        await tokens.refresher.reconcile(7 * DAY)
        await tokens.refresher.care(TokenKey(source, TENANT, id_), "instagram")

        assert await config.conn.fetchval("select count(*) from reactor.tokens") == 0

    async def test_a_partitioned_table_is_seen_through_its_root_and_through_each_partition(self, tended, tokens):
        await tended.conn.execute("""
            create table parts (id bigint, tenant_id text, access_token text, expires_at timestamptz, primary key (id, tenant_id)) partition by list (tenant_id);
            create table parts_acme partition of parts for values in ('acme');
            create table parts_rest partition of parts default""")
        source = await tended.conn.fetchval(
            "select reactor.attach_tokens('parts', 'instagram', expires_at_column => 'expires_at')"
        )

        await tended.conn.execute("insert into parts values (1, 'acme', 's', now() + interval '59 days')")
        await tended.conn.execute("insert into parts_rest values (2, 'beta', 's', now() + interval '59 days')")
        inserted = await tended.owed()
        await forget_jobs(tended.conn)
        await tended.conn.execute("update parts set tenant_id = 'gamma' where id = 1")
        moved = await tended.owed()
        await tokens.refresher.care(TokenKey(source, "gamma", "1"), "instagram")

        assert [job[:2] for job in inserted] == [("acme", "1"), ("beta", "2")]
        assert sorted(job[:2] for job in moved) == [("acme", "1"), ("gamma", "1")]
        assert (await tended.token(TokenKey(source, "gamma", "1")))["state"] == "active"

    @pytest.mark.parametrize(
        ("arguments", "sqlstate", "message", "hint"),
        [
            ("'plain'", "22023", "integration => ... names the integration of every row, or integration_column => ... the column with it", None),
            ("'plain', 'x', integration_column => 'kind'", "22023", "integration => ... names the integration of every row, or integration_column => ... the column with it", None),
            ("'plain', ''", "22023", "an integration's name has 1 to 190 characters", None),
            ("'plain', 'x', access_token_column => 'tokn'", "42703", "table public.plain has no column tokn", "access_token_column => ... names the column; its columns are: id, tenant_id, access_token, short, day, kind, more, filled, always"),
            ("'plain', 'x', tenant_column => 'org'", "42703", "table public.plain has no column org", None),
            ("'plain', 'x', tenant_column => null", "42703", "table public.plain has no column null", None),
            ("'plain', 'x', access_token_column => 'short'", "42804", "column short of public.plain is a character varying(20), into which a longer token could not be saved", "alter table public.plain alter short type text"),
            ("'plain', 'x', refresh_token_column => 'day'", "42804", "column day of public.plain is a date, into which a longer token could not be saved", None),
            ("'plain', 'x', expires_at_column => 'day'", "42804", "column day of public.plain is a date, not a timestamp", "expires_at_column => null when the table has none"),
            ("'plain', 'x', sealed_access_token_column => 'kind'", "22023", "sealed tokens need both sealed_access_token_column and sealed_refresh_token_column", None),
            ("'plain', 'x', refresh_token_column => 'access_token'", "22023", "column access_token of public.plain is named twice", None),
            ("'plain', 'x', access_token_column => 'kind', sealed_access_token_column => 'access_token', sealed_refresh_token_column => 'more', refresh_token_column => 'filled'", "42804", "column filled of public.plain is not null, and what stands there in plain text is to be emptied once it is sealed", "alter table public.plain alter filled drop not null"),
            ("'plain', 'x', access_token_column => 'always'", "42804", "column always of public.plain is generated and cannot be written", None),
            ("'a_view', 'x'", "42809", "public.a_view is a view and cannot be attached", None),
            ("'reactor.tokens', 'x'", "42501", "reactor.tokens is not a producer's table", None),
        ],
    )  # fmt: skip
    async def test_what_cannot_be_attached_is_one_clear_line(self, conn, arguments, sqlstate, message, hint):
        await conn.execute("""
            create table plain (id bigint primary key, tenant_id text, access_token text, short varchar(20), day date, kind text, more text, filled text not null,
                always text generated always as (upper(kind)) stored);
            create view a_view as select * from plain""")

        with pytest.raises(asyncpg.PostgresError) as caught:
            await conn.execute(f"select reactor.attach_tokens({arguments})")

        assert (caught.value.sqlstate, caught.value.message) == (sqlstate, message)
        if hint is not None:
            assert caught.value.hint == hint
        assert await conn.fetchval("select count(*) from reactor.token_sources where relation = 'plain'::regclass") == 0

    async def test_attaching_again_changes_the_mapping_and_keeps_its_id(self, conn):
        await conn.execute("create table plain (id bigint primary key, tenant_id text, access_token text, other text)")
        first = await conn.fetchval("select reactor.attach_tokens('plain', 'x')")
        second = await conn.fetchval("select reactor.attach_tokens('plain', 'x', access_token_column => 'other')")
        await conn.execute("insert into plain values (1, 'acme', 'not this', null), (2, 'acme', null, 'this')")

        assert first == second
        assert [job[1] for job in await jobs_of(conn)] == ["2"]
        assert await conn.fetchval("select count(*) from pg_trigger where tgrelid = 'plain'::regclass") == 4


# --- one table, two uses; and whose rows are whose

BOTH = """
create table clients (id bigint primary key, tenant_id text not null, about text, secret text, ends timestamptz, created_at timestamptz default now());
alter table clients enable row level security;
"""
MEMORIES = "select reactor.attach('clients', 'client', '{about}', embed => 'none')"
TOKENS = (
    "select reactor.attach_tokens('clients', 'instagram', access_token_column => 'secret', expires_at_column => 'ends')"
)


async def granted(conn):
    """What the worker may do with the columns of clients: of memories (about), of tokens (secret)."""
    return await conn.fetchrow("""
        select has_column_privilege(reactor.worker_role(), 'clients', 'about', 'select') as about,
            has_column_privilege(reactor.worker_role(), 'clients', 'secret', 'select') as secret,
            has_column_privilege(reactor.worker_role(), 'clients', 'secret', 'update') as writes,
            array(select polname::text from pg_policy where polrelid = 'clients'::regclass order by 1) as policies""")


class TestBesideMemories:
    @pytest.mark.parametrize(
        "order", [(MEMORIES, TOKENS), (TOKENS, MEMORIES), (MEMORIES, TOKENS, MEMORIES), (TOKENS, MEMORIES, TOKENS)]
    )
    async def test_attached_as_both_in_any_order_each_has_its_rights(self, conn, order):
        await conn.execute(BOTH)
        for statement in order:
            await conn.execute(statement)

        assert tuple(await granted(conn)) == (True, True, True, ["reactor_reads", "reactor_tokens"])

    async def test_detaching_the_memories_leaves_the_tokens_theirs(self, conn):
        await conn.execute(BOTH + MEMORIES + ";" + TOKENS)
        await conn.execute("select reactor.detach('clients')")

        assert tuple(await granted(conn)) == (False, True, True, ["reactor_tokens"])

    async def test_detaching_the_tokens_leaves_the_memories_theirs(self, conn):
        await conn.execute(BOTH + MEMORIES + ";" + TOKENS)
        await conn.execute("select reactor.detach_tokens('clients')")

        assert tuple(await granted(conn)) == (True, False, False, ["reactor_reads"])

    async def test_a_change_is_told_to_whom_it_concerns(self, conn):
        await conn.execute(BOTH + MEMORIES + ";" + TOKENS)
        await conn.execute("insert into clients values (1, 'acme', 'uma padaria', 'key')")
        await forget_jobs(conn)

        await conn.execute("update clients set secret = 'another'")
        of_token = [row[0] for row in await conn.fetch("select type from reactor.jobs")]
        await forget_jobs(conn)
        await conn.execute("update clients set about = 'duas padarias'")

        assert of_token == ["refresh_token"]
        assert [row[0] for row in await conn.fetch("select type from reactor.jobs")] == ["sync_row"]


class TestTenants:
    @pytest.fixture
    async def two(self, tended, tokens):
        """A token of acme and one of beta, in our table and in an attached one."""
        await tended.conn.execute(BOTH + TOKENS)
        await tended.conn.execute(
            "insert into clients values (1, 'acme', '', 'a', now() + interval '50 d'), (2, 'beta', '', 'b', now() + interval '50 d')"
        )
        ours = [await tended.connect("x", tenant=tenant, ends=2 * HOUR) for tenant in ("acme", "beta")]
        source = await tended.conn.fetchval("select id from reactor.token_sources where relation = 'clients'::regclass")
        theirs = [TokenKey(source, "acme", "1"), TokenKey(source, "beta", "2")]
        for key in ours:
            await tokens.refresher.care(key, "x")
        for key in theirs:
            await tokens.refresher.care(key, "instagram")
        return tended

    @pytest.mark.parametrize("table", ["tokens", "clients", "reactor.tokens", "reactor.token_attempts", "reactor.jobs"])
    async def test_a_worker_scoped_to_one_tenant_neither_reads_nor_writes_anothers(self, two, table, pool):
        await two.conn.execute("""
            insert into reactor.token_attempts (token_id, tenant_id, from_version, host, process, replays, started_at, deadline)
            select id, tenant_id, 1, 'h', 'p', 0, now(), now() from reactor.tokens""")
        column = {
            "tokens": "access_token",
            "clients": "secret",
            "reactor.jobs": "lane",
            "reactor.tokens": "state",
            "reactor.token_attempts": "host",
        }[table]

        async with db.tenant(pool, "acme") as worker:
            seen = {row[0] for row in await worker.fetch(f"select tenant_id from {table}")}
            written = await worker.execute(f"update {table} set {column} = {column} where tenant_id = 'beta'")

        assert (seen, written) == ({"acme"}, "UPDATE 0")

    async def test_a_worker_cannot_give_a_row_to_another_tenant(self, two, pool):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with db.tenant(pool, "acme") as worker:
                await worker.execute("update tokens set tenant_id = 'beta'")

    async def test_a_wrong_tenant_planted_in_a_job_touches_nothing(self, two, tokens):
        before = (
            await two.conn.fetch("select * from tokens order by id"),
            await two.conn.fetch("select * from clients order by id"),
        )
        kept = await two.conn.fetch("select * from reactor.tokens order by id")
        of_beta = await two.conn.fetch(
            "select source, source_id, integration from reactor.tokens where tenant_id = 'beta'"
        )

        cares = [
            await tokens.refresher.care(TokenKey(source, "acme", id_), name, wanted_s=1e9)
            for source, id_, name in of_beta
        ]

        assert [care.action for care in cares] == ["gone", "gone"]
        assert (
            await two.conn.fetch("select * from tokens order by id"),
            await two.conn.fetch("select * from clients order by id"),
        ) == before
        assert await two.conn.fetch("select * from reactor.tokens order by id") == kept
        assert two.providers.calls.total() == 0

    async def test_a_tenant_sees_its_own_alerts_only(self, two, tokens, pool):
        for tenant in ("acme", "beta"):
            key = await two.connect("linkedin", tenant=tenant, ends=-DAY, refresh_token=None)
            await tokens.refresher.care(key, "linkedin")

        async with db.tenant(pool, "acme") as worker:
            assert [row[0] for row in await worker.fetch("select tenant_id from reactor.alerts")] == ["acme"]


@pytest.mark.parametrize("statement", ["delete from tokens", "truncate tokens"])
async def test_what_a_producer_takes_away_is_forgotten_with_its_job(tended, tokens, statement):
    key = await tended.connect("static_key")
    await tokens.refresher.care(key, "static_key")
    planned = await tended.due()
    await tended.conn.execute(statement)

    async def is_gone():
        return await tended.token(key) is None

    async with running_reactor(tended.settings()):
        await eventually(is_gone)
        await drained(tended.conn)

    assert len(planned) == 1
    assert await tended.due() == []
