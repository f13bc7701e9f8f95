"""Answers survive the death of whoever wrote them, and the living are told from the dead. Real processes, kill -9."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from reactor.errors import Unavailable
from reactor.journal import Journal
from reactor.sealing import KeyMissing, Keys, SealBroken, generate

PRIVATE, _ = generate()
KEYS = Keys.parse(PRIVATE)
CANARY = "canary-EAAG-5b1c"
ENTRY = {"status": 200, "body": CANARY, "half": "\ud83d"}
ATTEMPT = "0b0c7d3e-4f5a-4b6c-8d7e-9f0a1b2c3d4e"

OPEN = """
import os, signal, subprocess, sys
from pathlib import Path
from reactor import journal as module
from reactor.sealing import Keys
folder, private, attempt = sys.argv[1:]
journal = module.Journal(Path(folder), Keys.parse(private) if private else None)
print(journal.process, journal.host, flush=True)
"""
WAIT = "sys.stdin.read()\n"


@pytest.fixture(params=["sealed", "plain"])
def private(request):
    return PRIVATE if request.param == "sealed" else ""


@pytest.fixture
def journal(tmp_path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path / "journal", KEYS)) as journal:
        yield journal


@contextlib.contextmanager
def child(code: str, folder: Path, private: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process of its own; killed on the way out if it still lives."""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder), private, ATTEMPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def opened_by(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The child's `process` and `host`, once it has opened the journal."""
    process_id, host = process.stdout.readline().split()
    return process_id, host


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix in {".answer", ".reserved"}}


def test_an_entry_comes_back_as_it_was_and_is_gone_when_forgotten(journal, tmp_path):
    journal.reserve(ATTEMPT)
    assert journal.read(ATTEMPT) is None

    journal.write(ATTEMPT, ENTRY)
    assert journal.read(ATTEMPT) == ENTRY
    assert journal.entries() == [ATTEMPT]
    assert names(tmp_path / "journal") == {f"{ATTEMPT}.answer"}

    journal.forget(ATTEMPT)
    journal.forget(ATTEMPT)
    assert journal.read(ATTEMPT) is None
    assert journal.entries() == []
    assert names(tmp_path / "journal") == set()


def test_a_reservation_is_no_entry_holds_its_room_for_real_and_goes_when_forgotten(journal, tmp_path):
    journal.reserve(ATTEMPT)

    stat = (tmp_path / "journal" / f"{ATTEMPT}.reserved").stat()
    assert (stat.st_size, stat.st_blocks * 512 >= 65536) == (65536, True)
    assert journal.entries() == []
    journal.forget(ATTEMPT)
    assert names(tmp_path / "journal") == set()


@pytest.mark.parametrize("entry", [{}, {"body": "x" * 300_000}])
def test_an_answer_smaller_or_larger_than_its_room_is_kept_whole_and_leaves_no_more_than_itself(tmp_path, entry):
    journal = Journal(tmp_path, None)
    journal.reserve(ATTEMPT)

    journal.write(ATTEMPT, entry)

    assert journal.read(ATTEMPT) == entry
    assert (tmp_path / f"{ATTEMPT}.answer").read_bytes().endswith(b"}")
    journal.close()


def test_an_answer_without_a_reservation_and_a_second_answer_are_kept_too(journal):
    journal.write(ATTEMPT, {"n": 1})
    journal.write(ATTEMPT, {"n": 2})

    assert journal.read(ATTEMPT) == {"n": 2}
    assert journal.entries() == [ATTEMPT]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("where", "is_kept"),
    [
        ("module._write_all = lambda fd, content: KILL", False),
        ("module._write_all = lambda fd, content: (os.write(fd, content[: len(content) // 2]), KILL)", False),
        ("module._write_all = lambda fd, content: (os.write(fd, content[:-1]), KILL)", False),
        ("os.ftruncate = lambda *_: KILL", True),
        ("module._sync = lambda fd: KILL", True),
        ("Path.rename = lambda *_: KILL", True),
        ("module.Journal._sync_folder = lambda _: KILL", True),
        ("", True),
    ],
)
def test_kill_9_at_every_step_of_writing_leaves_the_whole_answer_or_none(tmp_path, private, where, is_kept):
    write = f"journal.reserve(attempt)\n{where}\njournal.write(attempt, {ENTRY!r})\nKILL\n".replace("KILL", KILL)
    with child(OPEN + write, tmp_path, private) as process:
        assert process.wait(60) == -signal.SIGKILL

    journal = Journal(tmp_path, KEYS if private else None)
    assert journal.read(ATTEMPT) == (ENTRY if is_kept else None)
    assert journal.entries() == ([ATTEMPT] if is_kept else [])
    journal.forget(ATTEMPT)
    assert names(tmp_path) == set()
    journal.close()


