"""The worker: claims what fits, drains on a signal, outlives its Postgres and its own death; idle, it is silent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import struct
import threading
from collections import Counter
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import anyio
import asyncpg
import pytest
from conftest import connect, drained, eventually, reactor_process
from test_settling import ended, enqueue, row, working
from voyage_stub import late, voyage_stub

from reactor.errors import Permanent, Unavailable
from reactor.job import Done, Failed, Handler, Snooze
from reactor.jobs import Jobs


class Wire:
    """A TCP port before a test's database, which can be cut, frozen and listened in on."""

    def __init__(self, dsn):
        parts = urlsplit(dsn)
        self._socket = parse_qs(parts.query)["host"][0] + "/.s.PGSQL.5432"
        self._user, self._database = parts.username, parts.path
        self.port = None
        self.statements = []
        self.freezes_on = None  # a word in a statement that shall never be answered
        self.frozen = asyncio.Event()
        self._server = None
        self._links = {}
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def dsn(self):
        return f"postgresql://{self._user}:@127.0.0.1:{self.port}{self._database}?sslmode=disable"

    async def open(self):
        self._server = await asyncio.start_server(self._link, "127.0.0.1", self.port or 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self):
        self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._server.wait_closed()
        self._flows.set()

    def freeze(self):
        self._flows.clear()

    async def _link(self, reader, writer):
        self._links[asyncio.current_task()] = writer
        with contextlib.suppress(OSError, asyncio.CancelledError):
            server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
            try:
                pumps = [self._pump(reader, server_writer, self._listen_in()), self._pump(server_reader, writer, None)]
                pumps = [asyncio.ensure_future(pump) for pump in pumps]
                try:
                    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.wait(pumps)
            finally:
                server_writer.transport.abort()
        writer.transport.abort()
        del self._links[asyncio.current_task()]

    async def _pump(self, reader, writer, ear):
        if ear is not None:
            next(ear)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                if ear is not None:
                    ear.send(data)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()

    def _listen_in(self):
        """Note the text of every statement a client runs: simple queries, and prepared ones when bound."""
        buffer, typed, prepared = b"", False, {}
        while True:
            buffer += yield
            while True:
                head = 5 if typed else 4
                if len(buffer) < head:
                    break
                [length] = struct.unpack_from(">i", buffer, head - 4)
                if len(buffer) < head - 4 + length:
                    break
                kind, body, buffer = buffer[:1], buffer[head : head - 4 + length], buffer[head - 4 + length :]
                if not typed:
                    typed = body[:4] != struct.pack(">i", 80877103)
                elif kind == b"Q":
                    self._note(body[:-1].decode())
                elif kind == b"P":
                    name, text, _ = body.split(b"\0", 2)
                    prepared[name] = text.decode()
                elif kind == b"B":
                    self._note(prepared.get(body.split(b"\0")[1], "?"))

    def _note(self, statement):
        self.statements.append(statement)
        if self.freezes_on is not None and self.freezes_on in statement:
            self.freeze()
            self.frozen.set()


@asynccontextmanager
async def wire_to(dsn):
    wire = Wire(dsn)
    await wire.open()
    try:
        yield wire
    finally:
        await wire.close()


class Output:
    """What a process says, read as it comes."""

    def __init__(self, process):
        self.lines = []
        self.process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for line in self.process.stdout:
                self.lines.append(line)
        except ValueError:
            pass

    @property
    def text(self):
        return "".join(self.lines)

    def named(self, event):
        entries = [json.loads(line) for line in list(self.lines) if line.startswith("{")]
        return [entry for entry in entries if entry["event"] == event]

    async def saw(self, event, count=1, timeout_s=30):
        async def check():
            assert self.process.poll() is None or len(self.named(event)) >= count, self.text
            return len(self.named(event)) >= count

        await eventually(check, timeout_s=timeout_s)

    async def exited(self, timeout_s=30):
        async def check():
            return self.process.poll() is not None

        await eventually(check, timeout_s=timeout_s)
        return self.process.returncode


@asynccontextmanager
async def reactor_of(dsn, stub, **env):
    """A real `reactor run` that embeds with the stub, and its output."""
    environment = {"VOYAGE_API_KEY": stub.key, "REACTOR_VOYAGE_BASE_URL": stub.url} | env
    with reactor_process(dsn, **environment) as process:
        yield Output(process)


