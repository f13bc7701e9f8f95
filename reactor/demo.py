"""`reactor demo`: the whole path on an embedded Postgres, with every number read from it as it happens."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from aiohttp import web
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reactor import db
from reactor.app import reactor
from reactor.embedded import start
from reactor.errors import Misuse, Unavailable
from reactor.log import get_log
from reactor.memory import Hits, Memory
from reactor.settings import Settings

_BAKERY, _GYM = "demo-padaria-sol", "demo-academia-forte"
_POSTS = [
    (_BAKERY, "Pão na chapa às 7h", "O forno liga às cinco. Quem chega cedo leva o pão ainda estalando."),
    (_BAKERY, "Quando publicar?", "Testamos por um mês: publicar às nove da manhã rendeu o dobro de comentários."),
    (_BAKERY, "Bolo de cenoura", "Cobertura de chocolate que racha na colher. Sai às quintas, acaba às dez."),
    (_BAKERY, "Encomendas de Natal", "Panetone de fermentação natural: pedidos até 15 de dezembro, sem exceção."),
    (_BAKERY, "Sem glúten", "Nosso pão de queijo não leva trigo, mas a cozinha é compartilhada."),
    (_GYM, "Treino de 20 minutos", "Três exercícios, quatro séries, nenhum aparelho. Dá para fazer no quarto."),
    (_GYM, "Melhor hora do dia", "A nossa turma posta o treino às 19h, logo depois da aula, com a camiseta suada."),
    (_GYM, "Descanso também é treino", "Músculo cresce dormindo: oito horas valem mais que um suplemento."),
]
_CHAT = [
    (_BAKERY, "c1", "user", "Prefiro títulos com pergunta e nada de emoji."),
    (_BAKERY, "c1", "user", "A gente não abre às segundas-feiras."),
]
_INTEGRATIONS = """
[demo_social]
strategy = "oauth2"
token_url = "{url}/token"
auth = "none"
rotates = true
[demo_gateway]
strategy = "static_key"
probe_url = "{url}/ping"
"""
_QUESTION = "qual é o melhor horário para publicar?"


async def run_demo(settings: Settings) -> None:
    """Show memory, tokens and the queue from real rows; ends by itself and leaves only the data in REACTOR_HOME.

    Raises:
        Misuse: The embedded server or the local model is not installed.
    """
    console = Console(highlight=False)
    began = time.perf_counter()
    with console.status("starting an embedded Postgres ..."):
        server = await anyio.to_thread.run_sync(start, settings.home)
    if server.notice:
        console.print(server.notice)
    with console.status("applying sql/ ..."):
        await db.migrate(server.dsn, with_tables=True)
    _done(console, "Postgres with pgvector is up, sql/ is applied, posts, chat_messages and tokens are attached", began)
    settings = settings.model_copy(update={"search_deadline_s": 10.0, "database_url": None})  # a cold model is slow
    conn = await db.connect(server.dsn, application="memory-reactor demo")
    try:
        await db.prepare_connection(conn)
        async with (
            _provider(settings) as integrations,
            _reactor_beside(settings.model_copy(update={"integrations": integrations}), server.dsn),
            Memory.open(server.dsn, settings=settings) as memory,
        ):
            await _act(console, conn, memory)
            await _care(console, conn)
            await _show_queue(console, conn)
    finally:
        await conn.close()
    took_s = time.perf_counter() - began
    console.print(
        f"\n[bold]Done in {took_s:.0f} s.[/] Nothing is left running; the rows stay in {settings.home}/. Next:"
    )
    command = _typed_command()
    for words, why in (
        (f'search {_BAKERY} "pão sem trigo"', "asks the rows of this demo"),
        ("up", "the same server and reactor, to stay; prints its address for psql"),
        ("attach --help", "makes a table you already have a source of memories"),
    ):
        console.print(f"  [cyan]{command} {words}[/]  [dim]{why}[/]", soft_wrap=True)


def _typed_command() -> str:
    """How the person would type this program here: from a clone it is not on the PATH."""
    return "reactor" if shutil.which("reactor") else os.path.relpath(sys.argv[0])


@asynccontextmanager
async def _reactor_beside(settings: Settings, dsn: str) -> AsyncIterator[None]:
    async with reactor(settings, dsn, log=get_log()) as worker, anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        yield
        worker.stop()


async def _act(console: Console, conn: db.Connection, memory: Memory) -> None:
    tenants = [_BAKERY, _GYM]
    for table in ("posts", "chat_messages"):  # of an earlier demo
        await conn.execute(f"delete from {table} where tenant_id = any ($1)", tenants)
    await _drained(console, conn, "clearing an earlier demo's rows ...")

    began = time.perf_counter()
    await conn.executemany(
        "insert into posts (tenant_id, title, body, status) values ($1, $2, $3, 'published')", _POSTS
    )
    await conn.executemany(
        "insert into chat_messages (tenant_id, conversation_id, role, content) values ($1, $2, $3, $4)", _CHAT
    )
    rows = f"{len(_POSTS)} posts and {len(_CHAT)} chat messages of two brands"
    console.print(f"\n[bold]A producer only inserts rows[/]: {rows}.")
    await _drained(console, conn, "the reactor embeds them ...")
    _done(console, "every row is a memory", began)

    for tenant_id in tenants:
        hits = await memory.search(tenant_id, _QUESTION, k=2)
        _show(console, f'{tenant_id} asks "{_QUESTION}"', hits)

    began = time.perf_counter()
    for _ in range(1000):
        await memory.search(_BAKERY, _QUESTION, k=2)
    console.print(f"  asked again, from the cache: [bold]{(time.perf_counter() - began) * 1000:.0f} µs[/] a search")

    await conn.execute(
        "update posts set body = 'Mudou: agora publicamos às sete da noite, quando o bairro volta do trabalho.' "
        "where tenant_id = $1 and title = 'Quando publicar?'",
        _BAKERY,
    )
    await conn.execute("delete from posts where tenant_id = $1 and title = 'Melhor hora do dia'", _GYM)
    console.print("\n[bold]A post is edited, another deleted[/], with plain SQL.")
    await _drained(console, conn, "the reactor follows ...")
    for tenant_id in tenants:
        _show(console, f'{tenant_id} asks "{_QUESTION}"', await memory.search(tenant_id, _QUESTION, k=1))

    words = "quando publicamos"
    found = await conn.fetch("select score, content from reactor.search($1, $2, 2)", _BAKERY, words)
    asked = f"select score, content from reactor.search('{_BAKERY}', '{words}', 2)"
    console.print(f"\n[bold]The same from SQL[/]: {asked}", soft_wrap=True)
    _print_rows(console, ["score", "content"], [[f"{row['score']:.3f}", row["content"]] for row in found])


@asynccontextmanager
async def _provider(settings: Settings) -> AsyncIterator[Path]:
    """A provider of tokens on this machine, and a REACTOR_INTEGRATIONS file that adds it to the user's."""
    current, theirs = "demo-refresh-1", ""
    if settings.integrations is not None:
        try:
            theirs = settings.integrations.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise Misuse(f"REACTOR_INTEGRATIONS: {settings.integrations} cannot be read: {exc}") from None

    async def token(request: web.Request) -> web.Response:
        nonlocal current
        if (await request.post()).get("refresh_token") != current:  # each is good for one use
            return web.json_response({"error": "invalid_grant"}, status=400)
        current = f"demo-refresh-{secrets.token_hex(8)}"
        access = f"demo-access-{secrets.token_hex(8)}"
        return web.json_response({"access_token": access, "refresh_token": current, "expires_in": 3600})

    async def ping(_request: web.Request) -> web.Response:
        return web.json_response({"error": "this key was revoked"}, status=401)

    routes = web.Application()
    routes.add_routes([web.post("/token", token), web.get("/ping", ping)])
    runner = web.AppRunner(routes, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "integrations.toml"
            file.write_text(f"{theirs}\n{_INTEGRATIONS.format(url=url)}", "utf-8")
            yield file
    finally:
        await runner.cleanup()


async def _care(console: Console, conn: db.Connection) -> None:
    demos = ["demo_social", "demo_gateway"]
    forget = "delete from tokens where integration = any ($1)"
    await conn.execute(forget, demos)  # of a demo that was interrupted
    began = time.perf_counter()
    await conn.execute(
        "insert into tokens (tenant_id, integration, access_token, refresh_token, issued_at, expires_at) values "
        "($1, 'demo_social', 'demo-access-1', 'demo-refresh-1', now() - interval '55 min', now() + interval '5 min'), "
        "($2, 'demo_gateway', 'demo-key', null, null, null)",
        _BAKERY,
        _GYM,
    )
    console.print("\n[bold]Two tokens come in[/]: one ends in 5 minutes; one is a key that its provider has revoked.")
    await _drained(console, conn, "the reactor looks after them ...")
    _done(console, "one is refreshed, of the other somebody is told", began)
    rows = await conn.fetch(
        "select integration, state, version, who_must_act, "
        "coalesce(round(extract(epoch from expires_at - now()) / 60) || ' min', '-') as ends_in "
        "from reactor.token_health where integration = any ($1) order by integration desc",
        demos,
    )
    names = ["integration", "state", "version", "who_must_act", "ends_in"]
    _print_rows(console, names, [[str(row[name]) for name in names] for row in rows])
    query = "select cause, detail from reactor.alerts where resolved_at is null and detail ->> 'integration' = any ($1)"
    for row in await conn.fetch(query, demos):
        console.print(f"  alert [bold]{row['cause']}[/]: {row['detail']['do']['pt']}", soft_wrap=True)
        console.print(f"  [dim]{row['detail']['do']['en']}[/]", soft_wrap=True)
    await conn.execute(forget, demos)  # their provider ends with the demo
    await _drained(console, conn, "letting go of them ...")


_FAILED = "select exists (select from reactor.jobs where status in ('dead', 'failed') and tenant_id like 'demo-%')"


async def _drained(console: Console, conn: db.Connection, doing: str) -> None:
    """Wait until nothing is owed, counting down.

    Raises:
        Unavailable: A job failed, or a minute passed.
    """
    with console.status(doing) as status, anyio.move_on_after(60):
        while True:
            numbers = await conn.fetchval("select reactor.status()")
            if await conn.fetchval(_FAILED):
                raise Unavailable("a job of the demo failed: see `reactor status`")
            if not numbers["running"] and numbers["oldest_due_s"] is None:
                return
            status.update(f"{doing} {numbers['pending'] + numbers['running']} to go")
            await anyio.sleep(0.05)
    raise Unavailable("the demo's rows took longer than a minute")


async def _show_queue(console: Console, conn: db.Connection) -> None:
    numbers: dict[str, Any] = await conn.fetchval("select reactor.status()")
    pending = "what is pending are the next scheduled looks for what bypassed the triggers"
    console.print(f"\n[bold]The queue[/] (reactor status); {pending}:", soft_wrap=True)
    names = ["pending", "running", "done_24h", "dead_24h", "memories", "listener"]
    _print_rows(console, names, [[str(numbers[name]) for name in names]])


def _done(console: Console, what: str, began: float) -> None:
    console.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - began:.1f} s)[/]")


def _show(console: Console, title: str, hits: Hits) -> None:
    console.print(f"\n{title}" + (f" [red](degraded: {hits.degraded})[/]" if hits.degraded else ""))
    _print_rows(console, ["score", "kind", "content"], [[f"{hit.score:.3f}", hit.kind, hit.content] for hit in hits])


def _print_rows(console: Console, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(*columns, header_style="dim")
    for row in rows:
        table.add_row(*(Text(" ".join(cell.split())) for cell in row))
    console.print(table)
