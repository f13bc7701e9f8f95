"""A folder of one's own handlers, run by the real command beside the built-in ones."""

from __future__ import annotations

import json
import sys

import anyio
import pytest
from aiohttp import web
from conftest import command, drained, eventually, make_settings, reactor_process, running_reactor

from reactor.errors import Misuse
from reactor.job import Handler
from reactor.loading import RESOURCES, bind, load_handlers

PUBLISH = """
from reactor import Handler, Job
from ._words import shout

async def publish(job: Job, *, pool, log) -> dict:
    log.info("published", post=job.payload["post"])
    connected_as = await pool.fetchval("select current_user")
    return {"said": shout(job.payload["post"]), "by": connected_as, "key": job.key, "tenant": job.tenant_id}

async def index_many(jobs: list[Job], *, pool, embedder, settings) -> None:
    for job in jobs:
        await job.note({"together_with": len(jobs) - 1, "model": embedder.model, "home": str(settings.home)})

HANDLERS = {"publish": publish, "index": Handler(index_many, batch=128, concurrency=2, lane="search", timeout_s=60, max_attempts=5)}
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "handlers"
    folder.mkdir()
    return folder


def write(folder, **modules):
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


async def result_of(conn, job_id):
    await eventually(lambda: conn.fetchval("select status = 'done' from reactor.jobs where id = $1", job_id))
    return await conn.fetchval("select result from reactor.jobs where id = $1", job_id)


class TestRunning:
    async def test_the_real_command_runs_what_sql_enqueues_single_and_batched_with_relative_imports(
        self, conn, dsn, folder
    ):
        write(folder, publish=PUBLISH, _words="def shout(text): return text.upper()")
        with reactor_process(dsn, REACTOR_HANDLERS=str(folder)) as process:
            single = await conn.fetchval("select reactor.enqueue('publish', $1, 'acme')", {"post": "olá"})
            async with conn.transaction():
                together = [await conn.fetchval("select reactor.enqueue('index', '{}', 'acme')") for _ in range(3)]
            result = await result_of(conn, single)
            await drained(conn)
            notes = [
                r["notes"] for r in await conn.fetch("select notes from reactor.jobs where id = any ($1)", together)
            ]
            process.terminate()
            said = process.communicate(timeout=30)[0]

        instance = await conn.fetchval("select left(id::text, 8) from reactor.instance")
        assert result == {"said": "OLÁ", "by": "postgres", "key": f"reactor-{instance}-{single}", "tenant": "acme"}
        assert notes == [{"together_with": 2, "model": "use-multilingual", "home": ".reactor"}] * 3
        assert [e["post"] for e in map(json.loads, said.splitlines()) if e["event"] == "published"] == ["olá"]

    async def test_http_is_a_session_for_who_asks_for_it_and_closed_at_the_end(self, conn, dsn, folder):
        write(
            folder,
            call="""
SESSIONS = []
async def call(job, *, http):
    SESSIONS.append(http)
    async with http.get(job.payload["url"]) as answer:
        return {"answer": await answer.text()}
HANDLERS = {"call": call}
""",
        )
        app = web.Application()
        app.router.add_get("/", _hello)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}/".format(*runner.addresses[0])

        async with running_reactor(make_settings(database_url=dsn, handlers=folder)):
            session_of = sys.modules["reactor_own_handlers.call"].SESSIONS
            result = await result_of(
                conn, await conn.fetchval("select reactor.enqueue('call', $1, 'acme')", {"url": url})
            )
        await runner.cleanup()

        assert result == {"answer": "hello"}
        assert session_of[0].closed

    async def test_the_tenant_scope_is_open_to_ones_own_handlers_and_closed_to_other_tenants(self, conn, dsn, folder):
        write(
            folder,
            count="""
import reactor
async def count(job, *, pool):
    async with reactor.tenant(pool, job.tenant_id) as conn:
        return {"memories": await conn.fetchval("select count(*) from reactor.memories"), "as": await conn.fetchval("select current_user")}
