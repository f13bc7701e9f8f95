"""`reactor serve`: fresh tokens for whoever shows the operator's token, health for anybody, and no secret in any refusal."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anyio
import asyncpg
import pytest
from conftest import Events, command, eventually, make_settings
from providers import Providers

from reactor.errors import Unavailable
from reactor.log import get_log
from reactor.service import serving

OPERATOR = "CANARY-operator"
AWAY = "postgresql://reactor:hunter2@127.0.0.1:1/nowhere"
FRESH = "/v1/tokens/fresh"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    json: Any


class Caller:
    """Calls a server that runs in this process, as the operator unless told otherwise."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    async def ask(self, method: str, path: str, *, token: str | None = OPERATOR, **body: Any) -> Reply:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=headers, **body) as response,
        ):
            return Reply(response.status, dict(response.headers), await response.json())

    async def fresh(self, **body: Any) -> Reply:
        return await self.ask("POST", FRESH, json={"tenant_id": "sol", "integration": "google"} | body)


@asynccontextmanager
async def served(dsn: str, home: Path, **settings: Any) -> AsyncIterator[Caller]:
    settings = {"http_port": 0, "http_token": OPERATOR, "home": home, "database_url": dsn} | settings
    async with serving(make_settings(**settings), dsn, log=get_log()) as port:
        yield Caller(port)


@pytest.fixture
async def caller(dsn: str, tmp_path: Path) -> AsyncIterator[Caller]:
    async with served(dsn, tmp_path) as caller:
        yield caller


async def store(conn: asyncpg.Connection, ends: str = "1 h", **columns: object) -> None:
    row = {"tenant_id": "sol", "integration": "google", "access_token": "CANARY-access"} | columns
    places = ", ".join(f"${place}" for place in range(1, len(row) + 1))
    query = f"insert into tokens ({', '.join(row)}, expires_at) values ({places}, now() + interval '{ends}')"
    await conn.execute(query, *row.values())


# --- tokens ---


async def test_a_fresh_token_is_answered_at_once_and_kept_by_no_cache(caller, conn):
    await store(conn, account="loja")

    reply = await caller.fresh()

    [item] = reply.json["items"]
    expires_at = await conn.fetchval("select expires_at from tokens")
    assert (reply.status, reply.headers["Cache-Control"], reply.json["degraded"]) == (200, "no-store", None)
    assert datetime.fromisoformat(item.pop("expires_at")) == expires_at
    assert item == {"access_token": "CANARY-access", "account": "loja", "version": 1}


async def test_a_token_that_is_about_to_end_is_refreshed_first_by_one_call_for_all_who_ask(
    dsn, conn, tmp_path, monkeypatch
):
    async with Providers() as providers:
        file = providers.toml(tmp_path)
        for name, value in providers.env.items():
            monkeypatch.setenv(name, value)
        grant = providers.seed("google", "sol")
        await store(conn, "1 min", **grant)
        async with served(dsn, tmp_path, integrations=file) as caller, anyio.create_task_group() as callers:
            replies: list[Reply] = []

            async def ask() -> None:
                replies.append(await caller.fresh(min_ttl_s=300))

            for _ in range(20):
                callers.start_soon(ask)
        newest, _ = providers.newest(grant["access_token"])

    assert [reply.status for reply in replies] == [200] * 20
    assert {reply.json["items"][0]["access_token"] for reply in replies} == {newest} != {grant["access_token"]}
    assert {reply.json["items"][0]["version"] for reply in replies} == {2}
    assert providers.calls["google"] == 1


@pytest.mark.parametrize(
    ("ends", "body", "status", "error"),
    [
        ("1 h", {"tenant_id": "lua"}, 404, {"code": "needs_reconnect", "state": "missing", "message": "lua has no google token"}),
        ("1 h", {"account": "nenhuma"}, 404, {"code": "needs_reconnect", "state": "missing"}),
        ("-1 h", {}, 409, {"code": "needs_reconnect", "state": "expired", "message": "sol/google: expired (its time is up)"}),
    ],
)  # fmt: skip
async def test_a_token_that_a_person_must_bring_says_so_and_why(caller, conn, ends, body, status, error):
    await store(conn, ends)

    reply = await caller.fresh(**body)

    assert reply.status == status
    assert reply.json["error"].items() >= error.items()
    assert "connects the account again" in reply.json["error"]["hint"]
    assert reply.json["error"]["reason"]


