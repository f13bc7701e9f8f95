"""Logs: a full run of the real process says what happened and never what was said: planted canaries appear nowhere."""

from __future__ import annotations

import json
import signal

from conftest import connect, drained, eventually
from test_worker import reactor_of, wire_to
from voyage_stub import rate_limited, status, vector_of, voyage_stub

FIELDS = {
    "job_done": {"type", "jobs", "duration_ms"},
    "job_failed": {"job_id", "type", "tenant_id", "attempt", "duration_ms", "error_code", "next_run_after"},
    "job_snoozed": {"type", "duration_ms", "next_run_after", "reason"},
    "job_dead": {"job_id", "type", "tenant_id", "attempt", "duration_ms", "error_code"},
    "embedding_batch": {"model", "texts", "tokens", "latency_ms"},
    "alert_opened": {"cause", "subject"},
    "listener_ready": set(),
    "listener_lost": {"reason"},
}
CANARIES = {
    "text": "canário-do-texto-71f2",
    "title": "canário-do-título-82a3",
    "metadata": "canário-dos-metadados-93b4",
    "metadata key": "canário-da-chave-a4c5",
    "slide": "canário-do-slide-b5d6",
    "edit": "canário-da-edição-c6e7",
    "refused": "canário-recusado-d7f8",
    "chat": "canário-da-conversa-e809",
    "note": "canário-da-nota-f91a",
    "handler": "canário-do-tratador-0a2b",
    "constraint": "canário-da-restrição-1b3c",
}
HANDLERS = f"""
from reactor import Handler, Permanent, Unavailable

async def breaks(job, *, pool):
    raise ValueError({CANARIES["handler"]!r})

async def breaks_in_postgres(job, *, pool):
    await pool.execute("insert into strict (word) values ($1)", {CANARIES["constraint"]!r})

async def breaks_in_a_cast(job, *, pool):
    await pool.fetchval("select $1::text::int", {CANARIES["constraint"]!r})

async def breaks_with_a_cause(jobs):
    try:
        raise KeyError({CANARIES["handler"]!r})
    except KeyError as exc:
        raise RuntimeError({CANARIES["handler"]!r}) from exc

async def groups(job):
    raise ExceptionGroup({CANARIES["handler"]!r}, [ValueError({CANARIES["handler"]!r}), OSError({CANARIES["handler"]!r})])

HANDLERS = {{"breaks": breaks, "breaks_in_postgres": breaks_in_postgres, "breaks_in_a_cast": breaks_in_a_cast,
            "breaks_with_a_cause": Handler(breaks_with_a_cause, batch=3), "groups": groups}}
"""


async def everything_ours_says(conn):
    """Every queue row, alert, rejected and migration row as text."""
    text = ""
    for table in ("jobs", "alerts", "rejected", "tombstones", "sources", "tenants"):
        text += json.dumps(
            [r[0] for r in await conn.fetch(f"select to_jsonb(t) from reactor.{table} t")], ensure_ascii=False
        )
    return text


