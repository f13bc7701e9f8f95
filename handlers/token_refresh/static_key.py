"""A key that only a person renews: a GET on probe_url tells whether it still works.

https://datatracker.ietf.org/doc/html/rfc6750#section-2.1 (probe_header and probe_prefix for those who differ)
No end unless life_s or the row's expires_at says so.
"""

from __future__ import annotations

from reactor.answers import read_probe
from reactor.strategy import Credential, Integration, Request, Strategy


def probe(credential: Credential, integration: Integration) -> Request | None:
    """Show the key at probe_url; nothing without one."""
    if integration.probe_url is None:
        return None
    headers = {integration.probe_header: f"{integration.probe_prefix}{credential.access_token}"}
    return Request("GET", integration.probe_url, headers=headers)


STRATEGY = Strategy(probe=probe, read_probe=read_probe)
