"""The memory reactor: rows inserted into Postgres become memories an agent can recall."""

from importlib import import_module
from typing import TYPE_CHECKING

from reactor.errors import NeedsReconnect, Permanent, Unavailable
from reactor.job import Handler, Job, Snooze

if TYPE_CHECKING:
    from reactor.db import tenant
    from reactor.memory import Hit, Hits, Memory
    from reactor.sealing import seal
    from reactor.tokens import FreshToken, Tokens

__all__ = [
    "FreshToken",
    "Handler",
    "Hit",
    "Hits",
    "Job",
    "Memory",
    "NeedsReconnect",
    "Permanent",
    "Snooze",
    "Tokens",
    "Unavailable",
    "seal",
    "tenant",
]

_HOMES = {
    "FreshToken": "reactor.tokens",
    "Hit": "reactor.memory",
    "Hits": "reactor.memory",
    "Memory": "reactor.memory",
    "Tokens": "reactor.tokens",
    "seal": "reactor.sealing",
    "tenant": "reactor.db",
}


def __getattr__(name: str) -> object:
    """What brings asyncpg and numpy along is imported when first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'reactor' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
