"""`reactor dev` as a process: it follows what is written into the handlers and the SQL, and no broken state of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import asyncpg
import pytest
from conftest import REPO, command, eventually

from reactor import dev

HANDLER = """
async def publish(job, *, pool):
    return {{"by": "{version}"}}

HANDLERS = {{"publish": publish}}
"""
WAITING = """
import anyio

async def publish(job, *, pool):
    while not await pool.fetchval("select exists (select from public.released)"):
        await anyio.sleep(0.02)
    return {{"by": "{version}"}}

HANDLERS = {{"publish": publish}}
"""
DYING = """
import os

async def publish(job, *, pool):
    os._exit(3)

HANDLERS = {"publish": publish}
"""


class Dev:
    """A running `reactor dev` on a clone of this repository, with a folder of handlers beside it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.mine = folder / "mine"
        self.sql = folder / "sql"
        self.code = folder / "reactor"
        self.output = folder / "output"
        self.process = process

    @property
    def text(self) -> str:
        return self.output.read_text("utf-8", "replace")

    @property
    def words(self) -> list[str]:
        """What it said, the reactor's own events left out."""
        return [line for line in self.text.splitlines() if not line.startswith("{")]

    def events(self, name: str) -> list[dict]:
        lines = [json.loads(line) for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [entry for entry in lines if entry["event"] == name]

    def write(self, version: str, template: str = HANDLER) -> None:
        (self.mine / "publish.py").write_text(template.format(version=version))

    async def says(self, pattern: str, times: int = 1) -> None:
        async def said():
            assert self.process.poll() is None or len(re.findall(pattern, self.text)) >= times, self.text
            return len(re.findall(pattern, self.text)) >= times

        await eventually(said, timeout_s=60)

    async def has_started(self, times: int) -> None:
        await self.says(r'"event": "started"', times)

    async def ends(self) -> int:
        async def ended():
            return self.process.poll() is not None

        await eventually(ended, timeout_s=60)
        return self.process.returncode


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("reactor", "sql", "handlers"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "publish.py").write_text(HANDLER.format(version="v1"))
    return tmp_path


@contextlib.contextmanager
def developing(clone: Path, dsn: str | None, **env: str):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("REACTOR_", "VOYAGE_", "DATABASE_"))
    }
    environment |= {"PYTHONPATH": str(clone), "REACTOR_HANDLERS": "mine", "REACTOR_POLL_S": "1"}
    if dsn is not None:
        environment["DATABASE_URL"] = dsn
    with (clone / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "reactor", "dev"],
            cwd=clone,
            env=environment | env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Dev(clone, process)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()


async def published(conn: asyncpg.Connection) -> str:
    """Which version of the handler runs a job."""
    job = await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
    done = "select result from reactor.jobs where id = $1 and status = 'done'"
    result = await eventually(lambda: conn.fetchval(done, job), timeout_s=60)
    return result["by"]


async def reactors(conn: asyncpg.Connection) -> int:
    return await conn.fetchval(
        "select count(distinct pid) from pg_stat_activity where application_name like 'memory-reactor%' and datname = current_database()"
    )


async def gone(conn: asyncpg.Connection) -> None:
    async def none_left():
        return await reactors(conn) == 0

    await eventually(none_left)


# --- changes ---


async def test_an_edited_handler_takes_over_even_twice_within_a_second(clone, dsn, conn):
    """The two edits have one size and time, by which Python would take the later for the earlier."""
    with developing(clone, dsn) as running:
        await running.has_started(1)
        assert await published(conn) == "v1"
        now = (running.mine / "publish.py").stat().st_mtime
        for version in ("v2", "v3"):
            running.write(version)
            os.utime(running.mine / "publish.py", (now, now))
            await running.says("starting again", int(version[1]) - 1)
        await running.has_started(3)

        assert await published(conn) == "v3"
        assert [line for line in running.words if "changed" in line] == ["publish.py changed: starting again"] * 2