async def insert_posts(conn, count, tenant="acme"):
    await conn.execute(
        "insert into posts (tenant_id, body) select $1, 'texto número ' || n from generate_series(1, $2::int) n",
        tenant,
        count,
    )


async def all_done(conn):
    """Return once every row is synced, those that wait for a pause to end included."""
    await eventually(
        lambda: conn.fetchval(
            "select not exists (select from reactor.jobs where type = 'sync_row' and status <> 'done')"
        )
    )


async def remembered(conn):
    """The contents of all memories, as the one who may see them: each tenant for itself."""
    contents = []
    for r in await conn.fetch("select tenant_id from reactor.tenants order by 1"):
        contents += [
            h["content"] for h in await conn.fetch("select content from reactor.recent($1, 100)", r["tenant_id"])
        ]
    return sorted(contents)


async def count_memories(conn, tenant="acme"):
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant($1)", tenant)
        return await conn.fetchval("select count(*) from reactor.memories")


class TestRoom:
    async def test_concurrency_and_batch_are_never_exceeded_and_are_used(self, conn, pool):
        running, most, sizes = 0, 0, []
        full = anyio.Event()

        async def work(jobs):
            nonlocal running, most
            running += 1
            most = max(most, running)
            sizes.append(len(jobs))
            if running == 3:
                full.set()
            await full.wait()
            running -= 1

        for n in range(100):
            await enqueue(conn, n)
        with anyio.fail_after(30):
            async with working(pool, {"work": Handler(work, batch=7, concurrency=3)}):
                await drained(conn)

        assert most == 3
        assert max(sizes) == 7
        assert sum(sizes) == 100

    async def test_no_more_is_claimed_than_fits_so_others_can_have_the_rest(self, conn, pool):
        started, release = [], anyio.Event()

        async def work(job):
            started.append(job.id)
            await release.wait()

        for n in range(10):
            await enqueue(conn, n)
        async with working(pool, {"work": Handler(work, concurrency=2)}):
            await eventually(lambda: conn.fetchval("select count(*) = 2 from reactor.jobs where status = 'running'"))
            counts = Counter(r[0] for r in await conn.fetch("select status from reactor.jobs"))
            release.set()
            await drained(conn)

        assert counts == {"running": 2, "pending": 8}
        assert len(started) == 10

    async def test_a_slow_type_does_not_hold_up_another(self, conn, pool):
        release, slow_ones = anyio.Event(), 0

        async def slow(job):
            nonlocal slow_ones
            slow_ones += 1
            await release.wait()

        async def quick(job):
            return {"quick": True}

        for n in range(8):
            await enqueue(conn, n, type_="slow")
        async with working(pool, {"slow": Handler(slow, concurrency=2), "quick": quick}, poll_s=30) as worker:
            await eventually(lambda: conn.fetchval("select count(*) = 2 from reactor.jobs where status = 'running'"))
            ids = [await enqueue(conn, n, type_="quick") for n in range(20)]
            worker._wakeup.ring()
            rows = await ended(conn, *ids)
            assert slow_ones == 2
            release.set()

        assert {job["status"] for job in rows} == {"done"}

    async def test_a_job_that_enqueues_another_sees_it_run(self, conn, pool):
        async def first(job, *, pool):
            await pool.execute("select reactor.enqueue('second', '{}', $1)", job.tenant_id)

        async def second(job):
            return {"second": True}

        await enqueue(conn, type_="first")
        async with working(pool, {"first": first, "second": second}):
            await eventually(lambda: conn.fetchval("select count(*) = 2 from reactor.jobs where status = 'done'"))

    async def test_a_timer_is_slept_to_and_not_polled_for(self, conn, pool):
        ran = anyio.Event()
        at = None

        async def work(job):
            nonlocal at
            at = await conn.fetchval("select clock_timestamp() - run_after from reactor.jobs where id = $1", job.id)
            ran.set()

        await conn.execute(
            "insert into reactor.jobs (type, tenant_id, lane, run_after) values ('work', '', 'work', now() + interval '700 ms')"
        )
        async with working(pool, {"work": work}, poll_s=60):
            with anyio.fail_after(20):
                await ran.wait()

        assert timedelta(0) <= at < timedelta(seconds=0.4)

    async def test_a_job_blocked_by_a_twin_in_another_reactor_runs_once_that_one_ends(self, conn, pool):
        ran = anyio.Event()

        async def work(job):
            ran.set()

        await enqueue(conn, 1, key="k")
        [other] = await conn.fetch("select * from reactor.claim_jobs('{work}', '{1}', 'other', '1 hour')")
        await enqueue(conn, 2, key="k")
        async with working(pool, {"work": work}, poll_s=60):
            await eventually(
                lambda: conn.fetchval(
                    "select count(*) > 0 from pg_stat_activity where query like '%look_ahead%' and pid <> pg_backend_pid()"
                )
            )
            assert not ran.is_set()
            await conn.fetch("select reactor.settle_jobs($1, $2, '{done}')", [other["id"]], [other["claim_token"]])
            with anyio.fail_after(20):
                await ran.wait()


