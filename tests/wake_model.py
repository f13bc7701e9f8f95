"""The wake protocol as a machine small enough to try every order of its steps, so that a promise nobody looks for is found.

It is `Worker._claim_loop` with `reactor.ring`, `arm` and `disarm` of sql/0002, a statement a step: reactors with room for
one job each, producers with transactions of one job each, notifications that arrive whenever they like, jobs that end
whenever they like, and at most one fault. A state is *lost* when a job is due, a living reactor has room for it, and
nothing more would happen by itself but what cannot be counted on: a job's end, another transaction, a fault, the floor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

_LOOKS_NEXT = frozenset({"look", "started", "in flight"})


@dataclass(frozen=True)
class Protocol:
    """Ours; each field turned is a wrong one."""

    clears_before_look: bool = True
    looks_after_arming: bool = True
    looks_after_refusal: bool = True
    crowded_puts_down: bool = True  # no room, jobs waiting: it does not sleep armed
    hands_over: bool = True
    hands_over_later: bool = True  # also when it had put the watch down for a claim before it found itself crowded
    retries: bool = True  # who sleeps beside an armed reactor tries again now and then
    tells_watches_apart: bool = True  # and sees that it is not the same watch any more
    settling_rings: bool = True  # a job given back is rung for, like a new one
    has_lock: bool = True  # False: a flag in a table says whether somebody sleeps


@dataclass(frozen=True)
class World:
    """What there is: the types each reactor handles and each producer enqueues, and the faults of which one may strike."""

    handles: tuple[tuple[int, ...], ...] = ((0,), (0,))
    enqueues: tuple[int, ...] = (0, 0)
    transactions: tuple[int, ...] = (2, 2)
    faults: tuple[str, ...] = ()


class Reactor(NamedTuple):
    at: str = "look"
    is_rung: bool = False
    is_told: bool = False  # a notification is on its way
    is_busy: bool = False
    is_armed: bool = False
    is_relied_on: bool = False  # was armed since it last handed over
    knows_watch: bool = False  # was told of the watch of today, and not of a former one only
    is_deaf: bool = False  # its listener is down


class Producer(NamedTuple):
    left: int
    at: str = "idle"


class State(NamedTuple):
    due: tuple[int, ...]  # jobs by type
    reactors: tuple[Reactor, ...]
    producers: tuple[Producer, ...]
    may_fail: bool


class Move(NamedTuple):
    """A step of a reactor: what it becomes, what it does to the others, and whether it happens by itself."""

    name: str
    becomes: Reactor
    does: str = ""  # claim, arm, tell, return (its job, to the queue)
    is_certain: bool = True
    is_fault: bool = False


@dataclass(frozen=True)
class Verdict:
    states: int
    trace: list[str] | None  # the shortest way to a lost promise


def check(protocol: Protocol, world: World) -> Verdict:
    """Walk every reachable state, nearest first."""
    machine = _Machine(protocol, world)
    start = State(
        (0,) * (1 + max(world.enqueues)),
        tuple(Reactor() for _ in world.handles),
        tuple(Producer(left) for left in world.transactions),
        bool(world.faults),
    )
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            goes_on = False
            for name, is_certain, to in machine.steps(state):
                goes_on |= is_certain
                if to not in came_from:
                    came_from[to] = (state, name)
                    reached.append(to)
            if not goes_on and machine.is_owed(state):
                return Verdict(len(came_from), _trace(came_from, state))
        frontier = reached
    return Verdict(len(came_from), None)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    names = []
    while (origin := came_from[state]) is not None:
        state, name = origin
        names.append(name)
    return names[::-1]


class _Machine:
    def __init__(self, protocol: Protocol, world: World) -> None:
        self._protocol = protocol
        self._world = world
        self._reactors_are_alike = len(set(world.handles)) == 1
        self._producers_are_alike = len(set(world.enqueues)) == 1
        self._shifts = cache(lambda *seen: tuple(self._shifts_of(*seen)))  # the same ones come with many producers
        self._tell_alike = cache(lambda reactors: self._alike(_tell(reactors)))

    def is_owed(self, state: State) -> bool:
        return any(
            r.at != "gone" and not r.is_busy and any(state.due[type_] for type_ in types)
            for r, types in zip(state.reactors, self._world.handles, strict=True)
        )

    def steps(self, state: State) -> Iterator[tuple[str, bool, State]]:
        """Every next step: its name, whether it happens by itself, and where it leads."""
        due, reactors, producers, may_fail = state
        is_silent = False
        for i, (left, at) in enumerate(producers):
            type_ = self._world.enqueues[i]
            is_silent |= at == "silent"
            if at == "silent":
                yield (
                    f"P{i} commits",
                    True,
                    State(_add(due, type_, 1), reactors, self._put(producers, i, left), may_fail),
                )
            elif at == "ringing":
                told = self._tell_alike(reactors)
                yield f"P{i} commits", True, State(_add(due, type_, 1), told, self._put(producers, i, left), may_fail)
            elif left:  # nobody sees its insert before it has asked whether somebody sleeps
                asked = "ringing" if any(r.is_armed for r in reactors) else "silent"
                begun = self._put(producers, i, left - 1, asked)
                yield f"P{i} inserts, {asked}", False, State(due, reactors, begun, may_fail)
        for name, is_certain, is_fault, type_, jobs, become in self._shifts(
            reactors, tuple(map(bool, due)), is_silent, may_fail
        ):
            to = State(_add(due, type_, jobs) if jobs else due, become, producers, may_fail and not is_fault)
            yield name, is_certain, to

    def _shifts_of(
        self, reactors: tuple[Reactor, ...], is_due: tuple[bool, ...], is_silent: bool, may_fail: bool
    ) -> Iterator[tuple[str, bool, bool, int, int, tuple[Reactor, ...]]]:
        """What the reactors may do next: its name, certain or not, a fault or not, jobs of a type more, the reactors then."""
        is_watched = any(r.is_armed for r in reactors)
        is_shared = is_silent or any(r.at == "in flight" for r in reactors)
        may_arm = not self._protocol.has_lock or not (is_watched or is_shared)
        for i, r in enumerate(reactors):
            type_ = next((type_ for type_ in self._world.handles[i] if is_due[type_]), None)
            for move in self._moves(r, type_ is not None, is_watched, may_arm, may_fail):
                become, jobs, of = (*reactors[:i], move.becomes, *reactors[i + 1 :]), 0, type_ or 0
                match move.does:
                    case "claim":
                        jobs = -1
                    case "arm":  # a new watch, of which nobody has been told
                        become = tuple(other._replace(knows_watch=False) for other in become)
                    case "tell":
                        become = _tell(become)
                    case "return":
                        jobs, of = 1, self._world.handles[i][0]
                        if self._protocol.settling_rings and any(other.is_armed for other in become):
                            become = _tell(become)
                yield f"R{i} {move.name}", move.is_certain, move.is_fault, of, jobs, self._alike(become)

    def _alike(self, reactors: tuple[Reactor, ...]) -> tuple[Reactor, ...]:
        """One for all that differ only in who is who, or in a bell that is cleared next."""
        if self._protocol.clears_before_look:
            reactors = tuple(r._replace(is_rung=False) if r.at in _LOOKS_NEXT else r for r in reactors)
        return tuple(sorted(reactors)) if self._reactors_are_alike else reactors

    def _put(self, producers: tuple[Producer, ...], i: int, left: int, at: str = "idle") -> tuple[Producer, ...]:
        become = (*producers[:i], Producer(left, at), *producers[i + 1 :])
        return tuple(sorted(become)) if self._producers_are_alike else become

    def _moves(self, r: Reactor, is_due: bool, is_watched: bool, may_arm: bool, may_fail: bool) -> Iterator[Move]:
        ours = self._protocol
        if r.at == "gone":
            return
        if r.is_told:
            yield Move("hears", r._replace(is_told=False, is_rung=True))
        if r.is_deaf:
            yield Move("listens again", r._replace(is_deaf=False, is_rung=True))
        if r.is_busy:
            yield Move("ends its job", r._replace(is_busy=False, is_rung=True), is_certain=False)
        if may_fail:
            yield from self._faults(r)
        match r.at:
            case "look":
                yield self._look(r, is_due)
            case "asleep" | "crowded" if r.is_rung:
                yield self._look(r, is_due)
            case "started":
                yield Move("disarms", r._replace(at="look", is_armed=False))
            case "clear":
                yield Move("clears its bell late", r._replace(at="asleep" if r.is_armed else "arm", is_rung=False))
            case "hand over":
                yield Move("rings the others", r._replace(at="crowded"), "tell")
            case "arm" if r.is_deaf:
                yield Move("cannot ask", r._replace(at="asleep"))
            case "arm" if may_arm:
                to = "look" if ours.looks_after_arming else "asleep"
                yield Move("arms", r._replace(at=to, is_armed=True, is_relied_on=True), "arm")
            case "arm":
                yield Move("may not arm", r._replace(at="probe"))
            case "probe" if not is_watched:
                yield Move("sees one in flight", r._replace(at="in flight"))
            case "in flight":  # the probe's own lock is in others' way until now
                yield Move("looks again soon", r._replace(at="look", knows_watch=False))
            case "probe" if r.knows_watch or not ours.looks_after_refusal:
                yield Move("sleeps beside another", r._replace(at="asleep", knows_watch=True))
            case "probe":
                yield Move("sees another armed", r._replace(at="look", knows_watch=True))
            case "asleep" if ours.retries and not r.is_armed and not r.is_deaf:
                if not is_watched:
                    yield Move("tries again", r._replace(at="arm"))
                elif ours.tells_watches_apart and not r.knows_watch:
                    yield Move("sees another watch", r._replace(at="look", knows_watch=True))

    def _look(self, r: Reactor, is_due: bool) -> Move:
        """The bell is cleared in the same step: to hear between the two is to hear after both."""
        ours = self._protocol
        if ours.clears_before_look:
            r = r._replace(is_rung=False)
        if is_due and not r.is_busy:
            return Move("claims", r._replace(at="started", is_busy=True), "claim")
        if is_due and ours.crowded_puts_down:
            must = ours.hands_over and (r.is_armed or (r.is_relied_on and ours.hands_over_later)) and not r.is_deaf
            rest = r._replace(at="hand over" if must else "crowded", is_armed=False, is_relied_on=False)
            return Move("is crowded", rest)
        if not ours.clears_before_look:
            return Move("finds nothing", r._replace(at="clear"))
        return Move("finds nothing", r._replace(at="asleep" if r.is_armed else "arm"))

    def _faults(self, r: Reactor) -> Iterator[Move]:
        faults = self._world.faults
        if "crash" in faults:
            yield Move("crashes", Reactor("gone"), is_certain=False, is_fault=True)
        if "stop" in faults and r.at == "look":  # hands over, and gives its job back when the drain is over
            does = "return" if r.is_busy else "tell" if r.is_armed or r.is_relied_on else ""
            yield Move("stops", Reactor("gone"), does, is_certain=False, is_fault=True)
        if "deaf" in faults and not r.is_deaf:
            deaf = r._replace(is_armed=False, is_told=False, is_deaf=True, is_rung=True)
            yield Move("loses its listener", deaf, is_certain=False, is_fault=True)


def _add(due: tuple[int, ...], type_: int, jobs: int) -> tuple[int, ...]:
    return (*due[:type_], due[type_] + jobs, *due[type_ + 1 :])


def _tell(reactors: tuple[Reactor, ...]) -> tuple[Reactor, ...]:
    return tuple(r if r.at == "gone" or r.is_deaf else r._replace(is_told=True) for r in reactors)