async def test_a_job_that_runs_is_finished_by_the_code_it_began_with(clone, dsn, conn):
    (clone / "mine" / "publish.py").write_text(WAITING.format(version="v1"))
    await conn.execute("create table public.released ()")
    with developing(clone, dsn) as running:
        await running.has_started(1)
        job = await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
        await eventually(lambda: conn.fetchval("select status = 'running' from reactor.jobs where id = $1", job))
        running.write("v2", WAITING)
        await running.says("starting again")
        await running.says('"event": "stopping"')
        await conn.execute("insert into public.released default values")
        await running.has_started(2)

        row = await conn.fetchrow("select * from reactor.jobs where id = $1", job)
        assert (row["status"], row["attempts"], row["result"]) == ("done", 1, {"by": "v1"})
        assert await published(conn) == "v2"


BROKEN = {
    "async def publish(job)\n": r"publish.py does not import: SyntaxError: .*\(publish.py, line 1\)",
    "import not_there\n": r"publish.py does not import: ModuleNotFoundError: No module named 'not_there'",
    HANDLER.format(version="v2").replace("pool", "piscina"): r"asks for piscina; there are .*pool",
    "x = 1\n": r"HANDLERS = \{type: handler\} is missing",
    "raise SystemExit(0)\n": r"publish.py does not import: SystemExit",
    "import os; os._exit(7)\n": r"it failed without a word",
}


async def test_what_is_broken_is_said_naming_the_file_and_leaves_the_last_good_code_running(clone, dsn, conn):
    with developing(clone, dsn) as running:
        await running.has_started(1)
        for times, (broken, words) in enumerate(BROKEN.items(), 1):
            (running.mine / "publish.py").write_text(broken)
            await running.says("the last good code keeps running", times)
            said = [line for line in running.words if "keeps running" in line]
            assert re.match(rf"publish.py changed: .*{words}", said[-1])
        assert await published(conn) == "v1"
        assert len(running.events("started")) == 1

        running.write("v2")
        await running.has_started(2)
        assert await published(conn) == "v2"


async def test_a_broken_file_of_the_reactor_itself_is_said_with_its_line(clone, dsn, conn):
    with developing(clone, dsn) as running:
        await running.has_started(1)
        with (running.code / "worker.py").open("a") as file:
            file.write("\n)\n")
        await running.says("the last good code keeps running")

        assert re.search(r"worker.py changed: .*/reactor/worker.py:\d+: SyntaxError: unmatched", running.text)
        assert await published(conn) == "v1"


async def test_what_is_broken_from_the_start_runs_once_it_is_mended(clone, dsn, conn):
    (clone / "mine" / "publish.py").write_text("async def publish(job)\n")
    with developing(clone, dsn) as running:
        await running.says(r"publish.py does not import: .*: nothing runs until that changes")
        running.write("v2")

        assert await published(conn) == "v2"


async def test_changed_sql_is_migrated_and_broken_sql_changes_nothing(clone, dsn, conn):
    file = clone / "sql" / "0006_schedules.sql"
    good = file.read_text()
    with developing(clone, dsn) as running:
        await running.has_started(1)
        file.write_text(
            good + "\ncreate function reactor.half_made() returns int language sql as 'select 1';\nselct 2;\n"
        )
        await running.says("the last good code keeps running")
        assert re.search(r'0006_schedules.sql changed: .*syntax error at or near "selct"', running.text)
        assert await conn.fetchval("select to_regproc('reactor.half_made') is null")
        assert await published(conn) == "v1"

        file.write_text(good + "\ncreate or replace function reactor.whole() returns int language sql as 'select 1';\n")
        await running.has_started(2)
        assert await conn.fetchval("select reactor.whole()") == 1
        assert await published(conn) == "v1"


async def test_sql_that_a_long_transaction_keeps_out_is_tried_again_by_itself(clone, dsn, conn):
    file = clone / "sql" / "0006_schedules.sql"
    with developing(clone, dsn) as running:
        await running.has_started(1)
        async with conn.transaction():
            await conn.execute("lock table reactor.schedules in row exclusive mode")
            file.write_text(
                file.read_text()
                + "\nlock table reactor.schedules;\ncreate or replace function reactor.late() returns int language sql as 'select 1';\n"
            )
            await running.says(r"a long transaction holds a table.*: the last good code keeps running")
        await running.has_started(2)

    assert await conn.fetchval("select reactor.late()") == 1


