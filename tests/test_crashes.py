"""What is promised is kept through kill -9, restarts, lost connections, wrong clocks, full servers and full disks."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import textwrap
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import asyncpg
import pytest
from aiohttp import web
from conftest import REPO, connect, eventually, reactor_process
from servers import own_cluster
from test_worker import Output

from reactor import db

# Leaves a trace outside before its work, and one inside.
WORK = """
import os
import anyio
from reactor import Handler

TRACES = os.open(os.environ["TRACES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

async def work(jobs, *, pool):
    os.write(TRACES, "".join(f"{job.id}\\n" for job in jobs).encode())
    await anyio.sleep(0.01)
    await pool.execute("insert into effects select unnest($1::bigint[])", [job.id for job in jobs])

HANDLERS = {"work": Handler(work, batch=10, concurrency=3)}
"""


class Scene:
    """A database with jobs, a folder of handlers, and the traces that these leave."""

    def __init__(self, dsn, folder):
        self.dsn = dsn
        self.folder = folder
        self.traces_file = folder / "traces"
        self.traces_file.touch()
        self.handlers = folder / "handlers"
        self.handlers.mkdir()
        (self.handlers / "work.py").write_text(WORK)

    @contextmanager
    def reactor(self, **env):
        """A real process; its own embedder is never needed, and not loaded."""
        own = {
            "TRACES": str(self.traces_file),
            "REACTOR_HANDLERS": str(self.handlers),
            "REACTOR_LEASE_S": "1",
            "VOYAGE_API_KEY": "none",
            "REACTOR_VOYAGE_BASE_URL": "http://127.0.0.1:9",
        }
        with reactor_process(self.dsn, **own | env) as process:
            yield Output(process)

    def traces(self):
        return [int(line) for line in self.traces_file.read_text().split()]

    def count(self):
        return self.traces_file.read_bytes().count(b"\n")

    async def traced(self, count):
        async def check():
            return self.count() >= count

        await eventually(check, timeout_s=60)


async def owe(conn, count, type_="work", tenants=7):
    await conn.execute(
        "insert into reactor.jobs (type, tenant_id, lane) select $1, 'tenant ' || n % $3, $1 from generate_series(1, $2::int) n",
        type_, count, tenants,
    )  # fmt: skip
    await conn.execute("select reactor.ring()")


@pytest.fixture
async def scene(dsn, conn, tmp_path):
    await conn.execute("create table effects (job_id bigint)")
    return Scene(dsn, tmp_path)


async def all_done(conn, timeout_s=120):
    await eventually(
        lambda: conn.fetchval(
            "select not exists (select from reactor.jobs where status <> 'done' and lane <> 'upkeep')"
        ),
        timeout_s=timeout_s,
    )


async def settled_once(conn, scene, jobs, *, may_repeat=frozenset()):
    """Every job is done, has left its traces, and was counted as done once; only some may have run again."""
    ids = {row["id"] for row in await conn.fetch("select id from reactor.jobs where status = 'done' and type = 'work'")}
    assert len(ids) == jobs
    assert await conn.fetchval("select sum(done) from reactor.job_minutes") == jobs
    assert await conn.fetchval("select sum(dead) from reactor.job_minutes") == 0
    for runs in (Counter(scene.traces()), Counter(r["job_id"] for r in await conn.fetch("select job_id from effects"))):
        assert set(runs) == ids
        assert {job_id for job_id, count in runs.items() if count > 1} <= may_repeat


SESSIONS = "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'memory-reactor%'"


class TestKilling:
    async def test_twenty_kills_at_random_moments_lose_and_double_nothing_of_5000_jobs(self, conn, scene):
        moments, held = random.Random(4711), set()
        await owe(conn, 5000)
        for _ in range(20):
            with scene.reactor() as reactor:
                await scene.traced(scene.count() + moments.randint(1, 200))
                await anyio.sleep(moments.uniform(0, 0.03))  # any instruction
                reactor.process.kill()
                await reactor.exited()
            await eventually(lambda: conn.fetchval(f"select ({SESSIONS}) = 0"))  # what it had asked for has been done
            held |= {row["id"] for row in await conn.fetch("select id from reactor.jobs where status = 'running'")}
        assert await conn.fetchval("select count(*) from reactor.jobs where status <> 'done' and type = 'work'") > 0
        with scene.reactor():
            await all_done(conn)

        assert 0 < len(held) < 1500
        await settled_once(conn, scene, 5000, may_repeat=held)

    async def test_a_job_that_kills_its_process_dies_after_its_attempts_and_takes_no_neighbour_along(self, conn, scene):
        (scene.handlers / "work.py").write_text(
            WORK.replace(
                "    await anyio.sleep",
                "    if any(job.payload for job in jobs):\n        os._exit(9)\n    await anyio.sleep",
            )
        )
        await owe(conn, 30)
        await conn.execute(
            "update reactor.jobs set payload = '{\"poison\": true}', max_attempts = 2 where id = (select id from reactor.jobs offset 7 limit 1)"
        )
        lives = 0

        async def is_over():
            return await conn.fetchval(
                "select not exists (select from reactor.jobs where status not in ('done', 'dead') and lane <> 'upkeep')"
            )

        while not await is_over():
            lives += 1
            assert lives < 8
            with scene.reactor() as reactor:

                async def is_over_or_dead(reactor=reactor):
                    return reactor.process.poll() is not None or await is_over()

                await eventually(is_over_or_dead)

        ended = await conn.fetch(
            "select status, attempts, last_error, payload <> '{}' as is_poison from reactor.jobs where type = 'work'"
        )
        assert Counter((job["status"], job["attempts"]) for job in ended if not job["is_poison"]) == {("done", 1): 29}
        [poison] = [job for job in ended if job["is_poison"]]
        assert (poison["status"], poison["attempts"]) == ("dead", 2)
        assert poison["last_error"].startswith("lease_expired")
        assert (
            await conn.fetchval("select subject from reactor.alerts where cause = 'dead_jobs'") == "work lease_expired"
        )

    async def test_sigterm_under_load_finishes_what_runs_returns_the_rest_unharmed_and_exits_0(self, conn, scene):
        await owe(conn, 2000)
        with scene.reactor() as reactor:
            await scene.traced(300)
            reactor.process.send_signal(signal.SIGTERM)
            assert await reactor.exited() == 0, reactor.text
        left = Counter(map(tuple, await conn.fetch("select status, attempts from reactor.jobs where type = 'work'")))
        assert left[("pending", 0)] > 0
        assert set(left) == {("done", 1), ("pending", 0)}
        with scene.reactor():
            await all_done(conn)

        await settled_once(conn, scene, 2000)  # and nothing ran twice


class TestManyReactors:
    async def test_eight_on_one_database_do_every_job_once(self, conn, scene):
        names = "select count(distinct locked_by) from reactor.jobs"
        reactors = [scene.reactor(REACTOR_LEASE_S="30") for _ in range(8)]
        outputs = [reactor.__enter__() for reactor in reactors]
        try:
            for output in outputs:
                await output.saw("listener_ready", timeout_s=90)
            await owe(conn, 4000)
            worked = 0

            async def done():
                nonlocal worked
                worked = max(worked, await conn.fetchval(names))
                return await conn.fetchval(
                    "select not exists (select from reactor.jobs where status <> 'done' and lane <> 'upkeep')"
                )

            await eventually(done, timeout_s=120)
            for output in outputs:
                output.process.send_signal(signal.SIGTERM)
            codes = [await output.exited() for output in outputs]
        finally:
            for reactor in reactors:
                reactor.__exit__(None, None, None)

        assert worked >= 4
        assert codes == [0] * 8
        assert await conn.fetchval("select max(attempts) from reactor.jobs where type = 'work'") == 1
        await settled_once(conn, scene, 4000)


@pytest.fixture(scope="module")
def cluster(server):
    with own_cluster(server.programs) as cluster:
        anyio.run(lambda: db.migrate(cluster.dsn, with_tables=True))
        yield cluster


@pytest.fixture
async def fragile(cluster, tmp_path):
    """A scene on a server that may be stopped."""
    conn = await connect(cluster.dsn)
    await conn.execute(
        "delete from reactor.jobs; delete from reactor.job_minutes; drop table if exists effects; create table effects (job_id bigint)"
    )
    await conn.close()
    return Scene(cluster.dsn, tmp_path)


async def connected(dsn):
    try:
        return await connect(dsn)
    except (OSError, asyncpg.PostgresError):
        return None


@asynccontextmanager
async def a_connection(dsn):
    conn = await eventually(lambda: connected(dsn))
    try:
        yield conn
    finally:
        conn.terminate()


class TestPostgres:
    @pytest.mark.parametrize("mode", ["fast", "immediate"])
    async def test_a_restart_under_load_loses_nothing_and_spends_no_attempt(self, cluster, fragile, mode):
        async with a_connection(cluster.dsn) as conn:
            await owe(conn, 1500)
        with fragile.reactor() as reactor:
            for _ in range(3):
                await fragile.traced(fragile.count() + 100)
                await anyio.to_thread.run_sync(cluster.stop, mode)
                await anyio.to_thread.run_sync(cluster.start)
            async with a_connection(cluster.dsn) as conn:
                await all_done(conn)
                assert reactor.process.poll() is None
                assert "Traceback" not in reactor.text
                reactor.process.send_signal(signal.SIGTERM)
                assert await reactor.exited() == 0
                twice = {job_id for job_id, runs in Counter(fragile.traces()).items() if runs > 1}
                assert len(twice) < 300
                await settled_once(conn, fragile, 1500, may_repeat=twice)
                assert await conn.fetchval("select max(attempts) from reactor.jobs where type = 'work'") == 1

    async def test_connections_killed_at_random_lose_nothing_and_spend_no_attempt(self, conn, scene):
        moments = random.Random(4711)
        await owe(conn, 1500)
        with scene.reactor() as reactor:
            for _ in range(30):
                await scene.traced(scene.count() + moments.randint(1, 30))
                await conn.fetch(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = current_database() and application_name like 'memory-reactor%' order by random() limit 2"
                )
            await all_done(conn)
            assert reactor.process.poll() is None
            assert "Traceback" not in reactor.text

        twice = {job_id for job_id, runs in Counter(scene.traces()).items() if runs > 1}
        await settled_once(conn, scene, 1500, may_repeat=twice)
        assert await conn.fetchval("select max(attempts) from reactor.jobs where type = 'work'") == 1

    async def test_a_server_without_a_free_connection_is_waited_for(self, cluster, fragile):
        await anyio.to_thread.run_sync(cluster.stop, "fast")
        await anyio.to_thread.run_sync(cluster.start, "max_connections=20")
        async with a_connection(cluster.dsn) as conn:
            hogs = []
            with fragile.reactor() as reactor:
                await reactor.saw("listener_ready")
                await conn.fetch(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'memory-reactor%'"
                )
                while (hog := await connected(cluster.dsn)) is not None:
                    hogs.append(hog)
                await reactor.saw("listener_lost")
                await owe(conn, 100)
                await reactor.saw("claim_failed")
                waiting = await conn.fetchval(
                    "select count(*) from reactor.jobs where status = 'pending' and type = 'work'"
                )
                for hog in hogs:
                    await hog.close()
                await all_done(conn)
                assert reactor.process.poll() is None
                assert "Traceback" not in reactor.text
            assert waiting == 100
            await settled_once(conn, fragile, 100)
            assert await conn.fetchval("select max(attempts) from reactor.jobs where type = 'work'") == 1
        await anyio.to_thread.run_sync(cluster.stop, "fast")
        await anyio.to_thread.run_sync(cluster.start)

    async def test_a_full_disk_is_said_and_outlived(self, cluster, fragile, tmp_path_factory):
        place = small_disk(tmp_path_factory)
        try:
            async with a_connection(cluster.dsn) as conn:
                await owe(conn, 300)
                await conn.execute(f"create tablespace small location '{place}'")
                await conn.execute(
                    "alter table reactor.jobs set tablespace small; alter table effects set tablespace small"
                )
                await conn.execute(
                    "create table ballast (filler text) tablespace small; alter table ballast alter filler set storage plain"
                )
                with fragile.reactor() as reactor:
                    await fragile.traced(50)
                    with pytest.raises(asyncpg.DiskFullError):
                        while True:
                            await conn.execute(
                                "insert into ballast select repeat('x', 7000) from generate_series(1, 100)"
                            )
                    with pytest.raises(asyncpg.DiskFullError):
                        while True:
                            await owe(conn, 50)  # until the table of jobs can grow no more
                    owed = await conn.fetchval("select count(*) from reactor.jobs where type = 'work'")
                    await conn.execute("drop table ballast; checkpoint")
                    # What failed in the handler waits for a minute.
                    await eventually(lambda: due_now(conn), timeout_s=90)
                    assert reactor.process.poll() is None
                    assert "Traceback" not in reactor.text
                twice = {job_id for job_id, runs in Counter(fragile.traces()).items() if runs > 1}
                await settled_once(conn, fragile, owed, may_repeat=twice)
                await conn.execute("drop table effects; alter table reactor.jobs set tablespace pg_default")
                await conn.execute("drop tablespace small")
        finally:
            subprocess.run(["umount", "-l", place], check=True)


async def due_now(conn):
    """Make what failed due at once; true when all is done."""
    await conn.execute("update reactor.jobs set run_after = now(), updated_at = now() where status = 'failed'")
    await conn.execute("select reactor.ring()")
    return await conn.fetchval(
        "select not exists (select from reactor.jobs where status <> 'done' and lane <> 'upkeep')"
    )


def small_disk(tmp_path_factory):
    """16 MB that Postgres may fill. Left out where no file system may be mounted."""
    place = Path("/tmp") / f"reactor-small-{os.getpid()}"
    place.mkdir(mode=0o700)
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", place], check=False, capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        place.rmdir()
        pytest.skip("mounting a small disk needs root")
    shutil.chown(place, "pgserver")
    return place


SHIFTED = """
import datetime, time
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + {by}
time.time_ns = lambda: real_ns() + {by} * 10**9

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds={by})

    @classmethod
    def utcnow(cls):
        return super().utcnow() + datetime.timedelta(seconds={by})

datetime.datetime = Shifted
"""

TIMED = """
from reactor import Handler, Snooze, Unavailable

async def work(job):
    if "snoozed" not in job.notes:
        await job.note({"snoozed": True})
        return Snooze(1.0)
    if "failed" not in job.notes:
        await job.note({"failed": True})
        raise LookupError
    if "rested" not in job.notes:
        await job.note({"rested": True})
        raise Unavailable("busy", retry_after_s=1.0)

HANDLERS = {"work": work}
"""


@pytest.mark.parametrize("by", [3600, -3600], ids=["ahead", "behind"])
async def test_a_worker_whose_clock_is_an_hour_off_keeps_every_instant(conn, scene, tmp_path, by):
    """Every lease, timer and backoff is by the database's clock."""
    (tmp_path / "sitecustomize.py").write_text(SHIFTED.format(by=by))
    (scene.handlers / "work.py").write_text(TIMED)
    with scene.reactor(PYTHONPATH=str(tmp_path), REACTOR_POLL_S="60") as reactor:
        await reactor.saw("listener_ready")
        said_at = reactor.named("listener_ready")[0]["timestamp"]
        off_by = await conn.fetchval("select extract(epoch from $1::text::timestamptz - now())::float8", said_at)
        job_id = await conn.fetchval(
            "select reactor.enqueue('work', '{}', 'acme', run_after => clock_timestamp() + interval '0.5 s')"
        )

        async def state():
            return await conn.fetchrow(
                "select status, attempts, notes, locked_at - run_after as late, run_after - updated_at as rest, "
                "clock_timestamp() - updated_at as ago from reactor.jobs where id = $1",
                job_id,
            )

        async def failed():
            job = await state()
            return job if job["status"] == "failed" else None

        job = await eventually(failed)
        assert 54 <= job["rest"].total_seconds() <= 66
        assert abs(job["ago"].total_seconds()) < 30
        await conn.execute("update reactor.jobs set run_after = now(), updated_at = now(); select reactor.ring()")
        await all_done(conn)
        final = await state()

    assert abs(off_by - by) < 60  # the clock really was off
    assert final["notes"] == {"snoozed": True, "failed": True, "rested": True}
    assert 0 <= final["late"].total_seconds() < 20  # by timers alone: neither an hour late nor early
    assert final["attempts"] == 2


class Publisher:
    """Somebody else's service: it does what it is asked, as often as it is asked, and can be searched."""

    def __init__(self):
        self.posts, self.asked = [], 0
        self.received, self.answers = anyio.Event(), anyio.Event()

    async def post(self, request):
        self.posts.append(await request.json() | {"key": request.headers["Idempotency-Key"]})
        self.received.set()
        await self.answers.wait()
        return web.json_response({"url": f"https://example.com/{len(self.posts)}"})

    async def find(self, request):
        self.asked += 1
        found = [n for n, post in enumerate(self.posts, 1) if post["reference"] == request.query["reference"]]
        return web.json_response([{"url": f"https://example.com/{n}"} for n in found])

    @asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_post("/posts", self.post)
        app.router.add_get("/posts", self.find)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
        self.answers.set()
        await runner.cleanup()


class TestTheWorkedExample:
    """The handler printed in docs/handlers.md, word for word."""

    @pytest.fixture
    def publish(self, scene):
        [code] = re.findall(
            r"^```python\n(.*?)^```$", (REPO / "docs" / "handlers.md").read_text(), re.MULTILINE | re.DOTALL
        )
        (scene.handlers / "work.py").write_text(textwrap.dedent(code))
        return scene

    async def test_killed_after_its_call_it_finds_its_post_and_does_not_repeat_it(self, conn, publish):
        publisher = Publisher()
        await conn.execute(
            "insert into posts (id, tenant_id, body) overriding system value values (7, 'marca-1', 'olá')"
        )
        await conn.execute("delete from reactor.jobs")
        async with publisher.serving() as url:
            job_id = await conn.fetchval(
                """select reactor.enqueue('publish', '{"post": 7}', 'marca-1', dedupe_key => 'post:7')"""
            )
            with publish.reactor(PUBLISHER_URL=url) as first:
                with anyio.fail_after(30):
                    await publisher.received.wait()
                first.process.kill()
                await first.exited()
            publisher.answers.set()
            with publish.reactor(PUBLISHER_URL=url):
                await all_done(conn)

        job = await conn.fetchrow("select * from reactor.jobs where id = $1", job_id)
        instance = await conn.fetchval("select left(id::text, 8) from reactor.instance")
        assert publisher.posts == [
            {"text": "olá", "reference": f"reactor-{instance}-{job_id}", "key": f"reactor-{instance}-{job_id}"}
        ]
        assert publisher.asked == 1
        assert (job["result"], job["notes"], job["attempts"]) == (
            {"url": "https://example.com/1"},
            {"sending": True},
            1,
        )

    async def test_killed_before_its_call_it_makes_it(self, conn, publish):
        publisher = Publisher()
        publisher.answers.set()
        await conn.execute(
            "insert into posts (id, tenant_id, body) overriding system value values (7, 'marca-1', 'olá')"
        )
        await conn.execute("delete from reactor.jobs")
        async with publisher.serving() as url:
            # As an attempt leaves it that noted the step and died.
            await conn.execute("""select reactor.enqueue('publish', '{"post": 7}', 'marca-1')""")
            await conn.execute("""update reactor.jobs set notes = '{"sending": true}'""")
            with publish.reactor(PUBLISHER_URL=url):
                await all_done(conn)

        assert (publisher.asked, len(publisher.posts)) == (1, 1)
