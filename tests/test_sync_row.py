"""sync_row: memories follow their rows, whatever happens between the trigger, the embedding and the write."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
import numpy as np
import pytest
from conftest import connect, drained, eventually, make_settings, running_reactor
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from voyage_stub import late, rate_limited, status, voyage_stub

from reactor.embedder import Embeddings
from reactor.jobs import Jobs
from reactor.loading import load_handlers


@pytest.fixture
async def stub():
    async with voyage_stub() as stub:
        yield stub


@pytest.fixture
def voyage(dsn, stub):
    """Settings of a reactor that embeds with the stub."""
    return make_settings(database_url=dsn, voyage_api_key=stub.key, voyage_base_url=stub.url)


async def memories(conn, tenant="acme"):
    """The tenant's memories as they are stored, hidden ones too."""
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant($1)", tenant)
        return await conn.fetch(
            "select *, embedding is not null as has_vector from reactor.memories order by source, source_id, chunk"
        )


async def contents(conn, tenant="acme"):
    return [m["content"] for m in await memories(conn, tenant)]


async def recalled(conn, tenant="acme"):
    """What a reader sees."""
    return sorted(r["content"] for r in await conn.fetch("select content from reactor.recent($1, 100)", tenant))


async def all_done(conn):
    await eventually(
        lambda: conn.fetchval(
            "select not exists (select from reactor.jobs where type = 'sync_row' and status <> 'done')"
        )
    )


async def insert(conn, *bodies, tenant="acme"):
    return [
        await conn.fetchval("insert into posts (tenant_id, body) values ($1, $2) returning id", tenant, body)
        for body in bodies
    ]


async def results(conn):
    """What became of the jobs, oldest first."""
    return [r[0] for r in await conn.fetch("select result from reactor.jobs where type = 'sync_row' order by id")]


async def nothing_is_left(conn):
    assert await conn.fetchval("select count(*) from reactor.tombstones") == 0
    assert await conn.fetchval("select count(*) from reactor.jobs where status <> 'done' and lane <> 'upkeep'") == 0


