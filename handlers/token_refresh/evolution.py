"""A key of an Evolution API gateway (account: the instance): never refreshed, only probed.

https://doc.evolution-api.com/v2/api-reference/instance-controller/connection-state
401 or 403: the key is dead. A state that is not `open`: the key is good and WhatsApp is not connected.
"""

from __future__ import annotations

from urllib.parse import quote

from reactor.answers import json_object, read_probe
from reactor.strategy import Answer, Credential, Integration, Reading, Request, Strategy, Verdict

from ._requests import account_of, base_of

_STATES = {"close", "connecting", "refused"}


def probe(credential: Credential, integration: Integration) -> Request:
    """Ask for the state of the instance."""
    instance = quote(account_of(credential), safe="")
    url = f"{base_of(integration)}/instance/connectionState/{instance}"
    return Request("GET", url, headers={"apikey": credential.access_token})


def read_state(answer: Answer) -> Reading:
    """Tell a dead key from a session that is down; a success that names no state is neither."""
    reading = read_probe(answer)
    if reading.verdict is not Verdict.SUCCESS:
        return reading
    instance = (json_object(answer) or {}).get("instance")
    state = instance.get("state") if isinstance(instance, dict) else None
    if state == "open":
        return reading
    if isinstance(state, str) and state:
        return Reading(Verdict.SESSION_DOWN, f"state_{state if state in _STATES else 'other'}")
    return Reading(Verdict.UNKNOWN, "no_state")


STRATEGY = Strategy(probe=probe, read_probe=read_state)