HANDLERS = {"count": count}
""",
        )
        async with running_reactor(make_settings(database_url=dsn, handlers=folder)):
            await conn.execute(
                "insert into posts (tenant_id, body) values ('acme', 'um'), ('acme', 'dois'), ('other', 'três')"
            )
            await drained(conn)
            result = await result_of(conn, await conn.fetchval("select reactor.enqueue('count', '{}', 'acme')"))

        assert result == {"memories": 2, "as": "reactor_worker"}


async def _hello(_request):
    return web.Response(text="hello")


OK = "async def f(job): ...\nHANDLERS = {'mine': f}\n"
WRONG = {
    "an unknown keyword": ({"a": "async def f(job, *, tokenz): ...\nHANDLERS = {'mine': f}"}, "'mine' asks for tokenz"),
    "patterns, which come with a later release": (
        {"a": "async def f(job, *, patterns): ...\nHANDLERS = {'mine': f}"},
        "asks for patterns",
    ),
    "a handler without a job": ({"a": "async def f(): ...\nHANDLERS = {'mine': f}"}, "takes no job"),
    "two modules with one type": ({"a": OK, "b": OK}, "'mine' has a handler in"),
    "a type of the built-in ones": (
        {"a": "async def f(job): ...\nHANDLERS = {'sync_row': f}"},
        "'sync_row' has a handler in",
    ),
    "a module that raises": (
        {"a": "raise RuntimeError('first line\\nsecond line')"},
        "does not import: RuntimeError: first line",
    ),
    "a module that exits": ({"a": "raise SystemExit(0)"}, "does not import: SystemExit: 0"),
    "a module with a typing error": ({"a": "def f(:"}, "does not import: SyntaxError"),
    "a missing module": ({"a": "import nowhere_to_be_found"}, "No module named 'nowhere_to_be_found'"),
    "no HANDLERS": ({"a": "async def f(job): ..."}, "HANDLERS = {type: handler} is missing"),
    "HANDLERS that is a list": ({"a": "HANDLERS = []"}, "HANDLERS = {type: handler} is missing"),
    "a function that is not async": ({"a": "def f(job): ...\nHANDLERS = {'mine': f}"}, "is not an async function"),
    "a type that is not text": ({"a": "async def f(job): ...\nHANDLERS = {7: f}"}, "HANDLERS[7] is not"),
    "a batch of zero": (
        {"a": "from reactor import Handler\nasync def f(jobs): ...\nHANDLERS = {'mine': Handler(f, batch=0)}"},
        "above zero",
    ),
    "a batch that is text": (
        {"a": "from reactor import Handler\nasync def f(jobs): ...\nHANDLERS = {'mine': Handler(f, batch='9')}"},
        "above zero",
    ),
}


class TestWrongFolders:
    @pytest.mark.parametrize("case", WRONG)
    def test_it_is_one_clear_line(self, folder, case):
        modules, says = WRONG[case]
        write(folder, **modules)

        with pytest.raises(Misuse) as caught:
            bind(load_handlers(folder), dict.fromkeys(RESOURCES))

        assert says in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        "case", ["an unknown keyword", "two modules with one type", "a module that raises", "no HANDLERS"]
    )
    def test_the_real_command_says_so_and_exits_2(self, dsn, folder, case):
        modules, says = WRONG[case]
        write(folder, **modules)

        ran = command("run", dsn=dsn, REACTOR_HANDLERS=str(folder))

        assert ran.returncode == 2
        assert says in ran.stderr
        assert ran.stderr.startswith("reactor: ")
        assert ran.stderr.count("\n") == 1

    def test_a_folder_that_is_not_there_exits_2(self, dsn, tmp_path):
        ran = command("run", dsn=dsn, REACTOR_HANDLERS=str(tmp_path / "nowhere"))

        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert "is not a folder" in ran.stderr

    def test_a_database_without_our_schema_exits_2(self, empty_dsn):
        ran = command("run", dsn=empty_dsn)

        assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
        assert "reactor migrate" in ran.stderr


class TestBinding:
    async def test_a_keyword_with_a_default_is_given_where_there_is_such_a_resource(self):
        async def f(job, pool="default", *, depth=3, **more):
            return pool, depth, more

        call = bind({"mine": Handler(f)}, {"pool": "the pool", "log": None})["mine"].call

        assert await call("job") == ("the pool", 3, {})

    def test_every_type_the_triggers_enqueue_has_a_handler(self):
        assert set(load_handlers(None)) >= {"sync_row", "reconcile", "refresh_token", "reconcile_tokens"}

    def test_a_folder_named_like_the_built_in_one_shadows_nothing(self, folder):
        write(folder, memory="async def f(job): ...\nHANDLERS = {'mine': f}", _private="raise RuntimeError")

        assert set(load_handlers(folder)) == {"sync_row", "reconcile", "refresh_token", "reconcile_tokens", "mine"}

    def test_what_an_editor_leaves_beside_a_module_is_none(self, folder):
        (folder / "mine.py").write_text("async def work(job): ...\nHANDLERS = {'work': work}")
        for name in (".#mine.py", "._mine.py", "_helper.py"):
            (folder / name).write_text("this is no Python")

        assert "work" in load_handlers(folder)

    def test_an_edited_module_is_read_again(self, folder):
        load_handlers(write(folder, a=OK))
        (folder / "a.py").write_text("async def f(job): ...\n\n\nHANDLERS = {'renamed': f}\n")

        assert "renamed" in load_handlers(folder)


def test_a_handler_waits_on_its_own_resources_only():
    async def f(job, *, pool): ...

    bound = bind({"mine": Handler(f)}, {"pool": "p", "embedder": "e"})

    with pytest.raises(TypeError):
        anyio.run(bound["mine"].call)
