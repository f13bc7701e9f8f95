"""LinkedIn: approved partners refresh for 365 d from the first consent, which no refresh prolongs; others reconnect.

https://learn.microsoft.com/en-us/linkedin/shared/authentication/programmatic-refresh-tokens
https://learn.microsoft.com/en-us/linkedin/shared/authentication/token-introspection
Access 60 d; refresh_token_expires_in counts down to the real deadline.
"""

from __future__ import annotations

from reactor.answers import json_object, read_error, read_probe, read_refresh
from reactor.strategy import DAY_S, Answer, Credential, Integration, Reading, Request, Strategy, Verdict

from ._requests import refresh_request

_STATUSES = {"active", "expired", "revoked"}


def refresh(credential: Credential, integration: Integration) -> Request:
    """RFC 6749 section 6, the client in the body."""
    return refresh_request(credential, integration, f"{integration.base_url}/oauth/v2/accessToken")


def probe(credential: Credential, integration: Integration) -> Request | None:
    """Ask LinkedIn about the token, which only its client may; nothing without a client."""
    if integration.client_id is None or integration.client_secret is None:
        return None
    client_id, client_secret = integration.client()
    form = {"client_id": client_id, "client_secret": client_secret, "token": credential.access_token}
    return Request("POST", f"{integration.base_url}/oauth/v2/introspectToken", form=form)


def read_introspection(answer: Answer) -> Reading:
    """A token that is not active is dead; a 401 here means the client, not the token."""
    body = json_object(answer) or {}
    error = read_error(answer, body)
    if error is not None and error.verdict is Verdict.APP:
        return error
    if body.get("active") is False:
        status = body.get("status")
        return Reading(
            Verdict.KEY_DEAD, f"linkedin_{status if isinstance(status, str) and status in _STATUSES else 'inactive'}"
        )
    reading = read_probe(answer)
    if reading.verdict is Verdict.KEY_DEAD or (reading.verdict is Verdict.SUCCESS and body.get("active") is not True):
        return Reading(Verdict.UNKNOWN, f"http_{answer.status}")
    return reading


STRATEGY = Strategy(
    base_url="https://www.linkedin.com",
    refresh=refresh,
    read=read_refresh,
    probe=probe,
    read_probe=read_introspection,
    margin_s=7 * DAY_S,
    life_s=60 * DAY_S,
    refresh_life_s=365 * DAY_S,
)