class TestStopping:
    async def test_stop_lets_a_running_job_finish_and_claims_no_more(self, conn, pool):
        running, release = anyio.Event(), anyio.Event()

        async def work(job):
            running.set()
            await release.wait()
            return {"finished": True}

        first = await enqueue(conn)
        async with working(pool, {"work": Handler(work, concurrency=1)}) as worker:
            with anyio.fail_after(20):
                await running.wait()
            second = await enqueue(conn)
            worker.stop()
            release.set()

        assert (await row(conn, first))["result"] == {"finished": True}
        assert [(await row(conn, second))[c] for c in ("status", "attempts")] == ["pending", 0]

    @pytest.mark.parametrize("drain_s", [0, 0.2])
    async def test_a_job_cut_off_at_the_deadline_goes_back_unharmed(self, conn, pool, drain_s):
        running = anyio.Event()

        async def work(jobs):
            jobs[0].outcome = Snooze(100, "settled before the rest")
            running.set()
            await anyio.sleep_forever()

        ids = [await enqueue(conn, n, attempts=4) for n in range(3)]
        async with working(pool, {"work": Handler(work, batch=5)}, drain_s=drain_s):
            with anyio.fail_after(20):
                await running.wait()

        rows = [await row(conn, job_id) for job_id in ids]
        assert {(job["status"], job["attempts"]) for job in rows} == {("pending", 4)}
        assert [job["last_error"] for job in rows] == [
            "snoozed: settled before the rest",
            "given back: drained",
            "given back: drained",
        ]

    async def test_sigterm_lets_the_running_batch_finish_leaves_the_rest_and_exits_0(self, conn, dsn):
        answer = anyio.Event()
        async with voyage_stub() as stub:
            stub.always(late(answer))
            async with reactor_of(dsn, stub) as output:
                await insert_posts(conn, 128 * 4)  # all that runs at once
                with anyio.fail_after(30):
                    await stub.received(4)
                await insert_posts(conn, 20, "later")
                output.process.send_signal(signal.SIGTERM)
                await output.saw("stopping")
                answer.set()
                code = await output.exited()

        assert code == 0, output.text
        assert await count_memories(conn) == 512
        rest = await conn.fetch("select status, attempts from reactor.jobs where tenant_id = 'later'")
        assert Counter(map(tuple, rest)) == {("pending", 0): 20}
        assert output.lines[-1].count('"stopped"') == 1

    async def test_sigterm_gives_up_waiting_at_the_deadline_and_spends_no_attempt(self, conn, dsn):
        async with voyage_stub() as stub:
            stub.always(late(anyio.Event()))
            async with reactor_of(dsn, stub, REACTOR_DRAIN_S="0.2") as output:
                await insert_posts(conn, 5)
                with anyio.fail_after(30):
                    await stub.received(1)
                output.process.send_signal(signal.SIGTERM)
                code = await output.exited()

        assert code == 0, output.text
        assert Counter(
            map(tuple, await conn.fetch("select status, attempts from reactor.jobs where type = 'sync_row'"))
        ) == {("pending", 0): 5}

    async def test_a_second_signal_ends_it_at_once(self, conn, dsn):
        async with voyage_stub() as stub:
            stub.always(late(anyio.Event()))
            async with reactor_of(dsn, stub, REACTOR_DRAIN_S="600") as output:
                await insert_posts(conn, 1)
                with anyio.fail_after(30):
                    await stub.received(1)
                output.process.send_signal(signal.SIGTERM)
                await output.saw("stopping")
                output.process.send_signal(signal.SIGINT)
                await output.exited()

        assert "Traceback" not in output.text
        assert output.named("stopped_at_once")[0]["signal"] == "SIGINT"

    async def test_a_handler_that_swallows_being_cancelled_does_not_hold_up_the_end(self, conn, dsn, tmp_path):
        (tmp_path / "stubborn.py").write_text(
            "import anyio\n\n\nasync def stubborn(job):\n    while True:\n        try:\n"
            "            await anyio.sleep(1)\n        except BaseException:\n            pass\n\n\nHANDLERS = {'stubborn': stubborn}\n"
        )
        await conn.execute("select reactor.enqueue('stubborn', '{}', 'acme')")
        async with (
            voyage_stub() as stub,
            reactor_of(dsn, stub, REACTOR_DRAIN_S="1", REACTOR_HANDLERS=str(tmp_path)) as output,
        ):
            await eventually(lambda: conn.fetchval("select exists (select from reactor.jobs where status = 'running')"))
            output.process.send_signal(signal.SIGTERM)
            await output.exited()

        assert output.named("handlers_hang")[0]["calls"] == 1
        assert (
            await conn.fetchval("select status from reactor.jobs where type = 'stubborn'") == "running"
        )  # its lease ends

    async def test_a_frozen_postgres_does_not_hold_up_the_end(self, conn, dsn):
        answer = anyio.Event()
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            stub.always(late(answer))
            async with reactor_of(wire.dsn, stub, REACTOR_DRAIN_S="1", REACTOR_POLL_S="0.3") as output:
                await insert_posts(conn, 1)
                with anyio.fail_after(30):
                    await stub.received(1)
                wire.freezes_on = "claim_jobs"
                with anyio.fail_after(30):
                    await wire.frozen.wait()
                answer.set()
                output.process.send_signal(signal.SIGTERM)
                code = await output.exited(timeout_s=60)

        assert code == 0, output.text
        assert "Traceback" not in output.text

    async def test_a_postgres_that_is_gone_does_not_hold_up_the_end(self, conn, dsn):
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            async with reactor_of(wire.dsn, stub) as output:
                await output.saw("listener_ready")
                await wire.close()
                await output.saw("listener_lost")
                output.process.send_signal(signal.SIGTERM)
                code = await output.exited()

        assert code == 0, output.text
        assert "Traceback" not in output.text