def test_kill_9_between_reserving_and_answering_leaves_no_entry(tmp_path, private):
    with child(f"{OPEN}journal.reserve(attempt)\n{KILL}", tmp_path, private) as process:
        assert process.wait(60) == -signal.SIGKILL

    journal = Journal(tmp_path, KEYS)
    assert names(tmp_path) == {f"{ATTEMPT}.reserved"}
    assert journal.entries() == []
    assert journal.read(ATTEMPT) is None
    journal.close()


def test_an_answer_named_between_two_looks_of_a_reader_is_found(journal, tmp_path, monkeypatch):
    journal.write(ATTEMPT, ENTRY)
    answer = tmp_path / "journal" / f"{ATTEMPT}.answer"
    reserved = answer.with_suffix(".reserved")
    answer.rename(reserved)
    read_bytes = Path.read_bytes

    def named_after_the_first_look(path):
        try:
            return read_bytes(path)
        finally:
            if reserved.exists():
                reserved.rename(answer)

    monkeypatch.setattr(Path, "read_bytes", named_after_the_first_look)

    assert journal.read(ATTEMPT) == ENTRY


def test_entries_come_oldest_first_whatever_their_names(journal, tmp_path):
    attempts = [str(uuid.UUID(int=number)) for number in (2, 3, 1)]
    for at, attempt in enumerate(attempts):
        journal.write(attempt, {})
        os.utime(tmp_path / "journal" / f"{attempt}.answer", (at, at))

    assert journal.entries() == attempts


def test_a_process_is_alive_until_it_is_killed(journal, tmp_path):
    with child(OPEN + WAIT, tmp_path / "journal") as process:
        other, host = opened_by(process)
        assert host == journal.host
        assert journal.is_alive(other)
        process.send_signal(signal.SIGSTOP)
        assert journal.is_alive(other)

        process.kill()
        process.wait(60)
        assert not journal.is_alive(other)


def test_a_killed_process_is_dead_although_a_program_it_started_lives_on(journal, tmp_path):
    orphan = "print(subprocess.Popen(['sleep', '1000'], close_fds=False, stdout=2).pid, flush=True)\n"
    with child(OPEN + orphan + WAIT, tmp_path / "journal") as process:
        other, _ = opened_by(process)
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(60)
        try:
            os.kill(pid, 0)
            assert not journal.is_alive(other)
        finally:
            os.kill(pid, signal.SIGKILL)


def test_the_dead_are_told_from_the_living_until_they_are_buried(journal, tmp_path):
    with child(OPEN + WAIT, tmp_path / "journal") as living, child(OPEN + KILL, tmp_path / "journal") as dying:
        alive, dead = opened_by(living)[0], opened_by(dying)[0]
        dying.wait(60)

        late = Journal(tmp_path / "journal", None)

        assert late.dead() == [dead]
        for process in (dead, alive):
            late.bury(process)
        assert late.dead() == []
        assert {path.stem for path in (tmp_path / "journal").glob("*.alive")} == {journal.process, alive, late.process}
        assert [late.is_alive(process) for process in (journal.process, alive, late.process, dead)] == [
            True,
            True,
            True,
            False,
        ]
        late.close()
        assert not journal.is_alive(late.process)
        assert not late.is_alive(late.process)


def test_lookers_do_not_take_one_another_for_the_living(journal, tmp_path):
    with child(OPEN + KILL, tmp_path / "journal") as process:
        dead, _ = opened_by(process)
        process.wait(60)
    with (tmp_path / "journal" / f"{dead}.alive").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as another process's look does

        assert not journal.is_alive(dead)


@pytest.mark.parametrize("process", ["", "..", "../journal/LIVING", "LIVING\n", "a" * 31, "0" * 32])
def test_nobody_lives_under_an_id_that_nobody_has(journal, tmp_path, process):
    living = Journal(tmp_path / "journal", None)

    assert not journal.is_alive(process.replace("LIVING", living.process))
    assert journal.is_alive(living.process)
    living.close()


