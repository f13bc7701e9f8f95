"""Servers of a test's own: a cluster to stop, freeze and fill, and a pooler before a database."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import anyio
import psutil
from conftest import eventually

_USER = "pgserver" if os.geteuid() == 0 else None


class Cluster:
    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs = programs
        self.data = folder / "data"
        self.dsn = f"postgresql://postgres@/postgres?host={self.data}"

    def run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self.programs / program, *arguments],
            user=_USER,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )

    def start(self, *options: str) -> None:
        """`options` as in postgresql.conf, for this start."""
        all_options = ("listen_addresses=''", f"unix_socket_directories={self.data}", "fsync=off", *options)
        words = " ".join(f"-c {option}" for option in all_options)
        self.run("pg_ctl", "-w", "-D", str(self.data), "-l", str(self.data / "log"), "-o", words, "start")

    def stop(self, mode: str = "immediate") -> None:
        self.run("pg_ctl", "-w", "-m", mode, "-D", str(self.data), "stop")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        postmaster = psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)


@contextmanager
def own_cluster(programs: Path) -> Iterator[Cluster]:
    """A cluster that runs, with nothing in it."""
    folder = Path(tempfile.mkdtemp(prefix="reactor-cluster-"))
    folder.chmod(0o755)
    cluster = Cluster(programs, folder)
    if _USER is not None:
        shutil.chown(folder, _USER)
    cluster.run(
        "initdb", "-D", str(cluster.data), "-U", "postgres", "--no-locale", "-E", "UTF8", "--no-sync", "-A", "trust"
    )
    cluster.start()
    try:
        yield cluster
    finally:
        with suppress(subprocess.CalledProcessError):
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Pooled(str):
    """A pooler's DSN, and the pooler."""

    __slots__ = ("folder", "process")

    def pools(self, mode: str) -> None:
        """From now on it pools `session`s or `transaction`s."""
        ini = self.folder / "pgbouncer.ini"
        ini.write_text(re.sub(r"pool_mode = \w+", f"pool_mode = {mode}", ini.read_text()))
        self.process.send_signal(signal.SIGHUP)

    def start(self) -> None:
        self.process = subprocess.Popen(
            [shutil.which("pgbouncer"), "-q", str(self.folder / "pgbouncer.ini")], user=_USER, stderr=subprocess.DEVNULL
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()


@asynccontextmanager
async def pgbouncer(server: object, dsn: str, *, mode: str = "transaction", size: int = 2) -> AsyncIterator[Pooled]:
    """pgbouncer over `size` connections of `dsn`'s database."""
    folder = Path(tempfile.mkdtemp(prefix="reactor-pooler-"))
    folder.chmod(0o777)
    database = dsn.partition("?")[0].rpartition("/")[2]
    (folder / "users").write_text('"postgres" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={server.data}\n[pgbouncer]\nlisten_addr =\nunix_socket_dir = {folder}\nlisten_port = 6432\n"
        f"auth_type = trust\nauth_file = {folder}/users\npool_mode = {mode}\ndefault_pool_size = {size}\n"
        "ignore_startup_parameters = extra_float_digits\n"
    )
    pooled = Pooled(f"postgresql://postgres@/{database}?host={folder}&port=6432")
    pooled.folder = folder
    pooled.start()
    try:
        await eventually(lambda: anyio.Path(folder / ".s.PGSQL.6432").exists())
        yield pooled
    finally:
        pooled.stop()
        shutil.rmtree(folder, ignore_errors=True)
