"""Recurring jobs: each tick of reactor.schedules runs once, whoever watches, whatever the clock does."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import anyio
import asyncpg
import pytest
from conftest import command, connect, eventually, make_settings, reactor_process, running_reactor
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from reactor import db
from reactor.log import get_log
from reactor.schedules import fire_due, plan

NEW_YORK, LISBON = "America/New_York", "Europe/Lisbon"
MINUTE = timedelta(minutes=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ticks_of(cron: str, timezone: str, since: datetime, until: datetime) -> list[str]:
    """What a reactor that was away from `since` to `until` owes under `all`."""
    _, first = plan(cron, timezone, "all", None, since)
    owed, _ = plan(cron, timezone, "all", first, until)
    return [f"{tick:%d %H:%M}" for tick in owed]


# --- the clock ---


@pytest.mark.parametrize(
    ("timezone", "since", "until", "ticks"),
    [
        # 02:00 becomes 03:00 in New York on 8 March 2026, and 01:00 becomes 02:00 in Lisbon on the 29th.
        (NEW_YORK, "2026-03-07 12:00", "2026-03-10 12:00", ["08 07:00", "09 06:30", "10 06:30"]),
        (LISBON, "2026-03-27 12:00", "2026-03-30 12:00", ["28 02:30", "29 01:30", "30 01:30"]),
        ("America/Sao_Paulo", "2026-03-07 12:00", "2026-03-09 12:00", ["08 05:30", "09 05:30"]),
    ],
)
def test_a_time_that_spring_skips_comes_when_the_clock_has_jumped(timezone, since, until, ticks):
    assert ticks_of("30 2 * * *", timezone, utc(since), utc(until)) == ticks


@pytest.mark.parametrize(
    ("timezone", "since", "until", "ticks"),
    [
        (NEW_YORK, "2026-10-31 12:00", "2026-11-02 12:00", ["01 05:30", "02 06:30"]),
        (LISBON, "2026-10-24 12:00", "2026-10-26 12:00", ["25 00:30", "26 01:30"]),
    ],
)
def test_a_time_that_autumn_repeats_comes_once(timezone, since, until, ticks):
    assert ticks_of("30 1 * * *", timezone, utc(since), utc(until)) == ticks


@pytest.mark.parametrize("since", ["2026-03-08 05:00", "2026-11-01 04:00"])
def test_every_hour_is_every_hour_also_when_the_clock_is_set(since):
    start = utc(since)

    owed = ticks_of("0 * * * *", NEW_YORK, start, start + timedelta(hours=5, minutes=1))

    first = start + timedelta(hours=1)
    assert owed == [f"{first + timedelta(hours=n):%d %H:%M}" for n in range(5)]


def test_inside_the_repeated_hour_the_next_tick_is_tomorrow_s():
    second_pass = utc("2026-11-01 06:10")  # 01:10 for the second time

    assert plan("30 1 * * *", NEW_YORK, "once", None, second_pass) == ([], utc("2026-11-02 06:30"))


@pytest.mark.parametrize("missed", ["once", "skip", "all"])
def test_a_tick_missed_before_the_repeated_hour_runs_in_it_and_is_not_owed_again(missed):
    second_pass = utc("2026-11-01 06:10")
    before = utc("2026-11-01 05:30")

    owed, coming = plan("30 1 * * *", NEW_YORK, missed, before, second_pass)

    assert owed == ([] if missed == "skip" else [before])
    assert coming == utc("2026-11-02 06:30")


@pytest.mark.parametrize(
    ("cron", "comes"),
    [
        ("@hourly", "2026-01-01 01:00"),
        ("@daily", "2026-01-02 00:00"),
        ("@weekly", "2026-01-04 00:00"),
        ("@monthly", "2026-02-01 00:00"),
        ("@YEARLY", "2027-01-01 00:00"),
        ("0 9 * * mon-fri", "2026-01-01 09:00"),
        ("*/15 * * * *", "2026-01-01 00:15"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("0 8 L * *", "2026-01-31 08:00"),
    ],
)
def test_expressions_mean_what_they_mean_in_cron(cron, comes):
    assert plan(cron, "UTC", "once", None, utc("2026-01-01 00:00")) == ([], utc(comes))


@pytest.mark.parametrize(
    ("cron", "timezone", "words"),
    [
        ("61 * * * *", "UTC", "bad minute"),
        ("* * * *", "UTC", "five fields"),
        ("* * * * * *", "UTC", "five fields"),
        ("todo dia", "UTC", "five fields"),
        ("", "UTC", "five fields"),
        ("0 0 30 2 *", "UTC", "bad day-of-month"),
        ("0 0 * 2 MON#6", "UTC", "bad day-of-week"),
        ("9" * 5000 + " * * * *", "UTC", "999"),
        ("* * * * *", "America/Sao_Paolo", "no time zone 'America/Sao_Paolo'"),
        ("* * * * *", "America", "no time zone 'America'"),
        ("* * * * *", "x" * 300, "no time zone"),
        ("* * * * *", "../../etc/passwd", "no time zone"),
        ("* * * * *", "", "no time zone"),
    ],
)
def test_a_wrong_expression_or_zone_is_said_in_words(cron, timezone, words):
    with pytest.raises(ValueError) as caught:
        plan(cron, timezone, "once", None, utc("2026-01-01 00:00"))

    assert words in str(caught.value)


# An oracle that looks at every minute of wall and real time, and knows no search.
_FIELD_RANGES = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 6)]


@st.composite
def fields(draw, low, high):
    """One field's text and the values it stands for."""
    kind = draw(st.sampled_from(["star", "star", "value", "list", "range", "step"]))
    everything = range(low, high + 1)
    if kind == "star":
        return "*", set(everything)
    if kind == "step":
        step = draw(st.integers(1, 30))
        return f"*/{step}", set(everything[::step])
    values = sorted(draw(st.sets(st.integers(low, high), min_size=1, max_size=3)))
    if kind == "range":
        return f"{values[0]}-{values[-1]}", set(range(values[0], values[-1] + 1))
    if kind == "value":
        values = values[:1]
    return ",".join(map(str, values)), set(values)


