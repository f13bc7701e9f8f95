"""A Facebook user: a token that still lives is exchanged for another of about 60 d; an expired one cannot be.

https://developers.facebook.com/docs/facebook-login/guides/access-tokens/get-long-lived
A version of the API lives two years at least: `api_version` moves it.
"""

from __future__ import annotations

from reactor.answers import read_probe, read_refresh
from reactor.strategy import DAY_S, Credential, Integration, Request, Strategy

from ._requests import meta_probe

VERSION = "v24.0"


def refresh(credential: Credential, integration: Integration) -> Request:
    """Exchange the token for a longer-lived one."""
    client_id, client_secret = integration.client()
    params = {
        "grant_type": "fb_exchange_token",
        "client_id": client_id,
        "client_secret": client_secret,
        "fb_exchange_token": credential.access_token,
    }
    version = integration.api_version or VERSION
    return Request("GET", f"{integration.base_url}/{version}/oauth/access_token", params=params)


def probe(credential: Credential, integration: Integration) -> Request:
    """Ask who the token belongs to."""
    return meta_probe(credential, f"{integration.base_url}/{integration.api_version or VERSION}/me")


STRATEGY = Strategy(
    base_url="https://graph.facebook.com",
    refresh=refresh,
    read=read_refresh,
    renews_with="access_token",
    probe=probe,
    read_probe=read_probe,
    works_expired=False,
    margin_s=20 * DAY_S,
    life_s=60 * DAY_S,
)