async def test_several_accounts_are_400_until_one_is_named(caller, conn):
    await store(conn, account="loja")
    await store(conn, account="fábrica", access_token="CANARY-other")

    unnamed, named = await caller.fresh(), await caller.fresh(account="fábrica")

    assert (unnamed.status, unnamed.json["error"]["code"]) == (400, "several_accounts")
    assert named.json["items"][0]["access_token"] == "CANARY-other"


async def test_a_provider_that_is_away_is_503_and_names_when_to_ask_again(dsn, conn, tmp_path, monkeypatch):
    async with Providers() as providers:
        file = providers.toml(tmp_path)
        for name, value in providers.env.items():
            monkeypatch.setenv(name, value)
        await store(conn, "-1 min", **providers.seed("google", "sol"))
        providers.fail("google", (429, {"error": "CANARY-slow down"}, {"Retry-After": "71"}))
        async with served(dsn, tmp_path, integrations=file) as caller:
            reply = await caller.fresh()

    assert (reply.status, reply.headers["Retry-After"]) == (503, "71")
    assert reply.json["error"]["code"] == "http_429"
    assert "CANARY" not in str(reply.json)


async def test_without_postgres_a_token_is_503_and_the_service_goes_on(tmp_path):
    async with served(AWAY, tmp_path) as caller:
        reply, alive, ready = (
            await caller.fresh(),
            await caller.ask("GET", "/healthz"),
            await caller.ask("GET", "/readyz"),
        )

    assert (reply.status, reply.json["error"]["code"], reply.headers["Retry-After"]) == (503, "postgres", "5")
    assert (alive.status, alive.json) == (200, {"ok": True})
    assert (ready.status, ready.json["error"]["code"]) == (503, "not_ready")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tenant_id": ["CANARY"]}, "tenant_id: Input should be a valid string; integration: Field required"),
        ({"tenant_id": "s", "integration": "g", "CANARY": 1}, "1 unknown field(s)"),
        ({"tenant_id": "CANARY" * 40, "integration": "g"}, "tenant_id: String should have at most 200 characters"),
        ({"tenant_id": "s", "integration": "g", "min_ttl_s": -1}, "min_ttl_s: Input should be greater than or equal to 0"),
        ({"tenant_id": "s", "integration": "g", "min_ttl_s": 1e300}, "min_ttl_s: Input should be less than or equal to 31536000"),
        ({"tenant_id": "\ud800CANARY", "integration": "g"}, "tenant_id: Input should be a valid string, unable to parse raw data as a unicode string"),
        (["CANARY"], "the body is no JSON object"),
        ("CANARY", "the body is no JSON object"),
    ],
)  # fmt: skip
async def test_a_wrong_body_is_422_by_the_names_of_its_fields_and_quotes_nothing(caller, body, message):
    reply = await caller.ask("POST", FRESH, json=body)

    assert (reply.status, reply.json["error"]["code"], reply.json["error"]["message"]) == (
        422,
        "invalid_request",
        message,
    )
    assert "CANARY" not in str(reply.json)


async def test_text_that_is_no_json_is_422(caller):
    for data in (b"{CANARY", b"\xff\xfe", b""):
        reply = await caller.ask("POST", FRESH, data=data, params={})

        assert (reply.status, reply.json["error"]["code"]) == (422, "invalid_request"), data


# --- who may ---


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", FRESH), ("GET", "/status"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nada")],
)
@pytest.mark.parametrize("token", [None, "", "CANARY-operato", f"{OPERATOR}x", "é"])
async def test_everything_but_health_takes_the_operator_s_token(caller, method, path, token):
    reply = await caller.ask(method, path, token=token, json={"not": "even looked at"} if method == "POST" else None)

    assert (reply.status, reply.headers["WWW-Authenticate"], reply.json["error"]["code"]) == (
        401,
        "Bearer",
        "unauthorized",
    )
    assert OPERATOR not in str(reply.json)


async def test_where_no_operator_s_token_is_set_nobody_is_the_operator(dsn, tmp_path):
    async with served(dsn, tmp_path, http_token=None) as caller:
        statuses = [(await caller.ask("GET", "/status", token=token)).status for token in (None, "", "None", OPERATOR)]
        ready = await caller.ask("GET", "/readyz", token=None)

    assert statuses == [401] * 4
    assert ready.status == 200


async def test_health_is_open_and_holds_no_data(caller):
    for path in ("/healthz", "/readyz"):
        reply = await caller.ask("GET", path, token=None)

        assert (reply.status, reply.json) == (200, {"ok": True}), path