@st.composite
def expressions(draw):
    # Most in the hours around the clock's changes, or days would go by without a tick.
    near = draw(st.booleans())
    ranges = [(0, 59), (0, 4), *_FIELD_RANGES[2:]] if near else _FIELD_RANGES
    drawn = [draw(fields(*bounds)) for bounds in ranges]
    if draw(st.booleans()):
        drawn[2:] = [("*", set(range(low, high + 1))) for low, high in _FIELD_RANGES[2:]]
    if near and drawn[1][0].startswith("*"):
        drawn[1] = ("0-4", set(range(5)))
    return " ".join(text for text, _ in drawn), [values for _, values in drawn]


def expected_ticks(cron, values, timezone, since, until):
    zone = ZoneInfo(timezone)
    minutes, hours, days, months, weekdays = values
    texts = cron.split()

    def matches(wall):
        of_month, of_week = wall.day in days, wall.isoweekday() % 7 in weekdays
        needs_both = texts[2].startswith("*") or texts[4].startswith("*")
        is_day = of_month and of_week if needs_both else of_month or of_week
        return wall.minute in minutes and wall.hour in hours and wall.month in months and is_day

    found = set()
    if texts[0].startswith("*") or texts[1].startswith("*"):
        at = since + MINUTE
        while at <= until:
            if matches(at.astimezone(zone)):
                found.add(at)
            at += MINUTE
    else:
        wall = since.astimezone(zone).replace(tzinfo=None) - timedelta(hours=3)
        while wall <= until.astimezone(zone).replace(tzinfo=None) + timedelta(hours=3):
            if matches(wall):
                at = wall.replace(tzinfo=zone)
                while at.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != at.replace(tzinfo=None):
                    at += MINUTE  # a wall time that does not exist
                found.add(at.astimezone(UTC))
            wall += MINUTE
    return sorted(tick for tick in found if since < tick <= until)


STARTS = [
    (NEW_YORK, utc("2026-03-07 20:00")),
    (NEW_YORK, utc("2026-10-31 20:00")),
    (LISBON, utc("2026-03-28 20:00")),
    (LISBON, utc("2026-10-24 20:00")),
    ("Africa/Cairo", utc("2026-04-23 14:00")),  # midnight is skipped
    ("America/Sao_Paulo", utc("2026-02-28 20:00")),
    ("UTC", utc("2026-12-31 12:00")),
]


