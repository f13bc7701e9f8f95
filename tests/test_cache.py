"""The bounded cache keeps aiocache's behaviour and its own bound; a question has one key and shares it with no other."""

import enum
from collections import OrderedDict
from collections.abc import KeysView
from datetime import UTC, datetime, timedelta

import pytest
from aiocache import Cache, SimpleMemoryCache, cached
from aiocache.lock import OptimisticLock, OptimisticLockError, RedLock
from aiocache.plugins import HitMissRatioPlugin
from aiocache.serializers import JsonSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from reactor.cache import LRUCache, recall_key


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def finish(coroutine):
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("a look-up in memory waited for something")


async def test_the_least_recently_used_entry_makes_room(clock):
    cache = LRUCache(capacity=2, clock=clock)
    await cache.set("a", 1)
    await cache.set("b", 2)
    await cache.get("a")
    await cache.set("c", 3)

    assert await cache.multi_get(["a", "b", "c"]) == [1, None, 3]


async def test_writing_an_entry_again_is_a_use_of_it(clock):
    cache = LRUCache(capacity=2, clock=clock)
    await cache.multi_set([("a", 1), ("b", 2), ("a", 3), ("c", 4)])

    assert await cache.multi_get(["a", "b", "c"]) == [3, None, 4]


@pytest.mark.parametrize("ttl", [None, 0, 60])
async def test_the_bound_holds_whatever_the_ttl(clock, ttl):
    cache = LRUCache(capacity=10, ttl=ttl, clock=clock)
    for n in range(1000):
        await cache.set(n, n)
    await cache.multi_set([(f"many {n}", n) for n in range(100)])
    for n in range(100):
        await cache.add(f"added {n}", n)
        await cache.increment(f"counted {n}")
    await cache.raw("update", {f"raw {n}": n for n in range(100)})

    assert await cache.raw("__len__") == 10
    assert await cache.exists("raw 99")


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_cache_without_room_is_refused(capacity):
    with pytest.raises(ValueError, match="capacity"):
        LRUCache(capacity=capacity)


async def test_an_expired_entry_is_never_returned(clock):
    cache = LRUCache(capacity=10, ttl=60, clock=clock)
    await cache.set("a", 1)
    clock.now += 59.9
    assert await cache.get("a") == 1

    clock.now += 0.1

    assert await cache.get("a", default="gone") == "gone"
    assert await cache.multi_get(["a"]) == [None]
    assert not await cache.exists("a")
    assert await cache.delete("a") == 0
    assert await cache.add("a", 2)


async def test_a_ttl_of_none_or_zero_means_no_expiry_and_a_call_overrides_the_default(clock):
    cache = LRUCache(capacity=10, ttl=60, clock=clock)
    await cache.set("none", 1, ttl=None)
    await cache.set("zero", 1, ttl=0)
    await cache.set("longer", 1, ttl=120)
    await cache.set("default", 1)
    clock.now += 100

    assert await cache.multi_get(["none", "zero", "longer", "default"]) == [1, 1, 1, None]


async def test_a_new_value_does_not_inherit_the_old_expiry(clock):
    cache = LRUCache(capacity=10, clock=clock)
    await cache.set("a", 1, ttl=5)
    await cache.set("a", 2)
    await cache.set("b", 1, ttl=5)
    await cache.delete("b")
    await cache.increment("b")
    await cache.set("c", 1, ttl=5)
    await cache.raw("pop", "c")
    await cache.increment("c")
    clock.now += 10

    assert await cache.multi_get(["a", "b", "c"]) == [2, 1, 1]


async def test_expire_moves_sets_and_lifts_the_expiry(clock):
    cache = LRUCache(capacity=10, clock=clock)
    await cache.multi_set([("a", 1), ("b", 1), ("c", 1)], ttl=5)
    assert await cache.expire("a", 50)
    assert await cache.expire("b", 0)
    assert not await cache.expire("unknown", 5)
    clock.now += 10

    assert await cache.multi_get(["a", "b", "c"]) == [1, 1, None]
    assert not await cache.expire("c", 50)


KEYS = st.sampled_from("abcdef")
TTLS = st.sampled_from([None, 0, 1, 2.5, 7, 40])
OPERATIONS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(), TTLS),
    st.tuples(st.just("add"), KEYS, st.integers(), TTLS),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.just("multi_get"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("increment"), KEYS, st.integers(-5, 5)),
    st.tuples(st.just("expire"), KEYS, TTLS),
    st.tuples(st.just("exists"), KEYS),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("clear")),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 1, 3, 10])),
)


