"""search, search_by_embedding and recent from SQL: any arguments, one tenant, nothing that was deleted."""

from __future__ import annotations

from datetime import timedelta

import asyncpg
import numpy as np
import pytest
from conftest import connect
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from recalling import LOCAL, NOON, scoped, store, store_one_of_each_kind

SEARCH = "select * from reactor.search($1, $2)"


def direction(*numbers: float) -> np.ndarray:
    vector = np.zeros(1024, dtype=np.float32)
    vector[: len(numbers)] = numbers
    return vector / np.linalg.norm(vector)


async def test_k_is_clamped_to_1_to_100(conn):
    for n in range(103):
        await store(conn, "acme", str(n), f"bolo de cenoura {n}", vectors=[direction(1, n)])

    for k, count in [(0, 1), (-1, 1), (3, 3), (None, 5), (100, 100), (1_000_000, 100), (2_147_483_647, 100)]:
        searched = await conn.fetch("select * from reactor.search('acme', 'bolo', $1)", k)
        near = await conn.fetch("select * from reactor.search_by_embedding('acme', '{1}', $2, $1)", k, LOCAL)
        recent = await conn.fetch("select * from reactor.recent('acme', $1)", k)

        assert (len(searched), len(near), len(recent)) == (count, count, 10 if k is None else count), k


QUERIES = [
    "", " \n\t", "?!... ---", "o a de que e para", "🔥🔥👨‍👩‍👧", None, "&", "|", "!", "<->", "a & | !", ":*", "bol:*", "'", "''", "\\", "bo'lo\\", "%", "_", "%%",
    "/etc/'x\\y", "http://a.b/c'd?e=\\f", "(((", "bolo:A | x", "\u200b", "\u202e", "x" * 100_000, "palavra " * 20_000, "\ufffd", "é\u0301" * 50,
]  # fmt: skip


async def test_no_query_is_a_pattern_or_an_error(conn):
    await store(conn, "acme", "1", "Torta de limão")

    for query in QUERIES:
        assert await conn.fetch(SEARCH, "acme", query) == [], query


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)
    | st.text(st.sampled_from("ab'\\&|!<->:*()\"%_/@.#é "), max_size=40)
)
async def test_any_text_at_all_is_a_question_and_finds_itself(conn, text):
    await store(conn, "acme", "1", text + " confeitaria")

    hits = await conn.fetch(SEARCH, "acme", text + " confeitaria")

    assert [hit["source_id"] for hit in hits] == ["1"]


async def test_accents_and_case_do_not_matter_in_either_direction(conn):
    await store(conn, "acme", "1", "PROMOÇÃO de Natal")
    await store(conn, "acme", "2", "promocao de verao")

    assert {hit["source_id"] for hit in await conn.fetch(SEARCH, "acme", "promocao")} == {"1", "2"}
    assert {hit["source_id"] for hit in await conn.fetch(SEARCH, "acme", "Promoc\u0327a\u0303o")} == {"1", "2"}


async def test_the_filters_are_exact(conn):
    await store_one_of_each_kind(conn)

    async def found(arguments, *values):
        hits = await conn.fetch(f"select source_id from reactor.search('acme', 'bolo', {arguments})", *values)
        return {hit["source_id"] for hit in hits}

    assert await found("kinds => '{post,note}'") == {"0", "2"}
    assert await found("kinds => '{}'") == set()
    assert await found("kinds => '{po%,_ost,POST}'") == set()
    assert await found("since => $1", NOON + timedelta(days=1)) == {"1", "2"}
    assert await found("until => $1", NOON + timedelta(days=1)) == {"0"}
    assert await found("since => $1, until => $1", NOON) == set()
    assert await found("metadata => $1", {"tags": ["chat"]}) == {"1"}
    assert await found("metadata => $1", {"n": "1"}) == set()
    assert await found("metadata => $1", {}) == {"0", "1", "2"}
    assert await found("metadata => $1", []) == set()
    recent = await conn.fetch(
        "select source_id from reactor.recent('acme', kinds => '{post,chat}', metadata => $1)", {"tags": ["a"]}
    )
    assert [hit["source_id"] for hit in recent] == ["1", "0"]