class Unprintable(Permanent):
    def __str__(self):
        raise RuntimeError("not even this")


class Odd(BaseException):
    pass


def raising(exc):
    async def work(job):
        raise exc

    return work


def ending(outcome):
    async def work(job):
        job.outcome = outcome

    return work


async def raises_in_a_group_of_its_own(job):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        raise Odd


async def cancels_itself(job):
    asyncio.current_task().cancel()
    await anyio.sleep_forever()


async def refers_to_itself(job):
    result = {}
    result["again"] = result
    return result


async def returns_what_is_too_deep(job):
    result = {}
    for _ in range(20_000):
        result = {"deeper": result}
    return result


MISBEHAVIOURS = {
    "a group of what no program catches": (raising(BaseExceptionGroup("all", [SystemExit(1)])), "failed: SystemExit"),
    "a group of its own": (raises_in_a_group_of_its_own, "failed: Odd"),
    "an interrupt from the keyboard": (raising(KeyboardInterrupt()), "failed: KeyboardInterrupt"),
    "an exit of a generator": (raising(GeneratorExit()), "failed: GeneratorExit"),
    "an exception that raises when it is read": (raising(Unprintable("")), "failed: RuntimeError"),
    "a delay that is a date": (raising(Unavailable("busy", retry_after_s="Wed, 21 Oct 2026")), "pending: snoozed"),
    "a delay that is text": (raising(Unavailable("busy", retry_after_s="120")), "pending: snoozed"),
    "a delay that is no number": (ending(Failed("busy", "", float("nan"))), "failed: busy"),
    "a delay without end": (ending(Failed("busy", "", float("inf"))), "failed: busy"),
    "a delay before now": (
        ending(Failed("busy", "", -1e300)),
        ("failed: busy", "dead: busy"),
    ),  # at once, until the last
    "an outcome that is none": (ending("done"), "failed: outcome"),
    "a result that refers to itself": (refers_to_itself, ": "),
    "a result that is too deep": (returns_what_is_too_deep, ": "),
    "a cancellation of itself": (cancels_itself, "failed: CancelledError"),
}


