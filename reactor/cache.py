"""The bounded LRU with TTL behind aiocache, and how a question becomes a key."""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime
from typing import Any

from aiocache.base import BaseCache
from aiocache.serializers import BaseSerializer, NullSerializer


class LRUCache(BaseCache):
    """An aiocache backend in process that never holds more than `capacity` entries.

    When it is full, the least recently used goes: read or written, `exists` and `expire` do not count. No entry owns a
    timer: an expired one is dropped when it is met. As in aiocache, a ttl of None or 0 means no expiry and a cached
    None is a miss. With the default serializer a reader gets the stored object itself.

    Args:
        capacity: The most entries held, expired ones included.
        ttl: Seconds until an entry expires, where a call names none.
        serializer: aiocache's; the values as they are unless given.
        clock: Seconds that only grow.
        kwargs: aiocache's own: plugins, namespace, key_builder, timeout (its default costs a task a call; None none).
    """

    NAME = "lru"

    def __init__(
        self,
        *,
        capacity: int,
        ttl: float | None = None,
        serializer: BaseSerializer | None = None,
        clock: Callable[[], float] = time.monotonic,
        **kwargs: Any,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        super().__init__(serializer=serializer or NullSerializer(), ttl=ttl, **kwargs)
        self.capacity = capacity
        self._clock = clock
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()  # least recently used first
        self._expiries: dict[Hashable, float] = {}  # of every entry

    def _has(self, key: Hashable) -> bool:
        if key in self._cache and self._clock() >= self._expiries[key]:
            self._forget(key)
        return key in self._cache

    def _peek(self, key: Hashable) -> Any:
        return self._cache[key] if self._has(key) else None

    def _forget(self, key: Hashable) -> None:
        del self._cache[key], self._expiries[key]

    def _set_expiry(self, key: Hashable, ttl: float | None) -> None:
        self._expiries[key] = self._clock() + ttl if ttl else math.inf

    def _make_room(self) -> None:
        while len(self._cache) > self.capacity:
            self._forget(next(iter(self._cache)))

    def _put(self, key: Hashable, value: Any, ttl: float | None) -> None:
        self._cache[key] = value
        self._cache.move_to_end(key)
        self._set_expiry(key, ttl)
        self._make_room()

    # What aiocache's public methods stand on. They also pass `_conn` and `encoding`, which mean nothing here.

    async def _get(self, key: Hashable, **_: Any) -> Any:
        if not self._has(key):
            return None
        self._cache.move_to_end(key)
        return self._cache[key]

    _gets = _get

    async def _multi_get(self, keys: Sequence[Hashable], **_: Any) -> list[Any]:
        return [await self._get(key) for key in keys]

    async def _set(
        self, key: Hashable, value: Any, ttl: float | None = None, _cas_token: Any = None, **_: Any
    ) -> bool | int:
        if _cas_token is not None and _cas_token != self._peek(key):
            return 0
        self._put(key, value, ttl)
        return True

    async def _multi_set(self, pairs: Iterable[tuple[Hashable, Any]], ttl: float | None = None, **_: Any) -> bool:
        for key, value in pairs:
            self._put(key, value, ttl)
        return True

    async def _add(self, key: Hashable, value: Any, ttl: float | None = None, **_: Any) -> bool:
        if self._has(key):
            raise ValueError("the key already exists; set replaces it")
        self._put(key, value, ttl)
        return True

    async def _exists(self, key: Hashable, **_: Any) -> bool:
        return self._has(key)

    async def _increment(self, key: Hashable, delta: int, **_: Any) -> int:
        if not self._has(key):
            self._put(key, delta, None)  # as in aiocache, a counter is born without a ttl
            return delta
        try:
            value = int(self._cache[key]) + delta
        except ValueError:
            raise TypeError("the value is not an integer") from None
        self._cache[key] = value
        self._cache.move_to_end(key)
        return value

    async def _expire(self, key: Hashable, ttl: float, **_: Any) -> bool:
        if not self._has(key):
            return False
        self._set_expiry(key, ttl)
        return True

    async def _delete(self, key: Hashable, **_: Any) -> int:
        if not self._has(key):
            return 0
        self._forget(key)
        return 1

    async def _clear(self, namespace: str | None = None, **_: Any) -> bool:
        if namespace:
            for key in [key for key in self._cache if str(key).startswith(namespace)]:
                self._forget(key)
        else:
            self._cache.clear()
            self._expiries.clear()
        return True

    async def _raw(self, command: str, *args: Any, encoding: Any = None, _conn: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
        """What dict's method `command` does to the live entries; the bound holds afterwards."""
        for key in list(self._cache):
            self._has(key)
        result = getattr(self._cache, command)(*args, **kwargs)
        self._expiries = {key: self._expiries.get(key, math.inf) for key in self._cache}
        self._make_room()
        return result

    async def _redlock_release(self, key: Hashable, value: Any) -> int:
        return await self._delete(key) if self._peek(key) == value else 0


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=datetime.isoformat, sort_keys=True).encode


def recall_key(*parts: object) -> str:
    """The one key of a question, which begins with its tenant; JSON, so that no part runs into its neighbour.

    Each place holds JSON of cleaned text, or an instant: an instant and its text would be one key. Lists and tuples are
    equal; 1, 1.0, True and "1" are not.
    """
    return _encode(parts)