class Plain:
    """The same promises, written as simply as possible."""

    def __init__(self, capacity, clock):
        self.capacity, self.clock, self.entries = capacity, clock, OrderedDict()

    def has(self, key):
        if key in self.entries and self.entries[key][1] <= self.clock.now:
            del self.entries[key]
        return key in self.entries

    def until(self, ttl):
        return self.clock.now + ttl if ttl else float("inf")

    def set(self, key, value, ttl):
        self.entries.pop(key, None)
        if len(self.entries) == self.capacity:
            self.entries.popitem(last=False)
        self.entries[key] = value, self.until(ttl)
        return True

    def add(self, key, value, ttl):
        return ValueError if self.has(key) else self.set(key, value, ttl)

    def get(self, key):
        if not self.has(key):
            return None
        self.entries.move_to_end(key)
        return self.entries[key][0]

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def increment(self, key, delta):
        if self.get(key) is None:
            self.set(key, delta, None)
        else:
            value, until = self.entries[key]
            self.entries[key] = value + delta, until
        return self.entries[key][0]

    def expire(self, key, ttl):
        if not self.has(key):
            return False
        self.entries[key] = self.entries[key][0], self.until(ttl)
        return True

    def exists(self, key):
        return self.has(key)

    def delete(self, key):
        return int(self.has(key) and self.entries.pop(key) is not None)

    def clear(self):
        self.entries.clear()
        return True


@settings(max_examples=200, deadline=None)
@given(capacity=st.integers(1, 4), operations=st.lists(OPERATIONS, max_size=60))
def test_any_sequence_of_calls_answers_as_a_plain_model_would(capacity, operations):
    clock = Clock()
    cache, model = LRUCache(capacity=capacity, clock=clock, timeout=None), Plain(capacity, clock)
    for name, *arguments in operations:
        if name == "pass":
            clock.now += arguments[0]
            continue
        expected = getattr(model, name)(*arguments)
        if expected is ValueError:
            with pytest.raises(ValueError):
                finish(getattr(cache, name)(*arguments))
        else:
            assert finish(getattr(cache, name)(*arguments)) == expected
        assert len(cache._cache) <= capacity
        assert {key for key in "abcdef" if finish(cache.exists(key))} == {key for key in "abcdef" if model.has(key)}


async def script(cache):
    """What each of aiocache's commands answers, errors included."""
    seen = []

    async def note(call):
        try:
            answer = await call
            seen.append(sorted(answer) if isinstance(answer, KeysView) else answer)
        except (ValueError, TypeError) as exc:
            seen.append(type(exc))

    await note(cache.set("a", "1"))
    await note(cache.get("a"))
    await note(cache.get("unknown"))
    await note(cache.get("unknown", default="d"))
    await note(cache.set("none", None))
    await note(cache.get("none", default="d"))
    await note(cache.exists("none"))
    await note(cache.add("a", 2))
    await note(cache.add("b", 2))
    await note(cache.multi_set([("c", [1]), ("d", {"e": 1})]))
    await note(cache.multi_get(["a", "unknown", "c", "d", "c"]))
    await note(cache.increment("a", 4))
    await note(cache.increment("counter"))
    await note(cache.increment("counter", -3))
    await note(cache.set("word", "x"))
    await note(cache.increment("word"))
    await note(cache.set("a", 9, _cas_token="other"))
    await note(cache.set("a", 9, _cas_token=5))
    await note(cache.get("a"))
    await note(cache.delete("a"))
    await note(cache.delete("a"))
    await note(cache.set("k", 1, namespace="foo:"))
    await note(cache.get("k"))
    await note(cache.get("k", namespace="foo:"))
    await note(cache.clear(namespace="foo:"))
    await note(cache.get("k", namespace="foo:"))
    await note(cache.exists("b"))
    await note(cache.raw("get", "b"))
    await note(cache.raw("keys"))
    await note(cache.raw("pop", "b"))
    await note(cache._redlock_release("c", "other"))
    await note(cache._redlock_release("c", [1]))
    await note(cache.expire("d", 60))
    await note(cache.expire("unknown", 60))
    await note(cache.clear())
    await note(cache.exists("d"))
    return seen


async def test_every_command_answers_as_aiocache_s_memory_cache_does():
    theirs = SimpleMemoryCache()
    expected = await script(theirs)

    assert await script(LRUCache(capacity=100)) == expected
    assert await script(LRUCache(capacity=100, timeout=None)) == expected


async def test_serializers_namespaces_and_plugins_work():
    cache = LRUCache(
        capacity=10, serializer=JsonSerializer(), namespace="ours:", plugins=[HitMissRatioPlugin()], timeout=None
    )
    await cache.set("a", {"n": [1, 2]})

    assert await cache.get("a") == {"n": [1, 2]}
    assert await cache.get("b") is None
    assert await cache.raw("get", "ours:a") == '{"n": [1, 2]}'
    assert cache.hit_miss_ratio["hit_ratio"] == 0.5


