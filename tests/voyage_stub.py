"""A loopback stub of Voyage's embeddings API: its wire format, vectors that follow the words, and faults on demand.

    async with voyage_stub() as stub:
        embedder = VoyageEmbedder("voyage-4", SecretStr(stub.key), base_url=stub.url)   # or REACTOR_VOYAGE_BASE_URL
        stub.fail_next(rate_limited(retry_after="20"), cut())   # the next two requests
        stub.always(status(503))                                # every one after those; stub.always(None): healthy again
        stub.refuse("marker")                                   # 400 for any request with a text that holds the marker
        stub.requests                                           # the JSON bodies received, in order, failed ones too
        await stub.received(3)                                  # until that many have arrived

Texts that share words get near vectors: `vector_of(text)` is what the stub answers for it. As the real one does, it
refuses another key (401), a model it has not heard of, a blank text and more than 1,000 texts (400).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
from aiohttp import web

MODELS = ("voyage-4-large", "voyage-4", "voyage-4-lite", "voyage-3.5", "voyage-3-large")


class VoyageStub:
    """The running stub."""

    def __init__(self) -> None:
        self.url = ""  # ends in /v1
        self.key = "pa-stub-key"
        self.requests: list[dict[str, Any]] = []
        self.most_at_once = 0  # requests in hand at the same time
        self._queued: deque[Fault] = deque()
        self._standing: Fault | None = None
        self._markers: list[str] = []
        self._arrived = anyio.Event()
        self._in_hand = 0
        self._peers: set[object] = set()

    @property
    def texts(self) -> list[str]:
        """Every text received, in order, as often as it came."""
        return [text for body in self.requests for text in body["input"]]

    @property
    def connections(self) -> int:
        """TCP connections that brought a request so far."""
        return len(self._peers)

    def fail_next(self, *faults: Fault) -> None:
        self._queued.extend(faults)

    def always(self, fault: Fault | None) -> None:
        self._standing = fault

    def refuse(self, marker: str) -> None:
        self._markers.append(marker)

    async def received(self, count: int) -> None:
        while len(self.requests) < count:
            await self._arrived.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = Call(self, request, json.loads(await request.read()))
        self._peers.add(request.transport.get_extra_info("peername"))
        self.requests.append(call.body)
        self._arrived.set()
        self._arrived = anyio.Event()
        fault = self._queued.popleft() if self._queued else self._standing
        self._in_hand += 1
        self.most_at_once = max(self.most_at_once, self._in_hand)
        try:
            return call.respond() if fault is None else await fault(call)
        finally:
            self._in_hand -= 1

    def refusal(self, call: Call) -> tuple[int, str] | None:
        texts = call.texts
        if call.request.headers.get("Authorization") != f"Bearer {self.key}":
            return 401, "Provided API key is invalid."
        if call.body["model"] not in MODELS:
            return 400, f"Model {call.body['model']} is not supported. Supported models are {list(MODELS)}."
        if len(texts) > 1000 or not all(text.strip() for text in texts):
            return 400, "Input cannot contain empty strings or empty lists, nor more than 1000 texts."
        for marker in self._markers:
            for text in texts:
                if marker in text:
                    return 400, f"The request is invalid: cannot embed {text!r}"
        return None


class Call:
    """One request, as a fault sees it."""

    def __init__(self, stub: VoyageStub, request: web.Request, body: dict[str, Any]) -> None:
        self.stub = stub
        self.request = request
        self.body = body

    @property
    def texts(self) -> list[str]:
        return self.body["input"]

    @property
    def size(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    def respond(self) -> web.Response:
        """What a healthy provider says to this."""
        refusal = self.stub.refusal(self)
        if refusal is not None:
            return web.json_response({"detail": refusal[1]}, status=refusal[0])
        return web.json_response(self.answer())

    def answer(self, dimension: int | None = None) -> dict[str, Any]:
        dimension = dimension or self.body.get("output_dimension") or 1024
        vectors = [vector_of(text, dimension) for text in self.texts]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": self.encoded(vector), "index": i}
                for i, vector in enumerate(vectors)
            ],
            "model": self.body["model"],
            "usage": {"total_tokens": sum(tokens_of(text) for text in self.texts)},
        }

    def encoded(self, vector: np.ndarray) -> str | list[float]:
        if self.body.get("encoding_format") == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(x) for x in vector]


Fault = Callable[[Call], Awaitable[web.StreamResponse]]


def tokens_of(text: str) -> int:
    return max(1, len(text.encode()) // 4)


def vector_of(text: str, dimension: int = 1024) -> np.ndarray:
    """A hashed bag of words at length one, float32 of shape (dimension,)."""
    words = re.findall(r"\w+", text.casefold()) or [text]
    total = np.sum([_direction_of(word, dimension) for word in words], axis=0)
    return (total / np.linalg.norm(total)).astype(np.float32)


@functools.lru_cache(maxsize=4096)
def _direction_of(word: str, dimension: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return np.random.default_rng(seed).standard_normal(dimension)


def _fixed(build: Callable[[Call], web.StreamResponse]) -> Fault:
    async def fault(call: Call) -> web.StreamResponse:
        return build(call)

    return fault


def _altered(alter: Callable[[dict[str, Any], Call], None]) -> Fault:
    def build(call: Call) -> web.Response:
        answer = call.answer()
        alter(answer, call)
        return web.json_response(answer)

    return _fixed(build)


def late(until: anyio.Event | float) -> Fault:
    """A right answer, after that event or so many seconds."""

    async def fault(call: Call) -> web.StreamResponse:
        await (anyio.sleep(until) if isinstance(until, int | float) else until.wait())
        return call.respond()

    return fault


def out_of_order() -> Fault:
    """A right answer, last text first."""
    return _altered(lambda answer, _: answer["data"].reverse())


def short() -> Fault:
    """An answer that lacks the last vector."""
    return _altered(lambda answer, _: answer["data"].pop())


def long() -> Fault:
    """An answer with a vector nobody asked for."""
    return _altered(lambda answer, call: answer["data"].append(answer["data"][0] | {"index": len(call.texts)}))


def wrong_index() -> Fault:
    """As many vectors as texts, but every index is 1: doubled, or of no text."""
    return _altered(lambda answer, _: [datum.update(index=1) for datum in answer["data"]])


def as_lists() -> Fault:
    """A right answer with lists of numbers, as from a proxy that knows no base64."""

    def alter(answer: dict[str, Any], call: Call) -> None:
        for datum, text in zip(answer["data"], call.texts, strict=True):
            datum["embedding"] = [float(x) for x in vector_of(text)]

    return _altered(alter)


def wrong_dimension(dimension: int = 512) -> Fault:
    return _fixed(lambda call: web.json_response(call.answer(dimension)))


def filled_with(value: float) -> Fault:
    """The first text's vector is `value` throughout: 0.0, nan or inf."""

    def alter(answer: dict[str, Any], call: Call) -> None:
        answer["data"][0]["embedding"] = call.encoded(np.full(1024, value))

    return _altered(alter)


