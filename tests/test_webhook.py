"""Alerts told to a webhook: each piece of news, in order, once unless somebody dies, and through every outage."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta

import aiohttp
import anyio
import asyncpg
import pytest
from aiohttp import web
from conftest import POSTGRES, connect, eventually, make_settings, running_reactor
from pydantic import SecretStr
from servers import own_cluster

from reactor import db, tenant, webhook
from reactor.log import get_log
from reactor.webhook import deliver, text_of

SECRET = "T0-s3cret-p4th"
Answer = Callable[[web.Request, dict], web.StreamResponse | Awaitable[web.StreamResponse]]


def taken(_request: web.Request, _body: dict) -> web.StreamResponse:
    return web.Response(status=204)


def refused(status: int, **headers: str) -> Answer:
    return lambda _request, _body: web.Response(
        status=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


class Receiver:
    """A chat's incoming webhook. What it was sent it keeps, whatever it answered."""

    def __init__(self) -> None:
        self.url = SecretStr("")
        self.answer: Answer = taken
        self.received: list[dict] = []
        self.keys: list[str] = []
        self.elsewhere = 0  # requests for another place than the webhook's
        self.hangs_on = ""  # a subject that is never answered
        self.hanging = anyio.Event()
        self._port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post(f"/hooks/{SECRET}", self._handle)
        app.router.add_route("*", "/{other}", self._handle_elsewhere)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)  # 0 would be for ever
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = SecretStr(f"http://127.0.0.1:{self._port}/hooks/{SECRET}")

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append(body)
        self.keys.append(request.headers["Idempotency-Key"])
        if self.hangs_on == body["subject"]:
            self.hanging.set()
            await anyio.sleep_forever()
        answer = self.answer(request, body)
        return await answer if inspect.isawaitable(answer) else answer

    async def _handle_elsewhere(self, _request: web.Request) -> web.StreamResponse:
        self.elsewhere += 1
        return web.Response()

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(body["event"], body["subject"]) for body in self.received]


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    await receiver.start()
    yield receiver
    await receiver.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def tell(pool, receiver, http) -> Callable:
    """One look of a reactor that has this webhook, which one has had for a while."""
    async with pool.acquire() as conn:
        await conn.execute("select reactor.expect_webhook()")
    return lambda: deliver(pool, receiver.url, http=http, log=get_log())


async def open_alert(conn, subject="s", detail=None, *, cause="c", tenant_id="") -> bool:
    return await conn.fetchval("select reactor.open_alert($1, $2, $3, $4)", cause, subject, detail or {}, tenant_id)


async def resolve_alert(conn, subject="s", *, cause="c") -> bool:
    return await conn.fetchval("select reactor.resolve_alert($1, $2)", cause, subject)


async def pass_time(conn, by: timedelta = timedelta(days=1)) -> None:
    """As if that much went by for what waits to be told."""
    await conn.execute("update reactor.alerts set tell_at = tell_at - $1::interval", by)


async def owed(conn) -> int:
    return await conn.fetchval("select count(*) from reactor.alerts where owes > 0")


# --- what is told ---


async def test_an_alert_is_told_when_it_opens_and_when_it_is_resolved(conn, tell, receiver):
    await open_alert(conn, "digest", {"jobs": 3, "error": "KeyError"}, cause="stuck_jobs", tenant_id="sol")
    first_wait_s = await tell()
    await resolve_alert(conn, "digest", cause="stuck_jobs")
    await tell()

    row = await conn.fetchrow("select * from reactor.alerts")
    common = {
        "cause": "stuck_jobs",
        "subject": "digest",
        "tenant_id": "sol",
        "detail": {"jobs": 3, "error": "KeyError"},
        "occurrences": 1,
    }
    opened, resolved = receiver.received
    assert datetime.fromisoformat(opened.pop("opened_at")) == row["opened_at"]
    assert opened == common | {
        "event": "alert_opened",
        "resolved_at": None,
        "text": "⚠ stuck_jobs digest: jobs 3, error KeyError",
    }
    assert datetime.fromisoformat(resolved.pop("opened_at")) == row["opened_at"]
    assert datetime.fromisoformat(resolved.pop("resolved_at")) == row["resolved_at"]
    assert resolved == common | {"event": "alert_resolved", "text": "✓ stuck_jobs digest: resolvido / resolved"}
    assert len(set(receiver.keys)) == 2
    assert first_wait_s == 60.0, "nothing is owed: only the floor is left"