class TestWhatIsEmbedded:
    async def test_an_update_of_metadata_only_changes_it_and_embeds_nothing(self, conn, voyage, stub):
        async with running_reactor(voyage):
            await insert(conn, "bolo de cenoura")
            await drained(conn)
            await conn.execute("update posts set metadata = '{\"campanha\": \"natal\"}', format = 'reel'")
            await drained(conn)

        [memory] = await memories(conn)
        assert stub.texts == ["bolo de cenoura"]
        assert memory["metadata"] == {"campanha": "natal", "format": "reel"}
        assert memory["has_vector"]
        assert (await results(conn))[-1] == {"chunks": 1, "embedded": 0}

    async def test_a_job_for_an_unchanged_row_writes_nothing(self, conn, voyage, stub):
        async with running_reactor(voyage):
            await insert(conn, "bolo de cenoura")
            await drained(conn)
            before = await conn.fetchrow("select * from reactor.tenants")
            await conn.execute(
                "select reactor.enqueue(type, payload, tenant_id, dedupe_key) from reactor.jobs where type = 'sync_row'"
            )
            await drained(conn)

        assert (await results(conn))[-1] == {"unchanged": True}
        assert await conn.fetchrow("select * from reactor.tenants") == before
        assert len(stub.requests) == 1

    async def test_a_blank_row_is_recorded_and_never_sent(self, conn, voyage, stub):
        blank = ["", "   ", " \n\t ", "\u200b\u200b", "\u0301", None]
        async with running_reactor(voyage):
            await insert(conn, *blank, "um texto")
            await drained(conn)
            again = await conn.fetchval("select enqueued from reactor.reconcile('posts')")
            await drained(conn)

        assert stub.texts == ["um texto"]
        assert await recalled(conn) == ["um texto"]
        assert (await results(conn)).count({"blank": True}) == len(blank)
        assert again == 0
        assert await conn.fetchval("select memories from reactor.tenants") == 1

    async def test_a_row_that_becomes_blank_is_forgotten_and_one_that_is_filled_remembered(self, conn, voyage):
        async with running_reactor(voyage):
            full, _ = await insert(conn, "um texto", "  ")
            await drained(conn)
            await conn.execute("update posts set body = case id when $1 then ' ' else 'outro texto' end", full)
            await drained(conn)

        assert await recalled(conn) == ["outro texto"]
        assert await conn.fetchval("select memories from reactor.tenants") == 1

    async def test_of_a_long_text_only_the_changed_chunks_are_embedded_again(self, conn, voyage, stub):
        paragraphs = [f"Parágrafo {n}. " + f"frase {n} com algumas palavras. " * 45 for n in range(12)]
        async with running_reactor(voyage):
            await insert(conn, "\n\n".join(paragraphs))
            await drained(conn)
            first = len(stub.texts)
            paragraphs[-1] = paragraphs[-1].replace("palavras", "mudanças")
            await conn.execute("update posts set body = $1", "\n\n".join(paragraphs))
            await drained(conn)

        assert first >= 12
        assert 1 <= len(stub.texts) - first <= 2
        assert all("mudanças" in text for text in stub.texts[first:])
        assert await recalled(conn) == ["\n\n".join(paragraphs).strip()]
        assert all(m["has_vector"] for m in await memories(conn))

    async def test_a_row_of_5_mb_is_remembered_whole_and_the_reactor_lives_on(self, conn, voyage, stub):
        text = "".join(f"linha {n} de um texto muito longo\n" for n in range(150_000))[:5_000_000].strip()
        async with running_reactor(voyage):
            await conn.fetchval("select reactor.attach('posts', 'post', '{body}', embed => 'none')")
            await insert(conn, text)
            await drained(conn)

        assert await recalled(conn) == [text]
        assert len(await memories(conn)) > 3000

    async def test_no_request_has_more_than_128_texts(self, conn, voyage, stub):
        async with running_reactor(voyage):
            await conn.execute(
                "insert into posts (tenant_id, body) select 'acme', 'post ' || n from generate_series(1, 700) n"
            )
            await drained(conn)

        sizes = [len(body["input"]) for body in stub.requests]
        assert sum(sizes) == 700
        assert max(sizes) == 128

    async def test_an_embedding_of_none_is_by_words_alone_and_local_stays_on_the_machine(self, conn, voyage, stub):
        await conn.execute("select reactor.attach('posts', 'post', '{body}', embed => 'none')")
        await conn.execute("select reactor.attach('chat_messages', 'chat', '{content}', embed => 'local')")
        async with running_reactor(voyage):
            await insert(conn, "sem vetor")
            await conn.execute("insert into chat_messages (tenant_id, content) values ('acme', 'vetor daqui')")
            await drained(conn)

        assert stub.requests == []
        assert {m["content"]: (m["model"], m["has_vector"]) for m in await memories(conn)} == {
            "sem vetor": (None, False), "vetor daqui": ("use-multilingual", True),
        }  # fmt: skip
        assert await conn.fetchval("select model from reactor.tenants") is None

    async def test_the_model_a_tenant_has_wins_over_the_target(self, conn, voyage, stub):
        await conn.execute("insert into reactor.tenants (tenant_id, model) values ('old', 'use-multilingual')")
        async with running_reactor(voyage):
            await insert(conn, "do antigo", tenant="old")
            await insert(conn, "do novo", tenant="new")
            await drained(conn)

        assert stub.texts == ["do novo"]
        assert [m["model"] for m in await memories(conn, "old")] == ["use-multilingual"]
        assert [m["model"] for m in await memories(conn, "new")] == ["voyage-4"]
        assert await conn.fetchval("select model from reactor.tenants where tenant_id = 'new'") == "voyage-4"

    async def test_a_tenant_whose_model_cannot_be_had_here_waits_alone(self, conn, voyage):
        await conn.execute("insert into reactor.tenants (tenant_id, model) values ('e5', 'multilingual-e5-small')")
        async with running_reactor(voyage):
            async with conn.transaction():
                await insert(conn, "espera", tenant="e5")
                await insert(conn, "não espera", tenant="acme")
            await drained(conn)

        assert await recalled(conn, "acme") == ["não espera"]
        waiting = await conn.fetchrow("select status, attempts, last_error from reactor.jobs where tenant_id = 'e5'")
        assert (waiting["status"], waiting["attempts"]) == ("pending", 0)
        assert waiting["last_error"].startswith("snoozed: no_embedder")


