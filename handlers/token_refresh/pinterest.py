"""Pinterest: Basic, and a refresh token of 60 d that each refresh replaces.

https://developers.pinterest.com/docs/getting-started/scopes/
Access 30 d; the older refresh token of 365 d is no longer issued. Apps older than 2025-09-25 ask for the
continuous kind, the others ignore the word.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.strategy import DAY_S, Credential, Integration, Request, Strategy

from ._requests import refresh_request


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6, the client by Basic."""
    url = f"{integration.base_url}/v5/oauth/token"
    return refresh_request(credential, integration, url, auth="basic", continuous_refresh="true")


STRATEGY = Strategy(
    base_url="https://api.pinterest.com",
    refresh=refresh,
    read=read_refresh,
    rotates=True,
    margin_s=5 * DAY_S,
    life_s=30 * DAY_S,
    refresh_life_s=60 * DAY_S,
)
