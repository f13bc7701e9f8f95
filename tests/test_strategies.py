"""Each built-in strategy, spoken over a real socket to a server that checks what it is sent."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from providers import Providers
from pydantic import SecretStr
from wires import WIRES

from reactor.errors import Misuse, Permanent
from reactor.loading import load_strategies
from reactor.strategy import (
    DAY_S,
    Answer,
    Credential,
    Integration,
    Reading,
    Request,
    Verdict,
    load_integrations,
)

REPO = Path(__file__).parent.parent
FOLDER = REPO / "handlers" / "token_refresh"
DOCS = (REPO / "docs" / "integrations.md").read_text("utf-8")

STRATEGIES = load_strategies(None)
REFRESHABLE = [name for name, strategy in STRATEGIES.items() if strategy.refresh]
PROBED = [name for name, strategy in STRATEGIES.items() if strategy.probe]
ACCOUNT = {
    "facebook_page": "1234",
    "gohighlevel_location": "ve9EPM428h8vShlRW1KT",
    "evolution": "loja 1/a",
    "stevo": "loja",
}


async def send(request: Request) -> Answer:
    basic = {}
    if request.basic is not None:
        basic = {"Authorization": "Basic " + base64.b64encode(":".join(request.basic).encode()).decode()}
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            request.method,
            request.url,
            params=request.params,
            data=request.form,
            json=request.json,
            headers={**request.headers, **basic},
            allow_redirects=False,
        ) as response,
    ):
        return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())


class World:
    """The providers, the integrations that point at them, and a credential that they gave."""

    def __init__(self, providers: Providers, integrations: dict[str, Integration]) -> None:
        self.providers, self.integrations = providers, integrations

    def connect(self, name: str, account: str | None = None, **more: object) -> Credential:
        account = ACCOUNT.get(name, "loja") if account is None else account
        parent = None
        if (above := STRATEGIES[name].parent) is not None:
            parent = self.connect(above, "company-1")
        tokens = self.providers.seed(name, "acme", account, age_s=2 * DAY_S if name in {"instagram", "threads"} else 0)
        return Credential("acme", name, account, **tokens, parent=parent, **more)

    async def refresh(self, name: str, credential: Credential) -> Reading:
        strategy = STRATEGIES[name]
        assert strategy.refresh is not None
        assert strategy.read is not None
        return strategy.read(await send(strategy.refresh(credential, self.integrations[name])))

    async def probe(self, name: str, credential: Credential) -> Reading:
        strategy = STRATEGIES[name]
        assert strategy.probe is not None
        assert strategy.read_probe is not None
        request = strategy.probe(credential, self.integrations[name])
        assert request is not None
        return strategy.read_probe(await send(request))


@asynccontextmanager
async def _world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **overrides: dict) -> AsyncIterator[World]:
    minimum = {"instagram": DAY_S, "threads": DAY_S}
    async with Providers(minimum_age_s=minimum) as providers:
        path = providers.toml(tmp_path, **overrides)
        for variable, value in providers.env.items():
            monkeypatch.setenv(variable, value)
        yield World(providers, load_integrations(path, STRATEGIES))


@pytest.fixture
async def world(tmp_path, monkeypatch):
    async with _world(tmp_path, monkeypatch) as world:
        yield world


def after(credential: Credential, reading: Reading) -> Credential:
    fresh = reading.fresh
    assert fresh is not None, reading
    return replace(
        credential, access_token=fresh.access_token, refresh_token=fresh.refresh_token or credential.refresh_token
    )


@pytest.mark.parametrize("name", REFRESHABLE)
async def test_a_refresh_is_what_the_provider_asks_for_and_brings_a_token_that_works(world, name):
    credential = world.connect(name)

    reading = await world.refresh(name, credential)

    assert (reading.verdict, reading.code) == (Verdict.SUCCESS, "ok")
    fresh = after(credential, reading)
    assert fresh.access_token != credential.access_token
    assert world.providers.works(fresh.access_token)
    assert world.providers.calls[name] == 1
    assert reading.fresh.expires_in_s == WIRES[name].lives_s[0]


@pytest.mark.parametrize("name", [name for name in REFRESHABLE if not STRATEGIES[name].parent])
async def test_what_a_refresh_brought_can_be_refreshed_again(world, name):
    world.providers.minimum_age_s.clear()
    first = world.connect(name)

    second = after(first, await world.refresh(name, first))
    third = after(second, await world.refresh(name, second))

    assert len({first.access_token, second.access_token, third.access_token}) == 3
    if STRATEGIES[name].rotates:
        assert len({first.refresh_token, second.refresh_token, third.refresh_token}) == 3
        assert (await world.refresh(name, first)).verdict is Verdict.RECONNECT  # reuse ends the family
        assert (await world.refresh(name, third)).verdict is Verdict.RECONNECT
    else:
        assert (await world.refresh(name, first)).verdict is Verdict.SUCCESS


@pytest.mark.parametrize("name", [name for name in REFRESHABLE if not STRATEGIES[name].parent])
async def test_a_grant_that_the_user_took_back_is_a_reconnect(world, name):
    credential = world.connect(name)
    world.providers.revoke(credential.access_token)

    assert (await world.refresh(name, credential)).verdict is Verdict.RECONNECT


@pytest.mark.parametrize("name", [name for name in REFRESHABLE if WIRES[name].auth != "none"])
async def test_a_wrong_client_secret_is_the_app_s_fault_and_a_missing_one_is_said_in_one_line(world, name):
    credential = world.connect(name)
    wrong = world.integrations[name].model_copy(update={"client_secret": SecretStr("wrong")})
    world.integrations[name] = wrong

    assert (await world.refresh(name, credential)).verdict is Verdict.APP

    missing = world.integrations[name].model_copy(update={"client_secret": None, "client_id": None})
    with pytest.raises(Misuse) as refused:
        STRATEGIES[name].refresh(credential, missing)
    assert str(refused.value) == f"[{name}] needs client_id and client_secret_env in REACTOR_INTEGRATIONS"


@pytest.mark.parametrize("name", [name for name in REFRESHABLE if STRATEGIES[name].renews_with == "refresh_token"])
def test_a_row_without_a_refresh_token_is_said_to_have_none(name):
    integration = Integration(name=name, strategy=name, base_url="http://x", token_url="http://x/token")

    with pytest.raises(Permanent) as refused:
        STRATEGIES[name].refresh(Credential("acme", name, "", "CANARY"), integration)
    assert refused.value.code == "no_refresh_token"


@pytest.mark.parametrize("name", [name for name, strategy in STRATEGIES.items() if strategy.parent])
async def test_a_child_needs_its_parent_s_token_and_an_account(world, name):
    child = world.connect(name)

    for lacking, code in ((replace(child, parent=None), "no_parent"), (replace(child, account=""), "no_account")):
        with pytest.raises(Permanent) as refused:
            STRATEGIES[name].refresh(lacking, world.integrations[name])
        assert refused.value.code == code


async def test_an_inactive_location_is_suspended_and_its_company_is_the_row_s_or_the_agency_s(world):
    location = world.connect("gohighlevel_location")
    world.providers.states[location.account] = "inactive"

    assert (await world.refresh("gohighlevel_location", location)).code == "ghl_location_not_active"
    assert world.providers.log[-1].form["companyId"] == "company-1"

    await world.refresh("gohighlevel_location", replace(location, metadata={"company_id": "other"}))
    assert world.providers.log[-1].form["companyId"] == "other"
    with pytest.raises(Permanent, match="company"):
        await world.refresh("gohighlevel_location", replace(location, parent=replace(location.parent, account="")))


async def test_gohighlevel_says_which_kind_of_token_the_row_is(world):
    for metadata, kind in (({}, "Company"), ({"user_type": "Location"}, "Location"), ({"user_type": 5}, "Company")):
        await world.refresh("gohighlevel", world.connect("gohighlevel", metadata=metadata))
        assert world.providers.log[-1].form["user_type"] == kind


async def test_a_public_client_of_x_shows_its_id_and_no_secret(world):
    integration = world.integrations["x"].model_copy(update={"client_secret": None})

    request = STRATEGIES["x"].refresh(world.connect("x"), integration)

    assert request.basic is None
    assert request.form is not None
    assert request.form["client_id"] == "reactor"
    assert "client_secret" not in request.form


@pytest.mark.parametrize(
    ("auth", "basic", "in_form"), [(None, True, False), ("body", False, True), ("none", False, False)]
)
async def test_a_generic_client_shows_itself_as_it_is_told(tmp_path, monkeypatch, auth, basic, in_form):
    async with _world(tmp_path, monkeypatch, acme={"strategy": "oauth2", "auth": auth, "scope": "read"}) as world:
        credential = Credential("acme", "acme", "", **world.providers.seed("acme"))

        request = STRATEGIES["oauth2"].refresh(credential, world.integrations["acme"])

        assert (request.basic is not None, "client_secret" in request.form) == (basic, in_form)
        assert request.form["scope"] == "read"
        assert request.url == f"{world.providers.url}/acme/token"


def test_a_generic_client_without_a_token_url_is_told_so():
    with pytest.raises(Misuse, match=r"^\[oauth2\] needs token_url in REACTOR_INTEGRATIONS$"):
        STRATEGIES["oauth2"].refresh(
            Credential("acme", "oauth2", "", "a", "r"), Integration(name="oauth2", strategy="oauth2")
        )


@pytest.mark.parametrize("name", PROBED)
async def test_a_probe_tells_a_key_that_works_from_a_dead_one(world, name):
    credential = world.connect(name)

    assert (await world.probe(name, credential)).verdict is Verdict.SUCCESS
    world.providers.revoke(credential.access_token)
    assert (await world.probe(name, credential)).verdict is Verdict.KEY_DEAD
    assert world.providers.probes[name] == 2
    assert world.providers.calls[name] == 0


@pytest.mark.parametrize("name", ["evolution", "stevo"])
@pytest.mark.parametrize(
    ("state", "code"), [("close", "state_close"), ("connecting", "state_connecting"), ("CANARY", "state_other")]
)
async def test_a_gateway_whose_session_is_down_has_a_good_key(world, name, state, code):
    credential = world.connect(name)
    world.providers.states["loja"] = world.providers.states["a"] = state

    reading = await world.probe(name, credential)

    assert (reading.verdict, reading.code) == (Verdict.SESSION_DOWN, code)


async def test_a_gateway_that_names_no_state_is_not_taken_for_a_dead_key_nor_for_a_good_one(world):
    world.providers.fail("evolution", (200, {"instance": "CANARY"}, {}))

    reading = await world.probe("evolution", world.connect("evolution"))

    assert (reading.verdict, reading.code) == (Verdict.UNKNOWN, "no_state")


def test_a_gateway_of_the_user_s_own_needs_its_address():
    with pytest.raises(Misuse, match=r"^\[evolution\] needs base_url in REACTOR_INTEGRATIONS$"):
        STRATEGIES["evolution"].probe(
            Credential("acme", "evolution", "loja", "k"), Integration(name="evolution", strategy="evolution")
        )


async def test_a_key_that_may_not_read_its_location_is_a_good_key(world):
    body = {"statusCode": 401, "message": "The token is not authorized for this scope.", "error": "Unauthorized"}
    world.providers.fail("gohighlevel_pit", (401, body, {}))

    assert (await world.probe("gohighlevel_pit", world.connect("gohighlevel_pit"))).verdict is Verdict.SUCCESS


async def test_a_client_that_linkedin_does_not_know_kills_no_token(world):
    wrong = world.integrations["linkedin"].model_copy(update={"client_secret": SecretStr("wrong")})
    world.integrations["linkedin"] = wrong

    assert (await world.probe("linkedin", world.connect("linkedin"))).verdict is Verdict.APP


@pytest.mark.parametrize("name", ["linkedin", "static_key", "gohighlevel_pit", "oauth2"])
def test_there_is_no_probe_where_there_is_nothing_to_ask(name):
    integration = Integration(name=name, strategy=name, base_url="http://x")

    assert STRATEGIES[name].probe(Credential("acme", name, "", "CANARY"), integration) is None


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_token_of_a_row_cannot_lead_a_request_astray(name):
    """A path piece is quoted; what a row says stays one piece."""
    parent = Credential("acme", "above", "c", "CANARY")
    credential = Credential("acme", name, "../../admin?x=#", "CANARY", "CANARY-r", parent=parent)
    secret = SecretStr("s")
    integration = Integration(
        name=name,
        strategy=name,
        base_url="http://h",
        token_url="http://h/t",
        probe_url="http://h/p",
        client_id="i",
        client_secret=secret,
    )
    strategy = STRATEGIES[name]

    requests = [make(credential, integration) for make in (strategy.refresh, strategy.probe) if make]

    for request in requests:
        assert re.fullmatch(r"http://h/[\w./%-]+", request.url), request.url
        assert "../" not in request.url
        assert "CANARY" not in repr(request)
        assert "CANARY" not in request.url


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_names_its_source_and_stands_in_the_docs(name):
    first, _, rest = (ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or "").partition("\n")

    assert first.endswith((".", ":", ")"))
    assert "https://" in rest
    assert len(re.findall(rf"^\| `{name}` \|", DOCS, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_margin_and_a_minimum_age_leave_a_life_to_the_token(name):
    strategy = STRATEGIES[name]

    if strategy.life_s is not None and strategy.refresh is not None:
        margin_s = min(strategy.margin_s, strategy.life_s / 2)  # as plan_token caps it
        assert strategy.minimum_age_s < strategy.life_s - margin_s


def test_every_strategy_is_spoken_by_the_loopback_server():
    assert STRATEGIES.keys() == WIRES.keys()
