"""While Postgres or the provider is away, slow or broken, a reader answers what it can within its deadline, says so, and comes back by itself."""

from __future__ import annotations

import asyncio
import random
import subprocess
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from conftest import eventually, make_settings
from recalling import connected, proxy, store, watched_searches
from servers import own_cluster, pgbouncer
from voyage_stub import cut, html, late, rate_limited, status, vector_of, voyage_stub

from reactor import Memory, Unavailable, db

OPEN: list[str] = []  # readers inside readers
AT_THE_GATE = "select pid from pg_locks where locktype = 'advisory' and objid = 42 and not granted"
UNREACHABLE = "postgresql://nobody@127.0.0.1:1/nowhere"


@asynccontextmanager
async def opened(dsn, **settings):
    """A reader with a short deadline; nothing of it may be left behind."""
    OPEN.append(dsn)
    async with Memory.open(dsn, settings=make_settings(**{"search_deadline_s": 0.4, **settings})) as memory:
        yield memory
    OPEN.remove(dsn)
    await anyio.sleep(0)
    left = [
        repr(task)
        for task in asyncio.all_tasks()
        if any(part in repr(task) for part in ("/reactor/", "reactor.memory", "asyncpg"))
    ]
    assert OPEN or left == []


@pytest.fixture
async def proxied(dsn, conn):
    """A proxy before this test's database, where acme has remembered a cake."""
    await store(conn, "acme", "1", "bolo de cenoura")
    async with proxy(dsn) as front:
        front.database = (
            dsn.rpartition("/")[0].rpartition("/")[2]
            if "?host=/" not in dsn
            else dsn.partition("?")[0].rpartition("/")[2]
        )
        front.address_of_database = front.dsn(front.database)
        yield front


async def finds(memory, query="bolo", count=1):
    """Whether a search that is not degraded (or by words alone) finds so many."""
    hits = await memory.search("acme", query)
    return hits.degraded in (None, "lexical") and len(hits) == count


async def assert_away(memory, *, at_first=("postgres", "deadline")):
    """Empty, and says why; then at once, without one more look at Postgres by any search."""
    with anyio.fail_after(30):
        hits = await memory.search("acme", "bolo")
    assert (list(hits), hits.degraded in at_first) == ([], True), hits.degraded
    await eventually(lambda: says_postgres(memory))


async def says_postgres(memory):
    return (await memory.search("acme", "bolo")).degraded == "postgres" and (
        await memory.recent("acme")
    ).degraded == "postgres"


@pytest.mark.parametrize(
    "dsn",
    [
        UNREACHABLE,
        "postgresql://nobody@no-such-host.invalid/nowhere",
        "postgresql:///nowhere?host=/nowhere",
        "postgresql://u:p@[::1]:1/x?sslmode=require",
    ],
)
async def test_an_address_where_nobody_is_opens_answers_nothing_and_closes(dsn):
    async with opened(dsn) as memory:
        await assert_away(memory)
        with pytest.raises(Unavailable):
            await memory.remember("acme", "bolo")


@pytest.mark.parametrize(
    "sqlstate",
    ["57P03", "57P01", "53300", "28P01", "28000", "3D000", "08P01"],
    ids=[
        "starting up",
        "shutting down",
        "too many connections",
        "wrong password",
        "not allowed",
        "no such database",
        "pooler without server",
    ],
)
async def test_a_server_that_refuses_is_away_until_it_accepts(proxied, sqlstate):
    proxied.refuse_with = sqlstate
    async with opened(proxied.address_of_database) as memory:
        await assert_away(memory, at_first=("postgres",))
        accepted = proxied.accepted
        for _ in range(500):
            assert (await memory.search("acme", "bolo")).degraded == "postgres"
        assert proxied.accepted - accepted < 20  # those who ask for it in the background
        with pytest.raises(Unavailable):
            await memory.remember("acme", "bolo")

        proxied.refuse_with = None

        await eventually(lambda: finds(memory))
        assert await memory.remember("acme", "bolo") > 0


async def test_a_server_that_never_answers_is_away_until_it_does(proxied):
    proxied.takes = False
    async with opened(proxied.address_of_database) as memory:
        await assert_away(memory)

        proxied.takes = True

        await eventually(lambda: finds(memory))


async def test_connections_that_fall_silent_are_given_up_and_made_anew(proxied):
    async with opened(proxied.address_of_database) as memory:
        await asyncio.gather(*(memory.search("acme", f"bolo {n}") for n in range(8)))  # a pool of many
        await eventually(lambda: finds(memory))

        proxied.go_silent()
        hits = await memory.search("acme", "cenoura")
        assert (list(hits), hits.degraded) == ([], "deadline")
        await eventually(lambda: says_away(memory, "cenoura"))
        assert [hit.content for hit in await memory.search("acme", "bolo")] == [
            "bolo de cenoura"
        ]  # known, and no worse for it
        proxied.takes = True

        await eventually(lambda: finds(memory, "cenoura"))


async def says_away(memory, query):
    return (await memory.search("acme", query)).degraded == "postgres"