async def test_a_database_without_our_schema_is_not_ready(empty_dsn, tmp_path):
    async with served(empty_dsn, tmp_path) as caller:
        reply = await caller.ask("GET", "/readyz", token=None)

    assert (reply.status, reply.json["error"]["code"]) == (503, "not_ready")


async def test_status_is_the_one_of_sql(caller, conn):
    reply = await caller.ask("GET", "/status")

    assert reply.status == 200
    assert reply.json.keys() == (await conn.fetchval("select reactor.status()")).keys()


async def test_the_operator_is_told_of_a_wrong_path_or_method_in_the_same_shape(caller):
    unknown, wrong = await caller.ask("GET", "/nada"), await caller.ask("GET", FRESH)

    assert (unknown.status, unknown.json["error"]["code"]) == (404, "not_found")
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")


# --- what is logged ---


async def test_a_bug_is_500_and_one_event_without_its_words(empty_dsn, tmp_path, events: Events):
    async with served(empty_dsn, tmp_path) as caller:
        reply = await caller.ask("GET", "/status")

    assert (reply.status, reply.json["error"]["code"]) == (500, "internal")
    [event] = events.named("request_failed")
    assert (event["path"], event["error_code"]) == ("/status", "InvalidSchemaNameError")
    assert re.fullmatch(r"[\w.]+:\d+", event["at"])


async def test_neither_bodies_nor_tokens_are_logged(dsn, conn, tmp_path, events: Events, caplog):
    await store(conn)
    caplog.set_level(logging.DEBUG)
    async with served(dsn, tmp_path) as caller:
        await caller.fresh()
        await caller.fresh(tenant_id="CANARY-tenant")
        await caller.ask("POST", FRESH, data=b"{CANARY")

    assert "CANARY" not in events.text + caplog.text
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []


# --- the command ---


async def test_serve_ends_with_0_on_sigterm_and_answers_what_it_has_in_hand(dsn, conn, tmp_path):
    async with Providers() as providers:
        file = providers.toml(tmp_path)
        await store(conn, "1 min", **providers.seed("google", "sol"))
        providers.fail("google", "gate")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("REACTOR_", "VOYAGE_", "DATABASE_"))}
        environment |= providers.env | {
            "DATABASE_URL": dsn, "REACTOR_HTTP_PORT": "0", "REACTOR_HTTP_TOKEN": OPERATOR,
            "REACTOR_HOME": str(tmp_path), "REACTOR_INTEGRATIONS": str(file),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "reactor", "serve"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        try:
            assert process.stdout is not None
            with anyio.fail_after(60):
                line = await anyio.to_thread.run_sync(process.stdout.readline)
                port = int(re.findall(r'"port": (\d+)', line)[0])
                async with anyio.create_task_group() as asking:

                    async def ask() -> None:
                        nonlocal reply
                        reply = await Caller(port).fresh(min_ttl_s=300)

                    reply = None
                    asking.start_soon(ask)
                    await eventually(lambda: providers.calls["google"])
                    process.send_signal(signal.SIGTERM)
                    while "stopping" not in (line := await anyio.to_thread.run_sync(process.stdout.readline)):
                        assert line
                    providers.gate.set()
                code = await anyio.to_thread.run_sync(process.wait)
                rest = process.stdout.read()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    assert reply is not None and (reply.status, reply.json["items"][0]["version"]) == (200, 2)
    assert (code, '"event": "stopped"' in rest) == (0, True)
    assert OPERATOR not in rest


async def test_serve_on_an_address_that_is_taken_is_one_line(dsn, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        done = command("serve", dsn=dsn, cwd=tmp_path, REACTOR_HTTP_PORT=str(port), REACTOR_HTTP_TOKEN=OPERATOR)

        with pytest.raises(Unavailable, match="cannot listen on"):
            async with served(dsn, tmp_path, http_port=port):
                pass
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"reactor: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_serve_without_its_extra_is_one_line_that_names_it(dsn, tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError('no fastapi', name='fastapi')")

    done = command("serve", dsn=dsn, PYTHONPATH=str(tmp_path))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "reactor: fastapi is not installed: pip install 'memory-reactor[service]'\n"


async def test_serve_without_an_operator_s_token_says_what_that_means(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = command("serve", dsn=AWAY, cwd=tmp_path, REACTOR_HTTP_PORT=str(taken.getsockname()[1]))

    assert (
        done.stderr.splitlines()[0]
        == "REACTOR_HTTP_TOKEN is not set: only /healthz and /readyz answer, everything else is 401"
    )
