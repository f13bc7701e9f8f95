"""Recurring jobs: which ticks of `reactor.schedules` are due, and that each is run once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import asyncpg
from cronsim import CronSim, CronSimError

from reactor.db import Pool, borrowed, sentence_of
from reactor.log import Log

_MOST_S = 30.0  # for one look: a connection that is half open says nothing
_FRESH = timedelta(seconds=60)  # a tick seen this late was not missed
_AGAIN_S = 1.0  # until another look at one that somebody else has in hand
_MOST_TICKS = 1000  # at once; the rest of a long absence follows
_FIELDS = "minute, hour, day of month, month, day of week"
_WORDS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


def plan(
    cron: str, timezone: str, missed: str, next_at: datetime | None, now: datetime
) -> tuple[list[datetime], datetime]:
    """The ticks to run now, oldest first, and the one to come.

    `missed`: `once` runs the latest of the ticks that passed, `skip` only one that has just come, `all` each of them. A
    new schedule (`next_at` None) begins after `now`.

    Raises:
        ValueError: The expression or the time zone is none, or has no tick.
    """
    if next_at is not None and next_at > now:
        return [], next_at
    coming = next(_ticks(cron, timezone, after=now), None)
    if coming is None:
        raise ValueError(f"{cron!r} never comes")
    if next_at is None:
        return [], coming
    if missed == "all":
        owed = [next_at, *islice(_ticks(cron, timezone, after=next_at, until=now), _MOST_TICKS)]
        return (owed, coming) if len(owed) <= _MOST_TICKS else (owed[:-1], owed[-1])
    latest = _latest(cron, timezone, next_at, now)
    return ([latest] if missed == "once" or now - latest <= _FRESH else []), coming


def _ticks(cron: str, timezone: str, *, after: datetime, until: datetime | None = None) -> Iterator[datetime]:
    """The instants of an expression, ascending.

    As in cron, a time that the clock skips comes when it has jumped, and one that it repeats comes the first time only;
    `*` in the minutes or hours follows real time.
    """
    expression = _WORDS.get(cron.strip().lower(), cron)
    if len(expression.split()) != len(_FIELDS.split(",")):
        raise ValueError(f"{cron!r} does not have the five fields {_FIELDS}")
    try:
        zone = ZoneInfo(timezone)
    except (
        ZoneInfoNotFoundError,
        ValueError,
        OSError,
    ) as exc:  # OSError: a folder of zones, a name too long for a file
        raise ValueError(f"there is no time zone {timezone!r}") from exc
    try:
        wall_ticks = CronSim(expression, after.astimezone(zone))
    except (CronSimError, ValueError) as exc:
        raise ValueError(f"{cron!r}: {str(exc).lower()}") from exc
    # In the hour that a clock set back repeats, the wall shows again what came the first time.
    # Where the clock skips midnight, a `*` in the minutes or hours would tick in an hour that was not asked for.
    is_real_time = "*" in (expression.split()[0][:1], expression.split()[1][:1])
    asked = wall_ticks.hours if is_real_time else range(24)
    ticks = (
        tick
        for tick in (wall.astimezone(UTC) for wall in wall_ticks)
        if tick > after and tick.astimezone(zone).hour in asked
    )
    return ticks if until is None else takewhile(lambda tick: tick <= until, ticks)


def _latest(cron: str, timezone: str, since: datetime, now: datetime) -> datetime:
    """The last tick up to `now`; `since` is one. Looked for near `now` first: a year has half a million minutes."""
    for days in (1 / 24, 1, 40):
        near = max(since, now - timedelta(days=days))
        if ticks := list(_ticks(cron, timezone, after=near, until=now)):
            return ticks[-1]
    return [since, *_ticks(cron, timezone, after=since, until=now)][-1]


async def fire_due(pool: Pool, *, log: Log) -> float | None:
    """Run every tick that is due; returns the seconds until the next one, None when there is none.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    waits = []
    async with borrowed(pool, _MOST_S) as conn:
        for name, cron, timezone, missed, next_at, now in await conn.fetch(
            "select name, cron, timezone, missed, next_at, clock_timestamp() from reactor.schedules where is_enabled"
        ):
            try:
                ticks, coming = plan(cron, timezone, missed, next_at, now)
                if coming != next_at:
                    fire = "select reactor.fire_schedule($1, $2, $3, $4, $5, $6)"
                    if not await conn.fetchval(fire, name, cron, timezone, next_at, coming, ticks):
                        waits.append(_AGAIN_S)
                    elif ticks:
                        log.info("schedule_fired", schedule=name, ticks=len(ticks))
            except (ValueError, asyncpg.DataError) as exc:  # the others are looked at all the same
                problem = sentence_of(exc) if isinstance(exc, asyncpg.DataError) else str(exc)
                is_news = "select reactor.refuse_schedule($1, $2, $3, $4)"
                if await conn.fetchval(is_news, name, cron, timezone, problem):
                    log.error("alert_opened", cause="bad_schedule", subject=name, error=problem)
                continue
            waits.append(max((coming - now).total_seconds(), 0.0))
        for row in await conn.fetch("select reactor.resolve_mended_schedules()"):
            log.info("alert_resolved", cause="bad_schedule", subject=row[0])
    return min(waits, default=None)