class TestOddRows:
    async def test_a_time_python_cannot_hold_costs_no_memory(self, conn, voyage):
        async with running_reactor(voyage):
            for when in ["20000-01-01", "infinity", "-infinity", "0044-03-15 BC"]:
                await conn.execute(
                    "insert into posts (tenant_id, body, created_at) values ('acme', $1, $1::text::timestamptz)", when
                )
            await insert(conn, "y")
            await drained(conn)

        assert await recalled(conn) == ["-infinity", "0044-03-15 BC", "20000-01-01", "infinity", "y"]
        assert await conn.fetchval("select max(attempts) from reactor.jobs where type = 'sync_row'") == 1

    async def test_metadata_is_kept_as_postgres_holds_it(self, conn, voyage):
        kept = {
            '{"n": 1e400, "precise": 0.12345678901234567890123}': '{"n": 1e400, "precise": 0.12345678901234567890123}',
            '["a", 1]': '{"metadata": ["a", 1]}',
            '"text"': '{"metadata": "text"}',
            "null": '{"metadata": null}',
        }
        async with running_reactor(voyage):
            for metadata in kept:
                await conn.execute(
                    "insert into posts (tenant_id, body, metadata) values ('acme', 'x', $1::text::jsonb)", metadata
                )
            await drained(conn)

        async with conn.transaction():
            await conn.execute("select reactor.enter_tenant('acme')")
            for n, expected in enumerate(kept.values(), start=1):
                assert await conn.fetchval(
                    "select metadata = $2::text::jsonb from reactor.memories where source_id = $1", str(n), expected
                )

    async def test_a_payload_that_is_none_is_dead_and_an_id_that_is_none_fails_by_itself(self, conn, voyage, stub):
        async with conn.transaction():
            await insert(conn, "um", "dois", tenant="a")
            await conn.execute("select reactor.enqueue('sync_row', '{\"source\": 2, \"id\": \"seven\"}', 'b')")
            await conn.execute("select reactor.enqueue('sync_row', '{\"table\": \"posts\"}', 'a')")
            await insert(conn, "três", tenant="c")
        async with running_reactor(voyage):
            await drained(conn)

        ended = await conn.fetch(
            "select status, attempts, last_error from reactor.jobs where type = 'sync_row' and status <> 'done' order by id"
        )
        assert [(r["status"], r["attempts"]) for r in ended] == [("failed", 1), ("dead", 1)]
        assert "seven" not in ended[0]["last_error"]
        assert [await recalled(conn, t) for t in "ac"] == [["dois", "um"], ["três"]]
        assert len(stub.requests) == 1

    async def test_a_detached_or_dropped_table_owes_nothing(self, conn, voyage):
        await insert(conn, "um")
        await conn.execute("insert into chat_messages (tenant_id, content) values ('acme', 'dois')")
        await conn.execute("select reactor.detach('posts')")
        await conn.execute("drop table chat_messages")
        async with running_reactor(voyage):
            await drained(conn)

        assert await results(conn) == [{"absent": True}, {"absent": True}]