async def test_an_alert_that_was_opened_and_resolved_before_anybody_looked_is_told_from_its_beginning(
    conn, tell, receiver
):
    await open_alert(conn)
    await resolve_alert(conn)
    await open_alert(conn, detail={"threshold": 1})

    await tell()

    assert [(body["event"], body["detail"]) for body in receiver.received] == [
        ("alert_opened", {}),
        ("alert_resolved", {}),
        ("alert_opened", {"threshold": 1}),
    ]
    assert [body["resolved_at"] is None for body in receiver.received] == [True, False, True]
    assert await owed(conn) == 0


async def test_an_alert_that_occurs_again_is_no_news_and_another_threshold_is(conn, tell, receiver):
    news = []
    for days in (14, 14, 7, 7):
        news.append(await open_alert(conn, detail={"threshold": days}))
        await tell()

    assert news == [True, False, True, False]
    assert [(body["event"], body["detail"]["threshold"], body["occurrences"]) for body in receiver.received] == [
        ("alert_opened", 14, 1),
        ("alert_opened", 7, 3),
    ]
    assert len(set(receiver.keys)) == 2


async def test_of_thresholds_that_were_passed_untold_only_the_last_is_told(conn, tell, receiver):
    for days in (14, 7, 3):
        await open_alert(conn, detail={"threshold": days})

    await tell()

    assert [body["detail"]["threshold"] for body in receiver.received] == [3]


async def test_a_threshold_passed_while_the_one_before_is_being_told_is_told_next(conn, pool, tell, receiver):
    await open_alert(conn, detail={"threshold": 14})
    receiver.hangs_on = "s"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        with anyio.fail_after(30):
            await receiver.hanging.wait()
        await open_alert(conn, detail={"threshold": 7})
        [lease] = await conn.fetchrow("select tell_at from reactor.alerts")
        tasks.cancel_scope.cancel()
    receiver.hangs_on = ""
    await conn.execute("select reactor.alert_told(id, 1) from reactor.alerts")  # as if it had answered

    await tell()

    assert lease > await conn.fetchval("select now()")
    assert [body["detail"]["threshold"] for body in receiver.received] == [14, 7]


@pytest.mark.parametrize(
    ("event", "detail", "text"),
    [
        (
            "alert_opened",
            {"do": {"pt": "Reconecte a conta", "en": "Reconnect the account"}, "threshold": 7},
            "⚠ token padaria instagram: Reconecte a conta / Reconnect the account",
        ),
        ("alert_opened", {"do": {"en": "Look\nat it"}}, "⚠ token padaria instagram: Look at it"),
        ("alert_opened", {"do": {"pt": 1}}, "⚠ token padaria instagram"),
        (
            "alert_opened",
            {"do": "?", "left": 1.5, "deep": {"no": 1}, "none": None},
            "⚠ token padaria instagram: do ?, left 1.5",
        ),
        ("alert_opened", {}, "⚠ token padaria instagram"),
        ("alert_opened", ["any", "json"], "⚠ token padaria instagram"),
        ("alert_opened", {"who": "<!channel>"}, "⚠ token padaria instagram: who ‹!channel›"),
        ("alert_resolved", {"do": {"pt": "x", "en": "y"}}, "✓ token padaria instagram: resolvido / resolved"),
    ],
)
def test_the_text_is_one_line_that_says_what_to_do(event, detail, text):
    assert text_of(event, "token", "padaria instagram", detail) == text


def test_a_text_of_any_length_is_cut_to_what_a_chat_takes():
    assert len(text_of("alert_opened", "c", "s", {"error": "x" * 100_000})) == 1000


