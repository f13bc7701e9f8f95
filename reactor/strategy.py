"""What a provider of tokens is like: one Strategy an integration, pure functions without I/O, and its settings."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError

from reactor.errors import Misuse

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

_Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s?#]+$")]


class Integration(BaseModel):
    """One table of REACTOR_INTEGRATIONS: what overrides the strategy of an integration. None: the strategy's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    strategy: str
    base_url: _Url | None = None  # no slash at its end is needed
    token_url: _Url | None = None
    probe_url: _Url | None = None
    api_version: str | None = None
    client_id: str | None = None
    client_secret: SecretStr | None = None  # from client_secret_env
    auth: Literal["basic", "body", "none"] | None = None  # how the client shows its id and secret
    scope: str | None = None  # sent along by the generic oauth2 strategy
    probe_header: str = "Authorization"
    probe_prefix: str = "Bearer "
    parent: str | None = None  # the integration whose token this one is derived from
    parent_tenant: str | None = None  # of another tenant than the child's own, where the operator says so
    margin_s: float | None = Field(None, gt=0, le=3650 * DAY_S)
    minimum_age_s: float | None = Field(None, ge=0, le=3650 * DAY_S)
    life_s: float | None = Field(None, gt=0, le=3650 * DAY_S)
    refresh_life_s: float | None = Field(None, gt=0, le=3650 * DAY_S)
    rotates: bool | None = None
    timeout_s: float = Field(15.0, gt=0, le=60)
    probe_every_s: float = Field(DAY_S, ge=60, le=30 * DAY_S)

    def client(self) -> tuple[str, str]:
        """The client's id and secret.

        Raises:
            Misuse: The file does not name both.
        """
        if self.client_id is None or self.client_secret is None:
            raise Misuse(f"[{self.name}] needs client_id and client_secret_env in REACTOR_INTEGRATIONS")
        return self.client_id, self.client_secret.get_secret_value()


@dataclass(frozen=True, slots=True)
class Credential:
    """A token as a strategy sees it. The secrets are not in its repr."""

    tenant_id: str
    integration: str
    account: str
    access_token: str = field(repr=False)  # '' where there is none yet
    refresh_token: str | None = field(default=None, repr=False)
    scope: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    parent: Credential | None = None
    """The token that this one is derived from, where its strategy has a parent."""


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP call, sent once and as it is; its repr shows neither URL nor body."""

    method: Literal["GET", "POST"]
    url: str = field(repr=False)
    params: Mapping[str, str] = field(default_factory=dict, repr=False)
    form: Mapping[str, str] | None = field(default=None, repr=False)
    json: Mapping[str, Any] | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    basic: tuple[str, str] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the provider said: status, headers (names in lower case) and the body's bytes, all as they came."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class Verdict(StrEnum):
    """What an answer means (TOKENS section 2): what is done about it is the refresher's."""

    SUCCESS = "success"
    RECONNECT = "reconnect"  # a person must connect the account again
    APP = "app"  # our client id, secret or configuration is wrong
    PERMISSION = "permission"  # a scope is missing
    SUSPENDED = "suspended"  # the account is not active at the provider
    TRANSIENT = "transient"  # later; nothing has happened
    AMBIGUOUS = "ambiguous"  # nobody knows whether the provider did it
    UNKNOWN = "unknown"  # never taken for a revocation
    KEY_DEAD = "key_dead"  # of a probe: the key is refused
    SESSION_DOWN = "session_down"  # of a probe: the key is good, what it opens is not


