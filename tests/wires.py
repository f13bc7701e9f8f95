"""How each provider is spoken to: the table behind the loopback server of providers.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOUR_S = 3600
DAY_S = 24 * HOUR_S


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
    meta: bool = False
    words: str = "The provided authorization grant or refresh token is invalid, expired or revoked"


def _meta(key: str, grant_type: str, refresh: str, **more: Any) -> Wire:
    lives_s = (60 * DAY_S, None)
    return Wire(refresh, "GET .*me", key, grant_type, lives_s=lives_s, meta=True, **{"auth": "none", **more})


WIRES = {
    "instagram": _meta("access_token", "ig_refresh_token", "GET refresh_access_token"),
    "threads": _meta("access_token", "th_refresh_token", "GET refresh_access_token"),
    "facebook": _meta("fb_exchange_token", "fb_exchange_token", r"GET v\d+\.0/oauth/access_token", auth="body"),
    "facebook_page": Wire(
        r"GET v\d+\.0/(?!me$)[^/]+",
        "GET .*me",
        "access_token",
        lives_s=(None, None),
        auth="none",
        parent="facebook",
        meta=True,
    ),
    "linkedin": Wire(
        "POST oauth/v2/accessToken",
        "POST oauth/v2/introspectToken",
        lives_s=(60 * DAY_S, 365 * DAY_S),
        refresh_life="refresh_token_expires_in",
    ),
    "google": Wire("POST token", words="Token has been expired or revoked."),
    "youtube": Wire("POST token", words="Token has been expired or revoked."),
    "tiktok": Wire(
        "POST v2/oauth/token/",
        auth="client_key",
        lives_s=(2 * HOUR_S, 180 * DAY_S),
        rotation="strict",
        refresh_life="refresh_expires_in",
        words="Refresh token is invalid or expired.",
    ),
    "x": Wire("POST 2/oauth2/token", auth="basic", lives_s=(2 * HOUR_S, 182 * DAY_S), rotation="strict"),
    "pinterest": Wire(
        "POST v5/oauth/token",
        auth="basic",
        lives_s=(30 * DAY_S, 60 * DAY_S),
        rotation="strict",
        refresh_life="refresh_token_expires_in",
    ),
    "gohighlevel": Wire("POST oauth/token", lives_s=(DAY_S, 365 * DAY_S), rotation="strict"),
    "gohighlevel_location": Wire("POST oauth/locationToken", auth="none", lives_s=(DAY_S, None), parent="gohighlevel"),
    "gohighlevel_pit": Wire(None, "GET locations/.+", lives_s=(90 * DAY_S, None)),
    "evolution": Wire(None, "GET instance/connectionState/.+", lives_s=(None, None)),
    "stevo": Wire(None, "GET instance/connectionState/.+", lives_s=(None, None)),
    "oauth2": Wire("POST token", "GET probe", auth="basic"),
    "static_key": Wire(None, "GET probe", lives_s=(None, None)),
}
