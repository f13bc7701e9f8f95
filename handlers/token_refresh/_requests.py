"""What several strategies send alike, and what a request needs of its row and its settings."""

from __future__ import annotations

from typing import Literal

from reactor.errors import Misuse, Permanent
from reactor.strategy import Credential, Integration, Request

Auth = Literal["basic", "body", "none"]


def base_of(integration: Integration) -> str:
    """Where the service answers.

    Raises:
        Misuse: It stands on a host of the user's own, and REACTOR_INTEGRATIONS does not say which.
    """
    if integration.base_url is None:
        raise Misuse(f"[{integration.name}] needs base_url in REACTOR_INTEGRATIONS")
    return integration.base_url


def refresh_token_of(credential: Credential) -> str:
    """The refresh token.

    Raises:
        Permanent: The row has none: there is nothing to refresh with, and only a person can connect anew.
    """
    if not credential.refresh_token:
        raise Permanent(f"this {credential.integration} token has no refresh token", code="no_refresh_token")
    return credential.refresh_token


def account_of(credential: Credential) -> str:
    """The account.

    Raises:
        Permanent: The row names none, and the call cannot be made without.
    """
    if not credential.account:
        raise Permanent(f"this {credential.integration} token names no account", code="no_account")
    return credential.account


def parent_of(credential: Credential) -> Credential:
    """The token that this one is derived from.

    Raises:
        Permanent: The tenant has no such token.
    """
    if credential.parent is None or not credential.parent.access_token:
        raise Permanent(f"this {credential.integration} token has no parent's to be derived from", code="no_parent")
    return credential.parent


def refresh_request(
    credential: Credential, integration: Integration, url: str, *, auth: Auth = "body", **more: str
) -> Request:
    """RFC 6749 section 6: a form with the refresh token; `auth` and `url` give way to the integration's own.

    Raises:
        Misuse: The client has to show itself, and REACTOR_INTEGRATIONS does not name it.
        Permanent: The row has no refresh token.
    """
    form = {"grant_type": "refresh_token", "refresh_token": refresh_token_of(credential), **more}
    url, auth = integration.token_url or url, integration.auth or auth
    if auth == "none":
        public = {} if integration.client_id is None else {"client_id": integration.client_id}
        return Request("POST", url, form={**form, **public})
    client_id, client_secret = integration.client()
    if auth == "basic":
        return Request("POST", url, form=form, basic=(client_id, client_secret))
    return Request("POST", url, form={**form, "client_id": client_id, "client_secret": client_secret})


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def meta_probe(credential: Credential, url: str) -> Request:
    """Who am I: the cheapest call of a Meta API. The token stands in a header, which nobody's access log keeps."""
    return Request("GET", url, params={"fields": "id"}, headers=bearer(credential.access_token))
