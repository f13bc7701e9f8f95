"""Tells alerts to a webhook: at least once, the news of each in order, through outages of either side."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import aiohttp
import anyio
import asyncpg
from pydantic import SecretStr

from reactor import db
from reactor.errors import Unavailable, delay_s_of
from reactor.log import Log

_AT_ONCE = 4  # requests of one reactor
_TIMEOUT_S = 10.0
_WORK_S = 5.0  # for one statement
_LEASE = timedelta(seconds=30)  # over both
_FLOOR_S = 60.0  # under news that were not heard
_MOST_TEXT = 1000  # characters: what every chat takes in one message
# Slack would read <!channel> as a call to everybody; an escape would show as it stands in the other chats.
_HARMLESS = str.maketrans("<>", "‹›")  # noqa: RUF001


async def deliver(pool: db.Pool, url: SecretStr, *, http: aiohttp.ClientSession, log: Log) -> float:
    """Tell what is due until nothing is; returns the seconds to sleep before the next look.

    No connection is held while the webhook answers. What it has not taken with a 2xx within 10 s is tried again later,
    and the others do not wait for it. A reactor that is ended in between tells the same again, under the same
    Idempotency-Key. One `webhook_failed` is logged an outage.

    Raises:
        Unavailable: Postgres is out of reach.
    """
    await _ask(pool, "select reactor.expect_webhook()")
    while (news := await _claim(pool))["id"] is not None:
        await _tell_all(pool, url, news, http=http, log=log)
    wait_s: float | None = news["wait_s"]
    return _FLOOR_S if wait_s is None else min(wait_s, _FLOOR_S)


async def _tell_all(
    pool: db.Pool, url: SecretStr, first: asyncpg.Record, *, http: aiohttp.ClientSession, log: Log
) -> None:
    """Tell `first` and whatever else is due, several at once."""
    tellers = 1
    failed: list[Unavailable | asyncpg.PostgresError] = []  # raised when all have ended: none is cut off in mid-request

    async def tell(news: asyncpg.Record | None = None) -> None:
        nonlocal tellers
        try:
            news = news or await _claim(pool)
            while news["id"] is not None:
                if tellers < _AT_ONCE:
                    tellers += 1
                    tasks.start_soon(tell)
                await _tell(pool, url, news, http=http, log=log)
                if failed:
                    break
                news = await _claim(pool)
        except (Unavailable, asyncpg.PostgresError) as exc:
            failed.append(exc)
        tellers -= 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell, first)
    if failed:
        raise failed[0]


async def _claim(pool: db.Pool) -> asyncpg.Record:
    return await _ask(pool, "select * from reactor.claim_alert($1)", _LEASE)


async def _ask(pool: db.Pool, query: str, *args: object) -> asyncpg.Record:
    async with db.borrowed(pool, _WORK_S) as conn:
        [row] = await conn.fetch(query, *args)
    return row


async def _tell(pool: db.Pool, url: SecretStr, news: asyncpg.Record, *, http: aiohttp.ClientSession, log: Log) -> None:
    """One request, and what came of it into the row."""
    error_code, least_s = await _post(url, news, http=http)
    with anyio.CancelScope(shield=True):  # an answer that is here is not thrown away
        if error_code is None:
            await _ask(pool, "select reactor.alert_told($1, $2)", news["id"], news["news"])
            return
        query = "select reactor.alert_not_told($1, $2, $3)"
        [begins_an_outage] = await _ask(pool, query, news["id"], news["leased_until"], least_s)
        if begins_an_outage:
            log.warning("webhook_failed", error_code=error_code)


async def _post(url: SecretStr, news: asyncpg.Record, *, http: aiohttp.ClientSession) -> tuple[str | None, float]:
    """Why it was not taken (None: it was), and the seconds that the other side asks to be left alone.

    No exception leaves: its message would quote the address, which is a secret.
    """
    try:
        async with http.post(
            url.get_secret_value(),
            data=json.dumps(body_of(news)).encode(),
            headers={"Content-Type": "application/json", "Idempotency-Key": news["key"]},
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            allow_redirects=False,
        ) as answer:
            is_taken = 200 <= answer.status < 300  # noqa: PLR2004  # 2xx
            return None if is_taken else f"http_{answer.status}", delay_s_of(answer.headers.get("Retry-After")) or 0.0
    except TimeoutError:
        return "timeout", 0.0
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        return type(exc).__name__, 0.0


def body_of(news: asyncpg.Record | dict[str, Any]) -> dict[str, Any]:
    """What the webhook is sent of a row of `reactor.claim_alert`. `resolved_at` is null until that is the news."""
    resolved_at = news["resolved_at"]
    return {
        "event": news["event"],
        "cause": news["cause"],
        "subject": news["subject"],
        "tenant_id": news["tenant_id"],
        "detail": news["detail"],
        "opened_at": news["opened_at"].isoformat(),
        "resolved_at": resolved_at and resolved_at.isoformat(),
        "occurrences": news["occurrences"],
        "text": text_of(news["event"], news["cause"], news["subject"], news["detail"]),
    }


def text_of(event: str, cause: str, subject: str, detail: object) -> str:
    """One line for a chat: what a person must do, in Portuguese and English, if the alert says so; else its detail."""
    name = f"{cause} {subject}".strip()
    if event == "alert_resolved":
        line = f"✓ {name}: resolvido / resolved"
    else:
        said = _said(detail) if isinstance(detail, dict) else ""
        line = f"⚠ {name}: {said}" if said else f"⚠ {name}"
    return " ".join(line.translate(_HARMLESS).split())[:_MOST_TEXT]


def _said(detail: dict[str, Any]) -> str:
    do = detail.get("do")
    if isinstance(do, dict):
        return " / ".join(do[language] for language in ("pt", "en") if isinstance(do.get(language), str))
    return ", ".join(f"{name} {value}" for name, value in detail.items() if isinstance(value, str | int | float))
