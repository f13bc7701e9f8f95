"""Google: an hour at a time, from a refresh token that stays the same and is absent from the answer.

https://developers.google.com/identity/protocols/oauth2/web-server#offline
Access 1 h; the refresh token has no end, but dies after 6 months unused, and after 7 d while the app is in Testing.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.strategy import HOUR_S, Credential, Integration, Request, Strategy

from ._requests import refresh_request


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6, the client in the body."""
    return refresh_request(credential, integration, f"{integration.base_url}/token")


STRATEGY = Strategy(
    base_url="https://oauth2.googleapis.com",
    refresh=refresh,
    read=read_refresh,
    margin_s=HOUR_S / 6,
    life_s=HOUR_S,
)
