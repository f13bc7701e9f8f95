"""A token survives kill -9 at every step of its refresh, or somebody is told: tables of where, before which provider."""

from __future__ import annotations

import signal
from datetime import datetime, timedelta

import anyio
import pytest
from conftest import eventually, reactor_process
from proxy import proxy_to
from test_worker import Output
from token_cases import ATTACH_SEALED, line_of, said, scene_of

from reactor.sealing import generate


@pytest.fixture
async def scene(dsn, conn, tmp_path, monkeypatch):
    async with scene_of(dsn, conn, tmp_path, monkeypatch) as scene:
        await scene.attach()
        yield scene


async def looked_after(scene, tokens, key, provider):
    """What the reactors of this host do from now on: recover at start, then come back whenever they planned to."""
    await tokens.refresher.recover()
    token = await scene.token(key)
    if token["retry_at"] is not None and token["state"] == "active":
        await tokens.refresher.care(key, provider, now=token["retry_at"])


@pytest.mark.parametrize(
    ("point",     "provider", "calls", "state",           "alerts",                  "version", "attempts"),
    [
        # Claimed, and nothing sent: once more is the first time for the provider.
        ("claimed",   "strict", 1, "active",          set(),                     2, ["lost", "saved"]),
        ("claimed",   "grace",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("claimed",   "plain",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "strict", 1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "grace",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "plain",  1, "active",          set(),                     2, ["lost", "saved"]),
        # The provider has done it and its answer died with the process: nobody can bring it back from a strict one.
        ("sent",      "strict", 2, "needs_reconnect", {"token_needs_reconnect"}, 1, ["lost", "refused"]),
        ("sent",      "grace",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("sent",      "plain",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("answered",  "strict", 2, "needs_reconnect", {"token_needs_reconnect"}, 1, ["lost", "refused"]),
        ("answered",  "grace",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("answered",  "plain",  2, "active",          set(),                     2, ["lost", "saved"]),
        # From the journal on it is safe, and the provider is not asked again.
        ("journaled", "strict", 1, "active",          set(),                     2, ["saved"]),
        ("journaled", "grace",  1, "active",          set(),                     2, ["saved"]),
        ("journaled", "plain",  1, "active",          set(),                     2, ["saved"]),
        ("saving",    "strict", 1, "active",          set(),                     2, ["saved"]),
        ("saving",    "grace",  1, "active",          set(),                     2, ["saved"]),
        ("saving",    "plain",  1, "active",          set(),                     2, ["saved"]),
        ("saved",     "strict", 1, "active",          set(),                     2, ["saved"]),
        ("saved",     "grace",  1, "active",          set(),                     2, ["saved"]),
        ("saved",     "plain",  1, "active",          set(),                     2, ["saved"]),
    ],
)  # fmt: skip
async def test_kill_9_at_each_step(scene, point, provider, calls, state, alerts, version, attempts):
    key = await scene.connect(provider)
    before = await scene.row(key)

    await scene.dies(key, provider, point)
    async with scene.opened() as tokens:
        await looked_after(scene, tokens, key, provider)

    token = await scene.token(key)
    assert scene.providers.calls[provider] == calls
    assert (token["state"], token["version"]) == (state, version)
    assert await scene.alerts() == alerts
    assert await scene.attempts() == attempts
    assert scene.journal() == []
    if state == "active":
        assert await scene.holds_the_newest(key)
        assert await scene.waiting() == [token["next_at"]]
    else:
        assert await scene.row(key) == before
        assert await scene.waiting() == []  # only a person can help: the alert is open


@pytest.mark.parametrize(
    ("provider", "calls", "state", "reason"),
    [("grace", 2, "needs_reconnect", "answer_lost"), ("plain", 3, "active", None)],
)
async def test_of_two_answers_lost_in_a_row_only_a_token_that_rotates_needs_a_person(
    scene, provider, calls, state, reason
):
    key = await scene.connect(provider)
    scene.providers.fail(provider, "reset_after", "reset_after")
    async with scene.opened() as tokens:
        for _ in range(3):
            token = await scene.token(key)
            now = None if token is None or token["state"] != "active" else token["next_at"]
            await tokens.refresher.care(key, provider, now=now)

    token = await scene.token(key)
    assert scene.providers.calls[provider] == calls
    assert (token["state"], token["state_reason"]) == (state, reason)
    assert await scene.alerts() - {"token_late"} == ({"token_needs_reconnect"} if reason else set())
    assert await scene.waiting() == [token["next_at"]]  # it tries once more much later, without a person


class TestASupervisedReactor:
    async def test_killed_in_mid_call_and_started_again_it_recovers_within_the_grace_of_its_provider(self, scene):
        key = await scene.connect("grace")
        scene.providers.fail("grace", "gate")
        with reactor_process(scene.dsn, **scene.env()) as first:
            await eventually(lambda: scene.providers.calls["grace"] == 1, timeout_s=60)
            first.kill()
        job = await scene.conn.fetchrow(
            "select lease_until > clock_timestamp() as holds from reactor.jobs where type = 'refresh_token' and status = 'running'"
        )

        with reactor_process(scene.dsn, **scene.env()):
            await eventually(lambda: scene.is_at_version(key, 2), timeout_s=60)

        assert job["holds"]  # nobody waited for the lease of 30 s
        assert scene.providers.calls["grace"] == 2
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["lost", "saved"]
        assert await scene.alerts() == set()

    async def test_sigterm_in_mid_call_waits_for_the_answer_and_saves_it(self, scene):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        with reactor_process(scene.dsn, **scene.env()) as process:
            reactor = Output(process)
            await eventually(lambda: scene.providers.calls["strict"] == 1, timeout_s=60)
            process.send_signal(signal.SIGTERM)
            await reactor.saw("stopping")
            scene.providers.gate.set()
            assert await reactor.exited() == 0, reactor.text

        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]
        assert scene.providers.calls["strict"] == 1


class TestAnotherHost:
    """The host that made the call is gone; its journal may hold the answer."""

    MOMENT = timedelta(seconds=10)  # the process took its time to start

    @pytest.mark.parametrize(
        ("ends_in_s", "waits_s"),
        [
            (600, (600 - 30) / 2),  # half of what is left of the access token when the attempt should have ended
            (3 * 3600, 900),  # 15 min at most
            (None, 900),
        ],
    )
    async def test_it_waits_for_the_first_one_says_so_and_then_asks_once_more(self, scene, ends_in_s, waits_s):
        key = await scene.connect("grace", ends_in_s=ends_in_s)
        await scene.dies(key, "grace", "sent")
        attempt = await scene.live()
        give_up_at = attempt["deadline"] + timedelta(seconds=waits_s)

        async with scene.opened("another home") as tokens:
            early = await tokens.refresher.care(key, "grace", now=attempt["deadline"] - self.MOMENT)
            early_alerts = await scene.alerts()
            waiting = await tokens.refresher.care(key, "grace", now=give_up_at - self.MOMENT)
            alerts, jobs = await scene.alerts(), await scene.waiting()
            after = await tokens.refresher.care(key, "grace", now=give_up_at + self.MOMENT)

        assert (early.action, early.until, early_alerts) == ("held", attempt["deadline"], set())
        assert (waiting.action, alerts - {"token_late"}) == ("held", {"token_attempt_elsewhere"})
        assert abs(waiting.until - give_up_at) < self.MOMENT
        assert jobs == [waiting.until]
        assert after.action == "saved"
        assert scene.providers.calls["grace"] == 2
        assert await scene.holds_the_newest(key)
        assert await scene.alerts() == set()

    async def test_it_waits_no_longer_than_the_access_token_lives(self, scene):
        key = await scene.connect("grace", ends_in_s=10)
        await scene.dies(key, "grace", "sent")
        attempt = await scene.live()

        async with scene.opened("another home") as tokens:
            care = await tokens.refresher.care(key, "grace", now=attempt["deadline"])

        assert care.action == "saved"
        assert await scene.holds_the_newest(key)

    async def test_the_first_one_comes_back_in_time_with_the_answer_in_its_journal(self, scene):
        key = await scene.connect("strict")
        await scene.dies(key, "strict", "journaled")
        attempt = await scene.live()

        async with scene.opened("another home") as tokens:
            care = await tokens.refresher.care(key, "strict", now=attempt["deadline"] + timedelta(minutes=1))
        said_then = await scene.alerts()
        async with scene.opened() as tokens:
            recovered = await tokens.refresher.recover()

        assert (care.action, said_then) == ("held", {"token_attempt_elsewhere"})
        assert recovered == 1
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.alerts() == set()

    async def test_the_first_one_comes_back_after_it_was_given_up_and_nobody_need_reconnect_after_all(self, scene):
        scene.providers.grace_s = 0  # a spent token is refused, and the new one lives
        key = await scene.connect("grace")
        await scene.dies(key, "grace", "journaled")
        attempt = await scene.live()

        async with scene.opened("another home") as tokens:
            await tokens.refresher.care(key, "grace", now=attempt["deadline"] + timedelta(minutes=16))
        given_up = await scene.token(key), await scene.alerts()
        async with scene.opened() as tokens:
            await tokens.refresher.recover()

        assert given_up[0]["state"] == "needs_reconnect"
        assert given_up[1] == {"token_needs_reconnect"}
        assert (await scene.token(key))["state"] == "active"
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved", "refused"]
        assert await scene.alerts() == set()
        assert scene.providers.calls["grace"] == 2

    async def test_the_first_ones_answer_never_takes_the_place_of_a_newer_one(self, scene):
        """Asked again within its grace the provider issues new tokens, and those of the first answer end."""
        scene.providers.replays_anew.add("grace")
        key = await scene.connect("grace")
        await scene.dies(key, "grace", "journaled")
        attempt = await scene.live()

        async with scene.opened("another home") as tokens, anyio.create_task_group() as tasks:
            scene.providers.fail("grace", "gate")
            tasks.start_soon(
                lambda: tokens.refresher.care(key, "grace", now=attempt["deadline"] + timedelta(minutes=16))
            )
            await eventually(lambda: scene.providers.calls["grace"] == 2)
            async with scene.opened() as first:
                await first.refresher.recover()
            scene.providers.gate.set()

        assert await scene.holds_the_newest(key)


class TestPostgresIsAway:
    """It goes away exactly when the provider has rotated."""

    async def test_the_answer_is_saved_when_it_is_back(self, scene, events):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        async with (
            proxy_to(scene.dsn) as proxy,
            scene.opened(database_url=proxy.dsn) as tokens,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(tokens.refresher.care, key, "strict")
            await eventually(lambda: scene.providers.calls["strict"] == 1)
            await proxy.close()
            scene.providers.gate.set()
            await eventually(lambda: events.named("token_save_waits"))
            kept = scene.journal()
            await proxy.open()
            with anyio.fail_after(60):
                while not await scene.is_at_version(key, 2):
                    await anyio.sleep(0.02)

        assert kept == [".answer"]
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]
        assert scene.journal() == []

    async def test_a_process_killed_meanwhile_leaves_the_answer_to_the_next(self, scene):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        async with proxy_to(scene.dsn) as proxy:
            async with scene.process(
                "die", "never", "strict", str(key.source), key.source_id, DATABASE_URL=proxy.dsn
            ) as process:
                await eventually(lambda: scene.providers.calls["strict"] == 1)
                await proxy.close()
                scene.providers.gate.set()
                await eventually(scene.journal)
                process.kill()
                await process.wait()
            untouched = await scene.token(key)
            await proxy.open()
            async with scene.opened(database_url=proxy.dsn) as tokens:
                await tokens.refresher.recover()

        assert untouched["version"] == 1
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]

    async def test_while_a_living_process_holds_the_answer_up_no_other_of_its_host_asks_again(self, scene, events):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        async with (
            proxy_to(scene.dsn) as proxy,
            scene.process("die", "never", "strict", str(key.source), key.source_id, DATABASE_URL=proxy.dsn) as holding,
        ):
            await eventually(lambda: scene.providers.calls["strict"] == 1)
            await proxy.close()
            scene.providers.gate.set()
            await eventually(scene.journal)
            attempt = await scene.live()
            async with scene.opened() as tokens:
                await tokens.refresher.recover()  # it is the other's to save
                care = await tokens.refresher.care(key, "strict", now=attempt["deadline"] + timedelta(minutes=1))
            await proxy.open()
            with anyio.fail_after(60):
                assert await holding.wait() == 0, await said(holding)

        assert care.action == "held"
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]


@pytest.mark.parametrize("hours", [-1, 1])
async def test_a_workers_clock_that_is_an_hour_wrong_changes_no_time_of_a_token(scene, hours):
    key = await scene.connect("strict")
    began = await scene.conn.fetchval("select clock_timestamp()")

    async with scene.process("wrong_clock", str(hours), "strict", str(key.source), key.source_id) as process:
        with anyio.fail_after(60):
            assert await process.wait() == 0, await said(process)
        its_time = datetime.fromisoformat(await line_of(process))

    token, hour = await scene.token(key), timedelta(hours=1)
    ended = await scene.conn.fetchval("select clock_timestamp()")
    assert timedelta(minutes=59) < abs(its_time - began) < timedelta(minutes=61)
    assert began < token["issued_at"] < token["last_success_at"] < ended
    assert token["expires_at"] == (await scene.row(key))["expires_at"] == token["issued_at"] + hour
    assert (
        token["expires_at"] - timedelta(minutes=15) <= token["next_at"] <= token["expires_at"] - timedelta(minutes=13)
    )
    assert await scene.waiting() == [token["next_at"]]
    assert await scene.holds_the_newest(key)


class TestTheJournal:
    async def test_where_it_cannot_be_written_the_provider_is_never_called_and_later_it_goes_on(self, scene):
        key = await scene.connect("strict")

        async with scene.process("no_room", "strict", str(key.source), key.source_id) as process:
            with anyio.fail_after(60):
                code = await process.wait()
            words = await said(process)
        token, calls = await scene.token(key), scene.providers.calls["strict"]
        async with scene.opened() as tokens:
            await tokens.refresher.care(key, "strict", now=token["next_at"])

        assert (code, calls) == (0, 0), words
        assert (token["state"], token["last_error"], token["lost_answers"]) == ("active", "journal", 0)
        assert '"token_refresh_failed"' in words
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)

    async def test_a_folder_that_cannot_be_made_stops_the_refresh_and_not_the_reading_of_fresh_tokens(
        self, scene, events
    ):
        due, fresh = await scene.connect("strict"), await scene.connect("grace", ends_in_s=3000)
        (scene.folder / "a file").write_text("")

        async with scene.opened("a file") as tokens:
            care = await tokens.refresher.care(due, "strict")
            token = await tokens.ensure_fresh("acme", "grace")
            calls = scene.providers.calls["strict"]
            waiting, at = await scene.waiting(), (await scene.token(due))["next_at"]
            (scene.folder / "a file").unlink()  # the disk is well again
            again = await tokens.refresher.care(due, "strict", wanted_s=600)

        assert (care.action, care.outage.code) == ("failed", "journal")
        assert calls == 0
        assert again.action == "saved"
        assert [event["error_code"] for event in events.named("journal_failed")] == ["journal"]
        assert token == (await scene.row(fresh))["access_token"]
        assert at in waiting  # it comes back to it

    async def test_a_sealed_one_recovers_with_its_key(self, scene):
        scene.key = generate()[0]
        await scene.attach(ATTACH_SEALED)
        key = await scene.connect("strict")
        await scene.dies(key, "strict", "journaled")
        on_disk = b"".join(path.read_bytes() for path in (scene.folder / "home" / "journal").iterdir())

        async with scene.opened() as tokens:
            await tokens.refresher.recover()
            token = await tokens.ensure_fresh("acme", "strict")

        row = await scene.row(key)
        assert b"CANARY" not in on_disk
        assert (row["access_token"], row["refresh_token"]) == (None, None)
        assert scene.providers.works(token)
        assert scene.providers.newest(token)[0] == token
        assert scene.providers.calls["strict"] == 1
        assert scene.journal() == []

    async def test_without_its_key_the_answer_stays_it_is_said_and_the_provider_is_not_asked(self, scene, events):
        scene.key = generate()[0]
        key = await scene.connect("strict")
        await scene.dies(key, "strict", "journaled")
        attempt = await scene.live()

        kept, scene.key = scene.key, generate()[0]
        async with scene.opened() as tokens:
            await tokens.refresher.recover()
            await tokens.refresher.care(key, "strict", now=attempt["deadline"] + timedelta(hours=1))
        calls, journal, alerts, jobs = (
            scene.providers.calls["strict"],
            scene.journal(),
            await scene.alerts(),
            await scene.waiting(),
        )
        scene.key = kept
        async with scene.opened() as tokens:
            await tokens.refresher.recover()

        assert (calls, journal) == (1, [".answer"])
        assert alerts - {"token_late"} == {"token_key_missing"}
        assert len(jobs) == 1
        assert events.named("journal_kept")[0]["error_code"] == "KeyMissing"
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.alerts() == set()
        assert scene.journal() == []