async def test_whoever_closes_an_alert_by_whatever_statement_owes_its_end(conn, tell, receiver):
    """check_health and the settling of jobs update the table themselves."""
    check = "select event, cause, subject from reactor.check_health('a', 'host', 'polling', '', $1, '{}', '{}', '900 s', '150 s')"
    opened = await conn.fetch(check, True)
    await tell()
    closed = await conn.fetch(check, False)
    await tell()

    assert [tuple(row) for row in opened + closed] == [
        ("alert_opened", "listener_lost", "host"),
        ("alert_resolved", "listener_lost", "host"),
    ]
    assert receiver.told == [("alert_opened", "host"), ("alert_resolved", "host")]


async def test_of_the_time_before_there_was_a_webhook_open_alerts_are_told_and_closed_ones_are_not(
    conn, pool, receiver, http
):
    for subject in ("over", "open"):
        await open_alert(conn, subject)
    await resolve_alert(conn, "over")

    await deliver(pool, receiver.url, http=http, log=get_log())
    assert receiver.told == [("alert_opened", "open")]
    # Nobody has one for two days; what was told open is told to its end all the same.
    for subject in ("over again", "still open"):
        await open_alert(conn, subject)
    await resolve_alert(conn, "over again")
    await resolve_alert(conn, "open")
    await conn.execute("update reactor.alert_webhook set seen_at = now() - interval '2 d'")
    await deliver(pool, receiver.url, http=http, log=get_log())

    assert sorted(receiver.told[1:]) == [("alert_opened", "still open"), ("alert_resolved", "open")]
    assert await owed(conn) == 0


async def test_a_reactor_that_was_down_for_hours_tells_what_began_and_ended_meanwhile(conn, tell, receiver):
    await open_alert(conn)
    await resolve_alert(conn)
    await conn.execute("update reactor.alert_webhook set seen_at = now() - interval '20 h'")

    await tell()

    assert receiver.told == [("alert_opened", "s"), ("alert_resolved", "s")]
    assert await conn.fetchval("select now() - seen_at < interval '1 h' from reactor.alert_webhook")


# --- outages ---


async def test_a_server_that_is_down_is_asked_ever_more_seldom_and_told_once_it_is_up(conn, tell, receiver, events):
    await open_alert(conn)
    await receiver.stop()
    waits = []
    for _ in range(7):
        waits.append(await conn.fetchval("select extract(epoch from tell_at - now()) from reactor.alerts"))
        slept_s = await tell()
        assert 0 < slept_s <= 60
        await pass_time(conn)
    await resolve_alert(conn)

    await receiver.start()
    await tell()

    assert receiver.told == [("alert_opened", "s"), ("alert_resolved", "s")]
    assert [event["error_code"] for event in events.named("webhook_failed")] == ["ClientConnectorError"]
    assert await conn.fetchval("select (failures, told) = (0, 2) from reactor.alerts")


async def test_the_waits_are_5_s_30_s_2_min_10_min_and_an_hour_for_ever_and_slept_to_exactly(conn, tell, receiver):
    await open_alert(conn)
    receiver.answer = refused(500)
    waits, sleeps = [], []
    for _ in range(7):
        sleeps.append(await tell())
        waits.append(await conn.fetchval("select extract(epoch from tell_at - now())::float8 from reactor.alerts"))
        await pass_time(conn, timedelta(hours=2))

    exact = [5, 30, 120, 600, 3600, 3600, 3600]
    assert [expected - 3 < wait <= expected for wait, expected in zip(waits, exact, strict=True)] == [True] * 7
    assert sleeps[0] == pytest.approx(5, abs=3)
    assert sleeps[1] == pytest.approx(30, abs=3)
    assert sleeps[2:] == [60.0] * 5
    assert len(set(receiver.keys)) == 1, "every attempt is the same piece of news"
    assert len(receiver.keys) == 7


async def test_a_server_that_names_a_delay_is_left_alone_for_it(conn, tell, receiver):
    await open_alert(conn)
    receiver.answer = refused(429, Retry_After="90")

    await tell()

    wait_s = await conn.fetchval("select extract(epoch from tell_at - now()) from reactor.alerts")
    assert 80 < wait_s <= 90


