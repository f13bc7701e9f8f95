"""supervisord.conf, run by the real supervisord."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, drained, eventually

PROGRAMS = Path(sys.prefix) / "bin"


@pytest.fixture
def supervised(dsn, tmp_path):
    """A folder laid out like a clone; returns a function that runs supervisorctl there."""
    shutil.copy(REPO / "supervisord.conf", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = {**os.environ, "DATABASE_URL": dsn, "VOYAGE_API_KEY": "", "REACTOR_POLL_S": "1"}
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