class TestHandlersThatMisbehave:
    @pytest.mark.parametrize("name", MISBEHAVIOURS)
    async def test_whatever_one_does_ends_its_own_job_and_no_other(self, conn, pool, name):
        bad, becomes = MISBEHAVIOURS[name]
        running, release = anyio.Event(), anyio.Event()

        async def good(job):
            running.set()
            await release.wait()
            return {"unharmed": True}

        before = await enqueue(conn, type_="good")
        async with working(pool, {"good": good, "bad": bad}, poll_s=30) as worker:
            with anyio.fail_after(20):
                await running.wait()
            bad_ones = [await enqueue(conn, n, type_="bad") for n in range(2)]
            worker._wakeup.ring()
            rows = await ended(conn, *bad_ones)
            release.set()
            after = await enqueue(conn, type_="good")
            worker._wakeup.ring()
            unharmed = await ended(conn, before, after)

        for job in rows:
            assert f"{job['status']}: {job['last_error']}".startswith(becomes) or becomes == ": "
            assert job["due_s"] <= 86_400
        assert [(job["status"], job["attempts"], job["result"]) for job in unharmed] == [
            ("done", 1, {"unharmed": True})
        ] * 2

    async def test_one_that_is_cancelled_by_another_fails_and_both_go_on(self, conn, pool):
        tasks = {}

        async def victim(jobs):
            if len(jobs) > 1:
                tasks["victim"] = asyncio.current_task()
                await anyio.sleep_forever()

        async def murderer(job):
            await eventually(lambda: "victim" in tasks)
            tasks["victim"].cancel()

        victims = [await enqueue(conn, n, type_="victim") for n in range(2)]
        other = await enqueue(conn, type_="murderer")
        async with working(pool, {"victim": Handler(victim, batch=5), "murderer": murderer}):
            rows = await ended(conn, *victims, other)

        assert {(job["status"], job["attempts"]) for job in rows} == {("done", 1)}

    @pytest.mark.parametrize("way", ["timeout", "anyio", "group", "shield", "swallows"])
    async def test_timeouts_of_its_own_and_ours_do_not_mix(self, conn, pool, way):
        async def own(job):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anyio.sleep_forever()
            with anyio.move_on_after(0.01):
                await anyio.sleep_forever()
            return {"went": "on"}

        async def slow(job):
            match way:
                case "timeout":
                    async with asyncio.timeout(60):
                        await anyio.sleep_forever()
                case "anyio":
                    with anyio.move_on_after(60):
                        await anyio.sleep_forever()
                case "group":
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(anyio.sleep_forever)
                case "shield":
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.shield(asyncio.sleep(0.3))
                    raise LookupError
                case "swallows":
                    try:
                        await anyio.sleep_forever()
                    except BaseException as exc:
                        raise ValueError("cleaning up") from exc

        ids = [await enqueue(conn, type_="own"), await enqueue(conn, type_="slow")]
        table = {"own": Handler(own, timeout_s=5), "slow": Handler(slow, timeout_s=0.1)}
        async with working(pool, table):
            fine, timed_out = await ended(conn, *ids)

        assert fine["result"] == {"went": "on"}
        assert (timed_out["status"], timed_out["last_error"]) == ("failed", "timeout: longer than 0.1 s")

    async def test_an_ending_that_cannot_be_stored_fails_by_itself(self, conn, pool, monkeypatch):
        async def work(job):
            return {"n": job.payload["n"]}

        settle = Jobs.settle

        async def settles(jobs, endings):
            if any(outcome == Done({"n": 1}) for _, outcome in endings):
                raise asyncpg.ProgramLimitExceededError("total size of jsonb object elements exceeds the maximum")
            return await settle(jobs, endings)

        monkeypatch.setattr(Jobs, "settle", settles)
        ids = [await enqueue(conn, n) for n in range(3)]
        async with working(pool, {"work": work}):
            rows = await ended(conn, *ids)

        assert [(job["status"], (job["last_error"] or "").partition(":")[0]) for job in rows] == [
            ("done", ""),
            ("failed", "ProgramLimitExceededError"),
            ("done", ""),
        ]


