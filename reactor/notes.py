"""Brings what agents write down into Postgres, at once or in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import anyio

from reactor.db import Pool, borrowed
from reactor.errors import Unavailable
from reactor.listener import Wakeup
from reactor.log import Log
from reactor.text import clean, clean_json, is_blank

_MOST_WAITING = 1000
_MOST_AT_ONCE = 200
_TIMEOUT_S = 5.0
_TENANT_LENGTH = 200
_KIND_LENGTH = 100


@dataclass(frozen=True, slots=True, eq=False)
class Note:
    """A note as it will be stored."""

    tenant_id: str
    text: str
    kind: str
    metadata: dict[str, Any]


def new_note(tenant_id: str, text: str, kind: str, metadata: Mapping[str, Any] | None) -> Note:
    """The note, cleaned for Postgres.

    Raises:
        ValueError, TypeError: The text or kind is blank, or one of them is not what it should be.
    """
    if is_blank(checked_text("text", text)):
        raise ValueError("there is nothing to remember in a blank text")
    if is_blank(checked_text("kind", kind)) or len(kind) > _KIND_LENGTH:
        raise ValueError(f"a note needs a kind, of at most {_KIND_LENGTH} characters")
    return Note(checked_tenant(tenant_id), clean(text), clean(kind), checked_metadata(metadata) or {})


def checked_text(name: str, value: str) -> str:
    """`value`, which is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, not {type(value).__name__}")
    return value


def checked_tenant(tenant_id: str) -> str:
    """`tenant_id`, which names a tenant as it stands."""
    if not 0 < len(checked_text("tenant_id", tenant_id)) <= _TENANT_LENGTH or clean(tenant_id) != tenant_id:
        raise ValueError(f"a tenant is a text of 1 to {_TENANT_LENGTH} characters, without NUL and lone surrogates")
    return tenant_id


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`metadata` as a JSON object of our own."""
    if metadata is None:
        return None
    cleaned: dict[str, Any] = clean_json(dict(metadata))
    return cleaned


class Notes:
    """Writes notes through a pool; those that may wait stand in a bounded line while `run` runs.

    A note whose connection is lost in the very commit is written again: twice rather than never.
    """

    def __init__(self, pool: Pool, *, log: Log) -> None:
        self._pool = pool
        self._log = log
        self._waiting: deque[Note] = deque()
        self._bell = Wakeup()
        self._is_closed = False
        self.lost = 0

    async def write(self, note: Note) -> int:
        """Write one note and return its id.

        Raises:
            Unavailable: Postgres is out of reach; nothing was written.
        """
        [note_id] = await self._insert([note])
        return note_id

    def write_soon(self, note: Note) -> bool:
        """Let the note wait for `run`; False when it was lost."""
        if self._is_closed or len(self._waiting) >= _MOST_WAITING:
            self.lose(1, "closed" if self._is_closed else "buffer_full")
            return False
        self._waiting.append(note)
        self._bell.ring()
        return True

    def lose(self, count: int, error_code: str) -> None:
        """Count and log a loss."""
        self.lost += count
        self._log.error("notes_lost", error_code=error_code, lost=count, lost_in_all=self.lost)

    async def run(self) -> None:
        """Write what waits, oldest first, through outages, until closed and nothing waits."""
        delay_s = 0.1
        while self._waiting or not self._is_closed:
            self._bell.clear()
            try:
                if self._waiting:
                    await self._write_some()
                else:
                    await self._bell.wait(3600.0)
                delay_s = 0.1
            except Unavailable:
                await anyio.sleep(delay_s)
                delay_s = min(delay_s * 2, 1.0)

    def close(self) -> None:
        """Take no more notes, and let `run` end once the line is empty."""
        self._is_closed = True
        self._bell.ring()

    def give_up(self) -> None:
        """Count what still waits as lost."""
        if self._waiting:
            self.lose(len(self._waiting), "closed")
            self._waiting.clear()

    async def _write_some(self) -> None:
        """Write the oldest note and those of its tenant close behind it; one that Postgres refuses is lost alone."""
        tenant_id = self._waiting[0].tenant_id
        some = [note for note in islice(self._waiting, _MOST_AT_ONCE) if note.tenant_id == tenant_id]
        refusal = await self._refusal_of(some)
        if refusal is not None:
            some = some[:1]
            refusal = await self._refusal_of(some)
        if refusal is not None:
            self.lose(1, type(refusal).__name__)
        self._waiting = deque(note for note in self._waiting if note not in some)

    async def _refusal_of(self, notes: Sequence[Note]) -> Exception | None:
        try:
            await self._insert(notes)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, other notes must not wait behind it
            return exc
        return None

    async def _insert(self, notes: Sequence[Note]) -> list[int]:
        async with borrowed(self._pool, _TIMEOUT_S) as conn:
            rows = await conn.fetch(
                "select id from reactor.write_notes($1, $2, $3, $4) id",
                notes[0].tenant_id,
                [note.kind for note in notes],
                [note.text for note in notes],
                [note.metadata for note in notes],
            )
            return [row["id"] for row in rows]