class TestRaces:
    async def test_a_row_deleted_before_its_job_runs_is_nothing_to_do(self, conn, voyage, stub):
        await insert(conn, "um")
        await conn.execute("delete from posts")
        async with running_reactor(voyage):
            await drained(conn)

        assert (await memories(conn), stub.requests) == ([], [])
        await nothing_is_left(conn)

    async def test_a_row_changed_before_its_job_runs_is_embedded_once_as_it_is_now(self, conn, voyage, stub):
        await insert(conn, "velho")
        await conn.execute("update posts set body = 'novo'")
        async with running_reactor(voyage):
            await drained(conn)

        assert stub.texts == ["novo"]
        assert await recalled(conn) == ["novo"]

    async def test_an_edit_during_the_embedding_wins(self, conn, voyage, stub):
        answer = anyio.Event()
        stub.fail_next(late(answer))
        async with running_reactor(voyage):
            await insert(conn, "velho")
            with anyio.fail_after(20):
                await stub.received(1)
            await conn.execute("update posts set body = 'novo'")
            answer.set()
            await drained(conn)

        assert await recalled(conn) == ["novo"]
        await nothing_is_left(conn)

    async def test_a_delete_during_the_embedding_is_never_recalled_and_removed(self, conn, voyage, stub):
        answer, seen = anyio.Event(), []
        stub.fail_next(late(answer))
        async with running_reactor(voyage):
            await insert(conn, "segredo")
            with anyio.fail_after(20):
                await stub.received(1)
            await conn.execute("delete from posts")
            answer.set()

            async def until_done():
                seen.extend(await recalled(conn))
                return await conn.fetchval(
                    "select not exists (select from reactor.jobs where type = 'sync_row' and status <> 'done')"
                )

            await eventually(until_done)

        assert seen == []
        assert await memories(conn) == []
        await nothing_is_left(conn)

    @pytest.mark.parametrize("drains_between", [False, True])
    async def test_a_row_deleted_and_inserted_again_with_the_same_text_is_visible_again(
        self, conn, voyage, drains_between
    ):
        async with running_reactor(voyage):
            [post] = await insert(conn, "o mesmo texto")
            await drained(conn)
            await conn.execute("delete from posts")
            if drains_between:
                await drained(conn)
            await conn.execute("insert into posts (id, tenant_id, body) values ($1, 'acme', 'o mesmo texto')", post)
            await drained(conn)

        assert await recalled(conn) == ["o mesmo texto"]
        await nothing_is_left(conn)

    async def test_a_row_inserted_again_while_its_removal_is_under_way_is_visible_again(self, conn, voyage, dsn):
        author = await connect(dsn)
        async with running_reactor(voyage):
            [post] = await insert(conn, "o mesmo texto")
            await drained(conn)
            for _ in range(15):
                await conn.execute("delete from posts")
                await author.execute(
                    "insert into posts (id, tenant_id, body) values ($1, 'acme', 'o mesmo texto')", post
                )
            await drained(conn)
        await author.close()

        assert await recalled(conn) == ["o mesmo texto"]
        await nothing_is_left(conn)

    async def test_a_truncated_table_filled_again_with_the_same_rows_is_visible_again(self, conn, voyage):
        async with running_reactor(voyage):
            await conn.execute(
                "insert into posts (id, tenant_id, body, created_at) values (1, 'acme', 'fica', '2020-01-01'), (2, 'acme', 'vai', '2020-01-01')"
            )
            await drained(conn)
            async with conn.transaction():
                await conn.execute("truncate posts")
                await conn.execute(
                    "insert into posts (id, tenant_id, body, created_at) values (1, 'acme', 'fica', '2020-01-01')"
                )
            await drained(conn)

        assert await recalled(conn) == ["fica"]
        assert await contents(conn) == ["fica"]
        assert await conn.fetchval("select memories from reactor.tenants") == 1
        await nothing_is_left_of_truncation(conn)

    async def test_a_row_of_a_truncated_table_is_visible_again_before_the_truncation_is_cleared_up(self, conn, voyage):
        async with running_reactor(voyage):
            await conn.execute(
                same
                := "insert into posts (id, tenant_id, body, created_at) values (1, 'acme', 'o mesmo texto', '2020-01-01')"
            )
            await drained(conn)
        async with conn.transaction():
            await conn.execute("truncate posts")
            await conn.execute(same)
            await conn.execute("update reactor.jobs set run_after = now() + interval '1 hour' where type = 'reconcile'")
        hidden = await recalled(conn)
        async with running_reactor(voyage):
            await drained(conn)

        assert hidden == []
        assert await recalled(conn) == ["o mesmo texto"]

    async def test_a_row_that_moves_to_another_tenant_leaves_the_first(self, conn, voyage):
        async with running_reactor(voyage):
            await insert(conn, "de quem?")
            await drained(conn)
            await conn.execute("update posts set tenant_id = 'other'")
            await drained(conn)

        assert (await contents(conn, "acme"), await contents(conn, "other")) == ([], ["de quem?"])
        assert dict(await conn.fetch("select tenant_id, memories from reactor.tenants")) == {"acme": 0, "other": 1}
        await nothing_is_left(conn)

    async def test_a_row_that_merely_cannot_be_seen_keeps_its_memory(self, conn, voyage):
        async with running_reactor(voyage):
            await insert(conn, "fica")
            await drained(conn)
            await conn.execute(
                "create policy nobody on posts as restrictive for select to reactor_worker using (false)"
            )
            await conn.execute("update posts set body = 'mudou'")
            await drained(conn)

        assert await recalled(conn) == ["fica"]
        assert (await results(conn))[-1] == {"absent": True}