class TestCuttingOff:
    @pytest.mark.parametrize("batch", [1, 5])
    @pytest.mark.parametrize("way", ["raises", "returns", "groups"])
    async def test_what_a_handler_makes_of_being_cut_off_spends_no_attempt(self, conn, pool, way, batch):
        running, calls = anyio.Event(), []

        async def work(given):
            calls.append(given)
            if len(calls) == (3 if batch == 1 else 1):
                running.set()
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                match way:
                    case "raises":
                        raise ValueError from None
                    case "groups":
                        raise BaseExceptionGroup("all", [asyncio.CancelledError(), KeyError()]) from None
            return {"finished": "all the same"}

        ids = [await enqueue(conn, n) for n in range(3)]
        async with working(pool, {"work": Handler(work, batch=batch)}, drain_s=0.1):
            with anyio.fail_after(20):
                await running.wait()

        rows = [await row(conn, job_id) for job_id in ids]
        ended_as = ("done", 1) if way == "returns" else ("pending", 0)
        assert {(job["status"], job["attempts"]) for job in rows} == {ended_as}
        assert len(calls) == (3 if batch == 1 else 1)  # and none is tried alone now

    async def test_one_that_does_not_let_go_holds_up_neither_the_end_nor_the_others(self, conn, pool, events):
        running, let_go, calls = anyio.Event(), anyio.Event(), []

        async def work(job):
            calls.append(job.id)
            if len(calls) == 2:
                running.set()
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()
                if job.payload["n"] == 1:
                    return

        ids = [await enqueue(conn, n) for n in range(2)]
        with anyio.fail_after(20):
            async with working(pool, {"work": work}, drain_s=0):
                await running.wait()
        stubborn, other = [await row(conn, job_id) for job_id in ids]
        let_go.set()

        assert (other["status"], stubborn["status"]) == ("done", "running")
        assert [event["calls"] for event in events.named("handlers_hang")] == [1]

    async def test_a_job_claimed_in_the_last_moment_goes_back_though_its_call_never_began(self, conn, pool):
        calls = []

        async def work(job):
            calls.append(job.id)
            await anyio.sleep_forever()

        async with working(pool, {"work": work}, drain_s=0) as worker:
            claim = worker._jobs.claim

            async def claim_and_stop(*args):
                claimed = await claim(*args)
                if claimed:
                    worker.stop()
                return claimed

            worker._jobs.claim = claim_and_stop
            job_id = await enqueue(conn)

        job = await row(conn, job_id)
        assert (job["status"], job["attempts"], job["is_suspect"]) == ("pending", 0, False)

    async def test_what_ran_alone_after_its_batch_failed_is_kept_when_the_rest_is_cut_off(self, conn, pool):
        last = anyio.Event()

        async def work(jobs):
            if len(jobs) > 1:
                raise ValueError
            if jobs[0].payload["n"] == 2:
                last.set()
                await anyio.sleep_forever()
            return {"alone": jobs[0].payload["n"]}

        ids = [await enqueue(conn, n) for n in range(3)]
        async with working(pool, {"work": Handler(work, batch=5)}, drain_s=0):
            with anyio.fail_after(20):
                await last.wait()

        rows = [await row(conn, job_id) for job_id in ids]
        assert [(job["status"], job["result"]) for job in rows] == [
            ("done", {"alone": 0}),
            ("done", {"alone": 1}),
            ("pending", None),
        ]


