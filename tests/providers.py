"""A loopback server that speaks each provider's wire format, keeps real grants, and fails as it is told."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from aiohttp import web
from anyio.from_thread import start_blocking_portal
from wires import WIRES, Wire, ghl_error, meta_error

CLIENT_ID = "reactor"
PAGE = "<!doctype html><html><title>Attention Required!</title><p>Checking your browser CANARY</p></html>"

Words = tuple[int, Any]  # a status and a body


class Call(NamedTuple):
    method: str
    path: str
    form: dict[str, str]  # of the query and the body


@dataclass
class Grant:
    """What one user granted: every token of it, of which each knows its end."""

    integration: str
    tenant: str
    account: str
    access: dict[str, float | None] = field(default_factory=dict)  # until when each works
    keys: dict[str, float | None] = field(default_factory=dict)  # what renews it, and when each was spent
    born: dict[str, float] = field(default_factory=dict)
    refresh_token: str | None = None  # the current one
    refresh_ends_at: float | None = None
    revoked: bool = False


class Providers:
    """Every provider at one address; each integration lives under the path of its own name.

    Args:
        clock: What the provider takes for now, in seconds.
        lives: Per integration the lives of its access and refresh tokens in seconds; the real ones otherwise.
        rotation: Per integration `none`, `grace` (a spent refresh token works for `grace_s` more) or `strict` (its
            reuse revokes the family); the real ones otherwise.
        minimum_age_s: Per integration how old a token must be to be renewed.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        lives: Mapping[str, tuple[float | None, float | None]] | None = None,
        rotation: Mapping[str, str] | None = None,
        minimum_age_s: Mapping[str, float] | None = None,
        grace_s: float = 30.0,
    ) -> None:
        self.clock, self.grace_s = clock, grace_s
        self.wires = dict(WIRES)  # `toml` adds integrations of other names
        self.lives, self.rotation = dict(lives or {}), dict(rotation or {})
        self.minimum_age_s = dict(minimum_age_s or {})
        self.replays_anew: set[str] = set()  # those whose grace issues once more, and ends what it issued before
        self.states: dict[str, str] = {}  # by account: a gateway's session, `open` unless said; `inactive` locations
        self.calls: Counter[str] = Counter()  # refreshes, by integration
        self.probes: Counter[str] = Counter()
        self.token_calls: Counter[str] = Counter()  # refreshes, by the token that was sent
        self.log: list[Call] = []
        self.env: dict[str, str] = {}  # the secrets that the file of `toml` names
        self.url = ""
        self._faults: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._by_token: dict[str, Grant] = {}

    async def __aenter__(self) -> Self:
        self._closing, self.gate = asyncio.Event(), asyncio.Event()
        server = web.Server(self._serve)
        self._runner = web.ServerRunner(server, shutdown_timeout=0, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self.gate.set()
        await self._runner.cleanup()

    @contextmanager
    def in_thread(self) -> Iterator[Providers]:
        """The server in a thread of its own, for tests whose reactors are processes."""
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self):
            yield self

    def seed(self, integration: str, tenant: str = "acme", account: str = "", *, age_s: float = 0) -> dict[str, Any]:
        """A grant that a user gave `age_s` ago: its access_token, and its refresh_token or None."""
        wire, now = self._wire(integration), self.clock() - age_s
        grant = Grant(integration, tenant, account)
        access_token = self._mint(grant, "access", now)
        if wire.key != "refresh_token":
            grant.keys[access_token] = None
        elif wire.refresh is not None and wire.parent is None:
            grant.refresh_token = self._mint(grant, "refresh", now)
        return {"access_token": access_token, "refresh_token": grant.refresh_token}

    def revoke(self, token: str) -> None:
        """End the grant of an access or refresh token, as a user does in the provider's settings."""
        self._by_token[token].revoked = True

    def works(self, access_token: str) -> bool:
        grant = self._by_token.get(access_token)
        return grant is not None and not grant.revoked and _lives(grant.access.get(access_token, 0), self.clock())

    def newest(self, token: str) -> tuple[str, str | None]:
        """The access and refresh token issued last to the grant that this one is of."""
        grant = self._by_token[token]
        return list(grant.access)[-1], grant.refresh_token

    def fail(self, integration: str, *answers: Any) -> None:
        """What the next calls get instead: (status, body, headers), or `hang`, `reset_before`, `reset_after`,
        `slow:<s>`, `html` (a firewall's 403), `html:<status>`, `truncated`, `gate` (the answer stays here until the
        test sets `gate`). `*_after`, `truncated` and `gate` rotate first.
        """
        self._faults[integration].extend(answers)

    def toml(self, folder: Path, **overrides: Mapping[str, Any]) -> Path:
        """A REACTOR_INTEGRATIONS file that points every integration here, and those of `overrides` beside them."""
        lines = []
        for name in {**WIRES, **overrides}:
            table = dict(overrides.get(name, {}))
            strategy = table.get("strategy", name)
            wire = self.wires[name] = WIRES[strategy]
            if strategy in {"oauth2", "static_key"}:
                ours = {"token_url": f"{self.url}/{name}/token", "probe_url": f"{self.url}/{name}/probe"}
            else:
                ours = {"base_url": f"{self.url}/{name}"}
            if wire.refresh is not None and wire.auth != "none":
                variable = f"REACTOR_TEST_{name.upper()}_SECRET"
                self.env[variable] = self._secret(name)
                ours |= {"client_id": CLIENT_ID, "client_secret_env": variable}
            values = {key: value for key, value in {**ours, **table}.items() if value is not None}
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
        path = folder / "integrations.toml"
        path.write_text("\n".join(lines))
        return path

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        integration, _, path = request.path.removeprefix("/").partition("/")
        form = {**request.query, **{key: str(value) for key, value in (await request.post()).items()}}
        wire, line = self._wire(integration), f"{request.method} {path}"
        self.log.append(Call(request.method, request.path, form))
        is_refresh = wire.refresh is not None and re.fullmatch(wire.refresh, line) is not None
        if is_refresh:
            self.calls[integration] += 1
            self.token_calls[form.get(wire.key) or _bearer(request)] += 1
        else:
            self.probes[integration] += 1

        def answer() -> Words:
            if is_refresh:
                return self._refresh(integration, wire, request, path, form)
            if wire.probe is not None and re.fullmatch(wire.probe, line):
                return self._probe(integration, wire, request, path, form)
            return 404, PAGE

        faults = self._faults[integration]
        return await self._fail(request, faults.popleft(), answer) if faults else _response(*answer())

    async def _fail(self, request: web.BaseRequest, fault: Any, answer: Callable[[], Words]) -> web.StreamResponse:
        if not isinstance(fault, str):
            return _response(*fault)
        kind, _, number = fault.partition(":")
        if kind == "html":
            return _response(int(number or 403), PAGE)
        if kind == "slow":
            await asyncio.sleep(float(number))
            return _response(*answer())
        if kind == "gate":
            words = answer()
            await self.gate.wait()
            return _response(*words)
        if kind == "truncated":
            whole = json.dumps(answer()[1]).encode()
            half = web.StreamResponse(headers={"Content-Length": str(len(whole)), "Content-Type": "application/json"})
            await half.prepare(request)
            await half.write(whole[: len(whole) // 2])
            assert request.transport is not None
            request.transport.close()
            return half
        if kind == "hang":
            await self._closing.wait()
        elif kind == "reset_after":
            answer()
        elif kind != "reset_before":
            raise AssertionError(f"no such fault: {fault}")
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _refresh(
        self, integration: str, wire: Wire, request: web.BaseRequest, path: str, form: dict[str, str]
    ) -> Words:
        is_agency = wire is WIRES["gohighlevel"]
        if (is_agency or wire.parent == "gohighlevel") and "Version" not in request.headers:
            return 401, ghl_error(401, "version header was not found.", "Unauthorized")
        if wire.parent is not None:
            return self._derive(integration, wire, request, path, form)
        if not self._is_client(integration, wire, request, form):
            if wire.meta:
                return 400, meta_error("Error validating client secret.", 1)
            return 401, {"error": "invalid_client", "error_description": "Client authentication failed"}
        if form.get("grant_type") != wire.grant_type:
            return 400, {"error": "unsupported_grant_type"}
        if is_agency and form.get("user_type") not in {"Company", "Location"}:
            return 422, ghl_error(422, ["user_type must be a valid enum value"], "Unprocessable Entity")
        key, now = form.get(wire.key, ""), self.clock()
        grant = self._by_token.get(key)
        if grant is None or grant.integration != integration or key not in grant.keys or grant.revoked:
            return 400, wire.refusal
        ends_at = grant.refresh_ends_at if wire.key == "refresh_token" else grant.access[key]
        if not _lives(ends_at, now):
            return 400, wire.refusal
        if now - grant.born[key] < self.minimum_age_s.get(integration, 0):
            return 400, meta_error("The access token is too young to be refreshed.", 100)
        rotation, spent_at = self.rotation.get(integration, wire.rotation), grant.keys[key]
        if spent_at is not None and (rotation == "strict" or now - spent_at > self.grace_s):
            grant.revoked = rotation == "strict"
            return 400, wire.refusal
        return 200, self._renew(grant, wire, key, rotates=rotation != "none")

    def _renew(self, grant: Grant, wire: Wire, key: str, *, rotates: bool) -> dict[str, Any]:
        now, (life, refresh_life) = self.clock(), self._lives(grant.integration)
        if grant.keys[key] is not None and grant.integration in self.replays_anew:
            grant.access.popitem()
            grant.keys.update({key: None})
            grant.keys.pop(grant.refresh_token or "", None)
        body: dict[str, Any] = {"access_token": self._mint(grant, "access", now), "token_type": "bearer"}
        first_use = grant.keys[key] is None
        if rotates and first_use:
            grant.keys[key] = now
        if wire.key != "refresh_token":
            grant.keys[body["access_token"]] = None
        elif rotates:
            if first_use:
                grant.refresh_token = self._mint(grant, "refresh", now)
            body["refresh_token"] = grant.refresh_token
        elif refresh_life is not None:
            body["refresh_token"] = grant.refresh_token  # LinkedIn's: the same, its life counting down
        if wire.refresh_life is not None and grant.refresh_ends_at is not None:
            body[wire.refresh_life] = int(grant.refresh_ends_at - now)
        if life is not None:
            body["expires_in"] = int(life)
        return body if wire.meta else {**body, "scope": "read,write" if wire.auth == "client_key" else "read write"}

    def _derive(self, integration: str, wire: Wire, request: web.BaseRequest, path: str, form: dict[str, str]) -> Words:
        token = form.get("access_token") or _bearer(request)
        parent = self._by_token.get(token)
        account = form.get("locationId") or path.rpartition("/")[2]
        if parent is None or self._wire(parent.integration) is not WIRES[wire.parent or ""] or not self.works(token):
            return 400 if wire.meta else 401, wire.refusal
        if wire.meta:
            page = Grant(integration, parent.tenant, account)
            return 200, {"access_token": self._mint(page, "access", self.clock()), "id": account}
        if not form.get("companyId") or not form.get("locationId"):
            return 422, ghl_error(422, ["companyId should not be empty"], "Unprocessable Entity")
        if self.states.get(account) == "inactive":
            return 400, ghl_error(400, "Location is not active", "Bad Request")
        location = Grant(integration, parent.tenant, account)
        body = {"access_token": self._mint(location, "access", self.clock()), "token_type": "Bearer"}
        return 201, {**body, "expires_in": int(self._lives(integration)[0] or 0), "locationId": account}

    def _probe(self, integration: str, wire: Wire, request: web.BaseRequest, path: str, form: dict[str, str]) -> Words:
        account = path.rpartition("/")[2]
        if wire is WIRES["linkedin"]:
            if not self._is_client(integration, wire, request, form):
                return 401, {"error": "invalid_client", "error_description": "Client authentication failed"}
            works = self.works(form.get("token", ""))
            return 200, {"active": works, "status": "active" if works else "revoked", "client_id": CLIENT_ID}
        if not self.works(request.headers.get("apikey") or _bearer(request)):
            if wire.meta:
                return 400, wire.refusal
            return 401, {"status": 401, "error": "Unauthorized", "response": {"message": "Unauthorized"}}
        if wire in (WIRES["evolution"], WIRES["stevo"]):
            return 200, {"instance": {"instanceName": account, "state": self.states.get(account, "open")}}
        return 200, {"id": account}

    def _is_client(self, integration: str, wire: Wire, request: web.BaseRequest, form: dict[str, str]) -> bool:
        secret = self._secret(integration)
        if wire.auth == "none":
            return True
        if wire.auth == "basic":
            shown = "Basic " + base64.b64encode(f"{CLIENT_ID}:{secret}".encode()).decode()
            return request.headers.get("Authorization") == shown
        name = "client_key" if wire.auth == "client_key" else "client_id"
        return (form.get(name), form.get("client_secret")) == (CLIENT_ID, secret)

    def _mint(self, grant: Grant, kind: str, now: float) -> str:
        token = f"CANARY-{grant.integration}-{kind}-{secrets.token_hex(8)}"
        life, refresh_life = self._lives(grant.integration)
        if kind == "access":
            grant.access[token] = None if life is None else now + life
        else:
            grant.keys[token] = None
            if grant.refresh_ends_at is None or self._wire(grant.integration).rotation != "none":
                grant.refresh_ends_at = None if refresh_life is None else now + refresh_life
        grant.born[token] = now
        self._by_token[token] = grant
        return token

    def _wire(self, integration: str) -> Wire:
        return self.wires.get(integration, WIRES["oauth2"])

    def _lives(self, integration: str) -> tuple[float | None, float | None]:
        return self.lives.get(integration, self._wire(integration).lives_s)

    @staticmethod
    def _secret(integration: str) -> str:
        return f"CANARY-secret-{integration}"


def _lives(ends_at: float | None, now: float) -> bool:
    return ends_at is None or now < ends_at


def _bearer(request: web.BaseRequest) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _response(status: int, body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    if isinstance(body, bytes):
        return web.Response(status=status, body=body, headers=headers)
    if isinstance(body, str):
        kind = "text/html" if body.startswith("<") else "application/json"
        return web.Response(status=status, text=body, content_type=kind, headers=headers)
    return web.json_response(body, status=status, headers=headers)
