"""Any provider that speaks RFC 6749: `strategy = "oauth2"`, its token_url, and what it differs in.

https://datatracker.ietf.org/doc/html/rfc6749#section-6
Lives come from the answer, else from life_s and refresh_life_s; `rotates` says whether a refresh token is single use.
"""

from __future__ import annotations

from reactor.answers import read_probe, read_refresh
from reactor.errors import Misuse
from reactor.strategy import HOUR_S, Credential, Integration, Request, Strategy

from ._requests import refresh_request
from .static_key import probe


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6; the client by Basic (`auth`'s default here), in the body, or not at all."""
    if integration.token_url is None:
        raise Misuse(f"[{integration.name}] needs token_url in REACTOR_INTEGRATIONS")
    more = {"scope": integration.scope} if integration.scope else {}
    return refresh_request(credential, integration, integration.token_url, auth="basic", **more)


STRATEGY = Strategy(refresh=refresh, read=read_refresh, probe=probe, read_probe=read_probe, margin_s=HOUR_S / 4)
