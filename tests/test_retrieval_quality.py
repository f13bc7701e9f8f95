"""A question in Portuguese finds the passage that answers it, measured on a public set with the local model."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import drained, make_settings, running_reactor

from reactor import Memory

FAQUAD = json.loads((Path(__file__).parent / "data" / "faquad_dev.json").read_text("utf-8"))


async def test_at_least_82_of_100_questions_have_a_gold_passage_among_the_first_five(dsn, conn):
    settings = make_settings(database_url=dsn, search_deadline_s=30)
    await conn.executemany(
        "insert into posts (tenant_id, body, metadata) values ('faquad', $1, $2)",
        [(passage["text"], {"passage": passage["id"]}) for passage in FAQUAD["passages"]],
    )

    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await drained(conn)
        found = 0
        for question in FAQUAD["questions"]:
            hits = await memory.search("faquad", question["question"], k=5)
            assert hits.degraded is None
            found += any(hit.metadata["passage"] in question["gold"] for hit in hits)

    share = found / len(FAQUAD["questions"])
    print(f"gold among five: {share:.4f}")
    assert share >= 0.82
