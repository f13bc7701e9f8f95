"""A GoHighLevel location (account: its id) under an agency: minted again from the agency's token (gohighlevel).

https://marketplace.gohighlevel.com/docs/ghl/oauth/get-location-access-token
24 h, no refresh token. The company is metadata.company_id, else the account of the agency's token.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.errors import Permanent
from reactor.strategy import DAY_S, HOUR_S, Credential, Integration, Request, Strategy

from ._requests import account_of, bearer, parent_of
from .gohighlevel import VERSION


def refresh(credential: Credential, integration: Integration) -> Request:
    """Ask for a token of the location in the agency's name."""
    agency = parent_of(credential)
    company = credential.metadata.get("company_id") or agency.account
    if not isinstance(company, str) or not company:
        raise Permanent("neither metadata.company_id nor the agency's account names the company", code="no_company")
    form = {"companyId": company, "locationId": account_of(credential)}
    headers = {"Version": integration.api_version or VERSION, **bearer(agency.access_token)}
    return Request("POST", f"{integration.base_url}/oauth/locationToken", form=form, headers=headers)


STRATEGY = Strategy(
    base_url="https://services.leadconnectorhq.com",
    refresh=refresh,
    read=read_refresh,
    renews_with="parent",
    margin_s=3 * HOUR_S,
    life_s=DAY_S,
    parent="gohighlevel",
)