async def test_many_files_at_once_are_one_change_and_what_editors_leave_behind_is_none(clone, dsn, conn):
    with developing(clone, dsn) as running:
        await running.has_started(1)
        (running.mine / "__pycache__").mkdir(exist_ok=True)
        for leftover in ("publish.py~", ".publish.py.swp", ".publish.py.un~", "notes.txt", "__pycache__/a.py", "4913"):
            (running.mine / leftover).write_text("x")
        for n in range(40):  # each saved under another name first, as editors do
            new = running.mine / f".publish{n}.tmp"
            new.write_text(HANDLER.format(version="v2").replace('"publish":', f'"publish{n}":'))
            new.rename(running.mine / f"publish{n}.py")
        await running.has_started(2)
        temporary = running.mine / "publish.py.tmp"
        temporary.write_text(HANDLER.format(version="v2"))
        temporary.replace(running.mine / "publish.py")
        await running.has_started(3)

        assert await published(conn) == "v2"
        assert [line for line in running.words if "changed" in line] == [
            "publish0.py, publish1.py, publish10.py and 37 more changed: starting again",
            "publish.py changed: starting again",
        ]


@pytest.mark.parametrize("way", ["renamed", "deleted and made anew"])
async def test_a_folder_that_git_replaces_is_followed(clone, dsn, conn, way):
    with developing(clone, dsn) as running:
        await running.has_started(1)
        if way == "renamed":
            new = clone / "new"
            new.mkdir()
            (new / "publish.py").write_text(HANDLER.format(version="v2"))
            running.mine.rename(clone / "old")
            new.rename(running.mine)
        else:
            shutil.rmtree(running.mine)
            running.mine.mkdir()
            running.write("v2")
        await running.has_started(2)
        assert await published(conn) == "v2"

        async def edited():
            running.write("v3")  # a start may be under way still
            with anyio.move_on_after(10):
                await running.has_started(3)
                return True
            return False

        await eventually(edited, timeout_s=60)
        assert await published(conn) == "v3"


async def test_a_folder_that_is_away_for_a_while_is_waited_for(clone, dsn, conn):
    with developing(clone, dsn) as running:
        await running.has_started(1)
        running.mine.rename(clone / "elsewhere")
        await running.says("mine changed: REACTOR_HANDLERS: mine is not a folder: the last good code keeps running")
        assert await published(conn) == "v1"
        (clone / "elsewhere" / "publish.py").write_text(HANDLER.format(version="v2"))
        (clone / "elsewhere").rename(running.mine)
        await running.has_started(2)

        assert await published(conn) == "v2"


# --- ends ---


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_reactor_and_exits_0(clone, dsn, conn, stop):
    (clone / "mine" / "publish.py").write_text(WAITING.format(version="v1"))
    await conn.execute("create table public.released ()")
    with developing(clone, dsn) as running:
        await running.has_started(1)
        job = await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
        await eventually(lambda: conn.fetchval("select status = 'running' from reactor.jobs where id = $1", job))
        running.process.send_signal(stop)
        await running.says('"event": "stopping"')
        await conn.execute("insert into public.released default values")

        assert await running.ends() == 0
        assert await conn.fetchval("select status from reactor.jobs where id = $1", job) == "done"
        assert "Traceback" not in running.text
    await gone(conn)


async def test_a_second_signal_does_not_wait_for_the_job(clone, dsn, conn):
    (clone / "mine" / "publish.py").write_text(WAITING.format(version="v1"))
    await conn.execute("create table public.released ()")
    with developing(clone, dsn, REACTOR_DRAIN_S="600") as running:
        await running.has_started(1)
        job = await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
        await eventually(lambda: conn.fetchval("select status = 'running' from reactor.jobs where id = $1", job))
        running.process.send_signal(signal.SIGINT)
        await running.says('"event": "stopping"')
        running.process.send_signal(signal.SIGINT)

        assert await running.ends() == 0
        assert len(running.events("stopped_at_once")) == 1
        assert await conn.fetchval("select status from reactor.jobs where id = $1", job) != "done"
        assert "Traceback" not in running.text
    await gone(conn)