class TestOutages:
    async def test_it_waits_for_a_postgres_that_is_down_at_start(self, conn, dsn):
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            await wire.close()
            async with reactor_of(wire.dsn, stub) as output:
                await output.saw("postgres_awaited")
                await insert_posts(conn, 3)
                await wire.open()
                await output.saw("listener_ready")
                await drained(conn)

        assert await count_memories(conn) == 3

    async def test_sigterm_while_it_waits_for_postgres_is_a_clean_end(self, dsn):
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            await wire.close()
            async with reactor_of(wire.dsn, stub) as output:
                await output.saw("postgres_awaited")
                output.process.send_signal(signal.SIGTERM)
                code = await output.exited()

        assert code == 0, output.text

    async def test_connections_killed_again_and_again_under_work_lose_nothing(self, conn, dsn):
        kill = (
            "select count(pg_terminate_backend(pid)) from pg_stat_activity "
            "where datname = current_database() and application_name like 'memory-reactor%'"
        )
        async with voyage_stub() as stub, reactor_of(dsn, stub, REACTOR_LEASE_S="2") as output:
            await output.saw("listener_ready")
            for round_ in range(4):
                await insert_posts(conn, 200)
                with anyio.fail_after(30):
                    await stub.received(round_ + 1)
                await eventually(lambda: conn.fetchval(kill))
            await output.saw("listener_ready", 2)
            await all_done(conn)
            await insert_posts(conn, 1)
            await all_done(conn)

            assert output.process.poll() is None
            assert "Traceback" not in output.text
        assert await count_memories(conn) == 801

    async def test_a_crash_of_the_server_is_outlived(self, conn, dsn, server):
        victim = await connect(dsn)
        async with voyage_stub() as stub, reactor_of(dsn, stub, REACTOR_LEASE_S="2") as output:
            await output.saw("listener_ready")
            answer = anyio.Event()
            stub.fail_next(late(answer))
            await insert_posts(conn, 50)
            with anyio.fail_after(30):
                await stub.received(1)
            os.kill(victim.get_server_pid(), signal.SIGKILL)  # the postmaster restarts everything
            victim.terminate()
            await output.saw("listener_lost")
            answer.set()
            await output.saw("listener_ready", 2)
            again = await eventually(lambda: _connected(dsn))
            await all_done(again)

            assert output.process.poll() is None
            assert "Traceback" not in output.text
        assert await count_memories(again) == 50
        await again.close()

    async def test_an_outage_is_a_line_and_not_a_line_a_second(self, dsn):
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            async with reactor_of(wire.dsn, stub, REACTOR_POLL_S="0.2") as output:
                await output.saw("listener_ready")
                await wire.close()
                await output.saw("claim_failed")
                await wire.open()
                await output.saw("listener_ready", 2)

        assert len(output.named("claim_failed")) == 1

    async def test_a_dropped_jobs_table_is_said_and_outlived(self, conn, pool, events):
        async def work(job):
            return None

        await conn.execute("alter table reactor.jobs rename to jobs_elsewhere")
        async with working(pool, {"work": work}):
            await eventually(lambda: events.named("claim_failed"))
            await conn.execute("alter table reactor.jobs_elsewhere rename to jobs")
            await enqueue(conn)
            await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs"))

        assert [e["error_code"] for e in events.named("claim_failed")] == ["UndefinedTableError 42P01"]


async def _connected(dsn):
    with contextlib.suppress(OSError, asyncpg.PostgresError):
        return await connect(dsn)


class TestDying:
    async def test_kill_9_in_mid_batch_loses_nothing_and_leaves_no_job_running(self, conn, dsn):
        async with voyage_stub() as stub:
            stub.always(late(anyio.Event()))
            async with reactor_of(dsn, stub, REACTOR_LEASE_S="1") as output:
                await insert_posts(conn, 150)
                with anyio.fail_after(30):
                    await stub.received(1)
                output.process.kill()
                await output.exited()
            stub.always(None)
            async with reactor_of(dsn, stub, REACTOR_LEASE_S="1"):
                await all_done(conn)

        assert await count_memories(conn) == 150
        assert await conn.fetchval("select memories from reactor.tenants where tenant_id = 'acme'") == 150
        assert (
            await conn.fetchval("select max(attempts) from reactor.jobs where type = 'sync_row'") == 1
        )  # the killed claim spent none

    async def test_a_frozen_reactor_that_wakes_late_writes_nothing(self, conn, dsn):
        answer = anyio.Event()
        async with voyage_stub() as stub:
            stub.fail_next(late(answer))
            async with reactor_of(dsn, stub, REACTOR_LEASE_S="1") as frozen:
                await conn.execute("insert into posts (tenant_id, body) values ('acme', 'velho'), ('acme', 'apagado')")
                with anyio.fail_after(30):
                    await stub.received(1)
                frozen.process.send_signal(signal.SIGSTOP)
                await conn.execute("update posts set body = 'novo' where body = 'velho'")
                await conn.execute(
                    "delete from posts where body = 'apagado'"
                )  # a late write would bring it back for ever
                async with reactor_of(dsn, stub, REACTOR_LEASE_S="1") as other:
                    await eventually(lambda: _is(remembered(conn), ["novo"]))
                    other.process.send_signal(signal.SIGTERM)
                    assert await other.exited() == 0
                assert await conn.fetchval("select count(*) from reactor.tombstones") == 0
                frozen.process.send_signal(signal.SIGCONT)
                answer.set()
                await frozen.saw("claim_lost")
                await drained(conn)

        assert await remembered(conn) == ["novo"]
        assert await conn.fetchval("select memories from reactor.tenants") == 1

    async def test_an_author_who_edits_during_the_embedding_wins(self, conn, dsn):
        answer = anyio.Event()
        async with voyage_stub() as stub:
            stub.fail_next(late(answer))
            async with reactor_of(dsn, stub):
                await conn.execute("insert into posts (tenant_id, body) values ('acme', 'velho')")
                with anyio.fail_after(30):
                    await stub.received(1)
                await conn.execute("update posts set body = 'novo'")
                answer.set()
                await drained(conn)

        assert await remembered(conn) == ["novo"]


