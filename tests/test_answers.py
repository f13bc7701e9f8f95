"""What an answer is taken for: the providers' own wording, every parsing trap, and whatever bytes may come."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reactor.answers import read_probe, read_refresh
from reactor.strategy import DAY_S, Answer, Fresh, Verdict

PAGE = b"<!DOCTYPE html><html><title>Just a moment...</title></html>"
CODE = re.compile(r"[a-z0-9_]{2,40}")


def answer(status: int, body: object, **headers: str) -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, raw)


def meta(code: object, subcode: object = None, message: str = "CANARY", **more: object) -> dict[str, object]:
    error = {"message": message, "type": "OAuthException", "code": code, "fbtrace_id": "EJplcsCHuLu", **more}
    return {"error": error if subcode is None else {**error, "error_subcode": subcode}}


def rfc(error: object, description: object = "CANARY") -> dict[str, object]:
    return {"error": error, "error_description": description}


def ghl(status: int, message: object, error: str = "Bad Request") -> dict[str, object]:
    return {"statusCode": status, "message": message, "error": error}


EXPIRED = (
    "Error validating access token: Session has expired on Thursday, 01-Jan-26 10:00:00 PST."
    " The current time is Friday, 02-Jan-26 10:00:00 PST."
)
LOGGED_OUT = "Error validating access token: The session is invalid because the user logged out."
CHANGED = (
    "Error validating access token: The session has been invalidated because the user changed their password"
    " or Facebook has changed the session for security reasons."
)
NOT_AUTHORIZED = "Error validating access token: The user has not authorized application 123."
LINKEDIN = "The provided authorization grant or refresh token is invalid, expired or revoked"
TIKTOK_SCOPE = "The user did not authorize the scope required for completing this request."
X_TOKEN = "Value passed for the token was invalid."

REFRESHES = [
    # reconnect
    (400, rfc("invalid_grant", "Token has been expired or revoked."), Verdict.RECONNECT, "invalid_grant"),
    (400, rfc("invalid_grant", "Bad Request"), Verdict.RECONNECT, "invalid_grant"),
    (400, rfc("invalid_grant", LINKEDIN), Verdict.RECONNECT, "invalid_grant"),
    (400, rfc("invalid_grant", {"why": ["not a string"]}), Verdict.RECONNECT, "invalid_grant"),
    (400, {**rfc("invalid_grant", "Refresh token is invalid or expired."), "log_id": "2"}, Verdict.RECONNECT, "invalid_grant"),
    (200, {**rfc("invalid_grant", "Refresh token is invalid or expired."), "log_id": "2"}, Verdict.RECONNECT, "invalid_grant"),
    (400, rfc("invalid_request", X_TOKEN), Verdict.RECONNECT, "x_token_invalid"),
    (400, meta(190), Verdict.RECONNECT, "meta_190"),
    (401, meta(190, message="Invalid OAuth access token - Cannot parse access token"), Verdict.RECONNECT, "meta_190"),
    (400, meta("190", "463", EXPIRED), Verdict.RECONNECT, "meta_190_463"),
    (400, meta(190, 463, EXPIRED), Verdict.RECONNECT, "meta_190_463"),
    (400, meta(190, 467, LOGGED_OUT), Verdict.RECONNECT, "meta_190_467"),
    (400, meta(190, 460, CHANGED), Verdict.RECONNECT, "meta_190_460"),
    (400, meta(190, 458, NOT_AUTHORIZED), Verdict.RECONNECT, "meta_190_458"),
    (400, meta(190, 459), Verdict.RECONNECT, "meta_190_459"),
    (400, meta(190, 464), Verdict.RECONNECT, "meta_190_464"),
    (400, meta(190, 492), Verdict.RECONNECT, "meta_190_492"),
    (400, meta(102), Verdict.RECONNECT, "meta_102"),
    (400, rfc("invalid_grant", "Invalid refresh token"), Verdict.RECONNECT, "invalid_grant"),
    (401, rfc("invalid_client", "Invalid refresh token"), Verdict.APP, "invalid_client"),
    (400, ghl(400, "Invalid refresh token"), Verdict.RECONNECT, "ghl_invalid_refresh_token"),
    # app
    (401, rfc("invalid_client", "Client authentication failed"), Verdict.APP, "invalid_client"),
    (401, rfc("unauthorized_client", "Missing valid authorization header"), Verdict.APP, "unauthorized_client"),
    (400, rfc("unsupported_grant_type"), Verdict.APP, "unsupported_grant_type"),
    (400, rfc("invalid_request", 'A required parameter "refresh_token" is missing'), Verdict.APP, "invalid_request"),
    (401, rfc("deleted_client", "The OAuth client was deleted."), Verdict.APP, "deleted_client"),
    (400, meta(1, message="Error validating client secret."), Verdict.APP, "meta_client_secret"),
    (400, meta(101, message="Error validating application. Cannot get application info."), Verdict.APP, "meta_101"),
    # permission
    (400, meta(10, message="(#10) Application does not have permission for this action"), Verdict.PERMISSION, "meta_10"),
    (403, meta(200, message="(#200) Requires pages_manage_posts permission"), Verdict.PERMISSION, "meta_200"),
    (403, meta(299), Verdict.PERMISSION, "meta_299"),
    (400, rfc("invalid_scope"), Verdict.PERMISSION, "invalid_scope"),
    (401, rfc("scope_not_authorized", TIKTOK_SCOPE), Verdict.PERMISSION, "tiktok_scope_not_authorized"),
    (401, {"error": {"code": "scope_not_authorized", "message": TIKTOK_SCOPE, "log_id": "2"}}, Verdict.PERMISSION, "tiktok_scope_not_authorized"),
    (401, ghl(401, "The token is not authorized for this scope.", "Unauthorized"), Verdict.PERMISSION, "ghl_scope_not_authorized"),
    # suspended
    (400, ghl(400, "Location is not active"), Verdict.SUSPENDED, "ghl_location_not_active"),
    (400, ghl(400, ["CANARY", "Location is not active."]), Verdict.SUSPENDED, "ghl_location_not_active"),
    # transient
    (400, meta(1, message="An unknown error occurred"), Verdict.TRANSIENT, "meta_1"),
    (400, meta(2, message="An unexpected error has occurred. Please retry your request later."), Verdict.TRANSIENT, "meta_2"),
    (403, meta(4, message="(#4) Application request limit reached"), Verdict.TRANSIENT, "meta_4"),
    (400, meta(17, message="(#17) User request limit reached"), Verdict.TRANSIENT, "meta_17"),
    (400, meta(32, message="(#32) Page request limit reached"), Verdict.TRANSIENT, "meta_32"),
    (400, meta(341), Verdict.TRANSIENT, "meta_341"),
    (400, meta(613, message="(#613) Calls to this api have exceeded the rate limit."), Verdict.TRANSIENT, "meta_613"),
    (400, meta(190, 463, is_transient=True), Verdict.TRANSIENT, "meta_transient"),
    (429, rfc("rate_limit_exceeded", "The API rate limit was exceeded. Please try again later."), Verdict.TRANSIENT, "http_429"),
    (400, rfc("rate_limit_exceeded"), Verdict.TRANSIENT, "tiktok_rate_limit_exceeded"),
    (400, rfc("temporarily_unavailable"), Verdict.TRANSIENT, "temporarily_unavailable"),
    (408, rfc("invalid_grant"), Verdict.TRANSIENT, "http_408"),
    (429, rfc("invalid_grant"), Verdict.TRANSIENT, "http_429"),
    (500, rfc("invalid_grant"), Verdict.TRANSIENT, "http_500"),
    (503, meta(190, 463), Verdict.TRANSIENT, "http_503"),
    (502, PAGE, Verdict.TRANSIENT, "http_502"),
    (403, PAGE, Verdict.TRANSIENT, "http_403"),
    (404, PAGE, Verdict.TRANSIENT, "http_404"),
    (401, b"", Verdict.TRANSIENT, "http_401"),
    (400, b'{"error": "invalid_gr', Verdict.TRANSIENT, "http_400"),
    (400, ["invalid_grant"], Verdict.TRANSIENT, "http_400"),
    (302, b"", Verdict.TRANSIENT, "http_302"),
    (302, rfc("invalid_grant"), Verdict.TRANSIENT, "http_302"),
    # ambiguous
    (200, PAGE, Verdict.AMBIGUOUS, "not_json"),
    (200, b"", Verdict.AMBIGUOUS, "not_json"),
    (200, b'{"access_token": "CANA', Verdict.AMBIGUOUS, "not_json"),
    (200, b"[" * 100_000, Verdict.AMBIGUOUS, "not_json"),
    (200, b'{"access_token": "\xff"}', Verdict.AMBIGUOUS, "not_json"),
    (200, b"9" * 5000, Verdict.AMBIGUOUS, "not_json"),
    (200, ["CANARY"], Verdict.AMBIGUOUS, "not_json"),
    (200, {}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": ""}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": None}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": 5}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": ["CANARY"]}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": "  "}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": "CANARY\r\nX-Evil: 1"}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": "CANARY\x00"}, Verdict.AMBIGUOUS, "no_access_token"),
    (200, b'{"access_token": "\\ud800"}', Verdict.AMBIGUOUS, "no_access_token"),
    (200, {"access_token": "CANARY", "error": "something_new"}, Verdict.AMBIGUOUS, "error_unknown"),
    (200, {"data": {"description": "CANARY", "error_code": 10010}, "message": "error"}, Verdict.AMBIGUOUS, "error_unknown"),
    # unknown
    (401, {"error": {"code": "access_token_invalid", "message": "The access token is invalid or not found in the request."}}, Verdict.UNKNOWN, "tiktok_access_token_invalid"),
    (401, ghl(401, "Invalid token: access token is invalid", "Unauthorized"), Verdict.UNKNOWN, "ghl_access_token_invalid"),
    (422, ghl(422, ["user_type must be a valid enum value"], "Unprocessable Entity"), Verdict.UNKNOWN, "error_unknown"),
    (401, {"code": 2, "message": "Authentication failed.", "status": "failure"}, Verdict.UNKNOWN, "pinterest_2"),
    (400, {"status": "failure", "code": 283, "data": "Invalid Application ID", "message": "The authorization grant is invalid"}, Verdict.UNKNOWN, "pinterest_283"),
    (400, rfc("CANARY-the-token-itself"), Verdict.UNKNOWN, "error_unknown"),
    (400, rfc(["invalid_grant"]), Verdict.UNKNOWN, "error_unknown"),
    (400, rfc(17), Verdict.UNKNOWN, "error_unknown"),
    (400, rfc("Invalid_Grant"), Verdict.UNKNOWN, "error_unknown"),
    (400, meta(190, 461), Verdict.UNKNOWN, "meta_190_other"),
    (400, meta(190, "CANARY"), Verdict.UNKNOWN, "meta_190_other"),
    (400, meta(100), Verdict.UNKNOWN, "meta_other"),
    (400, meta(True), Verdict.UNKNOWN, "error_unknown"),
    (400, meta(None), Verdict.UNKNOWN, "error_unknown"),
    (400, {"error": {}}, Verdict.UNKNOWN, "http_400"),
    (404, {"message": "CANARY"}, Verdict.UNKNOWN, "http_404"),
    (401, {"status": 401, "serviceErrorCode": 65601, "code": "REVOKED_ACCESS_TOKEN", "message": "The token used in the request has been revoked by the user"}, Verdict.UNKNOWN, "http_401"),
    (400, {"access_token": "CANARY"}, Verdict.UNKNOWN, "http_400"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "verdict", "code"), REFRESHES)
def test_each_provider_s_own_words_are_understood(status, body, verdict, code):
    reading = read_refresh(answer(status, body))

    assert (reading.verdict, reading.code, reading.fresh) == (verdict, code, None)


@pytest.mark.parametrize(
    ("body", "fresh"),
    [
        ({"access_token": "a", "expires_in": 3599, "scope": "s", "token_type": "Bearer"}, Fresh("a", None, 3599.0, None, "s")),
        ({"access_token": "a", "token_type": "bearer", "expires_in": 5183944}, Fresh("a", None, 5183944.0)),
        ({"access_token": "a", "refresh_token": "r", "expires_in": 86400, "refresh_expires_in": 31536000, "open_id": "o", "scope": "user.info.basic,video.list"}, Fresh("a", "r", 86400.0, 31536000.0, "user.info.basic,video.list")),
        ({"access_token": "a", "refresh_token": "r", "refresh_token_expires_in": "525600"}, Fresh("a", "r", None, 525600.0)),
        ({"data": {"access_token": "a", "refresh_token": "r", "expires_in": 86400, "error_code": 0}, "message": "success"}, Fresh("a", "r", 86400.0)),
        ({"access_token": "a", "error": None}, Fresh("a")),
        ({"access_token": "a", "error": {"code": "ok", "message": "", "log_id": "2"}}, Fresh("a")),
        ({"access_token": "a", "refresh_token": None}, Fresh("a")),
        ({"access_token": "a", "refresh_token": ""}, Fresh("a")),
        ({"access_token": "a", "refresh_token": ["r"]}, Fresh("a")),
        ({"access_token": "a", "scope": ""}, Fresh("a")),
        ({"access_token": "a", "scope": ["read", "write"]}, Fresh("a", scope="read write")),
        ({"access_token": "a", "scope": {"read": True}}, Fresh("a")),
    ],
)  # fmt: skip
def test_a_success_brings_what_it_says_and_nothing_it_does_not(body, fresh):
    reading = read_refresh(answer(200, body))

    assert (reading.verdict, reading.code, reading.fresh) == (Verdict.SUCCESS, "ok", fresh)


@pytest.mark.parametrize(
    ("named", "seconds"),
    [
        ("3600", 3600.0),
        ("3600.0", 3600.0),
        (3600.5, 3600.5),
        (10**12, 3650 * DAY_S),
        *((nothing, None) for nothing in ("", "soon", None, True, False, 0, -1, "-3600", [3600], {}, 10**400)),
        *((float(word), None) for word in ("nan", "inf", "-inf")),
    ],
)
def test_a_life_is_a_number_above_zero_in_whichever_type_it_comes_or_none(named, seconds):
    fresh = read_refresh(answer(200, {"access_token": "a", "expires_in": named})).fresh

    assert fresh is not None
    assert fresh.expires_in_s == seconds


@pytest.mark.parametrize("status", [429, 503, 403])
def test_a_delay_that_the_provider_names_is_kept(status):
    assert read_refresh(answer(status, PAGE, retry_after="120")).retry_after_s == 120.0
    assert read_refresh(answer(400, meta(4), retry_after="90")).retry_after_s == 90.0
    assert read_refresh(answer(status, PAGE, retry_after="soon")).retry_after_s is None


@pytest.mark.parametrize(
    ("status", "body", "verdict", "code"),
    [
        (200, {"id": "1"}, Verdict.SUCCESS, "ok"),
        (204, b"", Verdict.SUCCESS, "ok"),
        (200, b"pong", Verdict.SUCCESS, "ok"),
        (401, b"", Verdict.KEY_DEAD, "http_401"),
        (403, {"message": "CANARY"}, Verdict.KEY_DEAD, "http_403"),
        (401, rfc("invalid_token"), Verdict.KEY_DEAD, "http_401"),
        (400, meta(190, 463, EXPIRED), Verdict.KEY_DEAD, "meta_190_463"),
        (403, meta(4, message="(#4) Application request limit reached"), Verdict.TRANSIENT, "meta_4"),
        (403, meta(200), Verdict.PERMISSION, "meta_200"),
        (403, PAGE, Verdict.TRANSIENT, "http_403"),
        (401, PAGE, Verdict.TRANSIENT, "http_401"),
        (404, PAGE, Verdict.TRANSIENT, "http_404"),
        (200, PAGE, Verdict.TRANSIENT, "http_200"),
        (408, b"", Verdict.TRANSIENT, "http_408"),
        (429, b"", Verdict.TRANSIENT, "http_429"),
        (500, rfc("invalid_grant"), Verdict.TRANSIENT, "http_500"),
        (301, b"", Verdict.TRANSIENT, "http_301"),
        (404, {"message": "no such route"}, Verdict.UNKNOWN, "http_404"),
        (200, rfc("CANARY"), Verdict.UNKNOWN, "error_unknown"),
    ],
)
def test_a_probe_tells_a_dead_key_from_a_bad_day(status, body, verdict, code):
    reading = read_probe(answer(status, body))

    assert (reading.verdict, reading.code) == (verdict, code)


KNOWN = [code for *_, code in REFRESHES]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["error", "error_description", "message", "code", "data", "statusCode", "access_token", "refresh_token"]
FIELDS += ["expires_in", "refresh_expires_in", "scope", "error_subcode", "is_transient"]
WORDS = st.sampled_from(["invalid_grant", "invalid_request", X_TOKEN, "Location is not active", "CANARY", 190, 463, 4])
OBJECTS = st.dictionaries(
    st.sampled_from(FIELDS), JSON | WORDS | st.dictionaries(st.sampled_from(FIELDS), JSON | WORDS, max_size=4)
)
BODIES = st.binary(max_size=99) | st.builds(lambda value: json.dumps(value).encode(), JSON | OBJECTS)
HEADERS = st.dictionaries(st.sampled_from(["retry-after", "content-type"]), st.text(max_size=30))


@settings(deadline=None)
@given(st.integers(100, 599), HEADERS, BODIES)
@example(200, {}, b'{"data": {"error_code": 1e400}, "access_token": "a"}')
def test_whatever_comes_is_read_without_raising_and_its_words_stay_out_of_the_code(status, headers, body):
    for read in (read_refresh, read_probe):
        reading = read(Answer(status, headers, body))

        assert CODE.fullmatch(reading.code), reading.code
        assert reading.code in KNOWN or reading.code in {"ok", f"http_{status}"} or reading.code.startswith("meta_2")
        assert (reading.fresh is not None) == (read is read_refresh and reading.verdict is Verdict.SUCCESS)
        assert reading.retry_after_s is None or 0 <= reading.retry_after_s <= DAY_S


@settings(deadline=None)
@given(st.integers(100, 599), HEADERS, BODIES)
def test_only_a_refusal_in_known_words_revokes(status, headers, body):
    reading = read_refresh(Answer(status, headers, body))

    if reading.verdict in {Verdict.RECONNECT, Verdict.PERMISSION, Verdict.APP, Verdict.SUSPENDED}:
        assert status // 100 in {2, 4}
        assert status not in {408, 429}
        assert isinstance(json.loads(body), dict)
        assert reading.code not in {"error_unknown", f"http_{status}", "not_json", "no_access_token"}


@settings(deadline=None)
@given(st.integers(400, 499), st.text())
def test_an_error_that_nobody_knows_revokes_nobody_and_is_not_repeated(status, word):
    reading = read_refresh(answer(status, {"error": f"CANARY{word}"}))

    assert reading.verdict in {Verdict.UNKNOWN, Verdict.TRANSIENT}
    assert reading.code in {"error_unknown", f"http_{status}"}
