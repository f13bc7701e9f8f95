"""TikTok: a form with `client_key` for `client_id`; the refresh token is replaced by each use.

https://developers.tiktok.com/docs/en/oauth-refresh-a-user-access-token
https://developers.tiktok.com/doc/oauth-error-handling
Access 2 h and refresh 180 d since November 2026, 24 h and 365 d before: the answer's own numbers count.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.strategy import DAY_S, HOUR_S, Credential, Integration, Request, Strategy

from ._requests import refresh_token_of


def refresh(credential: Credential, integration: Integration) -> Request:
    """TikTok's own form; the slash at the end of its address belongs to it."""
    form = {"grant_type": "refresh_token", "refresh_token": refresh_token_of(credential)}
    client_key, client_secret = integration.client()
    url = integration.token_url or f"{integration.base_url}/v2/oauth/token/"
    return Request("POST", url, form={**form, "client_key": client_key, "client_secret": client_secret})


STRATEGY = Strategy(
    base_url="https://open.tiktokapis.com",
    refresh=refresh,
    read=read_refresh,
    rotates=True,
    margin_s=2 * HOUR_S,  # of 24 h; of the shorter life the schedule takes half
    life_s=2 * HOUR_S,
    refresh_life_s=180 * DAY_S,
)
