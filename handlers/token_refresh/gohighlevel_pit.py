"""A GoHighLevel private integration token (account: the location's id): a person rotates it every 90 d.

https://marketplace.gohighlevel.com/docs/Authorization/PrivateIntegrationsToken
The old token may overlap the new one for 7 d. An agency's token has no location and needs a probe_url.
"""

from __future__ import annotations

from urllib.parse import quote

from reactor.answers import read_probe
from reactor.strategy import DAY_S, Answer, Credential, Integration, Reading, Request, Strategy, Verdict

from ._requests import bearer
from .gohighlevel import VERSION


def probe(credential: Credential, integration: Integration) -> Request | None:
    """Read the location; nothing where neither a location nor a probe_url is named."""
    url = integration.probe_url
    if url is None and credential.account:
        url = f"{integration.base_url}/locations/{quote(credential.account, safe='')}"
    headers = {"Version": integration.api_version or VERSION, **bearer(credential.access_token)}
    return None if url is None else Request("GET", url, headers=headers)


def read_key(answer: Answer) -> Reading:
    """A key that may not read locations is a good key all the same."""
    reading = read_probe(answer)
    return Reading(Verdict.SUCCESS, "ok") if reading.code == "ghl_scope_not_authorized" else reading


STRATEGY = Strategy(
    base_url="https://services.leadconnectorhq.com",
    probe=probe,
    read_probe=read_key,
    life_s=90 * DAY_S,
)