@hypothesis_settings(max_examples=400, deadline=None)
@given(
    expressions(),
    st.sampled_from(STARTS),
    st.sampled_from(["once", "skip", "all"]),
    st.lists(st.sampled_from([0.2, 0.7, 1, 7, 31, 63, 200, 900]), min_size=1, max_size=40),
)
@example(("* 0 * * 5", [set(range(60)), {0}, set(range(1, 32)), set(range(1, 13)), {5}]), STARTS[4], "all", [900])
@example(("30 1 * * *", [{30}, {1}, *(set(range(32)),) * 3]), STARTS[1], "all", [1] * 900)
@example(("45 2 * * *", [{45}, {2}, *(set(range(32)),) * 3]), STARTS[0], "all", [7] * 200)
def test_whenever_a_reactor_looks_no_tick_runs_twice_and_none_is_skipped_under_all(expression, start, missed, gaps):
    cron, values = expression
    timezone, since = start
    now, ran, looks = since, [], [since]
    try:
        _, next_at = plan(cron, timezone, missed, None, now)
    except ValueError:  # the 31st of February
        return
    for gap in gaps:
        now += timedelta(minutes=gap)
        looks.append(now)
        owed = None
        while owed is None or next_at <= now:  # a long absence is run in parts
            owed, coming = plan(cron, timezone, missed, next_at, now)
            assert coming > next_at or not owed
            assert [tick for tick in owed if tick > now] == []
            ran, next_at = ran + owed, coming

    assert ran == sorted(set(ran))
    expected = expected_ticks(cron, values, timezone, since, now)
    between = [[tick for tick in expected if a < tick <= b] for a, b in itertools.pairwise(looks)]
    if missed == "all":
        assert ran == expected
    elif missed == "once":
        assert ran == [ticks[-1] for ticks in between if ticks]
    else:
        fresh = zip(between, looks[1:], strict=True)
        assert ran == [ticks[-1] for ticks, look in fresh if ticks and look - ticks[-1] <= MINUTE]


# --- the table ---


async def insert_schedule(conn: asyncpg.Connection, name: str = "diário", **columns: object) -> None:
    row = {"name": name, "type": "digest", "cron": "0 7 * * *", "timezone": "America/Sao_Paulo"} | columns
    places = ", ".join(f"${n}" for n in range(1, len(row) + 1))
    await conn.execute(f"insert into reactor.schedules ({', '.join(row)}) values ({places})", *row.values())


async def be_late(conn: asyncpg.Connection, by: timedelta, name: str = "diário") -> datetime:
    """As if the next tick had come that long ago; the tick."""
    return await conn.fetchval(
        "update reactor.schedules set next_at = now() - $2::interval where name = $1 returning next_at", name, by
    )


async def jobs_of(conn: asyncpg.Connection) -> list[dict]:
    rows = await conn.fetch("select * from reactor.jobs where lane <> 'upkeep' order by id")
    return [dict(row) for row in rows]


async def next_tick(conn: asyncpg.Connection, name: str = "diário") -> datetime | None:
    return await conn.fetchval("select next_at from reactor.schedules where name = $1", name)


async def test_a_new_schedule_waits_for_its_first_tick(pool, conn):
    await insert_schedule(conn)

    wait_s = await fire_due(pool, log=get_log())

    local = (await next_tick(conn)).astimezone(ZoneInfo("America/Sao_Paulo"))
    assert (local.hour, local.minute) == (7, 0)
    assert 0 < wait_s <= 86_400
    assert await jobs_of(conn) == []


async def test_a_tick_enqueues_the_job_with_its_payload_tenant_lane_key_and_instant(pool, conn, events):
    await insert_schedule(conn, payload={"região": "sul"}, tenant_id="padaria-sol", lane="resumos")
    tick = await be_late(conn, timedelta(seconds=3))

    await fire_due(pool, log=get_log())

    [job] = await jobs_of(conn)
    assert datetime.fromisoformat(job["payload"].pop("scheduled_for")) == tick
    assert job["payload"] == {"região": "sul"}
    assert [job[name] for name in ("type", "tenant_id", "lane", "dedupe_key")] == [
        "digest",
        "padaria-sol",
        "resumos",
        "schedule:diário",
    ]
    assert await conn.fetchval("select last_at from reactor.schedules") == tick
    assert await next_tick(conn) > tick
    assert [event["schedule"] for event in events.named("schedule_fired")] == ["diário"]


