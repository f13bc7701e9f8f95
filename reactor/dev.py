"""`reactor dev`: a reactor that starts again when its handlers or SQL change, unless they are broken."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from watchfiles import Change, DefaultFilter, awatch

from reactor.db import SQL_FOLDER
from reactor.errors import Misuse
from reactor.listener import Wakeup
from reactor.loading import BUILT_IN
from reactor.settings import Settings

_TOGETHER_MS = 300  # saves this close are one change
_TRY_S = 60.0  # a module may wait for something while it is imported
_AGAIN_S = 5.0  # until the next try of what may pass without a change
_STOP_S = 20.0  # what a reactor may take beyond its drain
_MOST_NAMES = 3


async def run_dev(settings: Settings, dsn: str, *, say: Callable[[str], None]) -> None:
    """Run a reactor in a process of its own until a signal; replace it after each change that loads.

    The new code is tried in yet another process first, and the old one is drained before it goes. A second signal
    hurries the drain.

    Raises:
        Misuse: REACTOR_HANDLERS names no folder.
    """
    if settings.handlers is not None and not settings.handlers.is_dir():
        raise Misuse(f"REACTOR_HANDLERS: {settings.handlers} is not a folder")
    # A compiled module is told from its source by size and second: the later of two edits within one would be lost.
    environment = os.environ | {"DATABASE_URL": dsn, "PYTHONDONTWRITEBYTECODE": "1"}
    reactor = _Reactor(environment, patience_s=settings.drain_s + _STOP_S, say=say)
    trial = _command(["prepare", *(["--with-tables"] if settings.database_url is None else [])])
    changes = _Changes(folder for folder in (Path(__file__).parent, BUILT_IN, SQL_FOLDER, settings.handlers) if folder)
    async with anyio.create_task_group() as tasks:
        try:
            with anyio.CancelScope() as working:
                tasks.start_soon(_obey_signals, working, reactor)
                async with anyio.create_task_group() as watching:
                    watching.start_soon(changes.watch)
                    watching.start_soon(reactor.say_its_end)
                    await _keep_up(reactor, changes, trial, say)
        finally:
            with anyio.CancelScope(shield=True):
                await reactor.stop()
            tasks.cancel_scope.cancel()


async def _keep_up(reactor: _Reactor, changes: _Changes, trial: Sequence[str], say: Callable[[str], None]) -> None:
    await anyio.lowlevel.checkpoint()  # watched before they are read
    what, said, is_first = "", "", True
    while True:
        problem = await _problem(trial, reactor.environment)
        if problem is None:
            if not is_first:
                say(f"{what}starting again")
            await reactor.stop()
            await reactor.start()
            said = ""
        elif problem.words != said:
            said = problem.words
            still = "the last good code keeps running" if reactor.is_running else "nothing runs until that changes"
            say(f"{what}{problem.words}: {still}")
        if is_first:
            say(f"watching {', '.join(changes.folders)}")
        names = await changes.wait(_AGAIN_S if problem and problem.may_pass else math.inf)
        what, said, is_first = (f"{names} changed: ", "", False) if names else ("", said, False)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why the code on disk is not run."""

    words: str
    may_pass: bool  # without a change of the code: Postgres is away, a table is locked


async def _problem(trial: Sequence[str], environment: Mapping[str, str]) -> _Problem | None:
    with anyio.move_on_after(_TRY_S):
        tried = await anyio.run_process(trial, env=environment, check=False, stdin=subprocess.DEVNULL)
        if tried.returncode == 0:
            return None
        lines = tried.stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
        ours = [line.removeprefix("reactor: ") for line in lines if line.startswith("reactor: ")]
        if ours:
            return _Problem(ours[-1], may_pass=tried.returncode == 1)
        places = [":".join(found.groups()) for line in lines if (found := re.match(r' *File "(.+)", line (\d+)', line))]
        return _Problem(": ".join([*places[-1:], lines[-1]]), may_pass=False)  # Python's own words: where, and how
    return _Problem(f"it does not load or migrate within {_TRY_S:.0f} seconds", may_pass=True)


class _Reactor:
    """The process that is the reactor."""

    def __init__(self, environment: Mapping[str, str], *, patience_s: float, say: Callable[[str], None]) -> None:
        self.environment = environment
        self._patience_s = patience_s
        self._say = say
        self._process: anyio.abc.Process | None = None
        self._is_stopping = False
        self._started = Wakeup()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        # A session of its own: Ctrl-C reaches this process, which drains the other.
        with anyio.CancelScope(shield=True):
            self._process = await anyio.open_process(
                _command(["run"]),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=None,
                stderr=None,
                start_new_session=True,
            )
        self._is_stopping = False
        self._started.ring()

    async def stop(self) -> None:
        """Drain it; one that does not come to an end is killed."""
        if self._process is None:
            return
        if not self._is_stopping:  # or its drain is under way already
            self._is_stopping = True
            self.hurry()
        with anyio.move_on_after(self._patience_s):
            await self._process.wait()
        if self.is_running:
            self._say("the reactor does not stop: it is killed, and its jobs run again when their leases end")
            self._process.kill()
            await self._process.wait()

    def hurry(self) -> None:
        """Ask it to stop; asked twice, it stops at once."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    async def say_its_end(self) -> None:
        """Until cancelled: an end that nobody asked for is said."""
        while True:
            await self._started.wait(math.inf)
            self._started.clear()
            if (process := self._process) is not None:
                code = await process.wait()
                if process is self._process and not self._is_stopping:
                    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
                    self._say(f"the reactor ended by itself ({how}): it starts again at the next change")


class _Changes:
    """The Python and SQL files that changed in some folders, also while nobody waits, also where one was replaced."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.folders = [str(folder.resolve()) for folder in folders]
        self._names: set[str] = set()
        self._bell = Wakeup()

    async def wait(self, timeout_s: float) -> str:
        """The names of what changed since the last answer; '' when nothing does for `timeout_s`."""
        await self._bell.wait(timeout_s)
        self._bell.clear()
        names, self._names = sorted(self._names), set()
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more

    async def watch(self) -> None:
        """Until cancelled."""
        gone: set[str] = set()
        while True:
            if not all(map(os.path.isdir, self.folders)):
                await anyio.sleep(0.1)
                continue
            self._ring(gone)  # what is in the new one is not known
            found = awatch(*self.folders, watch_filter=_CodeOnly(self.folders), debounce=_TOGETHER_MS)
            with suppress(FileNotFoundError):
                async with aclosing(found):
                    async for changes in found:
                        paths = {path for _, path in changes}
                        self._ring(paths)
                        if gone := paths & set(self.folders):  # the watch went with the old folder
                            break

    def _ring(self, paths: Iterable[str]) -> None:
        names = {Path(path).name for path in paths}
        if names:
            self._names |= names
            self._bell.ring()


class _CodeOnly(DefaultFilter):
    """Python and SQL files, but not what editors leave beside them; the folders themselves when they are replaced."""

    def __init__(self, folders: Iterable[str]) -> None:
        super().__init__()
        self._folders = set(folders)

    def __call__(self, change: Change, path: str) -> bool:
        if path in self._folders:
            return change != Change.modified
        return path.endswith((".py", ".sql")) and super().__call__(change, path)


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "reactor", *words]


async def _obey_signals(working: anyio.CancelScope, reactor: _Reactor) -> None:
    wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    with anyio.open_signal_receiver(*(one for one in wanted if signal.getsignal(one) is not signal.SIG_IGN)) as signals:
        async for _ in signals:
            if working.cancel_called:
                reactor.hurry()
            working.cancel()