async def test_a_full_run_tells_every_event_and_no_canary(conn, dsn, tmp_path):
    (tmp_path / "mine.py").write_text(HANDLERS)
    heard = []
    ear = await connect(dsn)
    for channel in ("reactor_wake", "reactor_versions"):
        await ear.add_listener(channel, lambda _conn, _pid, channel, payload: heard.append((channel, payload)))
    await conn.execute("create table strict (word text check (length(word) < 3))")

    async with voyage_stub() as stub:
        stub.key = "pa-canary-of-the-key-2c4d"
        stub.refuse(CANARIES["refused"])
        stub.fail_next(status(500, CANARIES["text"]), rate_limited("0", detail=CANARIES["text"]))
        async with reactor_of(dsn, stub, REACTOR_HANDLERS=str(tmp_path)) as output:
            await output.saw("listener_ready")
            await conn.execute(
                "insert into posts (tenant_id, title, body, metadata, slides) values ('acme', $1, $2, $3, $4)",
                CANARIES["title"], CANARIES["text"], {CANARIES["metadata key"]: CANARIES["metadata"]}, [{"text": CANARIES["slide"]}],
            )  # fmt: skip
            await eventually(
                lambda: conn.fetchval("select bool_and(status = 'done') from reactor.jobs where type = 'sync_row'")
            )
            async with conn.transaction():
                await conn.execute(
                    "insert into posts (tenant_id, body) values ('acme', $1), ('acme', 'inocente')", CANARIES["refused"]
                )
            await conn.execute("insert into posts (tenant_id, body) select repeat($1, 20), 'x'", CANARIES["text"])
            await conn.execute("insert into chat_messages (tenant_id, content) values ('acme', $1)", CANARIES["chat"])
            await conn.execute("insert into posts (tenant_id, body) values ('acme', 'depois')")
            await _note(conn, CANARIES["note"])
            for type_ in (
                "breaks",
                "breaks_in_postgres",
                "breaks_in_a_cast",
                "breaks_with_a_cause",
                "breaks_with_a_cause",
                "groups",
            ):
                await conn.execute(
                    "select reactor.enqueue($1, '{}', 'acme', max_attempts => $2)", type_, 1 if type_ == "breaks" else 5
                )
            await drained(conn)
            await conn.execute("update posts set body = $1 where body = 'depois'", CANARIES["edit"])
            await conn.execute("delete from posts where body = 'inocente'")
            await drained(conn)
            await conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database()"
            )
            await output.saw("listener_ready", 2)
            output.process.send_signal(signal.SIGTERM)
            assert await output.exited() == 0
        vector = vector_of("inocente")
    rows = await everything_ours_says(conn)
    await ear.close()

    said = output.text
    entries = [json.loads(line) for line in said.splitlines()]
    for event, fields in FIELDS.items():
        named = [entry for entry in entries if entry["event"] == event]
        assert named, f"{event} was not logged"
        assert all(entry.keys() >= fields for entry in named), event
    for what, canary in [*CANARIES.items(), ("key", stub.key), ("vector", f"{float(vector[0]):.4f}")]:
        assert canary not in said, what
        assert json.dumps(canary)[1:-1] not in said, what
        assert canary not in rows, what
        assert canary not in str(heard), what
    assert {channel for channel, _ in heard} == {"reactor_wake", "reactor_versions"}
    assert {payload for channel, payload in heard if channel == "reactor_wake"} == {""}
    assert "acme" not in str(heard)
    assert {r[0] for r in await conn.fetch("select last_error from reactor.jobs where type like 'break%' or type = 'groups'")} >= {
        "ValueError: at mine.py:5", "CheckViolationError: 23514 at mine.py:8",
    }  # fmt: skip


async def _note(conn, text):
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant('acme')")
        await conn.execute("insert into reactor.notes (tenant_id, content) values ('acme', $1)", text)


async def test_nothing_is_left_unawaited_in_asyncios_debug_mode(conn, dsn):
    async with (
        voyage_stub() as stub,
        reactor_of(dsn, stub, PYTHONASYNCIODEBUG="1", PYTHONWARNINGS="default", PYTHONDEVMODE="1") as output,
    ):
        await output.saw("listener_ready")
        await conn.execute(
            "insert into posts (tenant_id, body) select 'acme', 'post ' || n from generate_series(1, 50) n"
        )
        await drained(conn)
        output.process.send_signal(signal.SIGTERM)
        assert await output.exited() == 0

    strange = [line for line in output.lines if not line.startswith("{")]
    assert [line for line in strange if "reactor/" in line or "handlers/" in line or "never" in line] == []


async def test_a_lost_listener_that_cannot_come_back_is_said_once_an_outage(dsn):
    async with voyage_stub() as stub, wire_to(dsn) as wire, reactor_of(wire.dsn, stub, REACTOR_POLL_S="0.2") as output:
        await output.saw("listener_ready")
        await wire.close()
        await output.saw("claim_failed")
        await wire.open()
        await output.saw("listener_ready", 2)

    assert len(output.named("listener_lost")) == 1


async def test_the_dsns_password_is_in_no_log(server):
    async with voyage_stub() as stub, reactor_of("postgresql://nobody:senha-canário@127.0.0.1:1/x", stub) as output:
        await output.saw("postgres_awaited")

    assert "senha" not in output.text
