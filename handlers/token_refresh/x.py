"""X: a refresh token (scope offline.access) is good for one use, and a second use may end the whole grant.

https://docs.x.com/fundamentals/authentication/oauth-2-0/authorization-code
Access 2 h; refresh 6 months by report. A confidential client shows itself by Basic, a public one by client_id alone.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.strategy import DAY_S, HOUR_S, Credential, Integration, Request, Strategy

from ._requests import refresh_request


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6: without Basic a confidential client is told "Missing valid authorization header"."""
    public = integration.client_id is not None and integration.client_secret is None
    url = f"{integration.base_url}/2/oauth2/token"
    return refresh_request(credential, integration, url, auth="none" if public else "basic")


STRATEGY = Strategy(
    base_url="https://api.x.com",
    refresh=refresh,
    read=read_refresh,
    rotates=True,
    margin_s=HOUR_S / 4,
    life_s=2 * HOUR_S,
    refresh_life_s=182 * DAY_S,
)