async def test_three_reactors_at_once_run_every_tick_once(dsn, conn):
    """Each round every schedule is due and all three look together."""
    names = [f"s{n}" for n in range(8)]
    for n, name in enumerate(names):
        await insert_schedule(conn, name, type=f"t{n}", missed=("once", "all")[n % 2], cron="*/5 * * * *")
    ticks: dict[str, set[datetime]] = {name: set() for name in names}
    pools = [await db.create_pool(dsn, application="test", size=2) for _ in range(3)]
    try:
        for _ in range(6):
            for name in names:
                ticks[name].add(await be_late(conn, timedelta(seconds=1), name))
            async with anyio.create_task_group() as tasks:
                for pool in pools:
                    tasks.start_soon(lambda pool=pool: fire_due(pool, log=get_log()))
    finally:
        for pool in pools:
            await pool.close()

    ran = [
        (f"s{job['type'][1:]}", datetime.fromisoformat(job["payload"]["scheduled_for"])) for job in await jobs_of(conn)
    ]
    assert len(ran) == len(set(ran))
    for name in names:
        assert {tick for other, tick in ran if other == name} >= ticks[name]


async def test_who_was_late_with_a_tick_changes_nothing(conn):
    await insert_schedule(conn)
    tick = await be_late(conn, MINUTE)
    fire = "select reactor.fire_schedule('diário', '0 7 * * *', 'America/Sao_Paulo', $1, $2, array[$1]::timestamptz[])"

    answers = [await conn.fetchval(fire, tick, tick + timedelta(days=1)) for _ in range(3)]

    assert answers == [True, False, False]
    assert len(await jobs_of(conn)) == 1


async def test_a_plan_made_before_the_schedule_was_changed_is_not_carried_out(conn):
    await insert_schedule(conn)  # its next tick is yet unknown, before and after the change
    await conn.execute("update reactor.schedules set cron = '0 9 * * *'")

    fired = await conn.fetchval(
        "select reactor.fire_schedule('diário', '0 7 * * *', 'America/Sao_Paulo', null, now(), '{}')"
    )
    refused = await conn.fetchval("select reactor.refuse_schedule('diário', '0 7 * * *', 'America/Sao_Paulo', 'wrong')")

    assert (fired, refused) == (False, False)
    assert await conn.fetchval("select next_at is null and error is null from reactor.schedules")
    assert await conn.fetchval("select count(*) from reactor.alerts") == 0


@pytest.mark.parametrize("cron", ["0 7 * * *", "61 * * * *"])
async def test_a_schedule_that_somebody_holds_in_a_transaction_holds_up_no_other(dsn, pool, conn, cron):
    await insert_schedule(conn, "a held one", cron=cron, type="held")
    await insert_schedule(conn, "free", type="free")
    for name in ("a held one", "free"):
        await be_late(conn, timedelta(seconds=1), name)
    other = await connect(dsn)
    async with other.transaction():
        await other.execute("update reactor.schedules set payload = '{}' where name = 'a held one'")
        wait_s = await fire_due(pool, log=get_log())
        assert [job["type"] for job in await jobs_of(conn)] == ["free"]
    await other.close()
    if cron == "0 7 * * *":
        assert wait_s <= 1
        await fire_due(pool, log=get_log())
        assert [job["type"] for job in await jobs_of(conn)] == ["free", "held"]


@pytest.mark.parametrize(("missed", "runs"), [("once", 1), ("skip", 0), ("all", 3)])
async def test_ticks_that_no_reactor_saw_are_run_by_the_schedule_s_policy(pool, conn, missed, runs):
    await insert_schedule(conn, cron="0 * * * *", missed=missed)
    hour = (await conn.fetchval("select now()")).replace(minute=0, second=0, microsecond=0)
    ago = MINUTE * 5 if (await conn.fetchval("select extract(minute from now())")) < 2 else timedelta()
    await conn.execute("update reactor.schedules set cron = $1, next_at = null", f"{(hour - ago).minute} * * * *")
    await conn.execute("update reactor.schedules set next_at = $1", hour - ago - timedelta(hours=2))

    await fire_due(pool, log=get_log())

    ran = [datetime.fromisoformat(job["payload"]["scheduled_for"]) for job in await jobs_of(conn)]
    assert ran == [hour - ago - timedelta(hours=n) for n in (2, 1, 0)][3 - runs :]
    assert await next_tick(conn) == hour - ago + timedelta(hours=1)