@pytest.mark.parametrize("status", [301, 302, 307, 400, 404, 500, 503])
async def test_what_is_no_2xx_was_not_told_and_no_redirect_is_followed(conn, tell, receiver, events, status):
    await open_alert(conn)
    receiver.answer = refused(status, Location="/elsewhere")
    await tell()
    assert await owed(conn) == 1
    receiver.answer = taken
    await pass_time(conn)

    await tell()

    assert await owed(conn) == 0
    assert receiver.elsewhere == 0
    assert [event["error_code"] for event in events.named("webhook_failed")] == [f"http_{status}"]


async def test_an_outage_is_one_line_in_the_log_however_many_alerts_it_holds_up_and_the_next_is_another(
    conn, tell, receiver, events
):
    for n in range(9):
        await open_alert(conn, f"s{n}")
    receiver.answer = refused(500)
    for _ in range(3):
        await tell()
        await pass_time(conn)
    await open_alert(conn, "s9")
    await tell()
    assert len(events.named("webhook_failed")) == 1
    receiver.answer = taken
    await pass_time(conn)
    await tell()
    assert await owed(conn) == 0

    receiver.answer = refused(502)
    await open_alert(conn, "s10")
    await tell()

    assert [event["error_code"] for event in events.named("webhook_failed")] == ["http_500", "http_502"]


async def test_one_alert_that_the_server_refuses_stops_no_other(conn, tell, receiver, events):
    for n in range(6):
        await open_alert(conn, f"s{n}")
    receiver.answer = lambda _request, body: web.Response(status=400 if body["subject"] == "s0" else 200)

    for _ in range(3):
        await tell()
        await pass_time(conn)

    assert receiver.told.count(("alert_opened", "s0")) == 3
    assert sorted(set(receiver.told)) == [("alert_opened", f"s{n}") for n in range(6)]
    assert len(receiver.told) == 3 + 5
    assert await conn.fetch("select subject from reactor.alerts where owes > 0") == [("s0",)]
    assert len(events.named("webhook_failed")) == 1


async def test_a_request_that_hangs_holds_up_no_other(conn, tell, receiver, monkeypatch):
    monkeypatch.setattr(webhook, "_TIMEOUT_S", 600.0)
    for n in range(9):
        await open_alert(conn, f"s{n}")
    receiver.hangs_on = "s0"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        await eventually(lambda: conn.fetchval("select count(*) = 8 from reactor.alerts where owes = 0"))
        tasks.cancel_scope.cancel()

    assert await conn.fetch("select subject, failures from reactor.alerts where owes > 0") == [("s0", 0)]


async def test_a_request_that_hangs_is_given_up(conn, tell, receiver, events, monkeypatch):
    monkeypatch.setattr(webhook, "_TIMEOUT_S", 0.2)
    await open_alert(conn)
    receiver.hangs_on = "s"

    await tell()

    assert await conn.fetchval("select failures from reactor.alerts") == 1
    assert [event["error_code"] for event in events.named("webhook_failed")] == ["timeout"]


async def test_an_answer_that_came_before_the_reactor_was_ended_is_kept(conn, dsn, tell, receiver):
    await open_alert(conn)
    other = await connect(dsn)
    await other.execute("begin")

    async def answer(_request: web.Request, _body: dict) -> web.StreamResponse:
        await other.execute("select from reactor.alerts for update")  # what comes of it cannot be written yet
        return web.Response()

    receiver.answer = answer
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        with anyio.CancelScope(shield=True):
            waits = (
                "select exists (select from pg_stat_activity where query ~ 'alert_told' and wait_event_type = 'Lock')"
            )
            await eventually(lambda: conn.fetchval(waits))
            tasks.cancel_scope.cancel()
            for _ in range(50):  # a statement that is given up is gone by then
                assert await conn.fetchval(waits)
            await other.execute("rollback")
    await other.close()

    assert await owed(conn) == 0


async def test_no_connection_is_held_while_the_server_thinks(conn, pool, tell, receiver):
    await open_alert(conn)
    receiver.hangs_on = "s"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        with anyio.fail_after(30):
            await receiver.hanging.wait()
        await eventually(lambda: pool.get_idle_size() == pool.get_size())
        in_transaction = await conn.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and state ~ 'transaction'"
        )
        tasks.cancel_scope.cancel()

    assert in_transaction == 0


