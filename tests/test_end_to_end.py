"""The main job: a row inserted becomes a memory an agent can recall."""

from __future__ import annotations

from conftest import drained, running_reactor

from reactor import Memory


async def test_a_row_inserted_is_found_by_a_portuguese_question(settings, conn):
    await conn.execute(
        "insert into posts (tenant_id, title, body) values ('acme', 'Café', 'O melhor horário para postar é às nove da manhã')"
    )
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'Pão de queijo quentinho saindo do forno')")

    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await drained(conn)
        await memory.warm()
        hits = await memory.search("acme", "que horas devo publicar?", k=1)

    assert [hit.content for hit in hits] == ["Café\n\nO melhor horário para postar é às nove da manhã"]
    assert hits.degraded is None
    assert hits[0].kind == "post"
    assert hits[0].source_id == "1"


async def test_an_edit_replaces_the_memory_and_a_delete_removes_it(settings, conn):
    await conn.execute(
        "insert into posts (tenant_id, body) values ('acme', 'Promoção de bolo de cenoura'), ('acme', 'Vaga para confeiteiro')"
    )

    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await drained(conn)
        await conn.execute("update posts set body = 'Promoção de torta de limão' where id = 1")
        await conn.execute("delete from posts where id = 2")
        await drained(conn)
        contents = [hit.content for hit in await memory.recent("acme")]

    assert contents == ["Promoção de torta de limão"]
    assert await conn.fetchval("select count(*) from reactor.tombstones") == 0
