"""`reactor tokens`, `alerts`, `attach-tokens` and `detach-tokens`: an operator sees what needs a person, and never a token."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from conftest import command, drained, make_settings, running_reactor
from providers import Providers

from reactor.sealing import generate, seal

PLAIN = "TOKENS LIE IN PLAIN TEXT: set REACTOR_TOKEN_KEY (reactor keygen), and they are sealed; docs/sealing.md"
PRIVATE, PUBLIC = generate()


async def put(conn: asyncpg.Connection, tenant: str, integration: str = "weather", **columns: object) -> int:
    """What the reactor would keep of a token that is well and ends in 30 days, but for `columns`; its id."""
    now = await conn.fetchval("select now()")
    row = {
        "source": 999, "source_id": f"{tenant}:{integration}", "tenant_id": tenant, "integration": integration, "account": "",
        "version": 1, "fingerprint": b"", "ends_at": now + timedelta(days=30), **columns,
    }  # fmt: skip
    places = ", ".join(f"${place}" for place in range(1, len(row) + 1))
    query = f"insert into reactor.tokens ({', '.join(row)}) values ({places}) returning id"
    return await conn.fetchval(query, *row.values())


def listed(dsn: str, *options: str) -> list[str]:
    """The tenants, from the first line on."""
    return [row["tenant_id"] for row in json.loads(command("tokens", "--json", *options, dsn=dsn).stdout)]


async def test_what_needs_a_person_comes_first_and_then_what_ends_soonest(dsn, conn):
    now = await conn.fetchval("select now()")
    day = timedelta(days=1)
    await put(conn, "well for a month")
    await put(conn, "well for an hour", ends_at=now + day / 24, can_refresh=True, late_at=now + day / 48)
    await put(conn, "endless", ends_at=None)
    await put(conn, "ends in 10 days", ends_at=now + 10 * day, deadline_at=now + 10 * day)
    await put(conn, "late", ends_at=now + day, can_refresh=True, late_at=now - day / 24)
    await put(conn, "child of one", state="needs_reconnect", state_reason="parent", ends_at=now - day)
    await put(conn, "dead for 3 days", state="key_dead", state_reason="http_401", ends_at=now - 3 * day)
    await put(conn, "unknown", trouble="unknown_integration", ends_at=now + 20 * day)

    everything = listed(dsn)

    assert everything == [
        "dead for 3 days", "late", "ends in 10 days", "unknown", "child of one", "well for an hour", "well for a month", "endless",
    ]  # fmt: skip
    assert listed(dsn, "-n", "3") == everything[:3]
    assert listed(dsn, "-n", "5") == everything[:5]


async def test_tokens_are_narrowed_to_a_tenant_and_a_state(dsn, conn):
    for tenant in ("sol", "lua"):
        await put(conn, tenant, "a", state="needs_reconnect")
        await put(conn, tenant, "b")

    assert sorted(listed(dsn, "--state", "needs_reconnect")) == ["lua", "sol"]
    assert listed(dsn, "--tenant", "sol") == ["sol", "sol"]
    assert listed(dsn, "--tenant", "sol", "--state", "active") == ["sol"]
    assert listed(dsn, "--tenant", "so") == []
    assert listed(dsn, "--state", "suspended") == []


async def test_json_has_every_column_of_the_view(dsn, conn):
    now = await conn.fetchval("select now()")
    await put(
        conn,
        "sol",
        "x",
        account="loja",
        state="suspended",
        state_reason="http_400",
        ends_at=now + timedelta(days=2),
        deadline_at=now + timedelta(days=2),
    )

    done = command("tokens", "--json", dsn=dsn)

    [row] = json.loads(done.stdout)
    columns = await conn.fetch(
        "select attname from pg_attribute where attrelid = 'reactor.token_health'::regclass and attnum > 0"
    )
    assert set(row) == {column["attname"] for column in columns}
    assert (row["tenant_id"], row["account"], row["state"], row["state_reason"]) == (
        "sol",
        "loja",
        "suspended",
        "http_400",
    )
    assert row["who_must_act"] == "account owner"
    assert datetime.fromisoformat(row["expires_at"]) == now + timedelta(days=2)
    assert 1.9 < row["days_left"] <= 2


async def test_the_table_has_one_line_a_token(dsn, conn):
    await put(
        conn,
        "sol",
        "x",
        account="loja",
        state="key_dead",
        state_reason="http_401",
        trouble="key_missing",
        last_error="http_401",
    )

    done = command("tokens", dsn=dsn, COLUMNS="40")

    header, line = done.stdout.splitlines()
    assert (
        header.split()
        == "tenant integration account state expires next refresh days left who must act last error".split()
    )
    assert "key_dead (http_401, key_missing)" in line
    assert line.split()[:3] == ["sol", "x", "loja"]


@pytest.mark.parametrize(
    ("locale", "line"),
    [
        ({"LANG": "pt_BR.UTF-8"}, "A chave de sol/weather foi recusada: crie outra no provedor e grave-a."),
        ({"LANG": "en_US.UTF-8"}, "The key of sol/weather is refused: make a new one at the provider and store it."),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "pt_PT"}, "A chave de sol/weather foi recusada: crie outra no provedor e grave-a."),
        ({"LANG": ""}, "The key of sol/weather is refused: make a new one at the provider and store it."),
    ],
)  # fmt: skip
async def test_it_says_on_stderr_what_to_do_in_the_language_of_the_locale(dsn, conn, locale, line):
    token = await put(conn, "sol", state="key_dead")
    await put(conn, "well")

    done = command("tokens", "--json", dsn=dsn, **({"LC_ALL": "", "LC_MESSAGES": ""} | locale))

    assert done.stderr == line.format(token) + "\n"


async def test_what_is_the_application_s_is_said_once_and_not_for_each_token(dsn, conn):
    for tenant in ("sol", "lua"):
        await put(conn, tenant, "google", state="app_error", state_reason="invalid_client")

    done = command("tokens", dsn=dsn, LC_ALL="C")

    assert done.stderr == (
        "The provider refuses our application (google): check client_id and client_secret in REACTOR_INTEGRATIONS.\n"
    )


async def test_a_tenant_s_name_cannot_write_to_the_terminal(dsn, conn):
    await put(conn, "so\x1b[2Jl\nreactor: all is well", state="key_dead")

    done = command("tokens", "--json", dsn=dsn, LC_ALL="C")

    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


async def test_tokens_in_plain_text_are_said_loudly_until_there_is_a_key_or_all_are_sealed(dsn, conn):
    assert command("tokens", dsn=dsn).stderr == ""

    await conn.execute("insert into tokens (tenant_id, integration, access_token) values ('sol', 'weather', 'CANARY')")
    plain, with_key = command("tokens", dsn=dsn), command("tokens", dsn=dsn, REACTOR_TOKEN_KEY=PRIVATE)
    sealed = seal(PUBLIC, "CANARY", tenant_id="sol", integration="weather", purpose="access_token")
    await conn.execute("update tokens set access_token = null, sealed_access_token = $1", sealed)

    assert plain.stderr.splitlines() == [PLAIN]
    assert with_key.stderr == ""
    assert command("tokens", dsn=dsn).stderr == ""


async def test_a_table_without_columns_for_sealed_tokens_is_as_plain_as_its_owner_wants(dsn, conn):
    await conn.execute(
        "create table config (id int primary key, tenant_id text, key text); insert into config values (1, 'sol', 'CANARY')"
    )
    await conn.execute("select reactor.attach_tokens('config', 'weather', access_token_column => 'key')")

    assert command("tokens", dsn=dsn).stderr == ""


async def test_a_dead_key_of_a_table_of_one_s_own_is_seen_from_attaching_to_curing(dsn, conn, tmp_path: Path):
    integrations = tmp_path / "integrations.toml"
    integrations.write_text('[weather]\nstrategy = "static_key"\n')
    await conn.execute(
        """create table config (tenant text primary key, weather_key text, weather_ends timestamptz);
           insert into config values ('sol', 'CANARY-1', now() - interval '1 h'), ('lua', 'CANARY-2', now() + interval '90 d')"""
    )

    attached = command(
        *"attach-tokens config weather --tenant-column tenant --id-column tenant --access-token-column weather_key".split(),
        *"--expires-at-column weather_ends".split(), dsn=dsn,
    )  # fmt: skip
    settings = make_settings(database_url=dsn, home=tmp_path, integrations=integrations)
    async with running_reactor(settings):
        await drained(conn)
        shown, alerts = command("tokens", dsn=dsn, LC_ALL="C"), command("alerts", dsn=dsn, LC_ALL="C")
        await conn.execute(
            "update config set weather_key = 'CANARY-3', weather_ends = now() + interval '90 d' where tenant = 'sol'"
        )
        await drained(conn)
    cured, resolved = command("tokens", dsn=dsn), command("alerts", "--all", "--json", dsn=dsn)

    assert (attached.returncode, attached.stdout) == (0, "")
    assert attached.stderr.startswith("attached the tokens of config as source ")
    do = "Connect sol/weather again: its access has expired."
    assert [line.split()[:3] for line in shown.stdout.splitlines()[1:]] == [
        ["sol", "weather", "expired"],
        ["lua", "weather", "active"],
    ]
    assert shown.stderr == f"{do}\n"
    [line] = alerts.stdout.splitlines()[1:]
    assert line.startswith(" token_expired") and line.rstrip().endswith(do)
    assert (cured.stderr, command("alerts", "--json", dsn=dsn).stdout) == ("", "[]\n")
    [alert] = json.loads(resolved.stdout)
    assert (alert["cause"], alert["tenant_id"], alert["resolved_at"] is None) == ("token_expired", "sol", False)
    for done in (attached, shown, alerts, cured, resolved):
        assert "CANARY" not in done.stdout + done.stderr


async def test_a_refresh_asked_of_a_key_that_can_only_be_probed_is_one_probe(
    dsn, conn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with Providers() as providers:
        file = providers.toml(tmp_path)
        for name, value in providers.env.items():
            monkeypatch.setenv(name, value)
        key = providers.seed("static_key", "sol")["access_token"]
        await conn.execute(
            "insert into tokens (tenant_id, integration, access_token) values ('sol', 'static_key', $1)", key
        )
        async with running_reactor(make_settings(database_url=dsn, home=tmp_path, integrations=file)):
            await drained(conn)
            before = providers.probes["static_key"]
            [asked] = await conn.fetch("select * from reactor.request_refresh('sol', 'static_key')")
            await drained(conn)
            after = providers.probes["static_key"]

    assert dict(asked) == {"account": "", "state": "active", "expires_at": None}
    assert (before, after) == (1, 2)


async def test_alerts_without_advice_show_what_they_found_newest_first(dsn, conn):
    await conn.execute("select reactor.open_alert('stuck_jobs', 'publicar', '{\"jobs\": 3, \"oldest_s\": 12.34}')")
    await conn.execute("select reactor.open_alert('lane_away', 'voyage')")

    done = command("alerts", dsn=dsn)

    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["cause", "subject"],
        ["lane_away", "voyage"],
        ["stuck_jobs", "publicar"],
    ]
    assert done.stdout.splitlines()[2].rstrip().endswith("jobs 3, oldest_s 12.3")
    assert len(json.loads(command("alerts", "-n", "1", "--json", dsn=dsn).stdout)) == 1


async def test_detach_tokens_takes_one_integration_or_all(dsn, conn):
    await conn.execute("create table config (id int primary key, tenant_id text, a text, b text)")
    for integration in ("a", "b"):
        await conn.execute("select reactor.attach_tokens('config', $1, access_token_column => $1)", integration)

    one, again = command("detach-tokens", "config", "a", dsn=dsn), command("detach-tokens", "config", "a", dsn=dsn)
    rest, nothing = command("detach-tokens", "config", dsn=dsn), command("detach-tokens", "config", dsn=dsn)

    assert (one.returncode, one.stderr) == (0, "detached the a tokens of config\n")
    assert (again.returncode, again.stderr) == (2, "reactor: the a tokens of config are not attached\n")
    assert (rest.returncode, rest.stderr) == (0, "detached the tokens of config\n")
    assert (nothing.returncode, nothing.stderr) == (2, "reactor: the tokens of config are not attached\n")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("config", "reactor: integration => ... names the integration of every row, or integration_column => ..."),
        ("config weather --access-token-column nada", "reactor: table public.config has no column nada (access_token_column => ..."),
        ("config weather --access-token-column short", "reactor: column short of public.config is a character varying(20), into which"),
        ("config weather --access-token-column key --expires-at-column key", "reactor: column key of public.config is a text, not a timestamp"),
        ("nada weather", 'reactor: relation "nada" does not exist'),
    ],
)  # fmt: skip
async def test_a_wrong_mapping_is_exit_code_2_and_one_clear_line(dsn, conn, options, line):
    await conn.execute("create table config (id int primary key, tenant_id text, key text, short varchar(20))")

    done = command("attach-tokens", *options.split(), dsn=dsn)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 1