REFUSE = """
create function refuse() returns trigger language plpgsql as $$ begin raise exception 'not today'; end $$;
create trigger refuse before update on accounts for each row execute function refuse();
"""


class TestTheTableRefusesTheNewToken:
    async def test_it_waits_in_the_journal_and_is_saved_when_the_table_takes_it(self, scene):
        key = await scene.connect("strict")
        await scene.conn.execute(REFUSE)
        async with scene.opened() as tokens:
            await tokens.refresher.care(key, "strict")
            alerts, journal, attempt = await scene.alerts(), scene.journal(), await scene.live()
            # Its job comes back, after the attempt's deadline too.
            an_hour_later = attempt["deadline"] + timedelta(hours=1)
            await tokens.refresher.care(key, "strict", now=an_hour_later)
            later = await scene.alerts()
        async with scene.opened("another home") as tokens:  # its job may come to any host
            care = await tokens.refresher.care(key, "strict", now=an_hour_later + timedelta(minutes=15))
        calls = scene.providers.calls["strict"]
        await scene.conn.execute("drop trigger refuse on accounts")
        async with scene.opened() as tokens:
            await tokens.refresher.recover()

        assert (alerts, journal) == ({"token_not_saved"}, [".answer"])
        assert (later - {"token_late"}, care.action, calls) == ({"token_not_saved"}, "held", 1)
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.alerts() == set()
        assert scene.journal() == []