async def nothing_is_left_of_truncation(conn):
    assert await conn.fetchval("select count(*) from reactor.jobs where status not in ('done', 'pending')") == 0
    assert await conn.fetchval("select count(*) from reactor.tombstones") == 0


class TestProviderTrouble:
    async def test_one_refused_text_is_a_dead_job_and_the_others_are_stored(self, conn, voyage, stub):
        stub.refuse("proibido")
        async with running_reactor(voyage):
            async with conn.transaction():
                await insert(
                    conn, *[f"texto {n}" for n in range(9)], "isto é proibido", *[f"outro {n}" for n in range(9)]
                )
            await drained(conn)

        assert len(await recalled(conn)) == 18
        [dead] = await conn.fetch("select * from reactor.jobs where status <> 'done' and type = 'sync_row'")
        assert (dead["status"], dead["attempts"], dead["last_error"]) == (
            "dead",
            1,
            "voyage_refused: Voyage refuses the text (HTTP 400)",
        )
        assert await conn.fetchval("select subject from reactor.alerts") == "sync_row voyage_refused"

    @pytest.mark.parametrize(
        "fault",
        [rate_limited("0"), rate_limited(), status(500), status(401), status(529), status(400, "no such model")],
        ids=["429 with a time", "429", "500", "401", "529", "400 for all"],
    )
    async def test_an_outage_snoozes_spends_no_attempt_and_is_recovered_from(self, conn, voyage, stub, fault):
        stub.always(fault)
        async with running_reactor(voyage):
            await insert(conn, "um")
            await eventually(
                lambda: conn.fetchval(
                    "select last_error like 'snoozed: voyage_%' from reactor.jobs where type = 'sync_row'"
                )
            )
            stub.always(None)
            await all_done(conn)

        assert await recalled(conn) == ["um"]
        assert await conn.fetchval("select attempts from reactor.jobs where type = 'sync_row'") == 1

    async def test_an_outage_of_the_provider_leaves_the_local_model_at_work(self, conn, voyage, stub):
        stub.always(status(500))
        await conn.execute("insert into reactor.tenants (tenant_id, model) values ('local', 'use-multilingual')")
        async with conn.transaction():
            await insert(conn, "espera")
            await insert(conn, "não espera", tenant="local")
        async with running_reactor(voyage):
            await eventually(
                lambda: conn.fetchval(
                    "select last_error is not null from reactor.jobs where tenant_id = 'acme' and type = 'sync_row'"
                )
            )
            await eventually(lambda: _is(recalled(conn, "local"), ["não espera"]))
            assert await recalled(conn) == []


class TestTenants:
    @asynccontextmanager
    async def watched(self, conn):
        """Records as whom, and in whose scope, every memory and tombstone is written or removed."""
        await conn.execute(
            "create table public.witness (who name, scope text, tenant text); grant insert on public.witness to public; "
            "create function public.witness() returns trigger language plpgsql as $$ begin insert into public.witness "
            "values (current_user, reactor.scope(), coalesce(new.tenant_id, old.tenant_id)); return null; end $$; "
            "create trigger witness after insert or update or delete on reactor.memories for each row execute function public.witness();"
            "create trigger witness after insert or update or delete on reactor.tenants for each row execute function public.witness();"
            "create trigger witness after delete on reactor.tombstones for each row execute function public.witness();"
        )
        yield
        self.seen = await conn.fetch("select * from public.witness")

    async def test_one_batch_of_many_tenants_and_sources_is_written_each_under_its_own_scope_as_the_worker(
        self, conn, voyage, stub
    ):
        tenants = ["a", "b", "a b", "a'; drop table posts; --", "%", "_", "á" * 200]
        async with self.watched(conn):
            async with conn.transaction():
                for n, tenant in enumerate(tenants):
                    await insert(conn, f"post de {n}", tenant=tenant)
                    await conn.execute(
                        "insert into chat_messages (tenant_id, content) values ($1, $2)", tenant, f"conversa de {n}"
                    )
            async with running_reactor(voyage):
                await drained(conn)
                await conn.execute("delete from posts where tenant_id = 'a'")
                await drained(conn)

        assert len(stub.requests) == 1
        assert len(stub.texts) == 14
        assert {r["who"] for r in self.seen} == {"reactor_worker"}
        assert all(r["scope"] == r["tenant"] for r in self.seen)
        for n, tenant in enumerate(tenants):
            assert await recalled(conn, tenant) == (
                [f"conversa de {n}"] if tenant == "a" else [f"conversa de {n}", f"post de {n}"]
            )