def without_usage() -> Fault:
    return _altered(lambda answer, _: answer.pop("usage"))


def status(code: int, detail: str | None = "stubbed", **headers: str) -> Fault:
    """That status with JSON; `detail=None` leaves out the field where Voyage says what is wrong."""
    body = {} if detail is None else {"detail": detail}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return _fixed(lambda _: web.json_response(body, status=code, headers=named))


def rate_limited(retry_after: str | None = None, *, detail: str | None = "Rate limit reached.") -> Fault:
    return status(429, detail, **({} if retry_after is None else {"Retry_After": retry_after}))


def html(code: int = 200, **headers: str) -> Fault:
    """A page, as a proxy or a load balancer sends."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    page = "<html><body>Something went wrong</body></html>"
    return _fixed(lambda _: web.Response(text=page, status=code, content_type="text/html", headers=named))


def model_unsupported() -> Fault:
    return status(400, "Model voyage-4 is not supported for this account.")


def too_large(most_bytes: int) -> Fault:
    """413 for a request with more than so many bytes of text, a right answer to others."""

    async def fault(call: Call) -> web.StreamResponse:
        return await status(413, "Payload too large.")(call) if call.size > most_bytes else call.respond()

    return fault


def truncated() -> Fault:
    """Whole HTTP, half the JSON."""

    def build(call: Call) -> web.Response:
        text = json.dumps(call.answer())
        return web.Response(text=text[: len(text) // 2], content_type="application/json")

    return _fixed(build)


def cut() -> Fault:
    """The connection ends before any answer."""

    async def fault(call: Call) -> web.StreamResponse:
        call.request.transport.abort()
        return web.Response()

    return fault


def cut_in_the_answer() -> Fault:
    """The connection ends in the middle of the answer's body."""

    async def fault(call: Call) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100000", "Content-Type": "application/json"})
        await answer.prepare(call.request)
        await answer.write(b'{"object": "list", "data": [')
        call.request.transport.close()
        return answer

    return fault


class LowRate:
    """An account without a payment method, as a standing fault: so many requests and tokens until `new_minute()`."""

    def __init__(self, requests: int = 3, tokens: int = 10_000, retry_after: str | None = "0") -> None:
        self._limits = requests, tokens
        self._refuse = rate_limited(retry_after)
        self.new_minute()

    def new_minute(self) -> None:
        self.requests, self.tokens = self._limits

    async def __call__(self, call: Call) -> web.StreamResponse:
        owed = sum(tokens_of(text) for text in call.texts)
        if self.requests < 1 or self.tokens < owed:
            return await self._refuse(call)
        self.requests -= 1
        self.tokens -= owed
        return call.respond()


@asynccontextmanager
async def voyage_stub() -> AsyncIterator[VoyageStub]:
    stub = VoyageStub()
    app = web.Application(client_max_size=64 * 1024**2)
    app.router.add_post("/v1/embeddings", stub.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        stub.url = f"http://{host}:{port}/v1"
        yield stub
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()