async def _is(awaitable, expected):
    return await awaitable == expected


class TestIdle:
    async def test_postgres_hears_a_look_at_each_floor_and_a_canary_now_and_then_and_no_processor_time_is_spent(
        self, conn, dsn
    ):
        async with voyage_stub() as stub, wire_to(dsn) as wire:
            async with reactor_of(wire.dsn, stub, REACTOR_POLL_S="0.4") as output:
                await insert_posts(conn, 3)
                await drained(conn)
                await _looks(wire, 3)  # settled down, and armed
                wire.statements.clear()
                spent = _cpu_s(output.process.pid)
                await _looks(wire, 20)  # 8 s: more than the 5 between two canaries
                spent = _cpu_s(output.process.pid) - spent
                said = Counter(map(_about, wire.statements))

        once_a_minute = {"check_health", "schedules"}
        assert set(said) - once_a_minute <= {"claim_jobs", "look_ahead", "release_expired_jobs", "pg_notify", "clean"}
        assert max(said[name] for name in once_a_minute) <= 1
        assert max(said[look] for look in ("claim_jobs", "look_ahead", "release_expired_jobs")) <= 21
        assert min(said[look] for look in ("claim_jobs", "look_ahead", "release_expired_jobs")) >= 19
        assert 1 <= said["pg_notify"] <= 2
        assert spent < 0.5  # at a floor a dozen times as often as the default

    async def test_what_is_overdue_but_locked_by_somebody_is_not_asked_for_without_a_pause(self, conn, dsn, pool):
        async def work(job):
            return None

        later = await conn.fetchval(
            "insert into reactor.jobs (type, tenant_id, lane, run_after) values ('work', '', 'work', now() + interval '0.3 s') returning id"
        )
        async with working(pool, {"work": work}, poll_s=30) as worker:
            looks, look = 0, worker._jobs.look_ahead

            async def counted(*args):
                nonlocal looks
                looks += 1
                return await look(*args)

            worker._jobs.look_ahead = counted
            async with conn.transaction():
                await conn.execute("select from reactor.jobs where id = $1 for update", later)
                other = await connect(dsn)
                await eventually(
                    lambda: other.fetchval("select run_after + interval '2 s' < clock_timestamp() from reactor.jobs")
                )
                await other.close()
            await ended(conn, later)

        assert 3 < looks < 25


async def _looks(wire, count):
    before = len([text for text in wire.statements if "claim_jobs" in text])
    await eventually(lambda: len([text for text in wire.statements if "claim_jobs" in text]) >= before + count)


def _about(statement):
    """The function of ours that a statement calls, or its own words."""
    called = re.search(
        r"reactor\.(\w+)\(|from reactor\.(schedules)|(pg_notify)|^(?:reset|unlisten|select pg_advisory_unlock_all)",
        statement,
        re.IGNORECASE,
    )
    return next(filter(None, called.groups()), "clean") if called else statement


def _cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
