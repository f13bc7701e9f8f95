"""Our exceptions, sorted by what the caller should do."""

from __future__ import annotations

import math
import time
from datetime import UTC
from email.utils import parsedate_to_datetime

_LONGEST_S = 86_400.0


def delay_s_of(named: object) -> float | None:
    """A delay that the other side named, in seconds or as an HTTP date, within a day; None for what is neither."""
    try:
        seconds = float(named)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        try:
            at = parsedate_to_datetime(str(named))
            seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_S)


class ReactorError(Exception):
    """Whatever this package raises on purpose."""


class Unavailable(ReactorError):
    """A dependency is out of reach and nothing was changed: try again later.

    Args:
        message: What is out of reach. It is logged and stored, so it quotes no text, secret or URL.
        retry_after_s: When the dependency itself named a delay, that delay, or its Retry-After header as it stands.
        code: A short stable word for logs and `last_error`.
    """

    def __init__(self, message: str, *, retry_after_s: float | str | None = None, code: str = "unavailable") -> None:
        super().__init__(message)
        self.retry_after_s = delay_s_of(retry_after_s)
        self.code = code


class NeedsReconnect(ReactorError):
    """A token that no program can bring back: a person must connect the account again.

    Args:
        message: Which token and why, without a secret.
        state: As in `reactor.token_health`; "missing" where there is none.
        reason: A code: what the provider said, or what has passed.
    """

    def __init__(self, message: str, *, state: str, reason: str) -> None:
        super().__init__(message)
        self.state = state
        self.reason = reason


class Permanent(ReactorError):
    """Trying again cannot help: the job is dead at once and waits for a person.

    The message is stored and logged, so it quotes no tenant text.
    """

    def __init__(self, message: str, *, code: str = "permanent") -> None:
        super().__init__(message)
        self.code = code


class StaleClaim(ReactorError):
    """The lease passed to another worker: drop the result, write nothing."""


class Misuse(ReactorError):
    """The caller's words are off: one clear line, exit code 2 on the command line."""
