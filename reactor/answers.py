"""The one place that reads a provider's answer: body first, then status; a page or an unknown word revokes nobody."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reactor.errors import delay_s_of
from reactor.strategy import DAY_S, Answer, Fresh, Reading, Verdict

_LONGEST_LIFE_S = 3650 * DAY_S

# The `error` of RFC 6749 and of those who borrowed it. A word that is not here is `error_unknown`: it is never echoed.
_WORDS = {
    "invalid_grant": Verdict.RECONNECT,
    "invalid_client": Verdict.APP,
    "unauthorized_client": Verdict.APP,
    "unsupported_grant_type": Verdict.APP,
    "invalid_request": Verdict.APP,
    "deleted_client": Verdict.APP,  # Google
    "disabled_client": Verdict.APP,  # Google
    "invalid_scope": Verdict.PERMISSION,
    "temporarily_unavailable": Verdict.TRANSIENT,
    "server_error": Verdict.TRANSIENT,
    "access_denied": Verdict.UNKNOWN,
    "invalid_token": Verdict.UNKNOWN,
}
_TIKTOK_WORDS = {
    "scope_not_authorized": Verdict.PERMISSION,
    "scope_permission_missed": Verdict.PERMISSION,
    "rate_limit_exceeded": Verdict.TRANSIENT,
    "internal_error": Verdict.TRANSIENT,
    "access_token_invalid": Verdict.UNKNOWN,
    "invalid_params": Verdict.APP,
}
# Sentences that say more than their `error` or status does, in lower case and without the full stop.
_SENTENCES = {
    "value passed for the token was invalid": (Verdict.RECONNECT, "x_token_invalid"),
    "location is not active": (Verdict.SUSPENDED, "ghl_location_not_active"),
    "invalid refresh token": (Verdict.RECONNECT, "ghl_invalid_refresh_token"),
    "the token is not authorized for this scope": (Verdict.PERMISSION, "ghl_scope_not_authorized"),
    "invalid token: access token is invalid": (Verdict.UNKNOWN, "ghl_access_token_invalid"),
    "error validating client secret": (Verdict.APP, "meta_client_secret"),  # Meta says it under the transient code 1
}
_META_CODES = {
    **dict.fromkeys((1, 2, 4, 17, 32, 341, 613), Verdict.TRANSIENT),
    **dict.fromkeys((10, *range(200, 300)), Verdict.PERMISSION),
    101: Verdict.APP,  # "Error validating application."
}
_META_TOKEN_CODES = {102, 190}
_META_TOKEN_SUBCODES = {458, 459, 460, 463, 464, 467, 492}
_PINTEREST_CODES = {2, 283}  # "Authentication failed." and "The authorization grant is invalid", beside `message`

_SUCCESSES, _REFUSALS = range(200, 300), range(400, 500)
_NO_REFUSALS = {408, 429}
_DEAD_KEY = {401, 403}


def read_refresh(answer: Answer) -> Reading:
    """Understand the answer to a refresh; never raises, and its code never holds a word of the body.

    Knows the bodies of RFC 6749, Meta, TikTok (wrapped in `data` or not) and GoHighLevel.
    """
    if _is_no_answer(answer.status):
        return _later(answer)
    body = json_object(answer)
    if body is None:
        # Who answers with a page has rotated nothing, unless it calls itself a success.
        return Reading(Verdict.AMBIGUOUS, "not_json") if answer.status in _SUCCESSES else _later(answer)
    error = read_error(answer, body)
    if error is not None:
        if error.verdict is Verdict.UNKNOWN and answer.status in _SUCCESSES:
            return Reading(Verdict.AMBIGUOUS, error.code)
        return error
    if answer.status not in _SUCCESSES:
        return Reading(Verdict.UNKNOWN, f"http_{answer.status}")
    inner = body.get("data")
    fresh = _fresh_of(inner if isinstance(inner, Mapping) and "access_token" not in body else body)
    return Reading(Verdict.AMBIGUOUS, "no_access_token") if fresh is None else Reading(Verdict.SUCCESS, "ok", fresh)


def read_probe(answer: Answer) -> Reading:
    """Understand the answer to a probe: 2xx works, 401 and 403 are a dead key, a page says nothing about a key."""
    if _is_no_answer(answer.status) or _is_page(answer):
        return _later(answer)
    body = json_object(answer)
    error = None if body is None else read_error(answer, body)
    if error is not None and error.verdict in {Verdict.TRANSIENT, Verdict.PERMISSION, Verdict.SUSPENDED}:
        return error
    if error is not None and error.verdict is Verdict.RECONNECT:
        return Reading(Verdict.KEY_DEAD, error.code)
    code = f"http_{answer.status}"
    if answer.status in _DEAD_KEY:
        return Reading(Verdict.KEY_DEAD, code)
    if error is None and answer.status in _SUCCESSES:
        return Reading(Verdict.SUCCESS, "ok")
    return Reading(Verdict.UNKNOWN, code if error is None else error.code)


def json_object(answer: Answer) -> dict[str, Any] | None:
    """The body as a JSON object; None for what is not one."""
    try:
        body = json.loads(answer.body)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def read_error(answer: Answer, body: Mapping[str, Any]) -> Reading | None:
    """The error a body holds; None where it holds none. One that is not known is UNKNOWN, `error_unknown`."""
    error = _error_of(body)
    if error is None:
        return None
    verdict, code = error
    return Reading(verdict, code, retry_after_s=delay_s_of(answer.headers.get("retry-after")))


def _error_of(body: Mapping[str, Any]) -> tuple[Verdict, str] | None:
    error, inner = body.get("error"), body.get("data")
    is_plain = isinstance(error, str) and error in _WORDS and error != "invalid_request"  # X's word for a dead token
    for text in () if is_plain else _texts_of(body):
        if (known := _SENTENCES.get(text.strip().rstrip(".").lower())) is not None:
            return known
    if isinstance(error, Mapping):
        return _error_in(error)
    if error:
        return _word(error)
    if isinstance(inner, Mapping) and _whole_number(inner.get("error_code")):
        return Verdict.UNKNOWN, "error_unknown"  # TikTok's older shape, whose numbers are no longer documented
    if (code := _whole_number(body.get("code"))) in _PINTEREST_CODES and "access_token" not in body:
        return Verdict.UNKNOWN, f"pinterest_{code}"
    return None


def _texts_of(body: Mapping[str, Any]) -> Iterator[str]:
    error, message = body.get("error"), body.get("message")
    inner = error.get("message") if isinstance(error, Mapping) else error
    for text in (body.get("error_description"), inner, *(message if isinstance(message, list) else [message])):
        if isinstance(text, str):
            yield text


def _error_in(error: Mapping[str, Any]) -> tuple[Verdict, str] | None:
    """What an `error` that is an object says: Meta's has a number for its code, TikTok's a word."""
    code = error.get("code")
    if not error or code == "ok":
        return None
    number = _whole_number(code)
    if error.get("is_transient") is True:
        return Verdict.TRANSIENT, f"meta_{number}" if number in _META_CODES else "meta_transient"
    if number is None:
        return _word(code)
    if number in _META_TOKEN_CODES:
        return _meta_token_error(number, error.get("error_subcode"))
    if number in _META_CODES:
        return _META_CODES[number], f"meta_{number}"
    return Verdict.UNKNOWN, "meta_other"


def _meta_token_error(code: int, named: object) -> tuple[Verdict, str]:
    subcode = _whole_number(named)
    if named is None or subcode == 0:
        return Verdict.RECONNECT, f"meta_{code}"
    if subcode in _META_TOKEN_SUBCODES:
        return Verdict.RECONNECT, f"meta_{code}_{subcode}"
    return Verdict.UNKNOWN, f"meta_{code}_other"


def _word(word: object) -> tuple[Verdict, str]:
    if isinstance(word, str) and word in _WORDS:
        return _WORDS[word], word
    if isinstance(word, str) and word in _TIKTOK_WORDS:
        return _TIKTOK_WORDS[word], f"tiktok_{word}"
    return Verdict.UNKNOWN, "error_unknown"


def _fresh_of(body: Mapping[str, Any]) -> Fresh | None:
    access_token = _secret(body.get("access_token"))
    if access_token is None:
        return None
    # TikTok's name; LinkedIn's, Google's and Pinterest's.
    refresh_life = body.get("refresh_expires_in", body.get("refresh_token_expires_in"))
    return Fresh(
        access_token,
        _secret(body.get("refresh_token")),
        _life_s(body.get("expires_in")),
        _life_s(refresh_life),
        _scope(body.get("scope")),
    )


def _secret(value: object) -> str | None:
    """A token that can be stored and sent in a header; None for one that cannot."""
    return value if isinstance(value, str) and value.strip() and value.isprintable() else None


def _scope(value: object) -> str | None:
    if isinstance(value, list):
        value = " ".join(scope for scope in value if isinstance(scope, str))
    return _secret(value)


def _life_s(value: object) -> float | None:
    """Seconds above zero, ten years at most; None for what is no such number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return min(seconds, _LONGEST_LIFE_S) if math.isfinite(seconds) and seconds > 0 else None


def _whole_number(value: object) -> int | None:
    """A number of at most seven digits, in whichever JSON type it came."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) else None


def _is_no_answer(status: int) -> bool:
    """What comes from before the provider's own logic, or from its collapse: the body does not matter."""
    return status in _NO_REFUSALS or not (status in _SUCCESSES or status in _REFUSALS)


def _is_page(answer: Answer) -> bool:
    return "html" in answer.headers.get("content-type", "").lower() or answer.body.lstrip().startswith(b"<")


def _later(answer: Answer) -> Reading:
    retry_after_s = delay_s_of(answer.headers.get("retry-after"))
    return Reading(Verdict.TRANSIENT, f"http_{answer.status}", retry_after_s=retry_after_s)
