"""YouTube: a Google token of its own name, so that its lane, its client and its alerts are its own.

https://developers.google.com/youtube/v3/guides/auth/server-side-web-apps#offline
Access 1 h; the refresh token as in google.py.
"""

from __future__ import annotations

from reactor.answers import read_refresh
from reactor.strategy import HOUR_S, Strategy

from .google import refresh

STRATEGY = Strategy(
    base_url="https://oauth2.googleapis.com",
    refresh=refresh,
    read=read_refresh,
    margin_s=HOUR_S / 6,
    life_s=HOUR_S,
)