async def test_connections_that_break_cost_a_moment_only(proxied):
    async with opened(proxied.address_of_database) as memory:
        await eventually(lambda: finds(memory))
        for _ in range(3):
            proxied.break_off()
            await eventually(lambda: finds(memory, "cenoura de bolo"))


async def test_a_connection_cut_in_mid_search_is_no_exception(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn, search_deadline_s=30) as memory, watched_searches(dsn) as searches:
        async with searches.held():
            asking = [asyncio.create_task(memory.search("acme", query)) for query in ("bolo", "outro")]
            await searches.waiting(2)
            await conn.execute(f"select pg_terminate_backend(pid) from ({AT_THE_GATE}) g")
            answers = [await task for task in asking]

        assert [(list(hits), hits.degraded) for hits in answers] == [([], "postgres")] * 2
        await eventually(lambda: finds(memory))


async def test_a_far_server_is_reached_though_connecting_takes_longer_than_any_search_may(proxied):
    proxied.delay_s = 0.04
    async with opened(proxied.address_of_database, search_deadline_s=0.25) as memory:
        await eventually(lambda: finds(memory))


async def test_a_slow_search_keeps_nobody_else_waiting(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    await store(conn, "other", "1", "bolo")
    async with opened(dsn) as memory, watched_searches(dsn) as searches:
        async with searches.held():
            hits = await memory.search("acme", "bolo")
            assert (list(hits), hits.degraded) == ([], "deadline")
            await eventually(lambda: other_finds(memory))
            await eventually(
                lambda: conn.fetchval(f"select not exists ({AT_THE_GATE})")
            )  # it does not go on for nobody
        await eventually(lambda: finds(memory))


async def other_finds(memory):
    return len(await memory.search("other", "bolo")) == 1


async def test_a_pool_without_a_free_connection_is_not_waited_for(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn, pool_size=2) as memory:
        await eventually(lambda: finds(memory))
        async with conn.transaction():
            await conn.execute("lock table reactor.notes")
            writing = [asyncio.create_task(memory.remember("acme", "nota")) for _ in range(2)]
            await eventually(
                lambda: conn.fetchval(
                    "select count(*) = 2 from pg_locks where relation = 'reactor.notes'::regclass and not granted"
                )
            )
            hits = await memory.search("acme", "cenoura")
            assert (list(hits), hits.degraded) == ([], "deadline")
            await eventually(lambda: says_away(memory, "cenoura"))

        assert len([await note for note in writing]) == 2
        await eventually(lambda: finds(memory, "bolo de novo"))


async def test_a_statement_timeout_of_the_role_s_is_a_deadline_and_no_outage(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    await store(conn, "other", "1", "bolo")
    await conn.execute(
        "do $$ begin execute format('alter database %I set statement_timeout = ''50ms''', current_database()); end $$"
    )
    async with opened(dsn, search_deadline_s=10) as memory, watched_searches(dsn) as searches:
        async with searches.held():
            hits = await memory.search("acme", "bolo")
            assert (list(hits), hits.degraded) == ([], "deadline")
            assert len(await memory.search("other", "bolo")) == 1
        assert await finds(memory)


async def test_callers_who_leave_at_any_moment_cost_no_connection(dsn, conn):
    await store(conn, "acme", "1", "bolo")
    async with opened(dsn, pool_size=2, search_deadline_s=5) as memory:
        for n in range(150):
            task = asyncio.create_task(memory.search("acme", f"bolo {n % 7}", k=n % 5))
            writing = asyncio.create_task(memory.remember("acme", f"nota {n}"))
            for _ in range(random.randrange(40)):
                await anyio.sleep(0)
            for leaving in (task, writing):
                leaving.cancel()
                with suppress(asyncio.CancelledError, Unavailable):
                    await leaving

        await eventually(lambda: finds(memory))
        assert await memory.remember("acme", "nota") > 0


# --- a server of this file's own, to stop and freeze ---


@pytest.fixture(scope="module")
def cluster(server):
    with own_cluster(server.programs) as cluster:
        anyio.run(lambda: db.migrate(cluster.dsn, with_tables=True))
        yield cluster


@pytest.fixture
async def kept(cluster):
    """The cluster, running, where acme has remembered a cake."""
    conn = await connected(cluster.dsn)
    await store(conn, "acme", "1", "bolo de cenoura")
    await conn.close()
    return cluster


async def test_a_server_stopped_and_started_is_away_and_back_without_opening_again(kept):
    async with opened(kept.dsn) as memory:
        await eventually(lambda: finds(memory))
        warm = list(await memory.search("acme", "bolo"))
        await anyio.to_thread.run_sync(kept.stop)
        try:
            hits = await memory.search("acme", "cenoura")
            assert (list(hits), hits.degraded) == ([], "postgres")
            assert (await memory.recent("acme")).degraded == "postgres"
            assert list(await memory.search("acme", "bolo")) in (warm, [])
            with pytest.raises(Unavailable):
                await memory.remember("acme", "bolo")
        finally:
            await anyio.to_thread.run_sync(kept.start)

        await eventually(lambda: finds(memory, "cenoura"))
        conn = await connected(kept.dsn)
        await store(conn, "acme", "2", "cenoura")
        await eventually(lambda: finds(memory, "cenoura", 2))
        async with conn.transaction():
            await conn.execute("select reactor.enter_tenant('acme')")
            await conn.execute("delete from reactor.memories where source_id = '2'")
        await conn.close()


async def test_a_server_down_at_open_is_found_once_it_is_up(kept):
    await anyio.to_thread.run_sync(kept.stop)
    try:
        async with opened(kept.dsn) as memory:
            await assert_away(memory, at_first=("postgres",))
            await anyio.to_thread.run_sync(kept.start)
            await eventually(lambda: finds(memory))
    finally:
        with suppress(subprocess.CalledProcessError):
            await anyio.to_thread.run_sync(kept.start)


async def test_a_frozen_server_costs_one_deadline_and_closing_beside_it_does_not_hang(kept):
    async with opened(kept.dsn) as memory, opened(kept.dsn) as closed_while_frozen:
        for reader in (memory, closed_while_frozen):
            await eventually(lambda reader=reader: finds(reader))
        with kept.frozen():
            hits = await memory.search("acme", "cenoura")
            assert (list(hits), hits.degraded) == ([], "deadline")
            await eventually(lambda: says_away(memory, "cenoura"))
            async with opened(kept.dsn) as third:
                await assert_away(third)
            assert (await closed_while_frozen.search("acme", "cenoura")).degraded == "deadline"

        await eventually(lambda: finds(memory, "cenoura"))


async def test_a_write_to_a_frozen_server_fails_in_time(kept, monkeypatch):
    monkeypatch.setattr("reactor.notes._TIMEOUT_S", 0.3)
    async with opened(kept.dsn) as memory:
        assert await memory.remember("acme", "antes") > 0
        with kept.frozen(), anyio.fail_after(30), pytest.raises(Unavailable):
            await memory.remember("acme", "nota")


# --- the provider ---

FAULTS = {
    "down": status(503), "refuses the key": status(401), "refuses the text": status(400), "rate limited": rate_limited("0"),
    "html": html(), "cut": cut(),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_without_the_provider_a_question_is_answered_by_its_words_and_the_next_one_in_full(dsn, conn, fault):
    await store(conn, "acme", "words", "bolo de cenoura", vectors=[vector_of("nada disso")], model="voyage-4")
    await store(conn, "acme", "meaning", "pão de queijo", vectors=[vector_of("bolo")], model="voyage-4")
    async with (
        voyage_stub() as stub,
        opened(dsn, voyage_api_key=stub.key, voyage_base_url=stub.url, search_deadline_s=20) as memory,
    ):
        await memory.warm()
        stub.always(fault)
        for _ in range(2):
            hits = await memory.search("acme", "bolo")
            assert ([hit.source_id for hit in hits], hits.degraded) == (["words"], "lexical")

        stub.always(None)

        await eventually(lambda: finds_in_full(memory))


async def finds_in_full(memory):
    hits = await memory.search("acme", "bolo")
    return hits.degraded is None and {hit.source_id for hit in hits} == {"words", "meaning"}


async def test_a_slow_provider_is_not_waited_for_and_what_it_says_late_serves_the_next_question(dsn, conn):
    await store(conn, "acme", "words", "bolo de cenoura", vectors=[vector_of("nada disso")], model="voyage-4")
    await store(conn, "acme", "meaning", "pão de queijo", vectors=[vector_of("bolo")], model="voyage-4")
    async with (
        voyage_stub() as stub,
        opened(dsn, voyage_api_key=stub.key, voyage_base_url=stub.url, search_deadline_s=2) as memory,
    ):
        await memory.warm()
        await memory.recent("acme")  # connected
        answer = anyio.Event()
        stub.fail_next(late(answer))
        hits = await memory.search("acme", "bolo")
        assert ([hit.source_id for hit in hits], hits.degraded) == (["words"], "lexical")

        answer.set()

        await eventually(lambda: finds_in_full(memory))
        assert len(stub.requests) == 1


# --- a transaction pooler ---


@pytest.fixture
async def pooler(server, dsn):
    async with pgbouncer(server, dsn) as pooled:
        yield pooled


@pytest.mark.needs("pgbouncer")
async def test_behind_a_transaction_pooler_many_readers_search_and_write_without_a_clash(pooler, conn):
    for n in range(4):
        await store(conn, f"tenant {n}", "1", f"bolo {n}")
    async with opened(pooler, search_deadline_s=30) as first, opened(pooler, search_deadline_s=30) as second:

        async def use(memory, n):
            tenant = f"tenant {n % 4}"
            hits = await memory.search(tenant, f"bolo de número {n}")
            assert ([hit.content for hit in hits], hits.degraded) == ([f"bolo {n % 4}"], None)
            assert await memory.remember(tenant, "nota") > 0
            assert [hit.content for hit in await memory.recent(tenant, k=n + 1)] == [f"bolo {n % 4}"]

        await first.warm()
        await asyncio.gather(*(use(memory, n) for n in range(30) for memory in (first, second)))

    assert await conn.fetchval("select count(*) from reactor.jobs where type = 'sync_row'") == 60