async def test_a_year_of_missed_minutes_is_one_run_under_once_and_comes_in_parts_under_all(pool, conn):
    await insert_schedule(conn, "uma", cron="* * * * *", type="one")
    await insert_schedule(conn, "todas", cron="* * * * *", type="every", missed="all")
    await be_late(conn, timedelta(days=365), "uma")
    await be_late(conn, timedelta(minutes=2500), "todas")

    waits = [await fire_due(pool, log=get_log()) for _ in range(3)]

    assert waits[:2] == [0.0, 0.0]
    types = [job["type"] for job in await jobs_of(conn)]
    assert types.count("one") <= 2  # another minute may come meanwhile
    assert 2500 <= types.count("every") <= 2502


async def test_runs_of_one_schedule_that_piled_up_become_one(pool, conn, dsn):
    """Nobody handled its type meanwhile; a reactor that does comes back."""
    await insert_schedule(conn, type="reconcile", lane="upkeep")
    for _ in range(50):
        await be_late(conn, timedelta(seconds=1))
        await fire_due(pool, log=get_log())
    claim = "select * from reactor.claim_jobs(array['reconcile'], array[10], 'w', '30 s')"

    claimed = await conn.fetch(claim)

    assert len(claimed) == 1
    assert claimed[0]["payload"]["scheduled_for"] == await conn.fetchval(
        "select to_jsonb(last_at) #>> '{}' from reactor.schedules"
    )
    assert await conn.fetchval("select count(*) from reactor.jobs where status in ('pending', 'failed')") == 0


async def test_a_run_waits_for_the_one_before_it(pool, conn):
    await insert_schedule(conn, type="slow")
    claim = "select * from reactor.claim_jobs(array['slow'], array[10], 'w', '30 s')"
    await be_late(conn, timedelta(seconds=1))
    await fire_due(pool, log=get_log())
    assert len(await conn.fetch(claim)) == 1
    await be_late(conn, timedelta(seconds=1))
    await fire_due(pool, log=get_log())

    assert len(await conn.fetch(claim)) == 0


async def test_under_all_every_tick_is_a_run_of_its_own(pool, conn):
    await insert_schedule(conn, missed="all", cron="* * * * *")
    await be_late(conn, timedelta(minutes=3))
    await fire_due(pool, log=get_log())

    claimed = await conn.fetch("select * from reactor.claim_jobs(array['digest'], array[10], 'w', '30 s')")

    assert len(claimed) == 4 or len(claimed) == 3


async def test_a_type_that_nobody_handles_waits_and_becomes_an_alert(dsn, pool, conn):
    await insert_schedule(conn, type="nobody's")
    await be_late(conn, timedelta(seconds=1))
    await fire_due(pool, log=get_log())
    await conn.execute("update reactor.jobs set run_after = run_after - interval '1 hour'")

    async with running_reactor(make_settings(database_url=dsn, stuck_s=60)):
        alert = await eventually(lambda: conn.fetchrow("select * from reactor.alerts where cause = 'stuck_jobs'"))

    assert alert["subject"] == "nobody's"
    assert [job["status"] for job in await jobs_of(conn)] == ["pending"]


# --- changes ---


@pytest.mark.parametrize(
    "change", ["payload = '{\"a\": 1}'", "type = 'other'", "name = 'renamed'", "missed = 'all'", "cron = cron"]
)
async def test_a_change_of_what_it_does_keeps_when_it_runs(pool, conn, change):
    await insert_schedule(conn)
    await fire_due(pool, log=get_log())
    before = await conn.fetchval("select next_at from reactor.schedules")

    await conn.execute(f"update reactor.schedules set {change}")

    assert await conn.fetchval("select next_at from reactor.schedules") == before


@pytest.mark.parametrize("change", ["cron = '0 9 * * *'", "timezone = 'Europe/Lisbon'"])
async def test_a_change_of_when_it_runs_forgets_the_tick_it_waited_for(pool, conn, change):
    await insert_schedule(conn)
    tick = await be_late(conn, timedelta(days=2))

    await conn.execute(f"update reactor.schedules set {change}")
    await fire_due(pool, log=get_log())

    assert await next_tick(conn) > tick + timedelta(days=2)
    assert await jobs_of(conn) == []


