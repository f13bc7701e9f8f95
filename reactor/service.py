"""The HTTP door (`reactor serve`): fresh tokens and status for the operator's token; health, without data, for anybody.

Only uvicorn's own errors could quote what callers sent, so its loggers are silent: every answer is decided here.
"""

from __future__ import annotations

import hmac
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime
from typing import Annotated, Any

import anyio
import asyncpg
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from reactor import db
from reactor.errors import Misuse, NeedsReconnect, Unavailable
from reactor.log import Log, get_log
from reactor.settings import Settings
from reactor.tokens import SeveralAccounts, Tokens

_OPEN = {"/healthz", "/readyz"}
_READY_S = 5.0
_RETRY_S = 5.0  # where a dependency that is away names no delay
_DAY_S = 86_400.0

_Text = Annotated[str, Field(max_length=200)]


class FreshAsked(BaseModel):
    """The body of POST /v1/tokens/fresh; as `Tokens.ensure_fresh`."""

    model_config = ConfigDict(extra="forbid")

    tenant_id: _Text
    integration: _Text
    account: _Text | None = None
    min_ttl_s: float = Field(600.0, ge=0, le=365 * _DAY_S, allow_inf_nan=False)


def create_app(pool: db.Pool, tokens: Tokens, *, token: SecretStr | None, log: Log) -> ASGIApp:
    """The routes, behind the door. `token` is the operator's; None: nobody is one."""
    app = FastAPI(openapi_url=None)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(NeedsReconnect, _needs_reconnect)
    app.add_exception_handler(Unavailable, _unavailable)
    app.add_exception_handler(Exception, _failed)

    @app.api_route("/healthz", methods=["GET", "HEAD"])
    async def healthz() -> JSONResponse:
        return _answer({"ok": True})

    @app.api_route("/readyz", methods=["GET", "HEAD"])
    async def readyz() -> JSONResponse:
        try:
            async with db.borrowed(pool, _READY_S) as conn:
                await db.check_schema(conn)
        except (Unavailable, Misuse, asyncpg.PostgresError):
            return _error(503, "not_ready", "Postgres is away, or its schema is of another release", retry_s=_RETRY_S)
        return _answer({"ok": True})

    @app.get("/status")
    async def status() -> JSONResponse:
        [[numbers]] = await db.fetch(pool, "select reactor.status()")
        return _answer(numbers)

    @app.post("/v1/tokens/fresh")
    async def fresh(asked: FreshAsked) -> JSONResponse:
        try:
            token = await tokens.ensure_fresh(asked.tenant_id, asked.integration, asked.account, asked.min_ttl_s)
        except SeveralAccounts:
            said = "the tenant has several accounts of this integration"
            return _error(400, "several_accounts", said, 'name one: {"account": "..."}')
        item = {
            "access_token": str(token),
            "account": token.account,
            "expires_at": token.expires_at,
            "version": token.version,
        }
        return _answer({"items": [item], "degraded": None})

    return _Door(app, token, log)


class _Door:
    """Turns away whoever is not the operator, before a body is read; and logs bugs without quoting them."""

    def __init__(self, app: ASGIApp, token: SecretStr | None, log: Log) -> None:
        self._app = app
        self._token = None if token is None else token.get_secret_value().encode()
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] not in _OPEN and not self._is_operator(Headers(scope=scope)):
            refused = _error(401, "unauthorized", "this takes the operator's token", "Authorization: Bearer ...")
            refused.headers["WWW-Authenticate"] = "Bearer"
            await refused(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as exc:  # noqa: BLE001  # answered by _failed; its words may hold a tenant's text
            self._log.error("request_failed", path=scope["path"], error_code=type(exc).__name__, at=_place_of(exc))

    def _is_operator(self, headers: Mapping[str, str]) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(shown.strip().encode("latin-1"), self._token)


def _answer(content: Mapping[str, Any], status: int = 200) -> JSONResponse:
    plain = _plain(content)
    return JSONResponse(plain, status, headers={"Cache-Control": "no-store"})


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case dict():
            return {name: _plain(one) for name, one in value.items()}
        case list():
            return [_plain(one) for one in value]
    return value


def _error(
    status: int, code: str, message: str, hint: str | None = None, *, retry_s: float | None = None, **more: str
) -> JSONResponse:
    answer = _answer({"error": {"code": code, "message": message, "hint": hint, **more}}, status)
    if retry_s is not None:
        answer.headers["Retry-After"] = str(max(1, math.ceil(retry_s)))
    return answer


# Starlette hands every handler an Exception; each is registered for its own kind.


async def _refused(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)  # noqa: S101
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "refused")
    return _error(exc.status_code, code, str(exc.detail))