async def test_a_key_builder_of_ones_own_is_used():
    cache = LRUCache(capacity=10, key_builder=lambda key, namespace=None: f"<{key}>")
    await cache.set("a", 1)

    assert await cache.raw("get", "<a>") == 1


async def test_aiocache_s_factory_decorator_and_locks_accept_it():
    cache = Cache(LRUCache, capacity=10, ttl=60)
    calls = []

    @cached(cache=LRUCache, capacity=10, key_builder=lambda _f, n: f"square {n}")
    async def square(n):
        calls.append(n)
        return n * n

    assert [await square(3), await square(3)] == [9, 9]
    assert calls == [3]
    async with RedLock(cache, "key", lease=5):
        assert await cache.exists("key-lock")
    assert not await cache.exists("key-lock")
    await cache.set("value", 1)
    async with OptimisticLock(cache, "value") as lock:
        await lock.cas(2)
        with pytest.raises(OptimisticLockError):
            await lock.cas(3)
    assert await cache.get("value") == 2


async def test_aiocache_disable_is_obeyed(monkeypatch):
    cache = LRUCache(capacity=10)
    await cache.set("a", 1)
    monkeypatch.setenv("AIOCACHE_DISABLE", "1")

    assert await cache.get("a") is None


ANY_TEXT = st.text(st.characters(), max_size=8) | st.sampled_from(
    ["", "'", '"', '",', "null", "1", "true", "[]", "{", ":", "\ud83d\ude00", "😀", "\0", "\\", 'a"/"b']
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(allow_nan=False, allow_infinity=False), ANY_TEXT
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(ANY_TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)
QUESTIONS = st.lists(VALUES, max_size=4).map(tuple)


def identity(value):
    """Equal exactly where two values ask the same."""
    if isinstance(value, dict):
        return ("object", frozenset((key, identity(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return ("array", tuple(map(identity, value)))
    return (type(value).__name__, repr(value))


@settings(max_examples=400, deadline=None)
@given(one=QUESTIONS, other=QUESTIONS)
def test_two_questions_share_a_key_exactly_when_they_are_the_same(one, other):
    assert (recall_key(*one) == recall_key(*other)) == (identity(one) == identity(other))


@settings(max_examples=200, deadline=None)
@given(tenants=st.tuples(ANY_TEXT, ANY_TEXT), question=QUESTIONS)
def test_no_key_of_one_tenant_begins_with_the_tenant_part_of_another(tenants, question):
    one, other = tenants
    opening = recall_key(one, "").removesuffix('""]')

    assert recall_key(other, "search", *question).startswith(opening) == (one == other)


NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "null"), (1, True), (1, "1"), (1, 1.0), (True, "true"), (0, False), ("", None), ([], None), ([], {}),
        (["a", "b"], ["a,b"]), (["a", "b"], ['a", "b']), ([["a"], "b"], [["a", "b"]]), ({"a": None}, {}),
        ({"a": 1}, {"a": "1"}), (NOON, None), (NOON, NOON + timedelta(microseconds=1)),
        ("\ud83d\ude00", "😀"), ("é", "e\u0301"),
    ],
)  # fmt: skip
def test_arguments_that_look_alike_have_keys_of_their_own(one, other):
    assert recall_key("t", "search", one) != recall_key("t", "search", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("foo", "bar", 1), ("foob", "ar", 1)),
        (("foo", "s"), ("foobar", "s")),
        (("a_b", "s"), ("a%b", "s")),
        (("t", "search", 1, 2), ("t", "search", 2, 1)),
        (("t", "search", None), ("t", "search")),
        (("t", "search", "x", "y"), ("t", "search", 'x", "y')),
    ],
)
def test_neighbouring_parts_never_run_into_each_other(one, other):
    assert recall_key(*one) != recall_key(*other)


def test_order_of_metadata_and_list_or_tuple_make_no_difference():
    one = recall_key("t", "search", ["post", "chat"], {"a": 1, "b": {"c": 2, "d": 3}})
    other = recall_key("t", "search", ("post", "chat"), {"b": {"d": 3, "c": 2}, "a": 1})

    assert one == other


def test_an_enum_s_member_of_text_is_that_text():
    class Kind(enum.StrEnum):
        POST = "post"

    assert recall_key("t", "s", [Kind.POST]) == recall_key("t", "s", ["post"])


@pytest.mark.parametrize("value", [{"a": {1, 2}}, {"a": object()}, b"bytes", {"a": [float("nan")]}])
def test_what_has_no_key_is_refused(value):
    with pytest.raises((TypeError, ValueError)):
        recall_key("t", "search", value)
