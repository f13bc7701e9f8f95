"""GoHighLevel by OAuth, agency or location (metadata.user_type: Company, the default, or Location).

https://marketplace.gohighlevel.com/docs/ghl/oauth/get-access-token
Access 24 h; refresh 1 y, or until it is used: each refresh replaces it.
"""

from __future__ import annotations

from dataclasses import replace

from reactor.answers import read_refresh
from reactor.strategy import DAY_S, HOUR_S, Credential, Integration, Request, Strategy

from ._requests import refresh_request

VERSION = "2021-07-28"


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6 with `user_type`, the client in the body, the API's version in a header."""
    user_type = "Location" if credential.metadata.get("user_type") == "Location" else "Company"
    request = refresh_request(credential, integration, f"{integration.base_url}/oauth/token", user_type=user_type)
    return replace(request, headers={"Version": integration.api_version or VERSION})


STRATEGY = Strategy(
    base_url="https://services.leadconnectorhq.com",
    refresh=refresh,
    read=read_refresh,
    rotates=True,
    margin_s=3 * HOUR_S,
    life_s=DAY_S,
    refresh_life_s=365 * DAY_S,
)