async def _misread(_request: Request, exc: Exception) -> JSONResponse:
    """What is wrong with a body, by the names of its fields; nothing of what was sent."""
    assert isinstance(exc, RequestValidationError)  # noqa: S101
    fields = f"fields: {', '.join(FreshAsked.model_fields)}"
    wrong = [(".".join(map(str, one["loc"][1:])), one["type"], one["msg"]) for one in exc.errors()]
    if any(type_ == "json_invalid" or not place for place, type_, _ in wrong):
        return _error(422, "invalid_request", "the body is no JSON object", f"Content-Type: application/json; {fields}")
    said = [f"{place}: {words}" for place, type_, words in wrong if type_ != "extra_forbidden"]
    if len(said) < len(wrong):  # the names of fields that are not ours are the caller's words
        said.append(f"{len(wrong) - len(said)} unknown field(s)")
    return _error(422, "invalid_request", "; ".join(said), fields)


async def _needs_reconnect(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, NeedsReconnect)  # noqa: S101
    status = 404 if exc.state == "missing" else 409
    hint = "a person connects the account again, and its new token is written into its row"
    return _error(status, "needs_reconnect", str(exc), hint, state=exc.state, reason=exc.reason)


async def _unavailable(_request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, Unavailable)  # noqa: S101
    return _error(503, exc.code, str(exc), "try again later", retry_s=exc.retry_after_s or _RETRY_S)


async def _failed(_request: Request, _exc: Exception) -> JSONResponse:
    return _error(500, "internal", "the reactor failed", "its log says where (request_failed)")


def _place_of(exc: Exception) -> str:
    """Where it was raised, as file:line."""
    step = exc.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return "-" if step is None else f"{step.tb_frame.f_code.co_filename.rpartition('/')[2]}:{step.tb_lineno}"


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to us: uvicorn would raise SIGTERM again when all is done, and it would not end with 0."""
        yield


@asynccontextmanager
async def serving(settings: Settings, dsn: str, *, log: Log) -> AsyncIterator[int]:
    """The port that is answered on; requests in hand are answered on the way out.

    Raises:
        Misuse: The environment or the file of integrations is wrong.
        Unavailable: The address cannot be listened on.
    """
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logging.getLogger(name).disabled = True
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(
            db.create_pool(dsn, application="memory-reactor http", size=settings.pool_size, statement_cache_size=0)
        )
        tokens = Tokens(pool, settings=settings, log=log)
        stack.push_async_callback(tokens.aclose)
        listening = stack.enter_context(_listen(settings.http_host, settings.http_port))
        server = _Server(
            uvicorn.Config(
                create_app(pool, tokens, token=settings.http_token, log=log),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
            )
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listening])
            port: int = listening.getsockname()[1]
            log.info("serving", host=settings.http_host, port=port)
            yield port
            server.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as exc:
        raise Unavailable(
            f"cannot listen on {host}:{port}: {(exc.strerror or '').partition(' (')[0]}", code="address"
        ) from exc


async def serve(settings: Settings, dsn: str) -> None:
    """Answer until SIGTERM or SIGINT, then end what is in hand; a second signal ends at once.

    Raises:
        Misuse, Unavailable: See `serving`.
    """
    log = get_log()
    async with serving(settings, dsn, log=log):
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            received = await anext(signals)
        log.info("stopping", signal=received.name)
    log.info("stopped")