async def test_an_alert_whose_earlier_one_of_the_same_was_not_told_to_its_end_waits_for_it(conn, tell, receiver):
    """Else the old one's end would be read as the new one's."""
    receiver.answer = lambda _request, body: web.Response(status=500 if body["event"] == "alert_resolved" else 200)
    await open_alert(conn)
    await resolve_alert(conn)
    await tell()
    await open_alert(conn)
    await open_alert(conn, tenant_id="lua")
    await tell()
    assert receiver.told == [("alert_opened", "s"), ("alert_resolved", "s"), ("alert_opened", "s")]
    assert receiver.received[-1]["tenant_id"] == "lua"
    receiver.answer = taken
    await pass_time(conn)

    await tell()

    assert receiver.told[3:] == [("alert_resolved", "s"), ("alert_opened", "s")]


async def test_news_that_is_held_in_somebody_s_transaction_is_looked_at_again_soon_and_holds_up_no_other(
    conn, dsn, tell, receiver
):
    await open_alert(conn, "held")
    await open_alert(conn, "free")
    other = await connect(dsn)
    async with other.transaction():
        await open_alert(other, "held")
        slept_s = await tell()
        assert receiver.told == [("alert_opened", "free")]
    await other.close()
    await tell()

    assert slept_s == 1.0
    assert receiver.told[1:] == [("alert_opened", "held")]


async def test_what_a_reactor_was_telling_when_it_died_is_told_again_under_the_same_key(conn, tell, receiver):
    await open_alert(conn)
    receiver.hangs_on = "s"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        with anyio.fail_after(30):
            await receiver.hanging.wait()
        tasks.cancel_scope.cancel()
    receiver.hangs_on = ""

    slept_s = await tell()
    assert 0 < slept_s <= 30, "until its lease ends"
    assert len(receiver.keys) == 1
    await pass_time(conn)
    await tell()

    assert len(receiver.keys) == 2
    assert len(set(receiver.keys)) == 1


async def test_a_teller_whose_lease_passed_on_moves_nothing(conn):
    await open_alert(conn)
    claim = "select id, leased_until from reactor.claim_alert('30 s')"
    slow = await conn.fetchrow(claim)
    await pass_time(conn)
    await conn.fetchrow(claim)

    failed = await conn.fetchval("select reactor.alert_not_told($1, $2, 0)", slow["id"], slow["leased_until"])

    assert (failed, await conn.fetchval("select failures from reactor.alerts")) == (False, 0)


async def test_a_postgres_that_fails_is_said_once_every_request_in_hand_has_ended(conn, tell, receiver):
    await conn.execute("""
        create sequence tried;
        create or replace function reactor.alert_told(p_id bigint, p_news bigint) returns void language plpgsql as
            $$ begin perform nextval('public.tried'); raise exception 'a full disk, say'; end $$;
    """)
    for subject in ("s0", "s1"):
        await open_alert(conn, subject)

    async def answer(_request: web.Request, body: dict) -> web.StreamResponse:
        if body["subject"] == "s0":
            return web.Response()
        await eventually(lambda: conn.fetchval("select is_called from tried"))
        return web.Response(status=500)

    receiver.answer = answer

    with pytest.raises(asyncpg.RaiseError):
        await tell()

    assert await conn.fetchval("select failures from reactor.alerts where subject = 's1'") == 1


# --- several reactors, and waking ---


async def test_two_reactors_tell_everything_once(conn, dsn, receiver):
    settings = make_settings(database_url=dsn, alert_webhook=receiver.url)
    async with running_reactor(settings), running_reactor(settings):
        for n in range(40):
            await open_alert(conn, f"s{n}")
            if n % 2:
                await resolve_alert(conn, f"s{n}")
        await eventually(lambda: conn.fetchval("select count(*) = 40 and max(owes) = 0 from reactor.alerts"))

    expected = [("alert_opened", f"s{n}") for n in range(40)] + [("alert_resolved", f"s{n}") for n in range(1, 40, 2)]
    assert sorted(receiver.told) == sorted(expected)
    assert len(set(receiver.keys)) == 60


