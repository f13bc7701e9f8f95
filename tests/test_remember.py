"""What an agent writes down is kept, with its kind and metadata, and becomes a memory; in the background it never fails the caller."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import asynccontextmanager

import anyio
import pytest
from conftest import drained, eventually, make_settings, running_reactor
from recalling import proxy

from reactor import Memory, Unavailable

UNREACHABLE = "postgresql://nobody@127.0.0.1:1/nowhere"


@asynccontextmanager
async def opened(dsn, **settings):
    async with Memory.open(dsn, settings=make_settings(**{"search_deadline_s": 30, **settings})) as memory:
        yield memory


@pytest.fixture
async def memory(dsn):
    async with opened(dsn) as memory:
        yield memory


async def notes(conn, tenant="acme"):
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant($1)", tenant)
        return [
            tuple(row) for row in await conn.fetch("select id, kind, content, metadata from reactor.notes order by id")
        ]


async def test_a_note_is_written_down_with_its_kind_and_metadata_and_owes_one_job(memory, conn):
    first = await memory.remember("acme", "Prefere fotos claras", metadata={"conversation_id": 7, "tags": ("a",)})
    second = await memory.remember("acme", "Sem gírias", kind="preference")

    assert await notes(conn) == [
        (first, "note", "Prefere fotos claras", {"conversation_id": 7, "tags": ["a"]}),
        (second, "preference", "Sem gírias", {}),
    ]
    assert await conn.fetchval("select count(*) from reactor.jobs where tenant_id = 'acme' and type = 'sync_row'") == 2


async def test_a_note_becomes_a_memory_of_its_kind(dsn, memory, conn):
    note = await memory.remember("acme", "Prefere fotos claras", kind="preference", metadata={"conversation_id": "c1"})
    async with running_reactor(make_settings(database_url=dsn)):
        await drained(conn)

    [hit] = await memory.recent("acme", kinds=["preference"], metadata={"conversation_id": "c1"})
    [same] = await memory.search("acme", "fotos")

    assert (hit.source_id, hit.kind, hit.content, hit.metadata) == (
        str(note),
        "preference",
        "Prefere fotos claras",
        {"conversation_id": "c1"},
    )
    assert same.memory_id == hit.memory_id
    assert list(await memory.recent("other")) == []


async def test_text_is_cleaned_of_what_postgres_cannot_hold(memory, conn):
    await memory.remember("acme", "a\0b \ud800 \ud83d\ude00", kind="no\0te", metadata={"k\0": ["\ud800", float("nan")]})

    assert [row[1:] for row in await notes(conn)] == [("note", "ab \ufffd 😀", {"k": ["\ufffd", None]})]


@pytest.mark.parametrize("text", ["", " \n\t", "\0", "\u200b\u202e"])
async def test_a_blank_note_is_refused(text):
    async with opened(UNREACHABLE) as memory:
        with pytest.raises(ValueError, match="blank"):
            await memory.remember("acme", text)


class Broken(Mapping):
    def __getitem__(self, key):
        raise OSError("broken")

    def __iter__(self):
        return iter(["a"])

    def __len__(self):
        return 1


WRONG = [
    (TypeError, (None, "x"), {}), (ValueError, ("", "x"), {}), (ValueError, ("x" * 201, "x"), {}), (TypeError, ("a", None), {}),
    (TypeError, ("a", b"x"), {}), (TypeError, ("a", ["x"]), {}), (ValueError, ("a", "x"), {"kind": " "}), (TypeError, ("a", "x"), {"kind": None}),
    (ValueError, ("a", "x"), {"kind": "k" * 101}), (ValueError, ("a", "x"), {"metadata": "abc"}), (TypeError, ("a", "x"), {"metadata": 5}),
    (TypeError, ("a", "x"), {"metadata": {"a": object()}}), (TypeError, ("a", "x"), {"metadata": {1: 1}}), (OSError, ("a", "x"), {"metadata": Broken()}),
]  # fmt: skip


async def test_a_wrong_note_raises_or_in_the_background_is_counted_and_logged(events):
    async with opened(UNREACHABLE) as memory:
        for count, (error, arguments, named) in enumerate(WRONG, 1):
            with pytest.raises(error):
                await memory.remember(*arguments, **named)
            assert memory.remember_soon(*arguments, **named) is False
            assert memory.notes_lost == count

    assert [event["error_code"] for event in events.named("notes_lost")] == [error.__name__ for error, *_ in WRONG]


async def test_notes_in_the_background_are_written_in_order_without_waiting_for_anything(memory, conn):
    for n in range(500):
        assert memory.remember_soon("acme" if n % 2 else "other", f"nota {n}", kind="k", metadata={"n": n}) is True

    await eventually(lambda: counted(conn, 250, 250))
    assert [row[1:] for row in await notes(conn, "other")] == [("k", f"nota {n}", {"n": n}) for n in range(0, 500, 2)]
    assert memory.notes_lost == 0


async def counted(conn, *counts):
    return [len(await notes(conn, tenant)) for tenant in ("acme", "other")] == list(counts)


async def test_closing_writes_what_waits(dsn, conn):
    async with opened(dsn) as memory:
        for n in range(1000):
            memory.remember_soon("acme", f"nota {n}")

    assert [row[2] for row in await notes(conn)] == [f"nota {n}" for n in range(1000)]
    assert memory.remember_soon("acme", "tarde demais") is False
    assert memory.notes_lost == 1


async def test_a_thousand_notes_wait_and_what_is_lost_is_counted_and_logged(monkeypatch, events):
    monkeypatch.setattr("reactor.memory._FLUSH_S", 0.2)
    async with opened(UNREACHABLE) as memory:
        kept = [memory.remember_soon("acme", f"nota {n}") for n in range(1003)]
        assert kept == [True] * 1000 + [False] * 3
        assert memory.notes_lost == 3

    assert memory.notes_lost == 1003
    assert [(event["error_code"], event["lost"]) for event in events.named("notes_lost")] == [
        ("buffer_full", 1)
    ] * 3 + [("closed", 1000)]
    assert "nota" not in events.text


async def test_notes_wait_through_an_outage_and_none_is_lost_or_doubled(dsn, conn):
    async with proxy(dsn) as front:
        front.refuse_with = "57P03"
        async with opened(front.dsn(await conn.fetchval("select current_database()"))) as memory:
            for n in range(5):
                memory.remember_soon("acme", f"nota {n}")
            with pytest.raises(Unavailable):
                await memory.remember("acme", "agora")
            accepted = front.accepted
            await eventually(lambda: more_than(front, accepted))
            front.refuse_with = None
            memory.remember_soon("acme", "nota 5")

    assert [row[2] for row in await notes(conn)] == [f"nota {n}" for n in range(6)]
    assert memory.notes_lost == 0


async def more_than(front, accepted):
    return front.accepted > accepted


async def test_a_note_that_postgres_refuses_is_lost_alone(dsn, conn, events):
    await conn.execute("alter table reactor.notes add check (content <> 'nota 3')")
    async with opened(dsn) as memory:
        for n in range(6):
            memory.remember_soon("acme", f"nota {n}")

    assert [row[2] for row in await notes(conn)] == [f"nota {n}" for n in range(6) if n != 3]
    assert memory.notes_lost == 1
    assert [event["error_code"] for event in events.named("notes_lost")] == ["CheckViolationError"]


async def test_a_bug_of_the_schema_s_raises_in_remember_and_ends_no_loop_of_ours(dsn, conn):
    async with opened(dsn) as memory:
        await conn.execute("alter table reactor.notes rename to elsewhere")
        with pytest.raises(Exception, match="does not exist"):
            await memory.remember("acme", "nota")
        memory.remember_soon("acme", "nota")
        await eventually(lambda: lost(memory, 1))
        await conn.execute("alter table reactor.elsewhere rename to notes")

        assert memory.remember_soon("acme", "nota de novo") is True

    assert [row[2] for row in await notes(conn)] == ["nota de novo"]


async def lost(memory, count):
    return memory.notes_lost == count


async def test_a_caller_cancelled_in_mid_write_leaves_the_memory_usable(memory, conn):
    for _ in range(30):
        writing = asyncio.create_task(memory.remember("acme", "nota"))
        for _ in range(int.from_bytes(os.urandom(1), "big") % 30):
            await anyio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])

    assert await memory.remember("acme", "a última") == (await notes(conn))[-1][0]


async def test_megabytes_are_a_note_and_the_caller_s_metadata_stays_its_own(memory, conn):
    metadata = {"tags": ["a"]}
    memory.remember_soon("acme", "pão " * 1_300_000, metadata=metadata)
    metadata["tags"].append("b")

    await eventually(lambda: counted(conn, 1, 0))
    [(_, _, content, stored)] = await notes(conn)
    assert (len(content), stored) == (5_200_000, {"tags": ["a"]})
