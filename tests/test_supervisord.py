"""supervisord.conf, run by the real supervisord."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from conftest import REPO, drained, eventually

PROGRAMS = Path(sys.prefix) / "bin"


# Handlers that wait until the test lets them go.
WAIT = """
import anyio
from pathlib import Path

async def wait(job):
    while not (Path(__file__).parent / "go").exists():
        await anyio.sleep(0.05)
    return {"waited": True}

HANDLERS = {"wait": wait}
"""


@pytest.fixture
def supervised(dsn, tmp_path, request):
    """A folder laid out like a clone; returns a function that runs supervisorctl there."""
    conf = (REPO / "supervisord.conf").read_text()
    for line in getattr(request, "param", []):
        assert conf.count(f"; {line}\n") == 1  # as the file says it can be done
        conf = conf.replace(f"; {line}\n", f"{line}\n")
    (tmp_path / "supervisord.conf").write_text(conf)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "handlers").mkdir()
    (tmp_path / "handlers" / "wait.py").write_text(WAIT)
    environment = {
        **os.environ,
        "DATABASE_URL": dsn,
        "VOYAGE_API_KEY": "",
        "REACTOR_POLL_S": "1",
        "REACTOR_LEASE_S": "2",
        "REACTOR_HANDLERS": "handlers",
    }
    daemon = subprocess.Popen(
        [PROGRAMS / "supervisord", "-c", "supervisord.conf"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def control(*words: str) -> str:
        return subprocess.run(
            [PROGRAMS / "supervisorctl", "-c", "supervisord.conf", *words],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        ).stdout

    yield control
    control("shutdown")
    daemon.communicate(timeout=60)


async def test_it_restarts_a_killed_reactor_loses_nothing_and_drains_on_stop(supervised, conn):
    async def pid():
        words = supervised("pid", "reactor").strip()
        return int(words) if words.isdigit() and words != "0" else None

    listening = "select exists (select from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database())"
    first = await eventually(pid)
    await eventually(lambda: conn.fetchval(listening))
    os.kill(first, signal.SIGKILL)
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'bolo de fubá')")

    async def restarted():
        return (now := await pid()) is not None and now != first

    await eventually(restarted, timeout_s=60)
    await drained(conn)

    assert await conn.fetchval("select content from reactor.recent('acme')") == "bolo de fubá"
    assert "reactor: stopped" in supervised("stop", "reactor")
    assert "STOPPED" in supervised("status")


@pytest.mark.parametrize("supervised", [["numprocs=2", "process_name=%(program_name)s_%(process_num)d"]], indirect=True)
async def test_several_reactors_share_the_work_one_that_is_killed_comes_back_and_all_drain_on_stop(
    supervised, conn, tmp_path
):
    async def pids():
        found = [supervised("pid", f"reactor:reactor_{n}").strip() for n in range(2)]
        return [int(pid) for pid in found] if all(pid.isdigit() and pid != "0" for pid in found) else None

    listening = "select count(*) = 2 from pg_stat_activity where application_name like 'memory-reactor listener%' and application_name not like '%connecting' and datname = current_database()"
    running = "select count(*) from reactor.jobs where status = 'running'"
    first = await eventually(pids)
    await eventually(lambda: conn.fetchval(listening))
    for _ in range(8):  # four places each
        await conn.execute("select reactor.enqueue('wait', '{}', 'acme')")
    await eventually(lambda: conn.fetchval(f"select ({running}) = 8"))
    workers = await conn.fetchval("select count(distinct locked_by) from reactor.jobs")
    os.kill(first[0], signal.SIGKILL)

    async def restarted():
        now = await pids()
        return now is not None and now[0] != first[0] and now[1] == first[1]

    await eventually(restarted, timeout_s=60)
    # What the killed one ran has come back by its lease: stopped sooner, nobody would be there to take it back.
    await eventually(lambda: conn.fetchval("select count(*) = 4 from reactor.jobs where is_suspect"))
    stopping = asyncio.create_task(anyio.to_thread.run_sync(supervised, "stop", "reactor:*"))
    await eventually(_says_stopping(supervised))
    (tmp_path / "handlers" / "go").touch()
    said = await stopping

    assert workers == 2
    assert [f"reactor:reactor_{n}: stopped" in said for n in range(2)] == [True, True]
    assert supervised("status").count("STOPPED") == 2
    left = {(job["status"], job["attempts"]) for job in await conn.fetch("select status, attempts from reactor.jobs")}
    assert left <= {("done", 1), ("pending", 0)}  # what ran was finished, and nothing else begun
    assert await conn.fetchval("select count(*) from reactor.jobs where status = 'done'") >= 4


def _says_stopping(control):
    async def check():
        return "STOPPING" in await anyio.to_thread.run_sync(control, "status")

    return check
