"""Recurring jobs: which ticks of `reactor.schedules` are due, and that each is run once."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from reactor.db import Pool, reaching
from reactor.log import Log

_FRESH = timedelta(seconds=60)  # a tick seen this late was not missed
_MOST_TICKS = 1000  # at once; the rest of a long absence follows


def plan(
    cron: str, timezone: str, missed: str, next_at: datetime | None, now: datetime
) -> tuple[list[datetime], datetime]:
    """The ticks to run now, and the one to come.

    `missed`: `once` runs the latest of the ticks that passed, `skip` only one that has just come, `all` each of them. A
    new schedule (`next_at` None) begins after `now`.

    Raises:
        ValueError: The expression or the time zone is none, or has no tick.
    """
    try:
        local = now.astimezone(ZoneInfo(timezone))
        coming = next(CronSim(cron, local))
        if next_at is None or next_at > now:
            return [], coming if next_at is None else next_at
        if missed == "all":
            later = takewhile(lambda tick: tick <= now, CronSim(cron, next_at.astimezone(local.tzinfo)))
            ticks = [next_at, *islice(later, _MOST_TICKS)]
            if len(ticks) > _MOST_TICKS:
                return ticks[:-1], ticks[-1]
            return ticks, coming
        latest = max(next_at, next(CronSim(cron, local + timedelta(seconds=1), reverse=True)))
    except (CronSimError, ZoneInfoNotFoundError, ValueError) as exc:
        raise ValueError(f"{cron!r} in {timezone!r}: {exc}") from exc
    except StopIteration:
        raise ValueError(f"{cron!r} never comes") from None
    return ([latest] if missed == "once" or now - latest <= _FRESH else []), coming


async def fire_due(pool: Pool, *, log: Log) -> float | None:
    """Run every tick that is due; returns the seconds until the next one, None when there is none.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    waits = []
    with reaching():
        async with pool.acquire(timeout=10.0) as conn:
            for row in await conn.fetch(
                "select name, cron, timezone, missed, next_at, clock_timestamp() as now "
                "from reactor.schedules where is_enabled"
            ):
                try:
                    ticks, coming = plan(row["cron"], row["timezone"], row["missed"], row["next_at"], row["now"])
                except ValueError as exc:
                    if await conn.fetchval("select reactor.refuse_schedule($1, $2)", row["name"], str(exc)):
                        log.error("alert_opened", cause="bad_schedule", subject=row["name"], error=str(exc))
                    continue
                if coming != row["next_at"]:
                    fired = await conn.fetchval(
                        "select reactor.fire_schedule($1, $2, $3, $4)", row["name"], row["next_at"], coming, ticks
                    )
                    if fired and ticks:
                        log.info("schedule_fired", schedule=row["name"], ticks=len(ticks))
                waits.append(max((coming - row["now"]).total_seconds(), 0.0))
    return min(waits, default=None)