@pytest.mark.parametrize("missed", ["once", "skip", "all"])
async def test_a_paused_schedule_runs_nothing_and_resumes_without_a_burst(pool, conn, missed):
    await insert_schedule(conn, cron="* * * * *", missed=missed)
    await be_late(conn, timedelta(days=2))
    await conn.execute("update reactor.schedules set is_enabled = false")
    assert await fire_due(pool, log=get_log()) is None

    await conn.execute("update reactor.schedules set is_enabled = true")
    await fire_due(pool, log=get_log())

    assert await jobs_of(conn) == []
    assert await next_tick(conn) is not None


async def test_a_deleted_schedule_is_over_and_its_waiting_job_still_runs(pool, conn):
    await insert_schedule(conn)
    await be_late(conn, timedelta(seconds=1))
    await fire_due(pool, log=get_log())
    await conn.execute("delete from reactor.schedules")

    assert await fire_due(pool, log=get_log()) is None
    assert [job["status"] for job in await jobs_of(conn)] == ["pending"]


@pytest.mark.parametrize(
    "columns",
    [
        {"type": ""},
        {"type": "t" * 201},
        {"name": ""},
        {"name": "n" * 201},
        {"name": "日" * 157},
        {"tenant_id": "t" * 201},
        {"lane": "l" * 201},
        {"missed": "never"},
        {"payload": [1]},
    ],
)
async def test_what_could_never_be_enqueued_is_refused_where_it_is_written(conn, columns):
    with pytest.raises(asyncpg.CheckViolationError):
        await insert_schedule(conn, **columns)


async def test_the_longest_names_there_may_be_still_make_a_job(pool, conn):
    longest = {"name": "日" * 156, "type": "t" * 200, "tenant_id": "ü" * 200, "lane": "ç" * 200, "missed": "all"}
    await insert_schedule(conn, **longest)
    await be_late(conn, timedelta(seconds=1), longest["name"])

    await fire_due(pool, log=get_log())

    assert len(await jobs_of(conn)) >= 1


# --- wrong ones ---


async def test_a_wrong_schedule_is_an_alert_and_the_others_run(pool, conn, events):
    await insert_schedule(conn, "a", cron="61 * * * *")
    await insert_schedule(conn, "b")
    await insert_schedule(conn, "c", timezone="x" * 300)  # the operating system's own error
    await be_late(conn, timedelta(seconds=1), "b")
    for _ in range(3):
        assert await fire_due(pool, log=get_log()) is not None

    alerts = await conn.fetch(
        "select subject, detail, occurrences from reactor.alerts where cause = 'bad_schedule' order by 1"
    )
    assert [tuple(row) for row in alerts[:1]] == [("a", {"error": "'61 * * * *': bad minute"}, 1)]
    assert [row["subject"] for row in alerts] == ["a", "c"]
    assert [event["subject"] for event in events.named("alert_opened")] == ["a", "c"]
    assert await conn.fetchval("select error from reactor.schedules where name = 'a'") == "'61 * * * *': bad minute"
    assert len(await jobs_of(conn)) == 1


@pytest.mark.parametrize(
    "cure",
    [
        "update reactor.schedules set cron = '0 7 * * *'",
        "update reactor.schedules set is_enabled = false",
        "update reactor.schedules set name = 'other', cron = '0 7 * * *'",
        "delete from reactor.schedules",
    ],
)
async def test_its_alert_closes_once_it_is_mended_or_off_or_gone(pool, conn, events, cure):
    await insert_schedule(conn, cron="61 * * * *")
    await fire_due(pool, log=get_log())
    assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 1

    await conn.execute(cure)
    await fire_due(pool, log=get_log())

    assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 0
    assert await conn.fetchval("select count(error) from reactor.schedules") == 0
    assert [event["cause"] for event in events.named("alert_resolved")] == ["bad_schedule"]


async def test_a_wrong_schedule_that_is_renamed_or_wrong_in_another_way_stays_an_alert(pool, conn):
    await insert_schedule(conn, cron="61 * * * *")
    await fire_due(pool, log=get_log())
    await conn.execute("update reactor.schedules set name = 'other'")
    await fire_due(pool, log=get_log())
    await conn.execute("update reactor.schedules set timezone = 'Mars/Base'")
    await fire_due(pool, log=get_log())

    still_open = await conn.fetch("select subject from reactor.alerts where resolved_at is null")
    assert [row["subject"] for row in still_open] == ["other"]
    # The expression is looked at once there is a clock to read it by.
    assert "Mars/Base" in await conn.fetchval("select error from reactor.schedules")


