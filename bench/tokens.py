"""Tokens: what a fresh one costs beside the bare read, and how many a second are refreshed while all are due at once.

`python -m bench.tokens FOLDER NUMBER` is the provider of the second: it seeds so many grants, prints them as one line of
JSON with its environment, and answers each call after 50 ms until its input ends.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import asyncpg

from reactor import db
from reactor.app import reactor
from reactor.log import get_log
from reactor.sealing import Keys, generate
from reactor.settings import load_settings
from reactor.tokens import Tokens

LATENCY_S = 0.05
DUE = 1000
INTEGRATION = "pinterest"  # it rotates, so each answer is journaled
BARE = "select access_token, expires_at, state from tokens where tenant_id = $1 and integration = $2 and account = $3"

Line = Callable[..., None]


async def reads(dsn: str, line: Line) -> None:
    """ensure_fresh on a fresh token and the bare indexed read, each with and without prepared statements."""
    key, _ = generate()
    keys, home = Keys.parse(key), Path(tempfile.mkdtemp(prefix="reactor-bench-tokens-"))
    prepared, unprepared = await asyncpg.connect(dsn), await asyncpg.connect(dsn, statement_cache_size=0)
    insert = (
        "insert into tokens (tenant_id, integration, account, access_token, sealed_access_token, expires_at) "
        "select 't' || i, $1, 'a', $2, $3, now() + interval '1 year' from generate_series(1, 1000) i"
    )
    await prepared.execute(insert, "google", "token", None)
    await prepared.execute(insert, "x", None, "")
    sealed = keys.seal("token", tenant_id="t5", integration="x", account="a", purpose="access_token")
    await prepared.execute(
        "update tokens set sealed_access_token = $1 where tenant_id = 't5' and integration = 'x'", sealed
    )
    await prepared.execute("vacuum analyze tokens")
    settings = load_settings(database_url=dsn, home=home, token_key=key)
    try:
        async with (
            Tokens.open(dsn, settings=settings) as ours,
            db.create_pool(dsn, application="bench", size=2, statement_cache_size=0, resets=False) as pool,
        ):
            pooled = Tokens(pool, settings=settings, log=get_log())
            contestants: dict[str, Callable[[], Awaitable[Any]]] = {
                "bare": lambda: prepared.fetchrow(BARE, "t5", "google", "a"),
                "plain": lambda: ours.ensure_fresh("t5", "google", "a"),
                "sealed": lambda: ours.ensure_fresh("t5", "x", "a"),
                "bare, unprepared": lambda: unprepared.fetchrow(BARE, "t5", "google", "a"),
                "plain, unprepared": lambda: pooled.ensure_fresh("t5", "google", "a"),
                "sealed, unprepared": lambda: pooled.ensure_fresh("t5", "x", "a"),
            }
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(100):
                for name, ask in contestants.items():
                    for _ in range(20):
                        began = time.perf_counter()
                        await ask()
                        times[name].append((time.perf_counter() - began) * 1e6)
            await pooled.aclose()
    finally:
        await prepared.close()
        await unprepared.close()
        shutil.rmtree(home, ignore_errors=True)
    took = {name: statistics.median(values) for name, values in times.items()}
    for name in ("plain", "sealed"):
        for how, wanted in (("", "<= 1.5"), (", unprepared", "behind a transaction pooler")):
            us, bare = took[name + how], took["bare" + how]
            line(f"ensure_fresh, {name}{how}", f"{us:.0f} us", f"bare read {bare:.0f} us", us / bare, wanted)


@asynccontextmanager
async def providing(folder: Path, number: int) -> AsyncIterator[dict[str, Any]]:
    """A provider in a process of its own, and what it granted."""
    words = [sys.executable, "-W", "ignore", "-m", "bench.tokens", str(folder), str(number)]
    async with await anyio.open_process(words, stderr=None) as process:
        said = b""
        assert process.stdout is not None
        assert process.stdin is not None
        while not said.endswith(b"\n"):
            said += await process.stdout.receive()
        yield json.loads(said)
        await process.stdin.aclose()
        await process.wait()


async def refreshes(dsn: str, home: Path, number: int) -> float:
    """A second, by one reactor to which all are due at once; each must be refreshed before its end."""
    conn = await asyncpg.connect(dsn)
    async with providing(home, number) as provider:
        os.environ.update(provider["env"])
        await conn.executemany(
            "insert into tokens (tenant_id, integration, account, access_token, refresh_token, issued_at, expires_at) "
            "values ($1, $2, $3, $4, $5, now() - interval '30 days', now() + interval '1 hour')",
            [
                (f"t{n % 100}", INTEGRATION, str(n), one["access_token"], one["refresh_token"])
                for n, one in enumerate(provider["grants"])
            ],
        )
        settings = load_settings(
            database_url=dsn,
            home=home,
            integrations=home / "integrations.toml",
            voyage_api_key="none",  # nothing is embedded here
            voyage_base_url="http://127.0.0.1:9",
        )
        async with reactor(settings, dsn, log=get_log()) as worker, anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            while await conn.fetchval("select count(*) from reactor.tokens where last_success_at is not null") < number:
                await anyio.sleep(0.2)
            worker.stop()
    took_s, late = await conn.fetchrow(
        "select extract(epoch from max(last_success_at) - min(last_success_at))::float8, "
        "count(*) filter (where state <> 'active') from reactor.tokens"
    )
    assert late == 0
    await conn.close()
    return number / took_s


async def hour(fresh: Callable[[], Awaitable[str]], line: Line) -> None:
    """As many tokens due at once as one reactor takes a second, and what its fsyncs cost."""
    rates: dict[str, float] = {}
    for name, folder in (("on disk", None), ("nothing synced", Path("/dev/shm"))):
        dsn = await fresh()
        if folder is not None:
            conn = await asyncpg.connect(dsn)
            await conn.execute(
                f"alter database {await conn.fetchval('select current_database()')} set synchronous_commit = off"
            )
            await conn.close()
        home = Path(tempfile.mkdtemp(prefix="reactor-bench-tokens-", dir=folder))
        try:
            rates[name] = await refreshes(dsn, home, DUE)
        finally:
            shutil.rmtree(home, ignore_errors=True)
    ours, unsynced = rates.values()
    needed = 10_000 / 3600
    line(
        f"{DUE:,} tokens due at once, 50 ms a call",
        f"{ours:.1f} /s",
        f"10,000 an hour {needed:.1f} /s",
        ours / needed,
        ">= 2",
    )
    line("the same", f"{ours:.1f} /s", f"nothing synced {unsynced:.1f} /s", ours / unsynced)


async def provide(folder: Path, number: int) -> None:
    """The other process, see above."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from providers import Providers

    class Distant(Providers):
        async def _serve(self, request: Any) -> Any:
            await anyio.sleep(LATENCY_S)
            return await super()._serve(request)

    async with Distant() as providers:
        providers.toml(folder)
        grants = [providers.seed(INTEGRATION, account=str(n)) for n in range(number)]
        print(json.dumps({"grants": grants, "env": providers.env}), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


if __name__ == "__main__":
    anyio.run(provide, Path(sys.argv[1]), int(sys.argv[2]))