async def test_a_sleeping_reactor_is_woken_by_news_and_by_the_end_of_a_wait(conn, dsn, receiver, monkeypatch):
    settings = make_settings(database_url=dsn, alert_webhook=receiver.url)
    monkeypatch.setattr(webhook, "_FLOOR_S", 3600.0)
    async with running_reactor(settings):
        await eventually(lambda: conn.fetchval("select exists (select from reactor.alert_webhook)"))
        await open_alert(conn)
        await eventually(lambda: receiver.told == [("alert_opened", "s")])
        receiver.answer = refused(500)
        await resolve_alert(conn)
        await eventually(lambda: conn.fetchval("select failures = 1 from reactor.alerts"))
        receiver.answer = taken
        await eventually(lambda: conn.fetchval("select owes = 0 from reactor.alerts"))

    assert receiver.told == [("alert_opened", "s"), ("alert_resolved", "s"), ("alert_resolved", "s")]


async def test_only_news_ring(conn, dsn):
    rung = []
    listening = await asyncpg.connect(dsn)
    await listening.add_listener("reactor_alerts", lambda *args: rung.append(args[-1]))

    async def rings(statement: str) -> int:
        rung.clear()
        await conn.execute(statement)
        await listening.execute("select 1")
        return len(rung)

    assert await rings("select reactor.open_alert('c', 's', '{\"threshold\": 2}')") == 1
    assert await rings("select reactor.open_alert('c', 's', '{\"threshold\": 2}')") == 0
    assert await rings("select reactor.open_alert('c', 's', '{\"threshold\": 1}')") == 1
    assert await rings("select reactor.alert_told(id, 3) from reactor.alerts") == 0
    assert await rings("update reactor.alerts set resolved_at = now()") == 1
    assert await rings("select reactor.alert_told(id, 4) from reactor.alerts") == 0
    assert await rings("select reactor.open_alert('c', n::text) from generate_series(1, 50) n") == 1
    await listening.close()


@pytest.mark.skipif(POSTGRES < 17, reason="the queue of notifications is 8 GB there")
async def test_a_queue_of_notifications_that_is_full_keeps_no_alert_from_being_opened_and_closed(server):
    with own_cluster(server.programs) as cluster:
        cluster.stop("fast")
        cluster.start("max_notify_queue_pages=64")
        await db.migrate(cluster.dsn)
        conn, stuck = await connect(cluster.dsn), await connect(cluster.dsn)
        await stuck.execute("listen anything")
        await stuck.execute("begin; select 1")  # it takes no notification until this ends
        with pytest.raises(asyncpg.ProgramLimitExceededError):
            while True:
                await conn.execute("select pg_notify('anything', repeat('x', 7000))")
        with pytest.raises(asyncpg.ProgramLimitExceededError):
            while True:
                await conn.execute("select pg_notify('anything', '')")

        assert await open_alert(conn) is True
        assert await resolve_alert(conn) is True

        stuck.terminate()
        await conn.close()


async def test_without_a_webhook_alerts_are_rows_that_go_when_they_are_old(conn, dsn):
    await open_alert(conn)
    await resolve_alert(conn)
    await conn.execute("update reactor.alerts set resolved_at = now() - interval '8 d'")

    await conn.fetchval("select reactor.prune('7 d', 100)")

    assert await conn.fetchval("select count(*) from reactor.alerts") == 0


# --- secrets ---