def test_many_processes_that_open_a_new_journal_at_once_agree_on_its_host_and_see_each_other(tmp_path):
    folder = tmp_path / "home" / "journal"
    at_once = OPEN.replace("journal = module", "print(flush=True); sys.stdin.readline()\njournal = module")
    look = "print(all(journal.is_alive(p) for p in sys.stdin.readline().split()), flush=True)\n"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(child(at_once + look + WAIT, folder)) for _ in range(6)]
        for process in processes:
            process.stdout.readline()  # up to the line before opening
        for process in processes:
            print(file=process.stdin, flush=True)
        ids, hosts = zip(*map(opened_by, processes), strict=True)
        for process in processes:
            print(*ids, file=process.stdin, flush=True)

        assert [process.stdout.readline().strip() for process in processes] == ["True"] * 6
        assert len(set(ids)) == 6
        assert len(set(hosts)) == 1
    later = Journal(folder, None)
    assert later.host == hosts[0]
    assert re.fullmatch(r".+/[0-9a-f]{8}", later.host)
    later.close()


@pytest.mark.parametrize("kept", ["", "not hex!", "0123abc", "0123abcd\n"])
def test_a_damaged_host_file_is_made_anew_and_then_holds(tmp_path, kept):
    (tmp_path / "host").write_text(kept)

    one, two = Journal(tmp_path, None), Journal(tmp_path, None)

    assert re.fullmatch(r".+/[0-9a-f]{8}", one.host)
    assert one.host == two.host
    one.close()
    two.close()


def test_the_host_is_named_by_todays_hostname_so_that_a_copied_folder_is_another(tmp_path, monkeypatch):
    one = Journal(tmp_path, None)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")

    two = Journal(tmp_path, None)

    assert two.host == f"elsewhere/{one.host.rpartition('/')[2]}" != one.host
    one.close()
    two.close()


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_nobody_else_may_read_whatever_the_umask(tmp_path, umask):
    folder = tmp_path / "journal"
    before = os.umask(umask)
    try:
        journal = Journal(folder, None)
        journal.reserve(ATTEMPT)
        journal.write(str(uuid.UUID(int=1)), {})
    finally:
        os.umask(before)

    assert folder.stat().st_mode & 0o7777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o7777 for path in folder.iterdir()}
    assert len(modes) == 5  # lock, host, alive, reserved, answer
    assert set(modes.values()) == {0o600}
    journal.close()


def test_a_folder_that_stood_open_is_closed(tmp_path):
    tmp_path.chmod(0o755)
    Journal(tmp_path, None).close()

    assert tmp_path.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize(("keys", "is_readable"), [(KEYS, False), (None, True)])
def test_with_keys_no_byte_of_the_folder_holds_the_secret(tmp_path, keys, is_readable):
    journal = Journal(tmp_path, keys)
    journal.reserve(ATTEMPT)
    journal.write(ATTEMPT, ENTRY)

    assert any(CANARY.encode() in path.read_bytes() for path in tmp_path.iterdir()) is is_readable
    journal.close()


@pytest.mark.parametrize("keys", [None, Keys.parse(generate()[0])])
def test_an_entry_whose_key_is_gone_says_which_key_and_stays(journal, tmp_path, keys):
    journal.write(ATTEMPT, ENTRY)
    without = Journal(tmp_path / "journal", keys)

    with pytest.raises(KeyMissing) as caught:
        without.read(ATTEMPT)

    assert caught.value.key_id == KEYS.key_id
    assert without.entries() == [ATTEMPT]
    assert journal.read(ATTEMPT) == ENTRY
    without.close()


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"{", b'{"body": "' + CANARY.encode(), b"[1]", b"hpke1.00000000.", b"{}x"]
)
@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_torn_entry_is_broken_quotes_nothing_and_stays(tmp_path, keys, content):
    journal = Journal(tmp_path, keys)
    (tmp_path / f"{ATTEMPT}.answer").write_bytes(content)

    with pytest.raises(SealBroken) as caught:
        journal.read(ATTEMPT)

    assert caught.value.__context__ is None  # json's error would hold the content
    assert CANARY not in str(caught.value)
    assert journal.entries() == [ATTEMPT]
    assert (tmp_path / f"{ATTEMPT}.answer").read_bytes() == content
    journal.close()


