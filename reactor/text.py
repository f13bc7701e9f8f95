"""Makes text fit for Postgres, for comparing questions, and for embedding: cleaned, folded, cut into chunks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unicodedata import category, combining, normalize

QUERY_CHARACTERS = 2000
_WINDOW = 3  # how many chunks' worth of text the splitter sees at once
# What words are written with, and what keeps an emoji whole: the joiner, tags (as in flags), skin tones.
_KEPT = frozenset("#@+\u200d" + "".join(map(chr, [*range(0xE0020, 0xE0080), *range(0x1F3FB, 0x1F400)])))
_EMPTY_GLYPHS = frozenset("\u115f\u1160\u2800\u3164\uffa0")  # letters and a symbol that are drawn as nothing
_LOOSE = re.compile(r"(?<![\w#@+])[#@+]+(?![\w#@+])")  # attached to no word


def clean(text: str) -> str:
    """`text` without what Postgres cannot hold: NUL is removed, a lone surrogate becomes U+FFFD."""
    if "\0" in text:
        text = text.replace("\0", "")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:  # this trip also joins the two halves of a pair into their character
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_json(value: Any, path: str = "$") -> Any:
    """A copy of a JSON value that jsonb holds: text cleaned, NaN and infinity null, tuples lists.

    Of two keys that become the same, the later wins.

    Raises:
        TypeError: Something in it is no JSON; the message names its path.
        ValueError: It is nested too deeply.
    """
    try:
        if isinstance(value, str):
            return clean(value)
        if value is None or isinstance(value, int):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, (list, tuple)):
            return [clean_json(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if not isinstance(value, dict):
            raise TypeError(f"{path}: {type(value).__name__} is not JSON")
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{path}: a JSON object has only text for keys")
        return {clean(key): clean_json(item, f"{path}.{key}") for key, item in value.items()}
    except RecursionError:
        raise ValueError("nested too deeply for JSON") from None


def is_blank(text: str) -> bool:
    """Whether a reader would see nothing: spaces, control and format characters, marks without a letter."""
    return not any(map(_is_visible, text[:64])) and not any(map(_is_visible, set(text[64:])))


def _is_visible(character: str) -> bool:
    kind = category(character)  # unassigned counts as visible: it may be a newer emoji
    return kind[0] not in "ZM" and kind not in ("Cc", "Cf") and character not in _EMPTY_GLYPHS


@lru_cache(maxsize=256)
def normalise_query(query: str) -> str:
    """What questions of equal meaning share: no case, accents or punctuation, single spaces; at most 2,000 characters.

    `#`, `@` and `+` stay where they touch a word, currency signs and emoji always. Only the first 2,000 characters
    count. Marks that make a letter another one (kana, Thai, Devanagari) stay. Doing it twice changes nothing.
    """
    before = None
    while query != before:  # what is left may compose anew, and then fold once more
        before, query = query, _fold(query[:QUERY_CHARACTERS])
    return query


def _fold(text: str) -> str:
    text = normalize("NFKC", clean(text))[:QUERY_CHARACTERS]  # one character can unfold into 18
    text = normalize("NFD", text.casefold())
    text = normalize("NFC", "".join(map(_fold_character, text)))
    return " ".join(_LOOSE.sub(" ", text).split())


@lru_cache(maxsize=1024)
def _fold_character(character: str) -> str:
    kind = category(character)
    if character in _KEPT:
        return character
    if kind == "Cf" or "\ufe00" <= character <= "\ufe0f":  # the last choose a style of drawing
        return ""
    if kind[0] == "M":
        place = combining(character)  # Hebrew and Arabic points; marks above and below
        return "" if 10 <= place <= 36 or place >= 200 else character  # noqa: PLR2004
    return " " if kind[0] in "PZ" or kind in ("Cc", "Sk") or character in "<=>|~" else character


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a text; its first `overlap` characters repeat the end of the chunk before it."""

    content: str
    overlap: int


def chunk(text: str, *, size: int = 1500, overlap: int = 150) -> list[Chunk]:
    """`text` in stretches of at most `size` characters, cut between paragraphs, sentences or words where possible.

    Joining `content[overlap:]` of all of them gives `text` again. A blank stretch joins a neighbour with room for it;
    where none has, it stays. [] for ''.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"overlap must be at least 0 and below size, not {overlap} of {size}")
    if len(text) <= size:
        return [Chunk(text, 0)] if text else []
    spans: list[tuple[int, int]] = []
    for start, end in _spans(text, size, overlap):
        if spans:
            first, last = spans[-1]
            if end - first <= size and (is_blank(text[last:end]) or is_blank(text[first:last])):
                spans[-1] = first, end
                continue
        spans.append((start, end))
    ends = [0, *(end for _, end in spans)]
    return [Chunk(text[start:end], before - start) for (start, end), before in zip(spans, ends, strict=False)]


def _spans(text: str, size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch, in order and without a gap."""
    from semantic_text_splitter import TextSplitter  # noqa: PLC0415  # only who chunks pays for it

    split = TextSplitter(size, overlap=overlap, trim=False).chunk_indices
    readable = text.encode(errors="replace").decode()  # the splitter refuses lone surrogates; lengths stay
    window = _WINDOW * size  # its time grows with the square of a stretch without a boundary: 9 s for 1 MB of "a"
    start = done = 0
    while done < len(text):
        pieces = split(readable[start : start + window])
        following = len(text)
        if start + window < len(text) and len(pieces) > 1:  # the last one ends where the window does: cut it again
            following = start + pieces.pop()[0]
        before = done
        for offset, piece in pieces:
            end = start + offset + len(piece)
            if end <= done:
                continue
            first = min(max(start + offset, done - overlap), done)
            while end - first > size:  # a guard: the splitter was not seen to do this
                yield first, first + size
                first = done = first + size
            yield first, end
            done = end
        if done == before:  # the same guard
            done = min(done + size, len(text))
            yield before, done
        start = following if done - overlap <= following <= done else done
