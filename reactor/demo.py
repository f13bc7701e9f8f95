"""`reactor demo`: the whole path on an embedded Postgres, with every number read from it as it happens."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reactor import db
from reactor.app import reactor
from reactor.embedded import start
from reactor.errors import Unavailable
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
_QUESTION = "qual é o melhor horário para publicar?"


async def run_demo(settings: Settings) -> None:
    """Show memory and the queue from real rows; ends by itself and leaves only the data in REACTOR_HOME.

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
    _done(console, "Postgres with pgvector is up, sql/ is applied, posts and chat_messages are attached", began)
    settings = settings.model_copy(update={"search_deadline_s": 10.0, "database_url": None})  # a cold model is slow
    conn = await db.connect(server.dsn, application="memory-reactor demo")
    try:
        await db.prepare_connection(conn)
        async with _reactor_beside(settings, server.dsn), Memory.open(server.dsn, settings=settings) as memory:
            await _act(console, conn, memory)
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


async def _drained(console: Console, conn: db.Connection, doing: str) -> None:
    """Wait until nothing is owed, counting down.

    Raises:
        Unavailable: A job failed, or a minute passed.
    """
    with console.status(doing) as status, anyio.move_on_after(60):
        while True:
            numbers = await conn.fetchval("select reactor.status()")
            if numbers["dead"] or numbers["failed"]:
                raise Unavailable("a job of the demo failed: see `reactor status`")
            if not numbers["running"] and numbers["oldest_due_s"] is None:
                return
            status.update(f"{doing} {numbers['pending'] + numbers['running']} to go")
            await anyio.sleep(0.05)
    raise Unavailable("the demo's rows took longer than a minute")


async def _show_queue(console: Console, conn: db.Connection) -> None:
    numbers: dict[str, Any] = await conn.fetchval("select reactor.status()")
    pending = "what is pending is the next scheduled look for rows that bypassed the triggers"
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
