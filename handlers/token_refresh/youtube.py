"""YouTube: a Google token of its own name, so that its lane, its client and its alerts are its own.

https://developers.google.com/youtube/v3/guides/auth/server-side-web-apps#offline
Access 1 h; the refresh token as in google.py.
"""

from __future__ import annotations

from .google import STRATEGY

__all__ = ["STRATEGY"]
