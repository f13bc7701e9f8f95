"""`reactor dev`: a reactor that starts again when its handlers or SQL change, unless they are broken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
from watchfiles import DefaultFilter, awatch

from reactor.db import SQL_FOLDER
from reactor.loading import BUILT_IN
from reactor.settings import Settings


class _CodeOnly(DefaultFilter):
    """Python and SQL files, but not what editors and Python itself leave beside them."""

    def __call__(self, change: object, path: str) -> bool:
        return path.endswith((".py", ".sql")) and super().__call__(change, path)  # type: ignore[arg-type]


def watched(settings: Settings) -> list[Path]:
    """The folders whose changes count: the reactor's own, and the user's handlers."""
    return [folder.resolve() for folder in (Path(__file__).parent, BUILT_IN, SQL_FOLDER, settings.handlers) if folder]


async def run_dev(settings: Settings, dsn: str, *, say: Callable[[str], None]) -> None:
    """Run a reactor in a process of its own until a signal; replace it after each change that loads.

    The new code is tried in yet another process first, and the old one is drained before it goes.
    """
    environment = os.environ | {"DATABASE_URL": dsn}
    process: anyio.abc.Process | None = None
    if await _loads(environment, say):
        process = await _start(environment)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_end_on_signal, tasks.cancel_scope)
        try:
            say("watching " + ", ".join(map(str, watched(settings))))
            async for changes in awatch(*watched(settings), watch_filter=_CodeOnly(), debounce=300):
                names = ", ".join(sorted({Path(path).name for _, path in changes}))
                if not await _loads(environment, say):
                    say(f"{names} changed: the last good code keeps running" if process else f"{names} changed")
                    continue
                say(f"{names} changed: starting again")
                await _stop(process)
                process = await _start(environment)
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


async def _loads(environment: dict[str, str], say: Callable[[str], None]) -> bool:
    """Whether the code on disk migrates and its handlers import; says what is wrong where they do not."""
    for words in (["check-handlers"], ["migrate"]):
        tried = await anyio.run_process(_command(words), env=environment, check=False, stdin=subprocess.DEVNULL)
        if tried.returncode != 0:
            lines = tried.stderr.decode(errors="replace").strip().splitlines()
            say(lines[-1] if lines else f"reactor {words[0]} failed")
            return False
    return True


async def _start(environment: dict[str, str]) -> anyio.abc.Process:
    # A session of its own: Ctrl-C reaches this process, which drains the other.
    return await anyio.open_process(
        _command(["run"]), env=environment, stdin=subprocess.DEVNULL, stdout=None, stderr=None, start_new_session=True
    )


async def _stop(process: anyio.abc.Process | None) -> None:
    if process is not None and process.returncode is None:
        process.terminate()
    if process is not None:
        await process.wait()


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "reactor", *words]


async def _end_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            scope.cancel()
            return
