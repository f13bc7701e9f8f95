"""The bounded LRU with TTL behind aiocache, and how a question becomes a key."""

from __future__ import annotations

import heapq
import itertools
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

    When it is full, an expired entry goes first, then the least recently used: read or written, `exists` and `expire`
    do not count. No entry owns a timer. As in aiocache, a ttl of None or 0 means no expiry and a cached None is a miss.
    With the default serializer a reader gets the stored object itself.

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
        self._expiries: dict[Hashable, float] = {}
        self._queue: list[tuple[float, int, Hashable]] = []  # a heap of expiries; some no longer hold
        self._ticket = itertools.count()  # keeps the heap from comparing keys

    def _has(self, key: Hashable) -> bool:
        if key not in self._cache:
            return False
        expiry = self._expiries.get(key)
        if expiry is None or self._clock() < expiry:
            return True
        self._forget(key)
        return False

    def _peek(self, key: Hashable) -> Any:
        return self._cache[key] if self._has(key) else None

    def _forget(self, key: Hashable) -> None:
        del self._cache[key]
        self._expiries.pop(key, None)

    def _set_expiry(self, key: Hashable, ttl: float | None) -> None:
        self._expiries.pop(key, None)
        if ttl:
            expiry = self._expiries[key] = self._clock() + ttl
            heapq.heappush(self._queue, (expiry, next(self._ticket), key))
        if len(self._queue) > 2 * len(self._expiries) + 64:  # the same keys set again and again
            self._queue = [(expiry, next(self._ticket), key) for key, expiry in self._expiries.items()]
            heapq.heapify(self._queue)

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._queue and self._queue[0][0] <= now:
            expiry, _, key = heapq.heappop(self._queue)
            if self._expiries.get(key) == expiry:
                self._forget(key)

    def _make_room(self) -> None:
        if len(self._cache) > self.capacity:
            self._drop_expired()
        while len(self._cache) > self.capacity:
            key, _ = self._cache.popitem(last=False)
            self._expiries.pop(key, None)

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
            self._queue.clear()
        return True

    async def _raw(self, command: str, *args: Any, encoding: Any = None, _conn: Any = None, **kwargs: Any) -> Any:  # noqa: ARG002
        """What dict's method `command` does to the live entries; the bound holds afterwards."""
        self._drop_expired()
        result = getattr(self._cache, command)(*args, **kwargs)
        self._expiries = {key: expiry for key, expiry in self._expiries.items() if key in self._cache}
        self._make_room()
        return result

    async def _redlock_release(self, key: Hashable, value: Any) -> int:
        return await self._delete(key) if self._peek(key) == value else 0


def recall_key(tenant_id: str, what: str, /, **arguments: object) -> str:
    """The one key of a question: equal for equal arguments in any order, different for all others.

    It opens with the quoted tenant, and every part ends itself, so no key is the beginning of another tenant's.
    Lists and tuples are equal; 1, 1.0, True and "1" are not; one instant written in two zones makes two keys.

    Raises:
        TypeError: An argument, named, holds what is neither JSON nor a datetime.
        ValueError: An argument, named, holds NaN or infinity, or is nested too deeply.
    """
    parts = [f"{name!r}:{_named(name, arguments[name])}" for name in sorted(arguments)]
    return f"{_quote(tenant_id)}/{_quote(what)}{{{','.join(parts)}}}"


_PLAIN = frozenset({str, int, bool, type(None)})  # exactly these: their repr is injective, ends itself, and escapes
_quote = str.__repr__  # lone surrogates, which a shared cache could not send


def _named(name: str, value: object) -> str:
    try:
        return repr(value) if type(value) in _PLAIN else _term(value)
    except (TypeError, ValueError) as exc:
        raise type(exc)(f"{name}: {exc}") from None
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply for a key") from None


def _term(value: object) -> str:  # noqa: PLR0911
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join([_term(item) for item in value])}]"
    if isinstance(value, datetime):
        return f"@{value.isoformat()}"
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a JSON object has only text for keys")
        return f"{{{','.join([f'{_quote(key)}:{_term(value[key])}' for key in sorted(value)])}}}"
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("JSON has no NaN and no infinity")
        return float.__repr__(value)
    raise TypeError(f"{type(value).__name__} is neither JSON nor a datetime")