async def test_a_row_is_one_hit_with_its_best_chunk_and_a_long_one_does_not_crowd_out_others(conn):
    long = "".join(f"Parágrafo {n} sobre bolo de cenoura e mais bolo. " * 40 for n in range(100))
    await store(conn, "acme", "long", long + " brigadeiro")
    await store(conn, "acme", "short", "Um bolo qualquer, de nada em especial, só para dizer que existe.")
    await store(conn, "acme", "other", "Nada a ver.")

    hits = await conn.fetch(SEARCH, "acme", "bolo")
    best = await conn.fetch(SEARCH, "acme", "brigadeiro")

    assert [hit["source_id"] for hit in hits] == ["long", "short"]
    assert [hit["content"].endswith(" brigadeiro") for hit in best] == [True]
    assert len(best[0]["content"]) <= 1500


async def test_words_and_meaning_vote_for_the_row_whichever_of_its_chunks_they_like(conn):
    text = "Receita de bolo. " * 88 + "Horário de entrega. " * 70
    await store(conn, "acme", "both", text, vectors=[direction(0, 1), direction(1, 0)])
    await store(conn, "acme", "words", "bolo bolo bolo bolo", vectors=[direction(0, 0, 1)])
    await store(conn, "acme", "meaning", "outra coisa", vectors=[direction(1, 0.05)])

    async with scoped(conn, "acme"):
        hits = await conn.fetch(
            "select * from reactor.find_memories('acme', 'bolo', (select embedding from reactor.memories where content = 'outra coisa'), $1, 5)",
            LOCAL,
        )

    assert hits[0]["source_id"] == "both"
    assert all(0 < hit["score"] <= 1 for hit in hits)


async def test_recent_gives_each_row_s_whole_text_exactly_newest_first(conn):
    long = "".join(f"Frase número {n}, com acentuação e 😀.\r\n\r\n" for n in range(300))
    await store(conn, "acme", "old", "  primeira \n", occurred_at=NOON)
    await store(conn, "acme", "long", long, occurred_at=NOON + timedelta(days=1))
    await store(conn, "acme", "blank", "", occurred_at=NOON + timedelta(days=2))

    hits = await conn.fetch("select * from reactor.recent('acme')")

    assert [(hit["source_id"], hit["content"], hit["score"]) for hit in hits] == [
        ("long", long, 1),
        ("old", "  primeira \n", 1),
    ]


async def test_scores_are_sorted_and_within_0_and_1(conn):
    for n in range(20):
        await store(conn, "acme", str(n), "bolo " * (n + 1), vectors=[direction(n - 10, 5)])

    for hits in (
        await conn.fetch("select * from reactor.search('acme', 'bolo', 20)"),
        await conn.fetch("select * from reactor.search_by_embedding('acme', '{1,0}', $1, 20)", LOCAL),
    ):
        scores = [hit["score"] for hit in hits]
        assert len(scores) == 20
        assert scores == sorted(scores, reverse=True)
        assert all(0 <= score <= 1 for score in scores)
        assert scores[0] > 0.85


async def test_search_by_embedding_pads_compares_by_cosine_and_never_mixes_models(conn):
    await store(conn, "acme", "near", "a", vectors=[direction(1, 0.1)])
    await store(conn, "acme", "far", "b", vectors=[direction(0, 1)])
    await store(conn, "acme", "other model", "c", vectors=[direction(1, 0)], model="voyage-4")
    await store(conn, "acme", "none", "d")

    hits = await conn.fetch("select * from reactor.search_by_embedding('acme', '{3,0}', $1)", LOCAL)

    assert [hit["source_id"] for hit in hits] == ["near", "far"]
    assert hits[0]["score"] == pytest.approx(0.995, abs=0.01)
    assert hits[1]["score"] == pytest.approx(0, abs=0.01)
    assert await conn.fetch("select * from reactor.search_by_embedding('acme', '{1}', 'no such model')") == []
    for without_direction in ([0.0, 0.0], []):
        assert (
            await conn.fetch("select * from reactor.search_by_embedding('acme', $1, $2)", without_direction, LOCAL)
            == []
        )


