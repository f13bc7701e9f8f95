"""A Facebook page (account: its id): derived again from the user's token, and without an end of its own.

https://developers.facebook.com/docs/facebook-login/guides/access-tokens/get-long-lived
It ends with the user's token: a changed password, a lost role on the page.
"""

from __future__ import annotations

from urllib.parse import quote

from reactor.answers import read_probe, read_refresh
from reactor.strategy import Credential, Integration, Request, Strategy

from ._requests import account_of, parent_of
from .facebook import VERSION, probe


def refresh(credential: Credential, integration: Integration) -> Request:
    """Ask for the page's token in the user's name."""
    page, version = quote(account_of(credential), safe=""), integration.api_version or VERSION
    params = {"fields": "access_token", "access_token": parent_of(credential).access_token}
    return Request("GET", f"{integration.base_url}/{version}/{page}", params=params)


STRATEGY = Strategy(
    base_url="https://graph.facebook.com",
    refresh=refresh,
    read=read_refresh,
    renews_with="parent",
    probe=probe,
    read_probe=read_probe,
    parent="facebook",
)
