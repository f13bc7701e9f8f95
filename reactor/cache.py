"""The bounded LRU with TTL behind aiocache, and how a question becomes a key."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from datetime import datetime
from typing import Any

from aiocache import SimpleMemoryCache


class _Entries(MutableMapping[Hashable, Any]):
    """The `capacity` entries last read or written; one that expired is dropped when it is met."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._clock = clock
        self._values: OrderedDict[Hashable, Any] = OrderedDict()  # least recently used first
        self._expiries: dict[Hashable, float] = {}

    def __contains__(self, key: object) -> bool:
        if key in self._expiries and self._clock() >= self._expiries[key]:
            del self[key]
        return key in self._values

    def __getitem__(self, key: Hashable) -> Any:
        if key not in self:
            raise KeyError(key)
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: Hashable, value: Any) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._capacity:
            del self[next(iter(self._values))]

    def __delitem__(self, key: Hashable) -> None:
        del self._values[key]
        self._expiries.pop(key, None)

    def __iter__(self) -> Iterator[Hashable]:
        return iter([key for key in list(self._values) if key in self])

    def __len__(self) -> int:
        return len(self._values)

    def expire(self, key: Hashable, ttl: float | None) -> None:
        self._expiries[key] = self._clock() + ttl if ttl else math.inf


class LRUCache(SimpleMemoryCache):
    """aiocache's cache in process, with a bound: it never holds more than `capacity` entries.

    When it is full, the least recently used goes: read or written, `exists` and `expire` do not count. No entry owns a
    timer. As in aiocache, a ttl of None or 0 means no expiry and a cached None is a miss. With the default serializer a
    reader gets the stored object itself.

    Args:
        capacity: The most entries held, expired ones included.
        clock: Seconds that only grow.
        kwargs: aiocache's own: ttl, serializer, plugins, timeout (its default costs a task a call; None none), ...
    """

    NAME = "lru"

    def __init__(self, *, capacity: int, clock: Callable[[], float] = time.monotonic, **kwargs: Any) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        super().__init__(**kwargs)
        self._cache = _Entries(capacity, clock)  # all that is inherited goes through it

    # What stands on timers or replaces the mapping there. `_conn` means nothing here.

    async def _set(
        self, key: Hashable, value: Any, ttl: float | None = None, _cas_token: Any = None, _conn: Any = None
    ) -> bool | int:
        if _cas_token is not None and _cas_token != self._cache.get(key):
            return 0
        self._cache[key] = value
        self._cache.expire(key, ttl)
        return True

    async def _expire(self, key: Hashable, ttl: float, _conn: Any = None) -> bool:
        if key not in self._cache:
            return False
        self._cache.expire(key, ttl)
        return True

    async def _clear(self, namespace: str | None = None, _conn: Any = None) -> bool:
        for key in self._cache:
            if not namespace or str(key).startswith(namespace):
                del self._cache[key]
        return True


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=datetime.isoformat, sort_keys=True).encode


def recall_key(*parts: object) -> str:
    """The one key of a question, which begins with its tenant; JSON, so that no part runs into its neighbour.

    Each place holds JSON of cleaned text, or an instant: an instant and its text would be one key. Lists and tuples are
    equal; 1, 1.0, True and "1" are not.
    """
    return _encode(parts)