async def test_reactor_schedules_says_what_is_wrong_before_any_reactor_has_looked(dsn, conn):
    await insert_schedule(conn, "semanal", cron="61 * * * *")
    await insert_schedule(conn, "diário")

    listed = command("schedules", dsn=dsn)

    assert listed.returncode == 0
    assert "semanal: '61 * * * *': bad minute" in listed.stderr
    assert "diário" in listed.stdout
    assert "07:00" in listed.stdout


# --- a running reactor ---


async def test_a_running_reactor_hears_of_every_change_at_once(settings, conn, events):
    """More changes than the looks it takes unasked at its start, each within half of the minute until the next one."""

    async def is_listening():
        return events.named("listener_ready")

    async with running_reactor(settings):
        await eventually(is_listening)
        await insert_schedule(conn)
        ticks = [await eventually(lambda: next_tick(conn))]
        for change in ("cron = '0 9 * * *'", "timezone = 'Asia/Tokyo'", "is_enabled = false", "is_enabled = true"):
            await conn.execute(f"update reactor.schedules set {change}")
            if change != "is_enabled = false":
                ticks.append(await eventually(lambda: next_tick(conn)))
        await insert_schedule(conn, "outro")
        await eventually(lambda: next_tick(conn, "outro"))
        await conn.execute("delete from reactor.schedules")

    assert len(set(ticks)) == 3
    assert ticks[2] == ticks[3]


async def test_a_running_reactor_runs_a_tick_when_it_comes(settings, conn):
    async with running_reactor(settings):
        await conn.execute(
            "insert into reactor.schedules (name, type, cron, next_at) values ('soon', 'reconcile', '0 0 1 1 *', now() + '1.5 s')"
        )
        job = await eventually(
            lambda: conn.fetchrow("select * from reactor.jobs where dedupe_key = 'schedule:soon' and status = 'done'")
        )

    assert job["created_at"] >= datetime.fromisoformat(job["payload"]["scheduled_for"])


async def test_what_was_changed_while_no_reactor_ran_counts_from_the_start(settings, conn):
    await insert_schedule(conn, "old", cron="0 9 * * *", type="reconcile")
    await be_late(conn, timedelta(hours=5), "old")
    await insert_schedule(conn, "new")

    async with running_reactor(settings):
        await eventually(lambda: next_tick(conn, "new"))
        await eventually(
            lambda: conn.fetchval("select true from reactor.jobs where dedupe_key = 'schedule:old' and status = 'done'")
        )

    assert await next_tick(conn, "old") > await conn.fetchval("select now()")


async def test_a_reactor_killed_between_ticks_leaves_the_next_one_to_whoever_comes(dsn, conn):
    await conn.execute(
        "insert into reactor.schedules (name, type, cron, next_at) values ('soon', 'reconcile', '0 0 1 1 *', now() + '1 hour')"
    )
    with reactor_process(dsn) as process:
        listening = "select exists (select from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database())"
        await eventually(lambda: conn.fetchval(listening))
        process.kill()
    tick = await be_late(conn, timedelta(seconds=1), "soon")

    with reactor_process(dsn):
        job = await eventually(
            lambda: conn.fetchrow("select * from reactor.jobs where dedupe_key = 'schedule:soon' and status = 'done'")
        )

    assert datetime.fromisoformat(job["payload"]["scheduled_for"]) == tick


# --- who may ---


async def test_only_the_schema_s_owner_may_read_or_write_schedules(server, dsn, conn):
    database = await conn.fetchval("select current_database()")
    role = f"producer_{database}"
    await conn.execute(f"create role {role} login; grant usage on schema reactor to {role}")
    try:
        other = await connect(server.dsn(database, user=role))
        for statement in (
            "select * from reactor.schedules",
            "insert into reactor.schedules (name, type, cron) values ('x', 'sync_row', '* * * * *')",
            "update reactor.schedules set tenant_id = 'victim'",
            "delete from reactor.schedules",
            "select reactor.fire_schedule('x', '', '', now(), now(), '{}')",
            "select reactor.refuse_schedule('x', '', '', 'y')",
            "select reactor.resolve_mended_schedules()",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await other.execute(statement)
        await other.close()
    finally:
        await conn.execute(f"drop owned by {role}; drop role {role}")