def test_a_whole_answer_without_its_last_name_is_an_entry_even_where_its_key_is_gone(journal, tmp_path):
    journal.write(ATTEMPT, ENTRY)
    answer = tmp_path / "journal" / f"{ATTEMPT}.answer"
    answer.rename(answer.with_suffix(".reserved"))
    without = Journal(tmp_path / "journal", None)

    assert journal.entries() == without.entries() == [ATTEMPT]
    with pytest.raises(KeyMissing):
        without.read(ATTEMPT)
    without.close()


def test_an_entry_put_in_anothers_place_does_not_open(journal, tmp_path):
    other = str(uuid.UUID(int=1))
    journal.write(ATTEMPT, ENTRY)
    (tmp_path / "journal" / f"{ATTEMPT}.answer").rename(tmp_path / "journal" / f"{other}.answer")

    with pytest.raises(SealBroken):
        journal.read(other)


def test_entries_from_before_there_was_a_key_are_read_with_one(tmp_path):
    plain, keyed = Journal(tmp_path, None), Journal(tmp_path, KEYS)
    plain.write(ATTEMPT, ENTRY)

    assert keyed.read(ATTEMPT) == ENTRY
    plain.close()
    keyed.close()


@pytest.mark.parametrize(
    "attempt",
    ["", "7", "../../etc/passwd", ATTEMPT.upper(), ATTEMPT + "\n", ATTEMPT + "/..", "0" * 32, "{" + ATTEMPT + "}"],
)
def test_an_attempt_that_is_no_uuid_touches_no_file(journal, tmp_path, attempt):
    before = sorted(tmp_path.rglob("*"))

    for act in (journal.reserve, journal.read, journal.forget, lambda attempt: journal.write(attempt, {})):
        with pytest.raises(ValueError, match="is a uuid"):
            act(attempt)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_below_a_file_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(Unavailable, match="the journal cannot be written: Not a directory") as caught:
        Journal(tmp_path / "file" / "journal", None)

    assert caught.value.code == "journal"


REFUSED = """
from reactor.errors import Unavailable
try:
    journal.reserve(attempt)
except Unavailable as exc:
    print(exc.code, exc, flush=True)
"""
READ_ONLY = "os.chmod(folder, 0o500)\nif os.geteuid() == 0: os.seteuid(65534)\n"
NO_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65535, 65535))\n"


@pytest.mark.parametrize(("limit", "why"), [(READ_ONLY, "Permission denied"), (NO_ROOM, "File too large")])
def test_a_folder_without_leave_or_room_to_write_is_found_before_the_provider_is_called(tmp_path, limit, why):
    with child(OPEN + limit + REFUSED, tmp_path) as process:
        opened_by(process)
        assert process.stdout.readline().strip() == f"journal the journal cannot be written: {why}"

    tmp_path.chmod(0o700)
    assert names(tmp_path) == set()


def test_a_file_system_without_allocation_gets_zeros_written(journal, tmp_path, monkeypatch):
    def without(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("os.posix_fallocate", without, raising=False)  # macOS has none

    journal.reserve(ATTEMPT)

    path = tmp_path / "journal" / f"{ATTEMPT}.reserved"
    assert path.read_bytes() == bytes(65536)
    assert path.stat().st_blocks * 512 >= 65536


def test_room_that_no_call_came_back_to_is_given_back_a_day_later_and_an_answer_never(tmp_path):
    folder, old, answered, new = tmp_path / "journal", *(str(uuid.uuid4()) for _ in range(3))
    with contextlib.closing(Journal(folder, KEYS)) as journal:
        for attempt in (old, answered, new):
            journal.reserve(attempt)
        journal.write(answered, ENTRY)
    (folder / f"{answered}.answer").rename(folder / f"{answered}.reserved")  # as death before the last step leaves it
    for attempt in (old, answered):
        os.utime(folder / f"{attempt}.reserved", (0, 0))

    with contextlib.closing(Journal(folder, KEYS)) as journal:
        assert journal.entries() == [answered]
        assert journal.read(answered) == ENTRY
    assert {path.stem for path in folder.glob("*.reserved")} == {answered, new}