async def test_an_embedding_that_is_none_and_a_tenant_that_is_none_are_errors(conn):
    for embedding in ([float("nan")], [float("inf")], [1.0] * 1025, [1e6], [None], None):
        with pytest.raises(asyncpg.DataError):
            await conn.fetch("select * from reactor.search_by_embedding('acme', $1, $2)", embedding, LOCAL)
    for tenant in (None, ""):
        for call in ("search($1, 'bolo')", "search_by_embedding($1, '{1}', 'm')", "recent($1)"):
            with pytest.raises(asyncpg.InvalidParameterValueError):
                await conn.fetch(f"select * from reactor.{call}", tenant)


# --- what was deleted ---


async def shown(conn):
    searched = await conn.fetch(SEARCH, "acme", "bolo")
    recent = await conn.fetch("select * from reactor.recent('acme')")
    near = await conn.fetch("select * from reactor.search_by_embedding('acme', '{1}', $1)", LOCAL)
    assert (
        {hit["source_id"] for hit in searched}
        == {hit["source_id"] for hit in recent}
        == {hit["source_id"] for hit in near}
    )
    return {hit["content"] for hit in searched}


@pytest.fixture
async def posts(conn):
    """Posts 1 and 2, remembered."""
    for _ in range(2):
        post, owed = await conn.fetchrow(
            "insert into posts (tenant_id, body) values ('acme', 'bolo') returning id, (select coalesce(max(id), 0) from reactor.jobs)"
        )
        await store(conn, "acme", str(post), f"bolo {post}", vectors=[direction(1, post)], version=owed + 1)
    await conn.execute("delete from reactor.jobs")


async def test_a_deleted_row_is_hidden_from_the_commit_on_without_a_reactor(conn, posts):
    await conn.execute("delete from posts where id = 1")

    assert await shown(conn) == {"bolo 2"}


async def test_a_truncated_table_is_hidden_from_the_commit_on(conn, posts):
    await conn.execute("truncate posts")

    assert await shown(conn) == set()


async def test_a_row_put_back_shows_nothing_until_it_is_read_anew(conn, posts):
    await conn.execute("delete from posts where id = 1")
    await conn.execute("insert into posts (id, tenant_id, body) values (1, 'acme', 'bolo novo')")

    assert await shown(conn) == {"bolo 2"}

    job = await conn.fetchval("select max(id) from reactor.jobs")
    await store(conn, "acme", "1", "bolo novo", vectors=[direction(1, 1)], version=job)

    assert await shown(conn) == {"bolo 2", "bolo novo"}


async def test_a_rolled_back_delete_hides_nothing_and_an_edit_may_show_the_old_text(conn, posts):
    with pytest.raises(ZeroDivisionError):
        async with conn.transaction():
            await conn.execute("delete from posts where id = 1")
            raise ZeroDivisionError
    await conn.execute("update posts set body = 'torta' where id = 2")

    assert await shown(conn) == {"bolo 1", "bolo 2"}


async def test_a_row_that_changes_its_tenant_leaves_the_first_at_once(conn, posts):
    await conn.execute("update posts set tenant_id = 'other' where id = 1")

    assert await shown(conn) == {"bolo 2"}


async def test_one_tenant_s_deletion_hides_nothing_of_another(conn, posts):
    await store(conn, "other", "1", "bolo 1")

    await conn.execute("delete from posts")

    assert [hit["content"] for hit in await conn.fetch(SEARCH, "other", "bolo")] == ["bolo 1"]


# --- tenants ---

TWINS = ["acme", "acme2", "acm", "Acme", "ACME", "acmé", "acme\u0301", "acme ", " acme", "ａｃｍｅ", "аcme", "acme'", "acme''", 'ac"me', "acme%", "acm_", "%", "_",
         "*", "a,b", "a:b", "acme\\", "acme\n", "acme'--", "🔥", "x" * 200, "x" * 199, "{acme}", "acme/post", "null", "NULL", "ß", "ss"]  # fmt: skip


