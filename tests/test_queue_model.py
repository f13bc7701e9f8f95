"""The queue against a plain model of it: whatever producers, workers, crashes and operators do, in whatever order."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg
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

LEASE_S = 30
WAITING = ("pending", "failed")
TENANTS = st.sampled_from(["a", "a", "", "\U0010ffff"])
LANES = {"work": ("fast", "slow"), "sync_row": ("memory",)}
WORKERS = st.sampled_from(["one", "two"])


@dataclass
class Row:
    """A job as the model has it; times are seconds of the model."""

    id: int
    type: str
    tenant: str
    lane: str
    key: str | None
    payload: dict
    max_attempts: int
    run_after: float
    status: str = "pending"
    attempts: int = 0
    version: int = 0
    token: UUID | None = None
    lease_until: float = 0
    is_suspect: bool = False
    snoozed_since: float | None = None

    @property
    def family(self) -> object:
        return self.id if self.key is None else (self.tenant, self.type, self.key)

    @property
    def newest(self) -> int:
        return max(self.id, self.version)


@dataclass
class Held:
    """A claim as its worker has it."""

    id: int
    token: UUID


@dataclass
class Worker:
    held: list[Held] = field(default_factory=list)
    lost: list[Held] = field(default_factory=list)
    """What it had claimed when it crashed: it may come back late."""
    after: dict[str, str] = field(default_factory=dict)
    """By lane, the tenant served last."""


class Queue(RuleBasedStateMachine):
    """Each rule does one thing to Postgres and says what it should have done; the tables are compared after every one."""

    loop: asyncio.Runner
    conn: asyncpg.Connection
    slow: asyncpg.Connection

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Row] = {}
        self.payloads: dict[int, dict] = {}  # as produced
        self.newest: dict[object, int] = {}
        self.ended: dict[object, int] = {}  # the highest version that a run which ended for good had
        self.workers = {"one": Worker(), "two": Worker()}
        self.posts: list[int] = []
        self.counts = Counter[str]()
        self.clock = 0.0
        self.seen = 0
        self.uncommitted: int | None = None

    def sql(self, query: str, *args: object) -> list:
        return self.loop.run(self.conn.fetch(query, *args))

    @property
    def now(self) -> datetime:
        return self.began + timedelta(seconds=self.clock)

    @initialize()
    def begin(self) -> None:
        self.loop.run(
            self.conn.execute(
                "set session_replication_role = replica; truncate reactor.jobs, reactor.job_minutes, reactor.alerts, "
                "reactor.tombstones, posts; reset session_replication_role"
            )
        )
        # Rows are written by the real clock, which never reaches the model's.
        [[self.began, self.seen]] = self.sql("select now() + interval '1 hour', last_value from reactor.job_ids")

    def note_new(self, run_after: float | None = None, since: int | None = None) -> None:
        for r in self.sql("select * from reactor.jobs where id > $1 order by id", since or self.seen):
            if r["id"] in self.rows:
                continue
            when = -1e9 if run_after is None else run_after
            row = Row(
                r["id"], r["type"], r["tenant_id"], r["lane"], r["dedupe_key"], r["payload"], r["max_attempts"], when
            )
            self.rows[row.id] = row
            self.payloads[row.id] = row.payload
            self.newest[row.family] = max(self.newest.get(row.family, 0), row.id)
            self.seen = max(self.seen, row.id)

    # --- producers ---

    @rule(
        tenant=TENANTS,
        key=st.sampled_from(["k", "k", "l", None]),
        lane=st.sampled_from(LANES["work"]),
        delay_s=st.sampled_from([None, None, 50.0]),
        most=st.sampled_from([1, 2, 5]),
    )
    def enqueue(self, tenant, key, lane, delay_s, most) -> None:
        self.sql(
            "select reactor.enqueue('work', $1, $2, $3, $4, $5, $6)",
            {"n": self.seen},
            tenant,
            key,
            None if delay_s is None else self.now + timedelta(seconds=delay_s),
            lane,
            most,
        )
        self.note_new(None if delay_s is None else self.clock + delay_s)

    @precondition(lambda self: self.uncommitted is None)
    @rule(key=st.sampled_from(["k", "l"]))
    def enqueue_without_committing(self, key) -> None:
        """Its id is lower than those of twins that are claimed before it can be seen."""
        self.loop.run(self.slow.execute("begin"))
        self.uncommitted = self.loop.run(
            self.slow.fetchval("select reactor.enqueue('work', '{\"slow\": 1}', 'a', $1, lane => 'fast')", key)
        )

    @precondition(lambda self: self.uncommitted is not None)
    @rule(commits=st.booleans())
    def end_the_transaction(self, commits) -> None:
        self.loop.run(self.slow.execute("commit" if commits else "rollback"))
        if commits:
            self.note_new(since=self.uncommitted - 1)
        self.uncommitted = None

    @rule(tenant=st.sampled_from(["a", "b"]), rows=st.integers(1, 3))
    def write_posts(self, tenant, rows) -> None:
        written = self.sql(
            "insert into posts (tenant_id, body) select $1, 'bolo' from generate_series(1, $2) returning id",
            tenant,
            rows,
        )
        self.posts += [r["id"] for r in written]
        before = len(self.rows)
        self.note_new()
        assert len(self.rows) - before == rows

    @precondition(lambda self: self.posts)
    @rule(data=st.data(), what=st.sampled_from(["edit", "move", "delete"]))
    def change_post(self, data, what) -> None:
        post = data.draw(st.sampled_from(self.posts))
        before = len(self.rows)
        if what == "edit":
            self.sql("update posts set body = body || '!' where id = $1", post)
        elif what == "move":
            self.sql("update posts set tenant_id = case tenant_id when 'a' then 'b' else 'a' end where id = $1", post)
        else:
            self.posts.remove(post)
            self.sql("delete from posts where id = $1", post)
        self.note_new()
        assert len(self.rows) - before == (2 if what == "move" else 1)

    # --- workers ---

    @precondition(lambda self: any(row.status in WAITING for row in self.rows.values()))
    @rule(name=WORKERS, fast=st.integers(0, 3), slow=st.integers(0, 3), memory=st.integers(0, 3))
    def claim(self, name, fast, slow, memory) -> None:
        self.claim_into(self.workers[name], {"fast": fast, "slow": slow, "memory": memory})

    @precondition(lambda self: any(row.status in WAITING for row in self.rows.values()))
    @rule(name=WORKERS)
    def claim_with_room(self, name) -> None:
        self.claim_into(self.workers[name], {"fast": 3, "slow": 3, "memory": 3})

    def claim_into(self, worker: Worker, room: dict[str, int]) -> int:
        after = worker.after
        rows, tokens = self.rows, set()
        waiting = [row for row in rows.values() if row.status in WAITING]
        running = {row.family for row in rows.values() if row.status == "running"}
        suspected = {row.family for row in waiting if row.is_suspect}
        ready = [
            row for row in waiting
            if row.run_after <= self.clock and room[row.lane] and row.family not in running
        ]  # fmt: skip
        busy = {row.type for row in rows.values() if row.status == "running" and row.is_suspect}

        claimed = self.sql(
            "select * from reactor.claim_jobs($1, $2, 'w', $3, null, $4, $5)",
            list(LANES),
            [9, 9],
            timedelta(seconds=LEASE_S),
            {
                t: {lane: {"room": room[lane], "after": after.get(lane, "")} for lane in lanes}
                for t, lanes in LANES.items()
            },
            self.now,
        )

        families = Counter(rows[r["id"]].family for r in claimed)
        assert not families or max(families.values()) == 1
        assert not running & set(families)
        lone = {row.type for row in ready if row.is_suspect and row.type not in busy}
        assert Counter(r["type"] for r in claimed if r["is_suspect"]) == dict.fromkeys(lone, 1)
        assert len(claimed) - len(lone) <= sum(room.values())
        for lane, places in room.items():  # tenants in turn, each of them while there is room
            innocent = [row for row in ready if row.lane == lane and row.family not in suspected]
            served = {row.tenant for row in innocent if row.family in families}
            tenants = {row.tenant for row in waiting if row.lane == lane and row.run_after <= self.clock}
            owed = places if len(tenants) >= places else 1
            assert len(served) >= min(len({row.tenant for row in innocent}), owed)
            if served:
                after[lane] = max({t for t in served if t <= after.get(lane, "")} or served)
        for r in claimed:
            lead = rows[r["id"]]
            twins = [row for row in waiting if row.family == lead.family]
            assert lead.id == min(row.id for row in twins if row.run_after <= self.clock)
            version = max(row.newest for row in twins)
            if version != lead.newest:
                lead.payload = self.payloads[version]
            lead.version, lead.is_suspect = version, any(row.is_suspect for row in twins)
            lead.status, lead.token, lead.lease_until = "running", r["claim_token"], self.clock + LEASE_S
            lead.attempts += 1
            tokens.add(lead.token)
            for row in twins:
                if row is not lead:
                    row.status = "done"
                    self.counts["done"] += 1
            assert (r["payload"], r["version"], r["attempts"], r["tenant_id"], r["is_suspect"]) == (
                lead.payload, lead.version, lead.attempts, lead.tenant, lead.is_suspect,
            )  # fmt: skip
            worker.held.append(Held(lead.id, lead.token))
        assert len(tokens) <= 1
        return len(claimed)

    @precondition(lambda self: any(worker.held for worker in self.workers.values()))
    @rule(name=WORKERS, is_noticed=st.booleans())
    def crash(self, name, is_noticed) -> None:
        worker = self.workers[name]
        worker.lost += worker.held
        worker.held.clear()
        if is_noticed:
            self.clock += LEASE_S + 1
            self.sweep()

    def claims(self, *, are_held: bool | None = None) -> list[Held]:
        """Every claim that some worker holds, or thinks it holds."""
        held = [held for worker in self.workers.values() for held in worker.held + worker.lost]
        return [h for h in held if are_held is None or (self.rows[h.id].token == h.token) == are_held]

    @precondition(lambda self: self.claims(are_held=True))
    @rule(
        data=st.data(),
        ending=st.sampled_from(["done", "completed", "failed", "dead", "snoozed"]),
        delay_s=st.sampled_from([0.0, 20.0, 5e5]),
    )
    def settle(self, data, ending, delay_s) -> None:
        chosen = data.draw(
            st.lists(st.sampled_from(self.claims(are_held=True)), min_size=1, max_size=4, unique_by=lambda h: h.id)
        )
        self.settle_as(chosen, ending, delay_s)
        for worker in self.workers.values():
            worker.lost += [held for held in worker.held if held in chosen]  # it may try again
            worker.held = [held for held in worker.held if held not in chosen]

    @precondition(lambda self: self.claims(are_held=True))
    @rule(ending=st.sampled_from(["failed", "snoozed", "dead"]), delay_s=st.sampled_from([0.0, 20.0]))
    def settle_everything(self, ending, delay_s) -> None:
        held = {h.id: h for h in self.claims(are_held=True)}  # also by one that was thought dead
        self.settle_as(list(held.values()), ending, delay_s)

    @precondition(lambda self: self.claims(are_held=False))
    @rule(data=st.data(), ending=st.sampled_from(["done", "completed", "failed", "dead", "snoozed"]))
    def settle_late(self, data, ending) -> None:
        held = data.draw(st.sampled_from(self.claims(are_held=False)))
        self.settle_as([held], ending, 0.0)
        assert self.sql("select reactor.note_job($1, $2, '{}')", held.id, held.token)[0][0] is False

    def settle_as(self, jobs: list[Held], ending: str, delay_s: float) -> None:
        ids, tokens = [held.id for held in jobs], [held.token for held in jobs]
        valid = [self.rows[held.id] for held in jobs if self.rows[held.id].token == held.token]
        if ending == "completed":
            done = self.sql("select reactor.complete_jobs($1, $2, $3)", ids, tokens, [None] * len(ids))
            assert {r[0] for r in done} == {row.id for row in valid}
        else:
            told = self.sql(
                "select * from reactor.settle_jobs($1, $2, $3, null, $4, $5, p_now => $6)",
                ids, tokens, [ending] * len(ids), ["e: m"] * len(ids), [delay_s] * len(ids), self.now,
            )  # fmt: skip
        for row in valid:
            self.end(row, {"completed": "done"}.get(ending, ending), delay_s)
        if ending != "completed":
            stale = dict.fromkeys(set(ids) - {row.id for row in valid})
            assert {r["id"]: r["status"] for r in told} == stale | {
                row.id: row.status for row in valid if row.status != "done"
            }

    def end(self, row: Row, ending: str, delay_s: float) -> None:
        is_free = ending == "snoozed" or (ending == "expired" and not row.is_suspect)
        if ending == "snoozed" and row.snoozed_since is not None and row.snoozed_since < self.clock - 7 * 86_400:
            ending, is_free = "dead", False
        if is_free:
            row.status = "pending"
            row.attempts -= 1
        elif ending in ("failed", "expired"):
            row.status = "dead" if row.attempts >= row.max_attempts else "failed"
        else:
            row.status = ending
        if ending not in ("done", "dead"):
            row.run_after = self.clock + min(delay_s, 86_400 if ending == "failed" else delay_s)
        row.snoozed_since = (
            (self.clock if row.snoozed_since is None else row.snoozed_since) if ending == "snoozed" else None
        )
        row.is_suspect = ending == "expired"
        row.token = None
        if row.status in ("done", "dead"):
            self.counts[row.status] += 1
            self.ended[row.family] = max(self.ended.get(row.family, 0), row.version)

    @precondition(lambda self: self.claims(are_held=True))
    @rule(name=WORKERS)
    def heartbeat(self, name) -> None:
        held = self.workers[name].held
        extended = self.sql(
            "select reactor.extend_leases($1, $2, $3, $4)",
            [h.id for h in held], [h.token for h in held], timedelta(seconds=LEASE_S), self.now,
        )  # fmt: skip
        valid = [self.rows[h.id] for h in held if self.rows[h.id].token == h.token]
        assert {r[0] for r in extended} == {row.id for row in valid}
        for row in valid:
            row.lease_until = self.clock + LEASE_S

    # --- time and people ---

    @rule(seconds=st.sampled_from([1.0, 25.0, 60.0, 8 * 86_400.0]))
    def time_passes(self, seconds) -> None:
        self.clock += seconds

    @precondition(lambda self: self.claims(are_held=True))
    @rule()
    def sweep(self) -> None:
        expired = [row for row in self.rows.values() if row.status == "running" and row.lease_until < self.clock]
        released = self.sql("select * from reactor.release_expired_jobs($1)", self.now)
        for row in expired:
            self.end(row, "expired", 0)
        assert {(r["id"], r["status"], r["attempts"]) for r in released} == {
            (row.id, row.status, row.attempts) for row in expired
        }

    @precondition(lambda self: any(row.status in ("failed", "dead") for row in self.rows.values()))
    @rule(data=st.data(), by=st.sampled_from(["ids", "type", "all"]))
    def retry(self, data, by) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.rows)), max_size=3)) if by == "ids" else None
        retried = self.sql("select reactor.retry_jobs($1, $2, $3)", ids, "work" if by == "type" else None, self.now)
        expected = [
            row for row in self.rows.values()
            if (row.status == "dead" or (row.status == "failed" and ids is not None))
            and (ids is None or row.id in ids) and (by != "type" or row.type == "work")
        ]  # fmt: skip
        assert {r[0] for r in retried} == {row.id for row in expected}
        for row in expected:
            row.status, row.attempts, row.run_after, row.snoozed_since = "pending", 0, self.clock, None

    # --- what must hold ---

    @invariant()
    def tables_are_as_the_model_says(self) -> None:
        stored = self.sql("select * from reactor.jobs order by id")
        assert [
            (r["id"], r["status"], r["attempts"], r["version"], r["payload"], r["claim_token"], r["snoozed_since"] is None)
            for r in stored
        ] == [
            (w.id, w.status, w.attempts, w.version, w.payload, w.token, w.snoozed_since is None)
            for _, w in sorted(self.rows.items())
        ]  # fmt: skip
        assert all(r["attempts"] <= r["max_attempts"] for r in stored)
        assert all(r["is_suspect"] == self.rows[r["id"]].is_suspect for r in stored if r["status"] != "done")
        running = Counter(row.family for row in self.rows.values() if row.status == "running")
        assert not running or max(running.values()) == 1
        [[done, dead]] = self.sql("select coalesce(sum(done), 0), coalesce(sum(dead), 0) from reactor.job_minutes")
        assert (done, dead) == (self.counts["done"], self.counts["dead"])

    def teardown(self) -> None:
        """From wherever it is, it drains, and nothing was lost."""
        if self.uncommitted is not None:
            self.end_the_transaction(commits=True)
        worker = Worker()
        for _ in range(2 * len(self.rows) + 10):
            self.clock += 8 * 86_400
            self.sweep()
            self.claim_into(worker, {"fast": 2, "slow": 1, "memory": 3})
            self.settle_as(worker.held, "done", 0)
            worker.held.clear()
            if all(row.status in ("done", "dead") for row in self.rows.values()):
                break
        self.tables_are_as_the_model_says()
        assert {row.status for row in self.rows.values()} <= {"done", "dead"}
        assert {family: self.ended[family] for family in self.newest} == self.newest


def test_whatever_happens_no_job_is_lost_run_twice_at_once_or_settled_twice(dsn):
    with asyncio.Runner() as loop:

        class OfThisDatabase(Queue):
            pass

        OfThisDatabase.loop = loop
        OfThisDatabase.conn, OfThisDatabase.slow = loop.run(connect(dsn)), loop.run(connect(dsn))
        run_state_machine_as_test(
            OfThisDatabase,
            settings=settings(
                max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
        for conn in (OfThisDatabase.conn, OfThisDatabase.slow):
            loop.run(conn.close())