async def test_no_log_line_and_no_exception_holds_the_address(conn, pool, dsn, receiver, http, events, caplog):
    await open_alert(conn)
    for url in (
        receiver.url.get_secret_value(),
        f"http://127.0.0.1:1/{SECRET}",
        f"http://no-such-host.invalid/{SECRET}",
        f"http://127.0.0.1:99999/{SECRET}",
        f"http://[{SECRET}/",
        f"http:///{SECRET}",
        f"http://{'a' * 70}.invalid/{SECRET}",
    ):
        receiver.answer = refused(500)
        await conn.execute("update reactor.alerts set tell_at = now(), failures = 0")
        await conn.execute("update reactor.alert_webhook set is_away = false")
        await deliver(pool, SecretStr(url), http=http, log=get_log())
    settings = make_settings(database_url=dsn, alert_webhook=f"http://127.0.0.1:1/{SECRET}")
    await pass_time(conn)
    await conn.execute("update reactor.alerts set failures = 0")
    async with running_reactor(settings):
        await eventually(lambda: conn.fetchval("select failures > 0 from reactor.alerts"))

    assert len(events.named("webhook_failed")) >= 7
    for text in (events.text, caplog.text, repr(settings), str(await conn.fetch("select * from reactor.alerts"))):
        assert SECRET not in text
        assert "no-such-host" not in text


# --- tenants ---


async def test_a_worker_sees_and_writes_the_alerts_of_its_own_tenant_only(conn, pool):
    await open_alert(conn, "the operator's")
    await open_alert(conn, "shared name", tenant_id="sol")
    async with tenant(pool, "lua") as worker:
        opened = await open_alert(worker, "shared name", tenant_id="lua")
        again = await open_alert(worker, "shared name", {"threshold": 1}, tenant_id="lua")
        seen = await worker.fetch("select tenant_id, subject, occurrences from reactor.alerts")
        touched = await worker.fetchval(
            "with t as (update reactor.alerts set seen_at = now() returning 1) select count(*) from t"
        )
    for foreign in ("sol", ""):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with tenant(pool, "lua") as worker:
                await open_alert(worker, "new", tenant_id=foreign)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with tenant(pool, "lua") as worker:
                await worker.execute("update reactor.alerts set tenant_id = $1", foreign)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with tenant(pool, "lua") as worker:
            await worker.execute("delete from reactor.alerts")
    async with tenant(pool, "lua") as worker:
        closed_foreign = await resolve_alert(worker, "the operator's")
        closed = await resolve_alert(worker, "shared name")

    assert (opened, again, [tuple(row) for row in seen], touched) == (True, True, [("lua", "shared name", 2)], 1)
    assert (closed_foreign, closed) == (False, True)
    rows = await conn.fetch("select tenant_id, subject, resolved_at is null as open from reactor.alerts order by id")
    assert [tuple(row) for row in rows] == [
        ("", "the operator's", True),
        ("sol", "shared name", True),
        ("lua", "shared name", False),
    ]


async def test_an_alert_opened_and_closed_within_a_tenant_s_scope_wakes_the_reactor_and_is_told(
    pool, conn, dsn, receiver, monkeypatch
):
    monkeypatch.setattr(webhook, "_FLOOR_S", 3600.0)
    async with running_reactor(make_settings(database_url=dsn, alert_webhook=receiver.url)):
        await eventually(lambda: conn.fetchval("select exists (select from reactor.alert_webhook)"))
        async with tenant(pool, "lua") as worker:
            await open_alert(worker, tenant_id="lua")
        await eventually(lambda: receiver.told)
        async with tenant(pool, "lua") as worker:
            await resolve_alert(worker)
        await eventually(lambda: conn.fetchval("select owes = 0 from reactor.alerts"))

    assert [(body["event"], body["tenant_id"]) for body in receiver.received] == [
        ("alert_opened", "lua"),
        ("alert_resolved", "lua"),
    ]


async def test_an_alert_is_resolved_for_one_tenant_or_for_whoever_has_it(conn):
    for tenant_id in ("", "sol", "lua"):
        await open_alert(conn, tenant_id=tenant_id)
    still_open = "select array_agg(tenant_id order by id) from reactor.alerts where resolved_at is null"

    assert await conn.fetchval("select reactor.resolve_alert('c', 's', 'sol')") is True
    assert await conn.fetchval(still_open) == ["", "lua"]
    assert await conn.fetchval("select reactor.resolve_alert('c', 's', '')") is True
    assert await conn.fetchval(still_open) == ["lua"]
    assert await conn.fetchval("select reactor.resolve_alert('c', 's')") is True
    assert await conn.fetchval("select reactor.resolve_alert('c', 's')") is False


