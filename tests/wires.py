"""How each provider is spoken to: the table behind the loopback server of providers.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HOUR_S = 3600
DAY_S = 24 * HOUR_S


def meta_error(message: str, code: int, subcode: int | None = None) -> dict[str, Any]:
    error = {"message": message, "type": "OAuthException", "code": code, "fbtrace_id": "AbCdEfGhIjK"}
    return {"error": error if subcode is None else {**error, "error_subcode": subcode}}


def invalid_grant(description: str) -> dict[str, Any]:
    return {"error": "invalid_grant", "error_description": description}


def ghl_error(status: int, message: Any, error: str) -> dict[str, Any]:
    return {"statusCode": status, "message": message, "error": error}


EXPIRED = meta_error("Error validating access token: Session has expired.", 190, 463)
GOOGLE = invalid_grant("Token has been expired or revoked.")


@dataclass(frozen=True)
class Wire:
    """How one provider is spoken to, and the words it refuses in."""

    refresh: str | None = None  # method and path under the integration's own prefix, as a pattern
    probe: str | None = None
    key: str = "refresh_token"  # the field of what is renewed
    grant_type: str = "refresh_token"
    auth: str = "body"  # how the client must show itself: body, basic, client_key, none
    lives_s: tuple[float | None, float | None] = (HOUR_S, None)  # access, refresh
    rotation: str = "none"
    parent: str | None = None
    refresh_life: str | None = None  # the field that tells the refresh token's life
    refusal: dict[str, Any] = field(default_factory=lambda: invalid_grant("The refresh token is invalid or expired."))

    @property
    def meta(self) -> bool:
        return self.refusal is EXPIRED


def _meta_wire(key: str, grant_type: str, refresh: str, **more: Any) -> Wire:
    lives_s = (60 * DAY_S, None)
    return Wire(refresh, "GET .*me", key, grant_type, lives_s=lives_s, refusal=EXPIRED, **{"auth": "none", **more})


WIRES = {
    "instagram": _meta_wire("access_token", "ig_refresh_token", "GET refresh_access_token"),
    "threads": _meta_wire("access_token", "th_refresh_token", "GET refresh_access_token"),
    "facebook": _meta_wire("fb_exchange_token", "fb_exchange_token", r"GET v\d+\.0/oauth/access_token", auth="body"),
    "facebook_page": Wire(
        r"GET v\d+\.0/(?!me$)[^/]+",
        "GET .*me",
        "access_token",
        lives_s=(None, None),
        auth="none",
        parent="facebook",
        refusal=EXPIRED,
    ),
    "linkedin": Wire(
        "POST oauth/v2/accessToken",
        "POST oauth/v2/introspectToken",
        lives_s=(60 * DAY_S, 365 * DAY_S),
        refresh_life="refresh_token_expires_in",
        refusal=invalid_grant("The provided authorization grant or refresh token is invalid, expired or revoked"),
    ),
    "google": Wire("POST token", refusal=GOOGLE),
    "youtube": Wire("POST token", refusal=GOOGLE),
    "tiktok": Wire(
        "POST v2/oauth/token/",
        auth="client_key",
        lives_s=(2 * HOUR_S, 180 * DAY_S),
        rotation="strict",
        refresh_life="refresh_expires_in",
        refusal={**invalid_grant("Refresh token is invalid or expired."), "log_id": "2"},
    ),
    "x": Wire(
        "POST 2/oauth2/token",
        auth="basic",
        lives_s=(2 * HOUR_S, 182 * DAY_S),
        rotation="strict",
        refusal={"error": "invalid_request", "error_description": "Value passed for the token was invalid."},
    ),
    "pinterest": Wire(
        "POST v5/oauth/token",
        auth="basic",
        lives_s=(30 * DAY_S, 60 * DAY_S),
        rotation="strict",
        refresh_life="refresh_token_expires_in",
    ),
    "gohighlevel": Wire(
        "POST oauth/token",
        lives_s=(DAY_S, 365 * DAY_S),
        rotation="strict",
        refusal=ghl_error(400, "Invalid refresh token", "Bad Request"),
    ),
    "gohighlevel_location": Wire(
        "POST oauth/locationToken",
        auth="none",
        lives_s=(DAY_S, None),
        parent="gohighlevel",
        refusal=ghl_error(401, "Invalid token: access token is invalid", "Unauthorized"),
    ),
    "gohighlevel_pit": Wire(None, "GET locations/.+", lives_s=(90 * DAY_S, None)),
    "evolution": Wire(None, "GET instance/connectionState/.+", lives_s=(None, None)),
    "stevo": Wire(None, "GET instance/connectionState/.+", lives_s=(None, None)),
    "oauth2": Wire("POST token", "GET probe", auth="basic"),
    "static_key": Wire(None, "GET probe", lives_s=(None, None)),
}
