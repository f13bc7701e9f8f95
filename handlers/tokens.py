"""Looks after tokens, one by one when each is due, and over all of them on a schedule."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from reactor.job import Done, Handler, Job
from reactor.refresher import Refresher, TokenKey
from reactor.settings import Settings

LANE = "tokens:"


async def refresh_token(job: Job, *, refresher: Refresher) -> dict[str, Any]:
    """Do what is due for the token in a row; the job of its next look is written together with what comes of it.

    Payload: {"source": int, "id": str}; the lane names the integration.
    Safe to repeat: an attempt under way elsewhere is left alone, and a token that is not due is only looked at.

    Raises:
        Unavailable: Postgres is out of reach (nothing was done), or the provider is (the job has ended all the same,
            and its lane rests).
    """
    key = TokenKey(int(job.payload["source"]), job.tenant_id, str(job.payload["id"]))
    care = await refresher.care(key, job.lane.removeprefix(LANE))
    if care.outage is not None:
        job.outcome = Done(care.evidence())
        raise care.outage
    return care.evidence()


async def reconcile_tokens(job: Job, *, refresher: Refresher, settings: Settings) -> dict[str, Any]:  # noqa: ARG001
    """Give a job to every token that nobody would come back to: the scheduled look, and the one after a TRUNCATE.

    Payload: {}

    Raises:
        Unavailable: Postgres is out of reach.
    """
    return {"enqueued": await refresher.reconcile(timedelta(days=settings.job_retention_d))}


HANDLERS = {
    "refresh_token": Handler(refresh_token, concurrency=8, timeout_s=120),
    "reconcile_tokens": Handler(reconcile_tokens, concurrency=1, lane="upkeep", timeout_s=3600),
}
