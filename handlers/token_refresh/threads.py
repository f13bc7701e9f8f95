"""Threads: the long-lived token renews itself, with no secret; once expired it is dead.

https://developers.facebook.com/docs/threads/get-started/long-lived-tokens
At least 24 h old, valid 60 d from each refresh; the grant of a private profile lasts 90 d whatever is refreshed.
"""

from __future__ import annotations

from reactor.answers import read_probe, read_refresh
from reactor.strategy import DAY_S, Credential, Integration, Request, Strategy

from ._requests import meta_probe


def refresh(credential: Credential, integration: Integration) -> Request:
    """Ask for 60 more days."""
    params = {"grant_type": "th_refresh_token", "access_token": credential.access_token}
    return Request("GET", f"{integration.base_url}/refresh_access_token", params=params)


def probe(credential: Credential, integration: Integration) -> Request:
    """Ask who the token belongs to."""
    return meta_probe(credential, f"{integration.base_url}/{integration.api_version or 'v1.0'}/me")


STRATEGY = Strategy(
    base_url="https://graph.threads.net",
    refresh=refresh,
    read=read_refresh,
    renews_with="access_token",
    probe=probe,
    read_probe=read_probe,
    works_expired=False,
    margin_s=20 * DAY_S,
    minimum_age_s=DAY_S,
    life_s=60 * DAY_S,
)
