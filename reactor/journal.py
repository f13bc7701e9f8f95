"""Keeps the answers of providers on durable disk before anybody interprets them.

A provider that rotates has spent the old refresh token once it answers: if Postgres is down just then, or the process
dies, the answer in this folder is all that is left of the account's connection. So room is reserved before the call,
the raw answer is on the disk before it is read, and it goes once the database has it. The functions block on the disk:
call them in a thread. The folder wants a local disk of Linux or macOS, where flock works and fsync means it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from reactor.errors import Unavailable
from reactor.sealing import KeyMissing, Keys, SealBroken, key_id_of

_ROOM_BYTES = 64 * 1024
_FORGOTTEN_S = 86_400.0  # a call takes a minute at most
_ATTEMPT = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PROCESS = re.compile(r"[0-9a-f]{32}")
_HOST = re.compile(r"[0-9a-f]{8}")


class Journal:
    """One folder of answers, shared by the reactors of a host. Folder 0700, files 0600, whatever the umask.

    `host` names this journal, `<hostname>/<8 hex>`. The hex stays in the folder; the hostname is today's, so that a
    copied folder is not taken for its original. `process` names this opening of it.

    A process lives while somebody holds the lock on its file. A child made by os.fork without exec holds it too: then
    the parent is taken for alive until the child is gone.

    Args:
        folder: Made where it is missing, its parents too.
        keys: What entries are sealed with; None: they are plain.

    Raises:
        Unavailable: The folder cannot be made or written, code `journal`.
    """

    def __init__(self, folder: Path, keys: Keys | None) -> None:
        self._folder = folder
        self._keys = keys
        self.process = uuid.uuid4().hex
        with _on_disk("written"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            with self._opening():
                self.host = f"{socket.gethostname()}/{self._host_hex()}"
                for path in folder.glob("*.reserved"):  # of attempts that died, or that another host has ended since
                    is_old = path.stat().st_mtime < time.time() - _FORGOTTEN_S
                    if is_old and _ATTEMPT.fullmatch(path.stem) and not self._is_answer_below(path.stem):
                        path.unlink(missing_ok=True)
                self._alive: int | None = _create(self._alive_file(self.process))
                fcntl.flock(self._alive, fcntl.LOCK_EX)

    def close(self) -> None:
        """Be no longer alive. Entries stay."""
        if self._alive is None:
            return
        with suppress(OSError):  # the next to open removes it otherwise
            self._alive_file(self.process).unlink()
        os.close(self._alive)
        self._alive = None

    def is_alive(self, process: str) -> bool:
        """Whether the process that opened this folder under that id still lives. False for what is no such id."""
        if process == self.process:
            return self._alive is not None
        if _PROCESS.fullmatch(process) is None:
            return False
        with _on_disk("read"):
            return _is_locked(self._alive_file(process))

    def dead(self) -> list[str]:
        """The processes that opened this folder and died without closing it, until they are buried."""
        with _on_disk("read"):
            return [path.stem for path in self._folder.glob("*.alive") if not _is_locked(path)]

    def bury(self, process: str) -> None:
        """Forget a dead process: what it left was seen to."""
        if _PROCESS.fullmatch(process) is not None and not self.is_alive(process):
            with _on_disk("written"):
                self._alive_file(process).unlink(missing_ok=True)

    def reserve(self, attempt: str) -> None:
        """Take the room for an answer, so that a full or read-only disk is found before a token is spent.

        Raises:
            Unavailable: The journal cannot be written, code `journal`: do not call the provider.
            ValueError: `attempt` is no uuid.
        """
        path = self._reserved(attempt)
        with _on_disk("written"):
            fd = _create(path)
            try:
                _allocate(fd)
                _sync(fd)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)

    def write(self, attempt: str, entry: dict[str, Any]) -> None:
        """Put the answer on the disk for good; once this returns, a crash does not lose it. Again: the last one holds.

        An entry is anything JSON can hold; bytes are the caller's to encode.

        Raises:
            Unavailable: The journal cannot be written, code `journal`. The answer is real all the same: save it.
            ValueError: `attempt` is no uuid.
        """
        reserved, answer = self._reserved(attempt), self._answer(attempt)
        text = json.dumps(entry)  # in ASCII: no text of a provider can fail to be written
        if self._keys is not None:
            text = self._keys.seal(text, tenant_id="", integration="", account=attempt, purpose="journal")
        content = text.encode()
        with _on_disk("written"):
            fd = _open(reserved, os.O_WRONLY | os.O_CREAT)
            try:
                _write_all(fd, content)
                os.ftruncate(fd, len(content))
                _sync(fd)
            finally:
                os.close(fd)
            reserved.rename(answer)
            self._sync_folder()

    def read(self, attempt: str) -> dict[str, Any] | None:
        """The entry of an attempt; None where there is no answer.

        An answer that was written whole counts, even where death came before the file had its last name.

        Raises:
            KeyMissing: It was sealed with a key that is not here. The file stays.
            SealBroken: It is torn, or was changed. The file stays.
            Unavailable: The disk does not answer, code `journal`.
            ValueError: `attempt` is no uuid.
        """
        answer, reserved = self._answer(attempt), self._reserved(attempt)
        with _on_disk("read"):
            # A writer may give the file its last name between two looks, hence a third.
            for path in (answer, reserved, answer):
                with suppress(FileNotFoundError):
                    content = path.read_bytes()
                    if path is answer:
                        return self._entry_of(attempt, content)
                    with suppress(SealBroken):  # still being written, or death cut it short
                        return self._entry_of(attempt, content.rstrip(b"\0"))
        return None

    def entries(self) -> list[str]:
        """The attempts that have an answer, oldest first. Those whose answer cannot be opened are among them."""
        found: dict[str, int] = {}
        with _on_disk("read"):
            for path in self._folder.iterdir():
                attempt, suffix = path.stem, path.suffix
                if suffix not in {".answer", ".reserved"} or _ATTEMPT.fullmatch(attempt) is None:
                    continue
                if suffix == ".answer" or self._is_answer_below(attempt):
                    with suppress(FileNotFoundError):  # forgotten, or renamed, a moment ago
                        found[attempt] = path.stat().st_mtime_ns
        return sorted(found, key=lambda attempt: (found[attempt], attempt))

    def forget(self, attempt: str) -> None:
        """Remove the entry of an attempt and its room, where they are.

        After a power failure it may be back: replaying it changes nothing, as its version has passed.

        Raises:
            Unavailable: The journal cannot be written, code `journal`.
            ValueError: `attempt` is no uuid.
        """
        paths = self._reserved(attempt), self._answer(attempt)
        with _on_disk("written"):
            for path in paths:
                path.unlink(missing_ok=True)

    def _is_answer_below(self, attempt: str) -> bool:
        try:
            return self.read(attempt) is not None
        except (KeyMissing, SealBroken):
            return True

    def _entry_of(self, attempt: str, content: bytes) -> dict[str, Any]:
        # An error of json or UTF-8 carries the content: it is dropped before ours is raised.
        entry: object = None
        with suppress(ValueError):
            text = content.decode()
            if not text.startswith("{"):
                text = self._opened(attempt, text)
            entry = json.loads(text)
        if not isinstance(entry, dict):
            raise SealBroken("the entry in the journal is torn")
        return entry

    def _opened(self, attempt: str, sealed: str) -> str:
        if self._keys is None:
            raise KeyMissing(key_id_of(sealed))
        return self._keys.open(sealed, tenant_id="", integration="", account=attempt, purpose="journal")

    def _host_hex(self) -> str:
        path = self._folder / "host"
        with suppress(FileNotFoundError):
            kept = path.read_text("ascii", errors="replace")
            if _HOST.fullmatch(kept):
                return kept
        made = uuid.uuid4().hex[:8]
        unnamed = self._folder / "host.new"
        fd = _create(unnamed)
        try:
            _write_all(fd, made.encode())
            _sync(fd)
        finally:
            os.close(fd)
        unnamed.rename(path)
        self._sync_folder()
        return made

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """One process opens the folder at a time: they agree on the host, and none is seen before it holds its lock."""
        fd = _create(self._folder / "lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            _sync(fd)
        finally:
            os.close(fd)

    def _reserved(self, attempt: str) -> Path:
        return self._folder / f"{_checked(attempt)}.reserved"

    def _answer(self, attempt: str) -> Path:
        return self._folder / f"{_checked(attempt)}.answer"

    def _alive_file(self, process: str) -> Path:
        return self._folder / f"{process}.alive"


@contextmanager
def _on_disk(done: str) -> Iterator[None]:
    """Turns an error of the disk into ours."""
    try:
        yield
    except OSError as exc:
        raise Unavailable(f"the journal cannot be {done}: {exc.strerror}", code="journal") from exc


def _checked(attempt: str) -> str:
    if _ATTEMPT.fullmatch(attempt) is None:  # it becomes a file's name
        raise ValueError("the id of an attempt is a uuid, in lower case with its hyphens")
    return attempt


def _open(path: Path, flags: int) -> int:
    fd = os.open(path, flags, 0o600)
    os.fchmod(fd, 0o600)  # a umask may have taken more
    return fd


def _create(path: Path) -> int:
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)


def _is_locked(path: Path) -> bool:
    """Whether somebody holds the lock on a process's file. Lookers share theirs, so none takes another for it."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(fd)


def _allocate(fd: int) -> None:
    """Makes the file's room its own: a hole would find the disk full only when the answer is written."""
    if sys.platform != "darwin":
        with suppress(OSError):  # no such call on this file system; what is wrong with the disk shows below
            os.posix_fallocate(fd, 0, _ROOM_BYTES)
            return
    _write_all(fd, bytes(_ROOM_BYTES))


def _write_all(fd: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left) :]


def _sync(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # its fsync stops at the drive's own cache
    else:
        os.fsync(fd)
