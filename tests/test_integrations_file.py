"""What REACTOR_INTEGRATIONS says over the built-in strategies, and how it is told what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from reactor.errors import Misuse
from reactor.strategy import HOUR_S, Credential, Integration, Request, Strategy, load_integrations

DOCS = (Path(__file__).parent.parent / "docs" / "integrations.md").read_text("utf-8")


def _refresh(_credential: Credential, integration: Integration) -> Request:
    return Request("POST", f"{integration.base_url}/token")


STRATEGIES = {
    "x": Strategy("https://api.x.example", refresh=_refresh, rotates=True, margin_s=900, life_s=2 * HOUR_S),
    "agency": Strategy("https://agency.example", refresh=_refresh),
    "location": Strategy("https://agency.example", refresh=_refresh, renews_with="parent", parent="agency"),
    "oauth2": Strategy(refresh=_refresh),
    "static_key": Strategy(),
    **{name: Strategy() for name in ("google", "evolution", "gohighlevel", "gohighlevel_location")},
}


@pytest.fixture
def load(tmp_path):
    def load(text: str) -> dict[str, Integration]:
        path = tmp_path / "integrations.toml"
        path.write_text(text, encoding="utf-8")
        return load_integrations(path, STRATEGIES)

    return load


def test_without_a_file_every_strategy_is_an_integration_under_its_own_name_with_its_own_numbers():
    integrations = load_integrations(None, STRATEGIES)

    assert integrations.keys() == STRATEGIES.keys()
    assert integrations["x"] == Integration(
        name="x",
        strategy="x",
        base_url="https://api.x.example",
        rotates=True,
        margin_s=900,
        minimum_age_s=0,
        life_s=2 * HOUR_S,
    )
    assert integrations["location"].parent == "agency"
    assert integrations["static_key"].base_url is None


def test_a_table_overrides_what_it_names_and_leaves_the_rest(load):
    integrations = load('[x]\nbase_url = "http://proxy.example/x/"\nrotates = false\nmargin_s = 60')

    x = integrations["x"]
    assert (x.base_url, x.rotates, x.margin_s, x.life_s) == ("http://proxy.example/x", False, 60, 2 * HOUR_S)
    assert integrations["agency"].base_url == "https://agency.example"


def test_an_integration_of_one_s_own_borrows_a_strategy_and_may_hang_under_another_parent(load):
    integrations = load(
        '[second_x]\nstrategy = "x"\n[kid]\nstrategy = "location"\nparent = "second_x"\nparent_tenant = "top"'
    )

    assert integrations["second_x"].rotates is True
    assert (integrations["kid"].parent, integrations["kid"].parent_tenant) == ("second_x", "top")
    assert integrations["location"].parent == "agency"


def test_a_secret_comes_from_the_environment_and_stands_in_no_repr(load, monkeypatch):
    monkeypatch.setenv("X_SECRET", " CANARY \n")

    x = load('[x]\nclient_id = "me"\nclient_secret_env = "X_SECRET"')["x"]

    assert x.client_secret is not None
    assert x.client_secret.get_secret_value() == "CANARY"
    assert "CANARY" not in repr(x)
    assert "CANARY" not in str(x.model_dump())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[x", "cannot be read"),
        ("margin_s = 5", "margin_s stands outside a [table]"),
        ("[acme]", "[acme] strategy 'acme' is none of agency, evolution,"),
        ("[x]\nstrategy = 5", "[x] strategy 5 is none of"),
        ('[x]\nname = "y"', "[x] name: "),
        ('[x]\nclient_secret = "CANARY"', 'client_secret_env = "..."'),
        ('[x]\nclient_secret_env = "NOT_SET_ANYWHERE"', "[x] client_secret_env: NOT_SET_ANYWHERE is not set"),
        ('[x]\ncolour = "CANARY"', "[x] colour: Extra inputs are not permitted"),
        ('[x]\nmargin_s = "CANARY"', "[x] margin_s: "),
        ("[x]\nmargin_s = 0", "[x] margin_s: "),
        ("[x]\nmargin_s = nan", "[x] margin_s: "),
        ("[x]\nlife_s = inf", "[x] life_s: "),
        ('[x]\nauth = "CANARY"', "[x] auth: "),
        ('[x]\nbase_url = "ftp://CANARY"', "[x] base_url: "),
        ('[x]\nbase_url = "https://x.example?key=CANARY"', "[x] base_url: "),
        ('[x]\ntoken_url = ""', "[x] token_url: "),
        ('[x]\nparent = "nobody"', "[x] parent 'nobody' is no other integration"),
        ('[x]\nparent = "x"', "[x] parent 'x' is no other integration"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_that_repeats_no_value(load, text, sentence):
    with pytest.raises(Misuse) as refused:
        load(text)

    assert sentence in str(refused.value)
    assert str(refused.value).startswith("REACTOR_INTEGRATIONS: ")
    assert "\n" not in str(refused.value)
    assert "CANARY" not in str(refused.value)


def test_a_file_that_is_not_there_or_not_utf_8_is_said_to_be_unreadable(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")

    for name in ("none.toml", "latin.toml", "."):
        with pytest.raises(Misuse, match=r"^REACTOR_INTEGRATIONS: .* cannot be read"):
            load_integrations(tmp_path / name, STRATEGIES)


def test_the_example_of_the_docs_loads(load, monkeypatch):
    for variable in ("GOOGLE_SECRET", "ACME_SECRET"):
        monkeypatch.setenv(variable, "s")
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS, re.DOTALL)

    integrations = load(example)

    assert (integrations["acme"].strategy, integrations["acme"].rotates) == ("oauth2", True)
    assert integrations["gohighlevel_location"].parent_tenant == "agency"
    assert integrations["weather"].probe_prefix == ""


def test_the_strategy_of_the_docs_is_whole():
    (example,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    module: dict = {}
    exec(compile(example, "acme.py", "exec"), module)

    strategy = module["STRATEGY"]
    integration = load_integrations(None, {"acme": strategy})["acme"]
    known = integration.model_copy(update={"client_id": "me", "client_secret": SecretStr("s")})
    request = strategy.refresh(Credential("t", "acme", "", "a", "r"), known)

    assert len(example.splitlines()) <= 15
    assert (request.url, request.basic) == ("https://api.acme.example/oauth/token", ("me", "s"))
    assert request.form == {"grant_type": "refresh_token", "refresh_token": "r"}
    assert (integration.margin_s, integration.life_s) == (HOUR_S / 4, HOUR_S)
    with pytest.raises(Misuse, match=r"^\[acme\] needs client_id and client_secret_env"):
        strategy.refresh(Credential("t", "acme", "", "a", "r"), integration)
