"""Voyage's embeddings API: batched, budgeted, slowed down to what the account is allowed."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import numpy as np
from pydantic import SecretStr

from reactor.embedder import DIMENSIONS, Embeddings, InputType, Vector, encoded, packed, unit
from reactor.errors import Permanent, Unavailable
from reactor.log import get_log

if TYPE_CHECKING:
    import aiohttp

_REQUEST_TEXTS = 128
_REQUEST_BYTES = 100_000  # a token is at least a byte, and the strictest model takes 120,000 tokens a request
_LEAST_REQUEST_BYTES = 10_000  # what an account of 10,000 tokens a minute surely takes in one request
_REQUESTS_AT_ONCE = 4
_TIMEOUT_S = {"document": 60.0, "query": 10.0}
_KEPT_VECTORS = 4096  # 16 MB

_OK = 200
_REFUSALS = (400, 413, 422)  # of the texts, unless a plain word is refused as well
_SAYS = {
    401: ("voyage_key_refused", "refuses the key"),
    402: ("voyage_payment_required", "asks for payment"),
    403: ("voyage_key_refused", "refuses the key"),
    429: ("voyage_rate_limited", "limits the rate"),
}
_SERVER_ERROR = ("voyage_server_error", "is in trouble")
_BAD_ANSWER = ("voyage_bad_answer", "answered with no embeddings")


@dataclass(slots=True)
class _Call:
    """One embed_documents call in the making, shared by its requests."""

    texts: Sequence[str]
    vectors: list[np.ndarray | None]
    refused: dict[int, Permanent] = field(default_factory=dict)
    tokens: int = 0
    accepted: bool = False  # the provider took a request of this call: a refusal is then about texts


class VoyageEmbedder:
    """Voyage's embeddings API through its own client, which is imported on first use: it costs half a second.

    It slows down to what the account is allowed: nothing is sent before the time the provider named, and a request over
    the rate makes the next ones smaller. Vectors of a call that failed half-way are kept, so that the same texts, tried
    again, are not billed twice, and three requests a minute get a large batch done in the end.

    Args:
        model: A Voyage model that answers with 1024 dimensions when asked.
        api_key: The account's key.
        base_url: Another address of the same API, `/v1` included; None for Voyage's own.
    """

    def __init__(self, model: str, api_key: SecretStr, *, base_url: str | None = None) -> None:
        self.model = model
        self._api_key = api_key
        self._base_url = base_url.rstrip("/") if base_url else None
        self._client: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._requests = anyio.CapacityLimiter(_REQUESTS_AT_ONCE)
        self._not_before = 0.0  # by the monotonic clock
        self._request_bytes = _REQUEST_BYTES
        self._kept: dict[bytes, np.ndarray] = {}
        self._unreported_tokens = 0  # billed in calls that failed, for the next one to report
        self._log = get_log(model=model)

    async def embed_documents(self, texts: Sequence[str]) -> Embeddings:
        """See Embedder. Several requests run at once; the first that fails cancels the others."""
        digests = [hashlib.blake2b(encoded(text), digest_size=16).digest() for text in texts]
        call = _Call(texts, [self._kept.get(digest) for digest in digests])
        owed = (i for i, vector in enumerate(call.vectors) if vector is None)
        parts = packed(owed, lambda i: len(encoded(texts[i])), most=_REQUEST_TEXTS, budget=self._request_bytes)
        try:
            async with anyio.create_task_group() as requests:
                for part in parts:
                    requests.start_soon(self._embed_part, part, call)
        except BaseException as exc:  # cancelled, too
            self._unreported_tokens += call.tokens
            for digest, vector in zip(digests, call.vectors, strict=True):
                if vector is not None:
                    self._kept[digest] = vector
            while len(self._kept) > _KEPT_VECTORS:
                del self._kept[next(iter(self._kept))]
            if isinstance(exc, ExceptionGroup):
                raise exc.exceptions[0] from None  # bare: callers catch Unavailable
            raise
        for digest in digests:
            self._kept.pop(digest, None)
        tokens, self._unreported_tokens = call.tokens + self._unreported_tokens, 0
        return Embeddings(call.vectors, call.refused, tokens)

    async def embed_query(self, text: str) -> np.ndarray:
        """See Embedder. Never waits behind documents."""
        try:
            [vector], _ = await self._ask([text], "query")
        except Permanent:
            await self._clear_the_request("query")
            raise
        return vector

    async def warm(self) -> None:
        """Import the client."""
        if self._client is None:
            self._client = await anyio.to_thread.run_sync(_import_client, abandon_on_cancel=True)

    async def aclose(self) -> None:
        """Close the HTTP session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _embed_part(self, part: list[int], call: _Call) -> None:
        """Fill in `part` of `call`, halving it while the provider refuses it, down to the texts at fault."""
        refusal = None
        async with self._requests:
            try:
                vectors, tokens = await self._ask([call.texts[i] for i in part], "document")
            except Permanent as exc:
                refusal = exc
        if refusal is None:
            for i, vector in zip(part, vectors, strict=True):
                call.vectors[i] = vector
            call.tokens += tokens
            call.accepted = True
            return
        if not call.accepted:
            call.tokens += await self._clear_the_request("document")
            call.accepted = True
        if len(part) == 1:
            call.refused[part[0]] = refusal
            return
        half = len(part) // 2
        await self._embed_part(part[:half], call)
        await self._embed_part(part[half:], call)

    async def _clear_the_request(self, input_type: InputType) -> int:
        """Make sure that a refusal was about the texts: the provider takes a plain word. The tokens that cost.

        A refusal's words are not read: they may quote a text, which could then pass for a refused model and hold up
        everybody; and a refused model, taken for refused texts, would bury every job.

        Raises:
            Unavailable: The provider refuses that too: the model's name or the request's form is what it dislikes.
        """
        try:
            _, tokens = await self._ask(["ok"], input_type)
        except Permanent:
            refused = Unavailable("Voyage refuses this model or form of request", code="voyage_model_refused")
        else:
            return tokens
        self._log.warning("embedding_failed", error_code=refused.code, input_type=input_type)
        raise refused

    async def _ask(self, texts: list[str], input_type: InputType) -> tuple[list[Vector], int]:
        """One request: the vectors in the order of `texts`, and the tokens billed.

        Raises:
            Unavailable: No usable answer, or the provider's named delay is not over: then nothing was sent.
            Permanent: The provider refuses the request as it stands (400, 413, 422).
        """
        await self.warm()
        client = self._client
        wait_s = self._not_before - time.monotonic()
        if wait_s > 0:
            raise Unavailable("Voyage asked to wait", retry_after_s=wait_s, code="voyage_rate_limited")
        exchange = _Exchange(self._opened_session())
        problem: Exception | None = None
        started = time.perf_counter()
        token = client.aiosession.set(exchange)
        try:
            api = client.AsyncClient(  # light; max_retries=1 is one attempt: its own retries ignore Retry-After
                api_key=self._api_key.get_secret_value().strip(),
                max_retries=1,
                timeout=_TIMEOUT_S[input_type],
                base_url=self._base_url,
            )
            answer = await api.embed(
                [encoded(text).decode() for text in texts],
                model=self.model,
                input_type=input_type,
                truncation=True,
                output_dimension=DIMENSIONS,
            )
            vectors, tokens = _in_order(answer.embeddings, exchange.order, len(texts)), int(answer.total_tokens)
        except (client.error.VoyageError, AttributeError, LookupError, TypeError, ValueError) as exc:
            problem = exc  # of its class no more than a hint is used: the client raises even bare AttributeErrors
        finally:
            client.aiosession.reset(token)
        log = self._log.bind(
            texts=len(texts), input_type=input_type, latency_ms=round((time.perf_counter() - started) * 1000, 1)
        )
        if problem is None and exchange.status == _OK:
            if input_type == "document":
                self._request_bytes = min(_REQUEST_BYTES, self._request_bytes + 1_000)
            log.info("embedding_batch", tokens=tokens)
            return vectors, tokens
        failure = _failure(exchange, problem, self._client.error.Timeout)
        if isinstance(failure, Unavailable):
            self._slow_down(failure, sum(len(encoded(text)) for text in texts), input_type)
        log.warning("embedding_failed", error_code=failure.code, status=exchange.status, problem=type(problem).__name__)
        raise failure  # outside the except clause: the client's exceptions quote the answer, and so the texts

    def _slow_down(self, failure: Unavailable, request_bytes: int, input_type: InputType) -> None:
        if failure.retry_after_s is not None:
            self._not_before = max(self._not_before, time.monotonic() + failure.retry_after_s)
        if failure.code == "voyage_rate_limited" and input_type == "document":
            smaller = max(_LEAST_REQUEST_BYTES, request_bytes // 2)  # by its size: four at once halve it once
            self._request_bytes = min(self._request_bytes, smaller)

    def _opened_session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            import aiohttp  # noqa: PLC0415 - as late as the client, which brought it

            self._session = aiohttp.ClientSession()
        return self._session


class _Exchange:
    """One HTTP exchange, given to the client as its session: keeps the status and headers that its errors lose."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.status: int | None = None  # None: there was no whole answer
        self.headers: Mapping[str, str] = {}
        self.order: list[int] = []  # the index of each datum, which the client drops

    async def request(self, **request: Any) -> aiohttp.ClientResponse:
        """What the client asks of a session. A redirect is not followed: texts go to the address given, or nowhere."""
        answer = await self._session.request(**request, allow_redirects=False)
        body = await answer.read()  # a cut answer fails here, as an error; where the client reads, it prints and warns
        self.status, self.headers = answer.status, answer.headers
        if answer.status == _OK:
            with suppress(ValueError, LookupError, TypeError):  # no such answer: the client says so itself
                self.order = [datum["index"] for datum in json.loads(body)["data"]]
        return answer


def _import_client() -> Any:
    client: Any = importlib.import_module("voyageai")
    client.log = client.util.VOYAGE_LOG = None  # it would print whole requests
    logging.getLogger("voyage").addFilter(_is_not_ours)
    return client


def _is_not_ours(_record: logging.LogRecord) -> bool:
    """Drops what the client logs, bodies included, about our requests; a host program's own stay its own matter."""
    return not isinstance(sys.modules["voyageai"].aiosession.get(), _Exchange)


def _failure(exchange: _Exchange, problem: Exception | None, timeout: type[Exception]) -> Unavailable | Permanent:
    status = exchange.status
    if status is None:
        late = isinstance(problem, timeout)
        code, says = ("voyage_timeout", "is too slow") if late else ("voyage_unreachable", "is out of reach")
        return Unavailable(f"Voyage {says} ({type(problem).__name__})", code=code)
    if status in _REFUSALS:
        return Permanent(f"Voyage refuses the text (HTTP {status})", code="voyage_refused")
    other = _SERVER_ERROR if status >= 500 else _BAD_ANSWER  # noqa: PLR2004 - a status says itself
    code, says = _SAYS.get(status, other)
    return Unavailable(f"Voyage {says} (HTTP {status})", retry_after_s=exchange.headers.get("Retry-After"), code=code)


def _in_order(rows: Sequence[Any], order: Sequence[int], count: int) -> list[Vector]:
    """The vectors by the `index` of each datum, because answers come in any order.

    Raises:
        ValueError: One is missing, doubled, of another dimension, or has no direction.
    """
    if len(rows) != count or sorted(order) != list(range(count)):
        raise ValueError("not one vector for each text")
    by_index = {index: np.asarray(row, dtype=np.float64) for index, row in zip(order, rows, strict=True)}
    if any(row.shape != (DIMENSIONS,) for row in by_index.values()):
        raise ValueError("another dimension")
    return [unit(by_index[i]) for i in range(count)]