async def _is(awaitable, expected):
    return await awaitable == expected


OPERATION = st.tuples(
    st.sampled_from(["insert", "insert", "update", "delete", "move", "rekey", "blank", "metadata", "upsert"]),
    st.integers(1, 4),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["um", "dois", "três", "quatro " * 500]),
)
STATEMENTS = {
    "insert": "insert into posts (id, tenant_id, body) values ($1, $2, $3) on conflict (id) do nothing",
    "upsert": "insert into posts (id, tenant_id, body) values ($1, $2, $3) on conflict (id) do update set body = excluded.body",
    "update": "update posts set body = $3 where id = $1 and $2::text is not null",
    "blank": "update posts set body = ' ' where id = $1 and $2 || $3 is not null",
    "delete": "delete from posts where id = $1 and $2 || $3 is not null",
    "move": "update posts set tenant_id = $2 where id = $1 and $3::text is not null",
    "rekey": "update posts set id = id + 4, body = $3 where id = $1 and $2::text is not null and not exists (select from posts p where p.id = $1 + 4)",
    "metadata": "update posts set metadata = jsonb_build_object('m', $3::text) where id = $1 and $2::text is not null",
}


async def test_after_any_sequence_of_changes_the_memories_are_the_table_and_the_counts_are_right(conn, voyage):
    @given(rounds=st.lists(st.lists(OPERATION, min_size=1, max_size=8), min_size=1, max_size=4))
    @hypothesis_settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(rounds):
        anyio.from_thread.run(play, rounds)

    async def play(rounds):
        for operations in rounds:  # the reactor is at work all along
            for name, post, tenant, text in operations:
                await conn.execute(STATEMENTS[name], post, tenant, text)
            await anyio.lowlevel.checkpoint()
        await drained(conn)
        rows = await conn.fetch("select tenant_id, id::text as source_id, btrim(body) as body, metadata from posts")
        for tenant in ("a", "b"):
            wanted = {r["source_id"]: r for r in rows if r["tenant_id"] == tenant}
            stored = await memories(conn, tenant)
            assert {m["source_id"] for m in stored} == set(wanted)
            assert Counter(await recalled(conn, tenant)) == Counter(r["body"] for r in wanted.values() if r["body"])
            assert all(m["metadata"] == wanted[m["source_id"]]["metadata"] for m in stored)
            counted = await conn.fetchval("select memories from reactor.tenants where tenant_id = $1", tenant)
            assert (counted or 0) == sum(m["content"] != "" for m in stored)
        await nothing_is_left(conn)
        await conn.execute("delete from posts")
        await drained(conn)
        assert await memories(conn, "a") + await memories(conn, "b") == []
        await nothing_is_left(conn)

    async with running_reactor(voyage):
        await anyio.to_thread.run_sync(check)


async def test_a_book_in_the_batch_is_embedded_after_its_neighbours_are_remembered(conn, pool):
    book = " ".join(f"frase {n}." for n in range(40_000))
    await conn.execute(
        "insert into posts (tenant_id, body) values ('acme', $1), ('acme', 'bolo'), ('other', 'bolo')", book
    )
    jobs = await Jobs(pool, worker="test", lease=timedelta(seconds=60)).claim({"sync_row": 10})
    calls = []

    class Watched:
        model = "use-multilingual"

        async def embed_documents(self, texts):
            calls.append((len(texts), await conn.fetchval("select sum(memories) from reactor.tenants")))
            vector = np.ones(1024, dtype=np.float32) / 32
            return Embeddings([vector] * len(texts), {}, 0)

    class One:
        def of_model(self, _model):
            return Watched()

    await load_handlers(None)["sync_row"].function(jobs, pool=pool, embedders=One())

    assert calls[0] == (1, None)  # two rows, one text
    assert calls[1][1] == 2
    assert calls[1][0] > 64
