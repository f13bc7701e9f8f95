"""Memory reads: any arguments, one tenant, from a bounded cache that follows the reactor's writes."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from types import MappingProxyType

import anyio
import asyncpg
import pytest
from aiocache import SimpleMemoryCache
from conftest import drained, eventually, make_settings, running_reactor
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recalling import NOON, store, store_one_of_each_kind, watched_searches
from voyage_stub import vector_of, voyage_stub

from reactor import Hit, Memory
from reactor.errors import Misuse


@pytest.fixture
async def memory(dsn):
    """A reader that waits as long as a loaded machine needs, and hears the reactors."""
    async with opened(dsn) as memory:
        yield memory


@asynccontextmanager
async def opened(dsn, **settings):
    async with Memory.open(dsn, settings=make_settings(**{"search_deadline_s": 30, **settings})) as memory:
        await memory.warm()
        await listening(dsn)
        yield memory


async def listening(dsn, readers=1):
    conn = await asyncpg.connect(dsn)
    try:
        await eventually(
            lambda: conn.fetchval(
                "select count(*) >= $1 from pg_stat_activity where datname = current_database() and application_name = 'memory-reactor reader listener'",
                readers,
            )
        )
        await anyio.sleep(0)
    finally:
        await conn.close()


# --- arguments ---


async def test_k_is_clamped_to_1_to_100(memory, conn):
    for n in range(103):
        await store(conn, "acme", str(n), f"bolo {n}")

    for k, count in [(0, 1), (-1, 1), (7, 7), (1_000_000, 100), (10**30, 100), (True, 1)]:
        assert len(await memory.search("acme", "bolo", k=k)) == count
        assert len(await memory.recent("acme", k=k)) == count


async def test_no_query_raises_and_none_is_a_pattern(memory, conn):
    await store(conn, "acme", "1", "Torta de limão")
    queries = ["\0", "\ud800", "\ud83d \udc00", "a\0b", "'", "''; drop table x; --", "&|!<->:*()", "bol:*", "torta<->bolo'", "\\", "\\'", "$1", "%", "_", "🔥", "\u200b",
               "é\u0301" * 3000, "palavra " * 12_500, "x" * 100_000, "\0" * 100_000, "o a de que"]  # fmt: skip

    for query in queries:
        hits = await memory.search("acme", query)
        assert hits.degraded is None, query
        assert {hit.source_id for hit in hits} <= ({"1"} if "torta" in query else set()), query


@pytest.mark.parametrize("query", ["", " \t\n\u00a0", "?! ... --- '", "\0\0", "\u200b\u202e", "()&|!"])
async def test_a_query_without_a_word_finds_nothing_and_asks_nobody(query):
    async with Memory.open("postgresql://nobody@127.0.0.1:1/nowhere", settings=make_settings()) as memory:
        hits = await memory.search("acme", query)

    assert (list(hits), hits.degraded) == ([], None)


async def test_what_is_no_argument_raises():
    async with Memory.open("postgresql://nobody@127.0.0.1:1/nowhere", settings=make_settings()) as memory:
        for error, tenant, query, arguments in [
            (TypeError, None, "q", {}), (TypeError, 1, "q", {}), (TypeError, b"a", "q", {}), (ValueError, "", "q", {}),
            (ValueError, "x" * 201, "q", {}), (ValueError, "a\0", "q", {}), (ValueError, "\ud800", "q", {}),
            (TypeError, "a", None, {}), (TypeError, "a", 1, {}), (TypeError, "a", b"q", {}), (TypeError, "a", ["q"], {}),
            (TypeError, "a", "q", {"k": "5"}), (TypeError, "a", "q", {"k": None}), (TypeError, "a", "q", {"k": 2.5}),
            (TypeError, "a", "q", {"k": float("inf")}), (TypeError, "a", "q", {"kinds": "post"}), (TypeError, "a", "q", {"kinds": [1]}),
            (TypeError, "a", "q", {"kinds": 1}), (TypeError, "a", "q", {"since": "2026-01-01"}), (TypeError, "a", "q", {"until": date(2026, 1, 1)}),
            (TypeError, "a", "q", {"since": 5}), (TypeError, "a", "q", {"metadata": 5}), (ValueError, "a", "q", {"metadata": "abc"}),
            (TypeError, "a", "q", {"metadata": {"a": object()}}), (TypeError, "a", "q", {"metadata": {1: 2}}),
            (ValueError, "a", "q", {"until": datetime.max.replace(tzinfo=timezone(timedelta(hours=-3)))}),
        ]:  # fmt: skip
            with pytest.raises(error):
                await memory.search(tenant, query, **arguments)
            if query == "q" and not {"since", "until"} & set(arguments):
                with pytest.raises(error):
                    await memory.recent(tenant, **arguments)


@pytest.mark.parametrize("dsn", ["", "garbage", "mysql://host/db", "host=localhost"])
async def test_an_address_that_is_none_is_said_at_open(dsn):
    with pytest.raises(Misuse):
        async with Memory.open(dsn, settings=make_settings()):
            pass


async def test_the_filters_are_exact_and_every_one_has_answers_of_its_own(memory, conn):
    await store_one_of_each_kind(conn)
    local = (NOON + timedelta(days=1)).astimezone().replace(tzinfo=None)

    for _ in range(2):  # asked, then cached
        for arguments, found in [
            ({}, {"0", "1", "2"}), ({"kinds": ["post", "note"]}, {"0", "2"}), ({"kinds": ("note", "post")}, {"0", "2"}), ({"kinds": []}, set()),
            ({"kinds": ["po%", "_ost", "POST"]}, set()), ({"kinds": ["post\0"]}, {"0"}), ({"since": NOON + timedelta(days=1)}, {"1", "2"}),
            ({"until": NOON + timedelta(days=1)}, {"0"}), ({"since": NOON, "until": NOON}, set()), ({"since": local}, {"1", "2"}),
            ({"since": datetime.min.replace(tzinfo=UTC), "until": datetime.max.replace(tzinfo=UTC)}, {"0", "1", "2"}),
            ({"metadata": {}}, {"0", "1", "2"}), ({"metadata": {"n": 1}}, {"1"}), ({"metadata": {"n": "1"}}, set()), ({"metadata": {"n": True}}, set()),
            ({"metadata": MappingProxyType({"tags": ("note",)})}, {"2"}), ({"metadata": {"a\0'": "\ud800"}}, set()),
        ]:  # fmt: skip
            hits = await memory.search("acme", "bolo", **arguments)
            assert ({hit.source_id for hit in hits}, hits.degraded) == (found, None), arguments
        assert [
            hit.source_id for hit in await memory.recent("acme", kinds=["post", "chat"], metadata={"tags": ["a"]})
        ] == ["1", "0"]


async def test_a_hit_says_what_it_is_and_recent_gives_the_whole_text(memory, conn):
    long = "".join(f"Frase número {n} sobre confeitaria. " for n in range(200))
    await store(conn, "acme", "7", long, kind="dossier", metadata={"a": [1]}, occurred_at=NOON)

    [found] = await memory.search("acme", "confeitaria")
    [newest] = await memory.recent("acme")

    assert (found.kind, found.source_id, found.occurred_at, found.metadata) == ("dossier", "7", NOON, {"a": [1]})
    assert found.content in long
    assert len(found.content) <= 1500
    assert 0 < found.score <= 1
    assert newest == Hit(newest.memory_id, "dossier", "7", long, 1.0, NOON, {"a": [1]})


async def test_a_bug_still_raises_in_every_caller(memory, conn):
    await conn.execute("drop function reactor.recall")

    answers = await asyncio.gather(
        *(memory.search("acme", "bolo") for _ in range(3)), memory.recent("acme"), return_exceptions=True
    )

    assert [type(answer) for answer in answers] == [asyncpg.UndefinedFunctionError] * 4


# --- tenants ---

TWINS = [
    "acme",
    "acme2",
    "acm",
    "Acme",
    "acmé",
    "acme\u0301",
    "acme ",
    "ａｃｍｅ",
    "аcme",
    "acme'",
    'ac"me',
    "acme%",
    "acm_",
    "%",
    "a,b",
    "a:b",
    "acme/'search'",
    "🔥",
    "x" * 200,
]


async def test_no_twin_of_a_tenant_s_name_sees_anything_of_it_asked_or_cached(memory, conn):
    for n, tenant in enumerate(TWINS):
        await store(conn, tenant, str(n), f"bolo secreto {n}", metadata={"n": n})

    for _ in range(2):
        for n, tenant in enumerate(TWINS):
            for hits in (await memory.search(tenant, "bolo secreto", k=100), await memory.recent(tenant, k=100)):
                assert [hit.content for hit in hits] == [f"bolo secreto {n}"]
    assert memory.outcomes["hit"] == 2 * len(TWINS)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=4)
                | st.text("aA'%_é", min_size=1, max_size=3), min_size=2, max_size=4, unique=True))  # fmt: skip
async def test_random_tenants_never_meet(memory, conn, tenants):
    for tenant in tenants:
        await store(conn, tenant, "1", f"segredo de {tenant.encode().hex()}")

    for _ in range(2):
        for tenant in tenants:
            hits = await memory.search(tenant, "segredo", k=100)
            assert [hit.content for hit in hits] == [f"segredo de {tenant.encode().hex()}"]


# --- the cache ---


async def test_a_warm_search_asks_nobody_and_answers_as_the_first_did(dsn, memory, conn):
    await store(conn, "acme", "1", "bolo de cenoura")
    async with watched_searches(dsn) as searches:
        first = await memory.search("acme", "Bolo de CENOURA?")
        again = [
            await memory.search("acme", query) for query in ("bolo de cenoura", " bôlo  de cenoura!", "BOLO DE CENOURA")
        ]

        assert [list(hits) for hits in again] == [list(first)] * 3
        assert await searches.count() == 1


async def test_a_warm_search_takes_at_most_three_times_aiocache_s_get(memory, conn):
    for n in range(5):
        await store(conn, "acme", str(n), f"bolo {n}", metadata={"conversation_id": "c1", "role": "user"})
    theirs = SimpleMemoryCache()
    await theirs.set("key", "value")

    async def cost(call):
        """Seconds of the quickest of many rounds, so that a busy machine does not count."""
        rounds = []
        for _ in range(30):
            started = time.perf_counter()
            for _ in range(50):
                await call()
            rounds.append(time.perf_counter() - started)
        return min(rounds)

    assert len(await memory.search("acme", "bolo")) == 5
    assert await cost(lambda: memory.search("acme", "bolo")) <= 3 * await cost(lambda: theirs.get("key"))


async def test_the_cache_is_bounded_and_lets_the_least_used_go(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn, cache_capacity=2) as memory, watched_searches(dsn) as searches:
        for query in ("bolo um", "bolo dois", "bolo um", "bolo tres", "bolo um"):
            await memory.search("acme", query)
        assert await searches.count() == 3

        await memory.search("acme", "bolo dois")
        assert await searches.count() == 4


async def test_an_entry_lives_for_its_ttl(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn, cache_ttl_s=0.2) as memory, watched_searches(dsn) as searches:
        await memory.search("acme", "bolo")

        async def asked_again():
            await memory.search("acme", "bolo")
            return await searches.count() == 2

        await eventually(asked_again)


async def test_what_a_caller_does_to_its_hits_reaches_no_other_caller(dsn, memory, conn):
    await store(conn, "acme", "1", "bolo", metadata={"tags": ["a", {"b": 1}]})
    await store(conn, "acme", "2", "bolo")
    async with watched_searches(dsn) as searches:
        async with searches.held():
            asking = [asyncio.create_task(memory.search("acme", "bolo")) for _ in range(2)]
            await searches.waiting()
        for hits in [await task for task in asking] + [await memory.search("acme", "bolo")]:
            assert sorted(hit.content for hit in hits) == ["bolo", "bolo"]
            assert sorted(str(hit.metadata) for hit in hits) == ["{'tags': ['a', {'b': 1}]}", "{}"]
            for hit in hits:
                hit.metadata.setdefault("tags", [0, {}])[1]["b"] = "spoilt"
                hit.metadata["new"] = hit.content = "spoilt"
            hits.clear()
        assert await searches.count() == 1


async def test_fifty_equal_questions_at_once_cost_one_search_and_one_embedding(dsn, conn):
    await store(conn, "acme", "1", "bolo", vectors=[vector_of("bolo")], model="voyage-4")
    async with (
        voyage_stub() as stub,
        opened(dsn, voyage_api_key=stub.key, voyage_base_url=stub.url) as memory,
        watched_searches(dsn) as searches,
    ):
        answers = await asyncio.gather(*(memory.search("acme", query) for query in ["bolo", "Bolo!"] * 25))

        assert [[hit.source_id for hit in hits] for hits in answers] == [["1"]] * 50
        assert await searches.count() == 1
        assert len(stub.requests) == 1

        await asyncio.gather(*(memory.search("acme", "bolo", k=k) for k in range(1, 6)))
        assert await searches.count() == 5  # the first was for k=5
        assert len(stub.requests) == 1


async def test_a_caller_who_leaves_takes_no_answer_from_the_others(dsn, memory, conn):
    await store(conn, "acme", "1", "bolo")
    async with watched_searches(dsn) as searches:
        async with searches.held():
            first, second = (asyncio.create_task(memory.search("acme", "bolo")) for _ in range(2))
            await searches.waiting()
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        assert len(await second) == 1
        assert await searches.count() == 1


async def test_what_the_reactor_does_elsewhere_is_seen_by_a_warm_reader(dsn, memory, conn):
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'bolo um')")

    async def found():
        return {hit.content for hit in await memory.search("acme", "bolo")}

    async with running_reactor(make_settings(database_url=dsn)):
        await drained(conn)
        await eventually(lambda: holds(found, {"bolo um"}))
        await conn.execute("insert into posts (tenant_id, body) values ('acme', 'bolo dois')")
        await eventually(lambda: holds(found, {"bolo um", "bolo dois"}))
        await conn.execute("update posts set body = 'bolo novo' where id = 1")
        await eventually(lambda: holds(found, {"bolo novo", "bolo dois"}))
        await conn.execute("delete from posts where id = 2")
        await eventually(lambda: holds(found, {"bolo novo"}))
        await conn.execute("truncate posts")
        await eventually(lambda: holds(found, set()))


async def holds(found, expected):
    return await found() == expected


@pytest.mark.parametrize("is_first_read", [True, False])
async def test_an_answer_read_before_a_change_is_not_kept_after_it(dsn, memory, conn, is_first_read):
    if not is_first_read:
        await store(conn, "acme", "0", "torta")
        assert len(await memory.search("acme", "torta")) == 1
        await store(conn, "acme", "00", "torta")  # so that the cached answer is not the current one
        await eventually(lambda: has_hits(memory, "torta", 2))
    async with watched_searches(dsn) as searches:
        async with searches.held():
            asking = asyncio.create_task(memory.search("acme", "bolo"))
            await searches.waiting()
            await store(conn, "acme", "1", "bolo")
            await heard_everything(memory, conn)

        assert await asking == []
        assert len(await memory.search("acme", "bolo")) == 1


async def has_hits(memory, query, count, tenant="acme"):
    return len(await memory.search(tenant, query)) == count


async def heard_everything(memory, conn):
    """Return once the reader has heard what was sent before: a change of a tenant of its own comes after it."""
    canary = f"canary {time.monotonic_ns()}"
    assert await memory.search(canary, "bolo") == []
    await store(conn, canary, "1", "bolo")
    await eventually(lambda: has_hits(memory, "bolo", 1, tenant=canary))


@asynccontextmanager
async def deaf(server, conn):
    """Nobody listens, nor can connect, in this block."""
    database = await conn.fetchval("select current_database()")
    listener = "select pid from pg_stat_activity where datname = current_database() and application_name = 'memory-reactor reader listener'"
    server.psql(server.superuser, f"alter database {database} allow_connections false")
    assert await conn.fetchval(f"select count(pg_terminate_backend(pid)) from ({listener}) l") > 0
    await eventually(lambda: conn.fetchval(f"select not exists ({listener})"))
    yield
    server.psql(server.superuser, f"alter database {database} allow_connections true")


async def test_an_answer_read_before_the_reader_listened_is_not_kept(server, dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn) as memory, watched_searches(dsn) as searches:
        async with searches.held():
            asking = asyncio.create_task(memory.search("acme", "bolo"))
            await searches.waiting()
            async with deaf(server, conn):
                await store(conn, "acme", "2", "bolo")
            await listening(dsn)
            await heard_everything(memory, conn)
        assert len(await asking) == 1

        assert len(await memory.search("acme", "bolo")) == 2


async def test_a_reader_that_did_not_listen_for_a_while_trusts_nothing_cached_before(server, dsn, memory, conn):
    await store(conn, "acme", "1", "bolo")
    assert len(await memory.search("acme", "bolo")) == 1

    async with deaf(server, conn):
        await store(conn, "acme", "2", "bolo")
        assert len(await memory.search("acme", "bolo")) == 1  # what it knows, rather than nothing

    await eventually(lambda: has_hits(memory, "bolo", 2))


async def test_news_of_unknown_tenants_and_nonsense_on_the_channel_change_nothing(dsn, memory, conn):
    await store(conn, "acme", "1", "bolo")
    assert len(await memory.search("acme", "bolo")) == 1

    for payload in (
        "",
        ",,,",
        "x",
        "x:y",
        ":1",
        "²:²",
        "a:²",
        "a:-1",
        "é" * 1000,
        *(f"{n:064x}:{n}" for n in range(2000)),
    ):
        await conn.execute("select pg_notify('reactor_versions', $1)", payload)
    await store(conn, "acme", "2", "bolo")

    await eventually(lambda: has_hits(memory, "bolo", 2))
    assert len(memory._tenants) == 1


async def test_asking_for_tenants_without_end_takes_bounded_memory(monkeypatch, dsn):
    monkeypatch.setattr("reactor.memory._MOST_TENANTS", 50)
    async with Memory.open("postgresql://nobody@127.0.0.1:1/nowhere", settings=make_settings()) as memory:
        for n in range(500):
            assert (await memory.search(f"tenant {n}", "bolo")).degraded == "postgres"

        assert len(memory._tenants) == 50
        assert memory._flights == {}


async def test_a_tenant_forgotten_while_its_search_is_under_way_is_not_kept_at_an_old_version(monkeypatch, dsn, conn):
    monkeypatch.setattr("reactor.memory._MOST_TENANTS", 2)
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn) as memory:
        for tenant in ("one", "two"):
            await memory.search(tenant, "bolo")
        async with watched_searches(dsn) as searches:
            async with searches.held():
                asking = asyncio.create_task(memory.search("acme", "bolo"))
                await searches.waiting()
                for tenant in ("one", "two"):
                    await memory.search(tenant, "bolo")
                await store(conn, "acme", "2", "bolo")
                await heard_everything(memory, conn)
            assert len(await asking) == 1

            assert len(await memory.search("acme", "bolo")) == 2


# --- models ---


async def test_a_reader_without_the_tenant_s_model_answers_by_words_and_says_so(memory, conn):
    await store(conn, "acme", "1", "bolo de cenoura", vectors=[vector_of("bolo de cenoura")], model="voyage-4")

    for _ in range(2):
        hits = await memory.search("acme", "cenoura")
        assert ([hit.source_id for hit in hits], hits.degraded) == (["1"], "lexical")
    assert (await memory.recent("acme")).degraded is None


async def test_a_reader_with_another_target_asks_in_the_tenant_s_own_model(dsn, conn):
    await store(
        conn, "acme", "1", "pão de queijo", vectors=[vector_of("bolo")], model="voyage-4"
    )  # found by meaning only
    async with voyage_stub() as stub:
        async with opened(
            dsn, embedding_model="use-multilingual", voyage_api_key=stub.key, voyage_base_url=stub.url
        ) as memory:
            for _ in range(2):
                hits = await memory.search("acme", "bolo")
                assert ([hit.source_id for hit in hits], hits.degraded) == (["1"], None)
        assert stub.texts == ["bolo"]


async def test_a_reader_follows_a_tenant_whose_model_changes(memory, conn):
    await store(conn, "acme", "1", "bolo", vectors=[vector_of("bolo")], model="voyage-4")
    assert (await memory.search("acme", "bolo")).degraded == "lexical"

    await conn.execute("update reactor.tenants set model = 'use-multilingual'")

    assert (await memory.search("acme", "bolo")).degraded is None


# --- lifetime ---


async def test_a_memory_may_be_opened_in_one_task_and_closed_in_another(dsn):
    opening = Memory.open(dsn, settings=make_settings())
    memory = await asyncio.create_task(opening.__aenter__())

    assert (await asyncio.create_task(memory.search("acme", "bolo", k=1))).degraded in (None, "lexical")

    await asyncio.create_task(opening.__aexit__(None, None, None))


async def test_nothing_is_left_behind_and_a_closed_memory_answers_nothing(dsn, conn):
    before = asyncio.all_tasks()
    async with watched_searches(dsn) as searches, searches.held(), opened(dsn) as memory:
        asking = asyncio.create_task(memory.search("acme", "bolo"))
        await searches.waiting()
    assert (await asking).degraded == "postgres"

    assert asyncio.all_tasks() == before
    assert (await memory.search("acme", "bolo")).degraded == "postgres"
    assert (await memory.recent("acme")).degraded == "postgres"
    await eventually(
        lambda: conn.fetchval(
            "select not exists (select from pg_stat_activity where application_name like 'memory-reactor reader%' and datname = current_database())"
        )
    )


def test_the_loop_may_end_right_after(dsn):
    async def main():
        async with Memory.open(dsn, settings=make_settings()) as memory:
            await memory.search("acme", "bolo")
            memory.remember_soon("acme", "bolo")

    asyncio.run(main())
    asyncio.run(main())