@pytest.mark.parametrize("opened_before", [False, True])
async def test_of_many_who_open_an_alert_at_once_one_has_news(dsn, conn, opened_before):
    if opened_before:
        await open_alert(conn, detail={"threshold": 14})
    conns = [await connect(dsn) for _ in range(8)]
    news = []

    async def open_one(one) -> None:
        news.append(await open_alert(one, detail={"threshold": 7}))

    async with anyio.create_task_group() as tasks:
        for one in conns:
            tasks.start_soon(open_one, one)
    for one in conns:
        await one.close()

    assert sorted(news) == [False] * 7 + [True]


# --- an earlier release ---

BEFORE_WEBHOOK = """
    drop table reactor.alerts, reactor.alert_webhook;
    drop function reactor.open_alert, reactor.resolve_alert, reactor.alert_owes, reactor.expect_webhook, reactor.claim_alert,
        reactor.alert_told, reactor.alert_not_told;
    create table reactor.alerts (
        id bigint generated always as identity primary key, cause text not null, subject text not null default '',
        detail jsonb not null default '{}', occurrences bigint not null default 1, opened_at timestamptz not null default now(),
        seen_at timestamptz not null default now(), resolved_at timestamptz);
    create unique index alerts_open on reactor.alerts (cause, subject) where resolved_at is null;
    call reactor.protect('reactor.alerts', 'registry');
    create function reactor.open_alert(p_cause text, p_subject text, p_detail jsonb default '{}') returns boolean language sql as $$
        insert into reactor.alerts as a (cause, subject, detail) values ($1, $2, $3)
        on conflict (cause, subject) where resolved_at is null
        do update set occurrences = a.occurrences + 1, seen_at = now(), detail = excluded.detail
        returning occurrences = 1 $$;
    create function reactor.resolve_alert(p_cause text, p_subject text) returns boolean language sql as 'select true';
    select reactor.open_alert('c', 'over');
    update reactor.alerts set resolved_at = now();
    select reactor.open_alert('c', 'open', '{"n": 1}') from generate_series(1, 3);
    update reactor.migrations set checksum = 'before the webhook' where number = 1;
"""
SHAPE = """
    select attname::text, format_type(atttypid, atttypmod) || attnotnull || coalesce(pg_get_expr(adbin, adrelid), '')
    from pg_attribute left join pg_attrdef on adrelid = attrelid and adnum = attnum
    where attrelid = 'reactor.alerts'::regclass and attnum > 0
    union all select indexdef, '' from pg_indexes where schemaname = 'reactor' and tablename ~ 'alert'
    union all select tgname, pg_get_triggerdef(oid) from pg_trigger where tgrelid = 'reactor.alerts'::regclass
    union all select polname, pg_get_expr(polqual, polrelid) || polroles::text from pg_policy where polrelid = 'reactor.alerts'::regclass
    union all select oid::regprocedure::text, proacl::text from pg_proc where proname ~ 'alert|webhook' and pronamespace = 'reactor'::regnamespace
    order by 1, 2
"""


async def test_the_alerts_of_an_earlier_release_are_kept_and_the_open_ones_told(conn, dsn, tell, receiver):
    fresh = await conn.fetch(SHAPE)
    await conn.execute(BEFORE_WEBHOOK)
    assert await conn.fetch(SHAPE) != fresh

    assert await db.migrate(dsn) is True

    await conn.execute("discard plans")
    assert await conn.fetch(SHAPE) == fresh
    assert await conn.fetchval("select reactor.open_alert('c', 'open', '{\"n\": 2}')") is False
    await tell()
    assert [(body["subject"], body["detail"], body["occurrences"]) for body in receiver.received] == [
        ("open", {"n": 2}, 4)
    ]


async def test_applying_the_file_to_a_database_that_has_it_locks_no_alert(dsn, conn, tmp_path):
    """Alerts are opened in the transactions that settle jobs."""
    await conn.execute("update reactor.migrations set checksum = 'of another release' where number = 1")
    other = await connect(dsn)
    async with other.transaction():
        await open_alert(other)  # holds its lock; a migration gives up after 1 s
        assert await db.migrate(dsn) is True
    await other.close()