@dataclass(frozen=True, slots=True)
class Fresh:
    """The tokens of a success. None: the answer did not say, and what was before holds."""

    access_token: str = field(repr=False)
    refresh_token: str | None = field(default=None, repr=False)
    expires_in_s: float | None = None
    refresh_expires_in_s: float | None = None
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """An answer understood.

    `code` is short, stable and free of secrets (`invalid_grant`, `meta_190_463`, `http_503`): it is stored and logged.
    """

    verdict: Verdict
    code: str
    fresh: Fresh | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """How the tokens of one integration are kept alive. Numbers are the provider's; `Integration` overrides them.

    Args:
        base_url: Where `refresh` and `probe` go unless the integration says otherwise; empty where it must say.
        refresh: The call that brings a fresh token; None for what only a person renews. Raises Misuse where the
            integration lacks a setting, Permanent where the row lacks what is sent.
        read: Understands the answer to `refresh`; `answers.read_refresh` knows the bodies of RFC 6749, Meta,
            TikTok and GoHighLevel.
        renews_with: What `refresh` sends: the refresh token, the access token itself, or the parent's access token.
        probe: A call that changes nothing and tells whether the token still works; None, or its None, for none.
        read_probe: Understands the answer to `probe`.
        rotates: The refresh token is single use: an answer that is lost may be the end of it.
        works_expired: `refresh` works after the access token has expired.
        margin_s: How long before the expiry it is refreshed.
        minimum_age_s: How old a token must be to be refreshed.
        life_s, refresh_life_s: Lives where an answer names none; None: no end.
        parent: The integration whose token of the same tenant this one is derived from.
    """

    base_url: str = ""
    refresh: Callable[[Credential, Integration], Request] | None = None
    read: Callable[[Answer], Reading] | None = None
    renews_with: Literal["refresh_token", "access_token", "parent"] = "refresh_token"
    probe: Callable[[Credential, Integration], Request | None] | None = None
    read_probe: Callable[[Answer], Reading] | None = None
    rotates: bool = False
    works_expired: bool = True
    margin_s: float = HOUR_S
    minimum_age_s: float = 0.0
    life_s: float | None = None
    refresh_life_s: float | None = None
    parent: str | None = None


def load_integrations(path: Path | None, strategies: Mapping[str, Strategy]) -> dict[str, Integration]:
    """Every integration by name: the strategies under their own names, and the tables of the file over them.

    Strategies find `base_url`, `rotates`, the numbers and `parent` of the returned integrations filled in.

    Raises:
        Misuse: The file cannot be read, a table is wrong or names an unset variable: one clear line, without a secret.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise Misuse(f"REACTOR_INTEGRATIONS: {path} cannot be read: {exc}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise Misuse(f"REACTOR_INTEGRATIONS: {name} stands outside a [table] of an integration")
    integrations = {name: _integration(name, tables.get(name, {}), strategies) for name in {**strategies, **tables}}
    for name, integration in integrations.items():
        if integration.parent is not None and (integration.parent == name or integration.parent not in integrations):
            raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] parent {integration.parent!r} is no other integration")
        if integration.parent is not None and integrations[integration.parent].parent is not None:
            raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] parent {integration.parent!r} is itself derived from another")
    return integrations


def _integration(name: str, table: Mapping[str, Any], strategies: Mapping[str, Strategy]) -> Integration:
    values = {"strategy": name, **table, "name": name}
    chosen = values["strategy"]
    if not isinstance(chosen, str) or chosen not in strategies:
        raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] strategy {chosen!r} is none of {', '.join(sorted(strategies))}")
    variable = values.pop("client_secret_env", None)
    if "name" in table:
        raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] name: the table's own name is the integration's")
    if "client_secret" in values:
        raise Misuse(f'REACTOR_INTEGRATIONS: [{name}] names its secret\'s variable: client_secret_env = "..."')
    if variable is not None:
        secret = os.environ.get(str(variable), "").strip()
        if not secret:
            raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] client_secret_env: {variable} is not set")
        values["client_secret"] = secret
    strategy = strategies[chosen]
    for number in ("margin_s", "minimum_age_s", "life_s", "refresh_life_s", "rotates", "parent", "base_url"):
        if values.get(number) is None and getattr(strategy, number) not in {None, ""}:
            values[number] = getattr(strategy, number)
    if isinstance(values.get("base_url"), str):
        values["base_url"] = values["base_url"].rstrip("/")
    try:
        return Integration(**values)
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]
        raise Misuse(f"REACTOR_INTEGRATIONS: [{name}] {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