async def test_no_twin_of_a_tenant_s_name_sees_anything_of_it(conn):
    for n, tenant in enumerate(TWINS):
        await store(conn, tenant, str(n), f"bolo secreto {n}", vectors=[direction(1, n)])

    for n, tenant in enumerate(TWINS):
        for call in (
            "search($1, 'bolo secreto', 100)",
            "recent($1, 100)",
            f"search_by_embedding($1, '{{1}}', '{LOCAL}', 100)",
        ):
            hits = await conn.fetch(f"select * from reactor.{call}", tenant)
            assert [hit["content"] for hit in hits] == [f"bolo secreto {n}"], (tenant, call)


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=5)
                | st.text("aA'%_é", min_size=1, max_size=3), min_size=2, max_size=4, unique=True))  # fmt: skip
async def test_random_tenants_never_meet(conn, tenants):
    for tenant in tenants:
        await store(conn, tenant, "1", f"segredo de {tenant.encode().hex()}")

    for tenant in tenants:
        hits = await conn.fetch("select * from reactor.search($1, 'segredo', 100)", tenant)
        assert [hit["content"] for hit in hits] == [f"segredo de {tenant.encode().hex()}"]


async def test_a_transaction_scoped_to_one_tenant_cannot_ask_for_another(conn):
    await store(conn, "other", "1", "bolo")

    for call in ("search('other', 'bolo')", "search_by_embedding('other', '{1}', 'm')", "recent('other')"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with scoped(conn, "acme"):
                await conn.fetch(f"select * from reactor.{call}")
    async with scoped(conn, "acme"):
        assert await conn.fetch("select * from reactor.memories") == []
        assert await conn.fetch(SEARCH, "acme", "bolo") == []


async def test_a_call_leaves_the_session_as_it_was(conn):
    await store(conn, "acme", "1", "bolo")
    await store(conn, "other", "1", "bolo")

    async with conn.transaction():
        before = await conn.fetchrow("select current_user, reactor.scope()")
        for tenant in ("acme", "other"):
            assert len(await conn.fetch(SEARCH, tenant, "bolo")) == 1
            assert len(await conn.fetch("select * from reactor.recent($1)", tenant)) == 1
            await conn.fetch("select reactor.write_notes($1, '{note}', '{x}', array['{}'::jsonb])", tenant)
        assert await conn.fetchrow("select current_user, reactor.scope()") == before

    assert (
        len(await conn.fetch("select h.* from (values ('acme'), ('other')) t (id), reactor.search(t.id, 'bolo') h"))
        == 2
    )


async def test_a_reader_needs_no_more_than_the_worker_s_role(conn, server, dsn):
    await store(conn, "acme", "1", "bolo", vectors=[direction(1)])
    await store(conn, "other", "1", "bolo")
    await conn.execute(
        "create role a_reader login; grant reactor_worker to a_reader; grant usage on schema reactor to a_reader"
    )
    try:
        reader = await connect(server.dsn(dsn.partition("/t")[2].partition("?")[0].join(["t", ""]), user="a_reader"))
        try:
            assert [hit["content"] for hit in await reader.fetch(SEARCH, "acme", "bolo")] == ["bolo"]
            assert len(await reader.fetch("select * from reactor.recent('acme')")) == 1
            assert len(await reader.fetch("select * from reactor.search_by_embedding('acme', '{1}', $1)", LOCAL)) == 1
            assert await reader.fetch("select * from reactor.memories") == []
        finally:
            await reader.close()
    finally:
        await conn.execute("drop owned by a_reader; drop role a_reader")


async def test_a_read_only_transaction_may_search(conn):
    await store(conn, "acme", "1", "bolo")

    async with conn.transaction(readonly=True):
        assert len(await conn.fetch(SEARCH, "acme", "bolo")) == 1
        assert len(await conn.fetch("select * from reactor.recent('acme')")) == 1
