"""A token against a plain model of its provider: whatever processes, hosts, people and time do, in whatever order."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from conftest import connect
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from token_cases import scene_of

from reactor import db, refresher
from reactor.log import get_log
from reactor.refresher import Refresher, TokenKey
from reactor.strategy import Answer
from reactor.tokens import Tokens

GRACE_S = 30.0
HOMES = {"one": "home", "neighbour": "home", "far": "another home"}  # processes, and the host of each
LATER = ("journaled", "saving", "saved")  # steps after the answer at which a process may die
PROCESSES = st.sampled_from(list(HOMES))


class KilledError(BaseException):
    """What a process that dies raises here: no `except` of the code under test takes it for an error."""


@dataclass
class Grant:
    """What a user granted, as its provider knows it. Tokens are numbered, `<grant>.<number>`."""

    name: int
    issued: int = 1
    spent_at: dict[int, float] = field(default_factory=dict)
    is_revoked: bool = False
    kept: int = 1
    """The newest number that reached a disk of ours."""


@dataclass
class Flight:
    """A look at the token that waits for its provider: `stage` asking, or answered (and the answer is on its way)."""

    process: str
    was_active: bool
    task: asyncio.Task | None = None
    stage: str = ""
    fate: str = "on"  # or lost, killed
    dies_at: str | None = None  # a later step
    is_saving: bool = False
    halted: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)


FLIGHT: ContextVar[Flight] = ContextVar("flight")


class Model(RuleBasedStateMachine):
    """Each rule lets one thing happen; what must hold is asked after every one."""

    loop: asyncio.Runner
    scene: object
    pool: object
    provider: str

    @initialize()
    def begin(self) -> None:
        self.calls = Counter[str]()  # by refresh token, of those made while nobody was asked to reconnect
        self.grants: list[Grant] = []
        self.flights: dict[str, Flight] = {}
        self.passed = 0.0
        self.newest_seen = (0, 0)
        self.sql("truncate accounts restart identity")
        self.sql("delete from reactor.tokens")
        self.sql("truncate reactor.token_attempts, reactor.jobs, reactor.alerts")
        for path in self.scene.folder.glob("*/journal/*.*"):
            path.unlink()
        self.began = self.sql("select clock_timestamp()")[0][0]
        self.processes = {name: self.loop.run(self.opened(name)) for name in HOMES}
        self.key = TokenKey(self.scene.source, "acme", "1")
        self.reconnect()

    def sql(self, query: str, *arguments: object) -> list:
        return self.loop.run(self.scene.conn.fetch(query, *arguments))

    async def opened(self, name: str) -> Tokens:
        return Tokens(self.pool, settings=self.scene.settings(HOMES[name]), log=get_log())

    @property
    def now(self):
        return self.began + timedelta(seconds=self.passed)

    # The provider, in place of the wire.

    async def send(self, request, _timeout_s) -> Answer:
        """Halts before the provider has it, and before its answer is back."""
        flight = FLIGHT.get()
        await self.halt(flight, "asking")
        answer = self.answer(request.form["refresh_token"], counts=flight.was_active)
        await self.halt(flight, "answered")
        return answer

    async def halt(self, flight: Flight, stage: str) -> None:
        flight.stage, flight.fate = stage, "on"
        flight.go.clear()
        flight.halted.set()
        await flight.go.wait()
        if flight.fate == "lost":
            raise refresher._LostError("timeout")
        if flight.fate == "killed":
            raise KilledError

    def answer(self, token: str, *, counts: bool) -> Answer:
        name, number = map(int, token.split("."))
        grant = self.grants[name]
        self.calls[token] += counts
        spent_at = grant.spent_at.get(number)
        if spent_at is not None and self.provider == "strict":
            grant.is_revoked = True
        if grant.is_revoked or (spent_at is not None and self.passed - spent_at > GRACE_S):
            return Answer(400, {}, b'{"error": "invalid_grant"}')
        if self.provider != "plain" and spent_at is None:
            grant.spent_at[number] = self.passed
            grant.issued += 1
        issued = f"{name}.{grant.issued}"
        body = {"access_token": issued, "refresh_token": issued, "expires_in": 3600}
        return Answer(200, {}, json.dumps(body).encode())

    # The processes.

    def fly(self, name: str, look) -> None:
        """Start a look on a process, and run until it waits for its provider or has ended."""
        states = {state for (state,) in self.sql("select state from reactor.tokens")}
        flight = self.flights[name] = Flight(name, was_active=states <= {"active"})

        async def start() -> None:
            FLIGHT.set(flight)
            flight.task = asyncio.create_task(look)
            await self.until_halted(flight)

        self.loop.run(start())

    async def until_halted(self, flight: Flight) -> None:
        halted = asyncio.create_task(flight.halted.wait())
        async with asyncio.timeout(60):
            await asyncio.wait({flight.task, halted}, return_when=asyncio.FIRST_COMPLETED)
        halted.cancel()
        if flight.task.done():
            del self.flights[flight.process]
            if isinstance(flight.task.exception(), KilledError):
                await self.restart(flight.process)
            else:
                flight.task.result()

    async def restart(self, name: str) -> None:
        await self.processes[name].aclose()
        self.processes[name] = await self.opened(name)

    def resume(self, name: str, fate: str = "on", *, dies_at: str | None = None) -> None:
        async def go() -> None:
            flight = self.flights[name]
            flight.fate, flight.dies_at = fate, dies_at
            flight.halted.clear()
            flight.go.set()
            await self.until_halted(flight)

        self.loop.run(go())

    # What happens.

    @rule(name=PROCESSES)
    def look(self, name) -> None:
        if name not in self.flights:
            self.fly(name, self.processes[name].refresher.care(self.key, self.provider, now=self.now))

    @rule(name=PROCESSES, end=st.sampled_from(["lost", "lost", "killed", "killed", "on", *LATER]))
    def call(self, name, end) -> None:
        """A look whose request reaches the provider, and then this happens."""
        self.look(name)
        flight = self.flights.get(name)
        if flight is not None and flight.stage == "asking":
            self.resume(name)
            if name in self.flights:
                self.finish(name, end)

    @rule(name=PROCESSES)
    def recover(self, name) -> None:
        if name not in self.flights:
            self.fly(name, self.processes[name].refresher.recover(self.now))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), end=st.sampled_from(["on", "on", "on", "lost", "killed", *LATER]))
    def go_on(self, data, end) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.flights))), end)

    def finish(self, name: str, end: str) -> None:
        if end in LATER:
            self.resume(name, dies_at=end)
        else:
            self.resume(name, end)

    @rule(seconds=st.sampled_from([1, 20, 1200, 7200]))
    def wait(self, seconds) -> None:
        """A call lasts no longer than its timeout of 15 s."""
        while seconds > 10 and self.flights:
            self.resume(next(iter(self.flights)), "lost")
        self.passed += seconds

    @rule(does=st.sampled_from(["reconnect", "reconnect", "delete"]))
    def a_person_comes(self, does) -> None:
        if does == "reconnect" or self.held() is None:
            self.reconnect()
        else:
            self.sql("delete from accounts")

    def reconnect(self) -> None:
        self.grants.append(Grant(len(self.grants)))
        self.sql(
            "insert into accounts (id, tenant_id, provider, access_token, refresh_token, expires_at) "
            "overriding system value values (1, 'acme', $1, $2, $2, $3) on conflict (id) do update "
            "set (access_token, refresh_token, expires_at) = (excluded.access_token, excluded.refresh_token, excluded.expires_at)",
            self.provider,
            f"{len(self.grants) - 1}.1",
            self.now + timedelta(minutes=10),
        )

    # What must hold.

    def held(self) -> tuple[int, int] | None:
        """The grant, and the number in it, of the token in the row."""
        rows = self.sql("select access_token, refresh_token from accounts")
        if not rows:
            return None
        [(access, refresh)] = rows
        assert access == refresh
        name, number = map(int, access.split("."))
        return name, number

    @invariant()
    def the_row_never_goes_back(self) -> None:
        held = self.held()
        if held is not None:
            assert held[0] == len(self.grants) - 1
            assert held >= self.newest_seen
            self.newest_seen = held

    @invariant()
    def nobody_is_asked_a_third_time_with_one_token(self) -> None:
        assert self.provider == "plain" or max(self.calls.values(), default=0) <= 2

    @invariant()
    def somebody_comes_back_to_it_or_was_told(self) -> None:
        if self.held() is not None:
            assert self.sql(
                "select from reactor.jobs where type = 'refresh_token' and status = 'pending' "
                "union all select from reactor.token_attempts where status = 'live' "
                "union all select from reactor.alerts where resolved_at is null"
            )

    def teardown(self) -> None:
        """From wherever it is, every host comes back: what reached a disk is in the row; in the end it works, or is said."""
        while self.flights:
            self.resume(next(iter(self.flights)))
        for name in HOMES:
            self.loop.run(self.restart(name))
        for name in HOMES:
            self.recover(name)
            while self.flights:
                self.resume(name)
        held, grant = self.held(), self.grants[-1]
        if held is not None:
            assert held[1] >= grant.kept
        for name in (*HOMES, *HOMES):
            self.passed += 7200
            self.look(name)
            while self.flights:
                self.resume(name)
            self.somebody_comes_back_to_it_or_was_told()
        if held is not None:
            [(state,)] = self.sql("select state from reactor.tokens")
            alerts = {cause for (cause,) in self.sql("select cause from reactor.alerts where resolved_at is null")}
            if state == "active":
                assert not grant.is_revoked
                assert self.held() == (grant.name, grant.issued)
                assert alerts == set()
            else:
                assert (state, alerts) == ("needs_reconnect", {"token_needs_reconnect"})
        for tokens in self.processes.values():
            self.loop.run(tokens.aclose())


def watch_steps(model: Model, monkeypatch) -> None:
    """Puts the model between the code and its wire, and lets flights die at the steps after it."""
    write_down, tenant = Refresher._write_down, db.tenant

    async def writes_down(self, case, attempt, answer):
        await write_down(self, case, attempt, answer)
        flight = FLIGHT.get()
        name, number = map(int, json.loads(answer.body)["access_token"].split("."))
        grant = model.current.grants[name]
        grant.kept = max(grant.kept, number)
        flight.is_saving = True
        if flight.dies_at == "journaled":
            raise KilledError

    @asynccontextmanager
    async def tenants(pool, tenant_id):
        flight = FLIGHT.get()
        async with tenant(pool, tenant_id) as conn:
            yield conn
            if flight.is_saving and flight.dies_at == "saving":
                raise KilledError
        if flight.is_saving and flight.dies_at == "saved":
            raise KilledError

    async def send(request, timeout_s):
        return await model.current.send(request, timeout_s)

    monkeypatch.setattr(refresher, "_send", send)
    monkeypatch.setattr(db, "tenant", tenants)
    monkeypatch.setattr(Refresher, "_write_down", writes_down)


@pytest.mark.parametrize("provider", ["strict", "grace", "plain"])
def test_whatever_happens_no_token_that_we_got_is_lost_and_none_is_left_alone(dsn, tmp_path, monkeypatch, provider):
    with asyncio.Runner() as loop:

        class OfThisProvider(Model):
            current: Model

            def __init__(self) -> None:
                super().__init__()
                type(self).current = self

        async def open_all(stack: AsyncExitStack) -> None:
            conn = await connect(dsn)
            stack.push_async_callback(conn.close)
            scene = await stack.enter_async_context(scene_of(dsn, conn, tmp_path, monkeypatch))
            await scene.attach()
            OfThisProvider.scene, OfThisProvider.loop, OfThisProvider.provider = scene, loop, provider
            OfThisProvider.pool = await stack.enter_async_context(db.create_pool(dsn, application="test", size=8))

        stack = AsyncExitStack()
        loop.run(open_all(stack))
        watch_steps(OfThisProvider, monkeypatch)
        try:
            run_state_machine_as_test(
                OfThisProvider,
                settings=settings(
                    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
                ),
            )
        finally:
            loop.run(stack.aclose())