async def test_a_signal_while_it_drains_for_new_code_ends_it_once(clone, dsn, conn):
    (clone / "mine" / "publish.py").write_text(WAITING.format(version="v1"))
    await conn.execute("create table public.released ()")
    with developing(clone, dsn) as running:
        await running.has_started(1)
        job = await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
        await eventually(lambda: conn.fetchval("select status = 'running' from reactor.jobs where id = $1", job))
        running.write("v2")
        await running.says('"event": "stopping"')
        running.process.send_signal(signal.SIGTERM)
        await conn.execute("insert into public.released default values")

        assert await running.ends() == 0
        assert running.events("stopped_at_once") == []
        row = await conn.fetchrow("select status, attempts from reactor.jobs where id = $1", job)
        assert tuple(row) == ("done", 1)
    await gone(conn)


@pytest.mark.parametrize("death", ["killed", "its own doing"])
async def test_a_reactor_that_dies_is_said_and_starts_again_at_the_next_change_only(clone, dsn, conn, death):
    if death == "its own doing":
        (clone / "mine" / "publish.py").write_text(DYING)
    with developing(clone, dsn, REACTOR_LEASE_S="1") as running:
        await running.has_started(1)
        if death == "killed":
            pid = int(running.events("started")[0].get("pid") or child_of(running.process.pid))
            os.kill(pid, signal.SIGKILL)
            await running.says(r"the reactor ended by itself \(SIGKILL\): it starts again at the next change")
        else:
            await conn.fetchval("select reactor.enqueue('publish', '{}', 'sol')")
            await running.says(r"the reactor ended by itself \(exit code 3\): it starts again at the next change")
        await gone(conn)
        (running.mine / "publish.py").write_text("async def publish(job)\n")
        await running.says("publish.py changed: .*: nothing runs until that changes")
        assert len(running.events("started")) == 1

        running.write("v2")
        assert await published(conn) == "v2"
        assert len(running.events("started")) == 2


def child_of(pid: int) -> int:
    """The one process it started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=True)
    [child, *_] = [line for line in listed.stdout.split() if line]
    return int(child)


async def test_a_reactor_that_does_not_stop_is_killed(monkeypatch, tmp_path):
    said: list[str] = []
    is_deaf = tmp_path / "deaf"
    deaf = f"import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); pathlib.Path({str(is_deaf)!r}).touch(); time.sleep(600)"
    monkeypatch.setattr(dev, "_command", lambda _words: [sys.executable, "-c", deaf])
    process = dev._Reactor(dict(os.environ), patience_s=0.5, say=said.append)
    with anyio.fail_after(30):
        await process.start()
        while not is_deaf.exists():
            await anyio.sleep(0.02)
        await process.stop()

    assert not process.is_running
    assert said == ["the reactor does not stop: it is killed, and its jobs run again when their leases end"]


# --- places ---


async def test_it_works_on_the_embedded_server_with_tables_for_producers(clone, tmp_path):
    home = {"REACTOR_HOME": str(tmp_path / "home")}
    with developing(clone, None, **home) as running:
        await running.has_started(1)
        running.write("v2")
        await running.has_started(2)
        status = command("status", "--json", cwd=clone, PYTHONPATH=str(clone), **home)
        assert json.loads(status.stdout)["sources"] >= 2

        running.process.send_signal(signal.SIGINT)
        assert await running.ends() == 0


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        ({"REACTOR_HANDLERS": "nowhere"}, 2, "REACTOR_HANDLERS: nowhere is not a folder"),
        ({"REACTOR_LEASE_S": "muito"}, 2, "REACTOR_LEASE_S: "),
        ({"DATABASE_URL": "mysql://u:hunter2@h/d"}, 2, "DATABASE_URL: "),
        ({"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/d"}, 1, "Postgres is out of reach"),
    ],
)
async def test_a_wrong_environment_is_one_line_and_no_start(clone, dsn, env, code, words):
    with developing(clone, **{"dsn": dsn, **env}) as running:
        assert await running.ends() == code

        assert running.words == [line for line in running.words if line.startswith(f"reactor: {words}")]
        assert len(running.words) == 1
        assert "hunter2" not in running.text
