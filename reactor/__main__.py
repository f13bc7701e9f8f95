"""The `reactor` command: data on stdout, words on stderr; exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from datetime import datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import anyio
import asyncpg
import typer

from reactor import db, log
from reactor.errors import Misuse, ReactorError, Unavailable
from reactor.settings import Settings, load_settings

if TYPE_CHECKING:
    from reactor.memory import Hits, Memory

app = typer.Typer(
    name="reactor",
    help="Memory and token care for AI content pipelines that live in Postgres: rows go in, recall comes out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # its boxes cut long options short
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise Misuse(f"--metadata is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise Misuse("--metadata is not a JSON object")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="Only this kind (post, chat, note, ...); repeats.")]
Metadata = Annotated[
    dict[str, Any] | None,
    typer.Option(parser=_metadata, metavar="JSON", help='Only what contains this, e.g. \'{"campanha": "natal"}\'.'),
]
T = TypeVar("T")

# What a wrong mapping raises in attach: the caller's words are off.
_WRONG_WORDS = {
    "42703",
    "42P01",
    "42809",
    "22023",
    "42704",
    "0A000",
    "42601",
    "42804",
    "42883",
    "42602",
    "22P02",
    "3F000",
}


def _example(*lines: str) -> str:
    """The end of a command's help, kept as written."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _instant(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone()


def say(line: str) -> None:
    """Words for the person, on stderr."""
    print(line, file=sys.stderr, flush=True)


def _dsn(settings: Settings) -> str:
    """DATABASE_URL, or the embedded server, started."""
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    from reactor.embedded import start  # noqa: PLC0415  # an extra

    server = start(settings.home)
    if server.notice:
        say(server.notice)
    return server.dsn


def _run(function: Callable[[Settings, str], Coroutine[Any, Any, T]]) -> T:
    settings = load_settings()
    dsn = _dsn(settings)
    return anyio.run(function, settings, dsn)


@asynccontextmanager
async def _connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await db.connect(dsn, application="memory-reactor command")
    try:
        with db.reaching():
            await db.prepare_connection(conn)
            await db.check_schema(conn)
            yield conn
    finally:
        await conn.close()


async def _on_one_connection(dsn: str, query: str, *args: object) -> list[asyncpg.Record]:
    async with _connected(dsn) as conn:
        rows: list[asyncpg.Record] = await conn.fetch(query, *args)
        return rows


def _print_json(data: object) -> None:
    print(json.dumps(data, ensure_ascii=False, default=lambda v: v.isoformat() if isinstance(v, datetime) else str(v)))


def _table(columns: list[str], rows: list[list[str]]) -> None:
    from rich.box import HEAVY_HEAD  # noqa: PLC0415  # heavy, and only for people
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    is_person = sys.stdout.isatty()
    table = Table(*columns, show_header=any(columns), header_style="bold", box=HEAVY_HEAD if is_person else None)
    for row in rows:
        table.add_row(*(Text(cell if is_person else " ".join(cell.split())) for cell in row))
    console = Console(width=None if is_person else 100_000)  # a file or a pipe has no edge to wrap at: a line a row
    console.print(table)


@app.command(epilog=_example("reactor demo"))
def demo() -> None:
    """Show the whole path on an embedded Postgres. Rows are inserted, remembered, found; it ends by itself."""
    from reactor.demo import run_demo  # noqa: PLC0415

    try:
        anyio.run(run_demo, load_settings())
    except ExceptionGroup as group:
        for heart in _leaves(group):
            if isinstance(heart, ReactorError):  # one clear line
                raise heart from None
        raise


def _leaves(exc: Exception) -> Iterator[Exception]:
    """The exceptions themselves, out of whatever groups they came in."""
    for one in exc.exceptions if isinstance(exc, ExceptionGroup) else (exc,):
        yield from (one,) if one is exc else _leaves(one)


@app.command(epilog=_example("reactor up"))
def up() -> None:
    """Migrate the database and run the reactor. Without DATABASE_URL, on an embedded one with tables for producers."""
    settings = load_settings()
    dsn = _dsn(settings)
    anyio.run(lambda: db.migrate(dsn, with_tables=settings.database_url is None, say=say))
    if settings.database_url is None:
        password = settings.home / "postgres.password"
        if sys.stderr.isatty():
            say(f"insert into it with: psql '{dsn}'")
        else:  # a log keeps no key
            hidden = dsn.replace(password.read_text(), "***")
            say(f"insert into it with: psql '{hidden}' (*** stands for what {password} holds)")
    _reactor(settings, dsn)


@app.command(epilog=_example("DATABASE_URL=postgresql://... reactor migrate"))
def migrate(
    with_tables: Annotated[
        bool, typer.Option("--with-tables", help="Also make and attach public.posts and public.chat_messages.")
    ] = False,
) -> None:
    """Bring the database's reactor schema to this release. Safe to repeat."""

    async def work(_settings: Settings, dsn: str) -> None:
        applied = await db.migrate(dsn, with_tables=with_tables, say=say)
        say("migrated" if applied else "nothing to do: the schema is up to date")

    _run(work)


@app.command(epilog=_example("DATABASE_URL=postgresql://... VOYAGE_API_KEY=... reactor run"))
def run() -> None:
    """Claim jobs, embed, keep memories true. Until SIGTERM; logs go to stdout, JSON unless at a terminal."""
    settings = load_settings()
    _reactor(settings, _dsn(settings))


def _reactor(settings: Settings, dsn: str) -> None:
    from reactor.app import run as run_reactor  # noqa: PLC0415  # what a one-shot command does not need

    log.configure(sys.stdout)
    anyio.run(run_reactor, settings, dsn)


@app.command(epilog=_example("REACTOR_HTTP_TOKEN=... reactor serve"))
def serve() -> None:
    """Answer over HTTP: fresh tokens, health, status. Until SIGTERM; logs go to stdout, JSON unless at a terminal."""
    settings = load_settings()
    try:
        from reactor import service  # noqa: PLC0415  # an extra
    except ModuleNotFoundError as exc:
        if exc.name not in {"fastapi", "uvicorn"}:
            raise
        raise Misuse(f"{exc.name} is not installed: pip install 'memory-reactor[service]'") from exc
    if settings.http_token is None:
        say("REACTOR_HTTP_TOKEN is not set: only /healthz and /readyz answer, everything else is 401")
    dsn = _dsn(settings)
    log.configure(sys.stdout)
    anyio.run(service.serve, settings, dsn)


@app.command(epilog=_example("REACTOR_HANDLERS=handlers_of_mine reactor dev"))
def dev() -> None:
    """Run a reactor that starts again when code changes. Broken handlers or SQL leave the last good one running."""
    from reactor.dev import run_dev  # noqa: PLC0415

    settings = load_settings()
    dsn = _dsn(settings)
    anyio.run(lambda: db.migrate(dsn, with_tables=settings.database_url is None, say=say))
    anyio.run(lambda: run_dev(settings, dsn, say=say))


@app.command(
    epilog=_example(
        "reactor attach app.artigos --kind post --tenant-column marca --title-column titulo \\",
        "    --text-columns chamada --text-columns corpo --time-column criado_em --backfill",
    )
)
def attach(
    table: Annotated[str, typer.Argument(help="The table, with its schema if not in the search path.")],
    kind: Annotated[str, typer.Option(help="What its rows are: post, chat, note, dossier, or a word of yours.")],
    text_columns: Annotated[list[str], typer.Option(help="A column to remember; repeats.")],
    tenant_column: Annotated[str, typer.Option()] = "tenant_id",
    id_column: Annotated[str, typer.Option()] = "id",
    time_column: Annotated[str, typer.Option(help="When it happened; '' for none.")] = "created_at",
    title_column: Annotated[str | None, typer.Option(help="Stands before the text.")] = None,
    format_column: Annotated[str | None, typer.Option()] = None,
    status_column: Annotated[str | None, typer.Option(help="Kept for patterns.")] = None,
    metrics_column: Annotated[str | None, typer.Option(help="Kept for patterns.")] = None,
    slides_column: Annotated[str | None, typer.Option(help="JSON whose texts are remembered too.")] = None,
    metadata_columns: Annotated[
        list[str] | None, typer.Option(help="Returned with hits and filterable; repeats.")
    ] = None,
    role_column: Annotated[str | None, typer.Option(help="Who speaks, in a chat.")] = None,
    conversation_column: Annotated[str | None, typer.Option()] = None,
    agent_column: Annotated[str | None, typer.Option()] = None,
    when: Annotated[str | None, typer.Option(help="Only rows of which this SQL condition is true.")] = None,
    embed: Annotated[str, typer.Option(help="provider, local (never leaves the machine) or none.")] = "provider",
    language: Annotated[str, typer.Option(help="Text search configuration.")] = "portuguese",
    notify: Annotated[bool, typer.Option(help="Off for producers that use prepared transactions.")] = True,
    backfill: Annotated[bool, typer.Option("--backfill", help="Remember the rows that are there already.")] = False,
) -> None:
    """Make an existing table a source of memories. Attaching again changes the mapping."""

    async def work(settings: Settings, dsn: str) -> None:
        [[source]] = await _on_one_connection(
            dsn,
            "select reactor.attach($1::text::regclass, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, "
            "$16, $17, $18, $19, $20)",
            table,
            kind,
            text_columns,
            tenant_column,
            id_column,
            time_column or None,
            title_column,
            format_column,
            status_column,
            metrics_column,
            slides_column,
            metadata_columns or [],
            role_column,
            conversation_column,
            agent_column,
            when,
            embed,
            language,
            notify,
            backfill,
        )
        say(f"attached {table} as source {source}")
        if backfill:
            found = await _reconcile(settings, dsn, source)
            say(f"{found['enqueued']} rows enqueued: `reactor run` remembers them")

    _run(work)


@app.command(epilog=_example("reactor detach app.artigos"))
def detach(table: str) -> None:
    """Take our triggers and grants off a table. Its memories stay."""

    async def work(_settings: Settings, dsn: str) -> None:
        [[was_attached]] = await _on_one_connection(dsn, "select reactor.detach($1::text::regclass)", table)
        if not was_attached:
            raise Misuse(f"{table} is not attached")
        say(f"detached {table}")

    _run(work)


@app.command(
    epilog=_example(
        "reactor attach-tokens public.tenant_config instagram --tenant-column tenant \\",
        "    --access-token-column instagram_access_token --expires-at-column instagram_expires_at",
        "reactor attach-tokens app.connections --integration-column provider --refresh-token-column refresh_token",
    )
)
def attach_tokens(
    table: Annotated[str, typer.Argument(help="The table, with its schema if not in the search path.")],
    integration: Annotated[
        str | None, typer.Argument(help="Of every row; or --integration-column, where rows name theirs.")
    ] = None,
    tenant_column: Annotated[str, typer.Option()] = "tenant_id",
    id_column: Annotated[str, typer.Option()] = "id",
    access_token_column: Annotated[str, typer.Option(help="'' for none.")] = "access_token",  # noqa: S107  # a column
    refresh_token_column: Annotated[str | None, typer.Option()] = None,
    issued_at_column: Annotated[str | None, typer.Option()] = None,
    expires_at_column: Annotated[str | None, typer.Option(help="When the access token ends.")] = None,
    refresh_expires_at_column: Annotated[str | None, typer.Option(help="When the refresh token ends.")] = None,
    scope_column: Annotated[str | None, typer.Option()] = None,
    account_column: Annotated[str | None, typer.Option(help="Which of a tenant's several accounts.")] = None,
    integration_column: Annotated[str | None, typer.Option()] = None,
    metadata_column: Annotated[str | None, typer.Option(help="What some integrations need (JSON).")] = None,
    state_column: Annotated[str | None, typer.Option(help="Told how the token is doing.")] = None,
    state_reason_column: Annotated[str | None, typer.Option(help="Told why.")] = None,
    version_column: Annotated[str | None, typer.Option(help="Counts the tokens of this row.")] = None,
    sealed_access_token_column: Annotated[str | None, typer.Option(help="Sealed text; see docs/sealing.md.")] = None,
    sealed_refresh_token_column: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Keep the tokens of an existing table fresh, in their rows. Only the columns named here are written."""

    async def work(_settings: Settings, dsn: str) -> None:
        [[source]] = await _on_one_connection(
            dsn,
            "select reactor.attach_tokens($1::text::regclass, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, "
            "$15, $16, $17, $18)",
            table,
            integration,
            tenant_column,
            id_column,
            access_token_column or None,
            refresh_token_column,
            issued_at_column,
            expires_at_column,
            refresh_expires_at_column,
            scope_column,
            account_column,
            integration_column,
            metadata_column,
            state_column,
            state_reason_column,
            version_column,
            sealed_access_token_column,
            sealed_refresh_token_column,
        )
        say(f"attached the tokens of {table} as source {source}: `reactor run` looks after them")

    _run(work)


@app.command(epilog=_example("reactor detach-tokens public.tenant_config instagram"))
def detach_tokens(
    table: str,
    integration: Annotated[str | None, typer.Argument(help="Only this one; else every one of the table.")] = None,
) -> None:
    """Take a table's tokens out of care. Its rows stay as they are."""

    async def work(_settings: Settings, dsn: str) -> None:
        [[was_attached]] = await _on_one_connection(
            dsn, "select reactor.detach_tokens($1::text::regclass, $2)", table, integration
        )
        which = f"the {integration} tokens of {table}" if integration else f"the tokens of {table}"
        if not was_attached:
            raise Misuse(f"{which} are not attached")
        say(f"detached {which}")

    _run(work)


@app.command(epilog=_example("reactor reconcile app.artigos"))
def reconcile(
    table: Annotated[str | None, typer.Argument(help="Only this table.")] = None, as_json: Json = False
) -> None:
    """Find and enqueue what bypassed the triggers. That is replication, or a partition attached with its rows."""

    async def work(settings: Settings, dsn: str) -> None:
        rows = await _on_one_connection(
            dsn,
            "select id, relation::text as table from reactor.sources s where detached_at is null "
            "and exists (select from pg_class c where c.oid = s.relation) "
            "and ($1::text is null or relation = $1::text::regclass) order by id",
            table,
        )
        if table is not None and not rows:
            raise Misuse(f"{table} is not attached")
        found, failed = {}, []
        for row in rows:
            try:
                found[row["table"]] = await _reconcile(settings, dsn, row["id"])
            except asyncpg.PostgresError as exc:  # the others are looked at all the same
                failed.append(f"{row['table']}: {db.sentence_of(exc)}")
        if as_json:
            _print_json(found)
        else:
            names = ["enqueued", "orphans", "truncated", "triggers_placed"]
            _table(["table", *names], [[name, *(str(counts[n]) for n in names)] for name, counts in found.items()])
        if failed:
            raise Unavailable("; ".join(failed))

    _run(work)


async def _reconcile(settings: Settings, dsn: str, source: int) -> dict[str, int]:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from reactor import sources  # noqa: PLC0415

    async with db.create_pool(dsn, application="memory-reactor command", size=settings.pool_size) as pool:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            total = await sources.count_rows(pool, source)
            bar = progress.add_task(f"source {source}: rows looked at", total=total)
            found = await sources.reconcile(pool, source, progress=lambda rows: progress.advance(bar, rows))
            progress.update(bar, completed=total)
            return found


@app.command(epilog=_example('reactor search padaria-sol "melhor horário para postar" -k 3'))
def search(
    tenant: str,
    query: str,
    k: Annotated[int, typer.Option("-k", help="How many, 1 to 100.")] = 5,
    kinds: Kinds = None,
    since: Annotated[
        datetime | None, typer.Option(parser=_instant, metavar="ISO", help="Only from this instant on.")
    ] = None,
    until: Annotated[
        datetime | None, typer.Option(parser=_instant, metavar="ISO", help="Only before this instant.")
    ] = None,
    metadata: Metadata = None,
    as_json: Json = False,
) -> None:
    """The tenant's memories nearest to a question, best first."""

    async def ask(memory: Memory) -> Hits:
        await memory.warm()
        return await memory.search(tenant, query, k, kinds=kinds, since=since, until=until, metadata=metadata)

    _recall(ask, as_json=as_json)


@app.command(epilog=_example("reactor recent padaria-sol -k 3 --kind post"))
def recent(
    tenant: str,
    k: Annotated[int, typer.Option("-k", help="How many, 1 to 100.")] = 10,
    kinds: Kinds = None,
    metadata: Metadata = None,
    as_json: Json = False,
) -> None:
    """The tenant's newest source rows. Newest first, each with its whole text."""
    _recall(lambda memory: memory.recent(tenant, k, kinds=kinds, metadata=metadata), as_json=as_json)


def _recall(ask: Callable[[Memory], Coroutine[Any, Any, Hits]], *, as_json: bool) -> None:
    async def work(settings: Settings, dsn: str) -> None:
        from reactor.memory import Memory  # noqa: PLC0415

        async with Memory.open(dsn, settings=settings) as memory:
            try:
                hits = await ask(memory)
            except ValueError as exc:  # what it says of a wrong argument is about the command line here
                raise Misuse(str(exc)) from exc
            _print_hits(hits, as_json=as_json)

    _run(work)


def _print_hits(hits: Hits, *, as_json: bool) -> None:
    reasons = {
        "postgres": "degraded: Postgres is out of reach, so nothing was searched",
        "deadline": "degraded: Postgres did not answer in time",
        "lexical": "degraded: the question could not be embedded, so it was answered by its words alone",
    }
    if hits.degraded is not None:
        say(reasons[hits.degraded])
    if as_json:
        names = ("memory_id", "kind", "source_id", "content", "score", "occurred_at", "metadata")
        _print_json([{name: getattr(hit, name) for name in names} for hit in hits])
        return
    rows = [
        [f"{hit.score:.3f}", hit.kind, hit.source_id, f"{hit.occurred_at:%Y-%m-%d %H:%M}", hit.content[:300]]
        for hit in hits
    ]
    _table(["score", "kind", "source", "when", "content"], rows)


@app.command(hidden=True)
def prepare(with_tables: Annotated[bool, typer.Option("--with-tables")] = False) -> None:
    """Import what `run` would, the handlers too; then migrate. What `dev` asks of changed code before it runs it."""
    import reactor.app  # noqa: F401, PLC0415
    from reactor.loading import RESOURCES, load_handlers, wanted_by  # noqa: PLC0415

    settings = load_settings()
    for type_, handler in load_handlers(settings.handlers).items():
        wanted_by(type_, handler, RESOURCES)
    dsn = _dsn(settings)
    anyio.run(lambda: db.migrate(dsn, with_tables=with_tables))


jobs_app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(jobs_app, name="jobs")
_STATUSES = ("pending", "running", "failed", "done", "dead")
_MOST_ID = 2**63 - 1


def _job_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= _MOST_ID):  # noqa: PLR2004
        raise Misuse(f"{text[:40]} is no job's id: those are whole numbers from 1 on, as `reactor jobs` lists them")
    return int(text)


@jobs_app.callback(
    invoke_without_command=True, epilog=_example("reactor jobs --status dead --type publish", "reactor jobs show 7")
)
def jobs(
    context: typer.Context,
    status: Annotated[str | None, typer.Option(help=", ".join(_STATUSES) + ".")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Only this type.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=10_000, help="How many.")] = 20,
    as_json: Json = False,
) -> None:
    """The queue's jobs, newest first. `show ID` prints one in full."""
    if context.invoked_subcommand is not None:
        return
    if status is not None and status not in _STATUSES:
        raise Misuse(f"--status {status}: one of {', '.join(_STATUSES)}")

    async def work(_settings: Settings, dsn: str) -> None:
        # The few dead and running ones are read by their own small index first: the newest of them may be far down the
        # history, which the order alone would lead through. The others are among the newest rows.
        of_status = "true" if status is None else f"status = '{status}'"
        is_rare = "materialized" if status in {"dead", "running"} else "not materialized"
        rows = await _on_one_connection(
            dsn,
            f"with found as {is_rare} (select * from reactor.jobs where {of_status}) "
            "select id, type, tenant_id, lane, status, attempts, max_attempts, run_after, last_error, updated_at "
            "from found where ($1::text is null or type = $1) "
            "and ($2::text is null or tenant_id = $2) order by id desc limit $3",
            type_,
            tenant,
            n,
        )
        if as_json:
            _print_json([dict(row) for row in rows])
            return
        names = ["id", "type", "tenant", "status", "attempts", "run after", "last error"]
        _table(names, [
            [str(row["id"]), row["type"], row["tenant_id"], row["status"], f"{row['attempts']}/{row['max_attempts']}",
             f"{row['run_after']:%Y-%m-%d %H:%M:%S}", (row["last_error"] or "")[:200]]
            for row in rows
        ])  # fmt: skip

    _run(work)


@jobs_app.command("show", epilog=_example("reactor jobs show 7 --json"))
def show_job(
    context: typer.Context,
    job_id: Annotated[int, typer.Argument(metavar="ID", parser=_job_id)],
    as_json: Json = False,
) -> None:
    """One job in full, with the history of its attempts."""
    as_json |= context.parent is not None and context.parent.params["as_json"]  # it may stand before `show` too

    async def work(_settings: Settings, dsn: str) -> None:
        rows = await _on_one_connection(
            dsn, "select to_jsonb(j) - 'claim_token' from reactor.jobs j where id = $1", job_id
        )
        if not rows:
            raise Unavailable(f"there is no job {job_id} (done ones are kept for REACTOR_JOB_RETENTION_D days)")
        if as_json:
            _print_json(rows[0][0])
        else:
            _table(["", ""], [[name, _plain(value)] for name, value in rows[0][0].items()])

    _run(work)


@app.command(epilog=_example("reactor retry 7 8", "reactor retry --type publish", "reactor retry --all"))
def retry(
    ids: Annotated[list[int] | None, typer.Argument(metavar="ID", parser=_job_id, help="Dead or failed jobs.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Every dead job of this type.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every dead job.")] = False,
    as_json: Json = False,
) -> None:
    """Run dead jobs again, now. All their attempts are before them, and their history stays."""
    if (bool(ids) + (type_ is not None) + every) != 1:
        raise Misuse("retry which? Give ids, or --type, or --all")

    async def work(_settings: Settings, dsn: str) -> None:
        retried = {
            row[0] for row in await _on_one_connection(dsn, "select reactor.retry_jobs($1, $2)", ids or None, type_)
        }
        if as_json:
            _print_json(sorted(retried))
        say("1 job will run again" if len(retried) == 1 else f"{len(retried)} jobs will run again")
        if left := sorted(set(ids or ()) - retried):
            raise Unavailable(f"neither dead nor failed, or not there: {', '.join(map(str, left))}")

    _run(work)


@app.command(epilog=_example("reactor schedules"))
def schedules(as_json: Json = False) -> None:
    """The recurring jobs and when each runs next. Says which ones cannot run, and why."""

    async def work(_settings: Settings, dsn: str) -> None:
        from reactor.schedules import plan  # noqa: PLC0415

        found = await _on_one_connection(
            dsn,
            "select name, type, tenant_id, lane, cron, timezone, missed, is_enabled, last_at, next_at, error, "
            "clock_timestamp() as now from reactor.schedules order by name",
        )
        rows = [dict(row) for row in found]
        for row in rows:
            now = row.pop("now")
            if row["is_enabled"] and row["next_at"] is None:  # no reactor has looked yet, or it found it wrong
                try:
                    _, row["next_at"] = plan(row["cron"], row["timezone"], row["missed"], None, now)
                except ValueError as exc:
                    row["error"] = str(exc)
        if as_json:
            _print_json(rows)
        else:
            _table(["name", "type", "cron", "zone", "last", "next"], [
                [row["name"], row["type"], row["cron"], row["timezone"], _local(row["last_at"], row["timezone"]),
                 _coming(row)]
                for row in rows
            ])  # fmt: skip
        for row in rows:
            if row["error"]:
                say(f"{row['name']}: {row['error']}")

    _run(work)


def _coming(row: dict[str, Any]) -> str:
    if not row["is_enabled"]:
        return "off"
    return "never: wrong" if row["error"] else _local(row["next_at"], row["timezone"])


def _local(at: datetime | None, timezone: str) -> str:
    if at is None:
        return "-"
    try:
        return f"{at.astimezone(ZoneInfo(timezone)):%Y-%m-%d %H:%M}"
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return f"{at:%Y-%m-%d %H:%M} UTC"


_TOKEN_STATES = (
    "active",
    "needs_reconnect",
    "permission",
    "suspended",
    "app_error",
    "key_dead",
    "session_down",
    "expired",
)

# Those that need somebody are few and have indexes of their own; of the others only the first ones are read, by when
# they end. What it is narrowed to is read first: an index in order of time would be searched to its end for it.
_TOKENS = """
with found as {materialized} (
    select * from reactor.tokens where ($1::text is null or tenant_id = $1) and {of_state}
), needing as (
    select id from (
        select id, coalesce(deadline_at, ends_at) as ends from found
        where (state <> 'active' or trouble is not null) and state_reason is distinct from 'parent'
        union select id, coalesce(deadline_at, ends_at) from found where state = 'active' and late_at <= now()
        union (select id, deadline_at from found where state = 'active' and deadline_at <= now() + interval '14 days'
            order by deadline_at limit $2)
    ) n order by ends limit $2
), others as (
    select id from found order by ends_at limit $2
)
select h.*, array(
    select w.advice -> 'do' from reactor.wanted_token_alerts(t, now()) w
    union all select reactor.advise('app_error', t.integration) -> 'do' where t.state = 'app_error') as advice
from reactor.token_health h join reactor.tokens t on t.id = h.token_id
where h.token_id = any (array(select id from needing union select id from others))
order by h.who_must_act = 'nobody',
    coalesce(case when h.who_must_act <> 'nobody' then t.deadline_at end, t.ends_at), t.id limit $2
"""


@app.command(epilog=_example("reactor tokens", "reactor tokens --tenant padaria-sol --state needs_reconnect --json"))
def tokens(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant.")] = None,
    state: Annotated[str | None, typer.Option(help=", ".join(_TOKEN_STATES) + ".")] = None,
    n: Annotated[int, typer.Option("-n", min=1, max=10_000, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """How each token is doing. What needs a person first, with what to do, then what ends soonest; never a token."""
    if state is not None and state not in _TOKEN_STATES:
        raise Misuse(f"--state {state}: one of {', '.join(_TOKEN_STATES)}")

    async def work(settings: Settings, dsn: str) -> None:
        is_few = tenant is not None or state not in {None, "active"}
        query = _TOKENS.format(
            materialized="materialized" if is_few else "not materialized",
            of_state="true" if state is None else f"state = '{state}'",
        )
        async with _connected(dsn) as conn:
            rows = [dict(row) for row in await conn.fetch(query, tenant, n)]
            is_plain = settings.token_key is None and await conn.fetchval("select reactor.holds_plain_tokens()")
        advice = {_in_ones_language(do): None for row in rows for do in row.pop("advice")}
        if as_json:
            _print_json(rows)
        else:
            names = [
                "tenant",
                "integration",
                "account",
                "state",
                "expires",
                "next refresh",
                "days left",
                "who must act",
            ]
            _table([*names, "last error"], [
                [row["tenant_id"], row["integration"], row["account"], _state_of(row), _minute(row["expires_at"]),
                 _minute(row["next_refresh"]), _plain(row["days_left"]), row["who_must_act"],
                 row["last_error_class"] or "-"]
                for row in rows
            ])  # fmt: skip
        if is_plain:
            say(
                "TOKENS LIE IN PLAIN TEXT: set REACTOR_TOKEN_KEY (reactor keygen), and they are sealed; docs/sealing.md"
            )
        for line in advice:
            say(line)

    _run(work)


def _state_of(row: dict[str, Any]) -> str:
    reasons = [row[name] for name in ("state_reason", "trouble") if row[name]]
    return f"{row['state']} ({', '.join(reasons)})" if reasons else str(row["state"])


def _minute(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M}"


def _in_ones_language(do: dict[str, str]) -> str:
    """What a person is told to do, in Portuguese where the locale is, else in English."""
    locale = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return _one_line(do["pt" if locale.lower().startswith("pt") else "en"])


def _one_line(text: str) -> str:
    """Without line ends and control characters: names of tenants and accounts stand in it."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


@app.command(epilog=_example("reactor alerts", "reactor alerts --all --json"))
def alerts(
    every: Annotated[bool, typer.Option("--all", help="The resolved ones too.")] = False,
    n: Annotated[int, typer.Option("-n", min=1, max=10_000, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """What a person must see to, newest first. Each closes by itself when it is cured."""

    async def work(_settings: Settings, dsn: str) -> None:
        rows = await _on_one_connection(
            dsn,
            "select id, cause, subject, tenant_id, detail, occurrences, opened_at, seen_at, resolved_at "
            f"from reactor.alerts where {'true' if every else 'resolved_at is null'} order by id desc limit $1",
            n,
        )
        if as_json:
            _print_json([dict(row) for row in rows])
            return
        names = ["cause", "subject", "since", "what to do"]
        _table([*names, "resolved"] if every else names, [
            [row["cause"], _one_line(row["subject"]), _minute(row["opened_at"]), _advice_of(row["detail"]),
             *([_minute(row["resolved_at"])] if every else [])]
            for row in rows
        ])  # fmt: skip

    _run(work)


def _advice_of(detail: dict[str, Any]) -> str:
    """What to do, where the alert says so; else what it found."""
    if isinstance(do := detail.get("do"), dict):
        return _in_ones_language(do)
    found: Iterable[tuple[str, Any]] = detail.items()
    return _one_line(", ".join(f"{name} {_plain(value)}" for name, value in found))


@app.command(epilog=_example("reactor keygen"))
def keygen(as_json: Json = False) -> None:
    """Make a pair of keys for sealing tokens. Nothing is stored, and no database is needed."""
    from reactor.sealing import Keys, generate  # noqa: PLC0415  # only keys need cryptography

    private, public = generate()
    if as_json:
        _print_json({"private": private, "public": public, "key_id": Keys.parse(private).key_id})
    else:
        print(f"REACTOR_TOKEN_KEY={private}\n# public, for producers: {public}")
    say("the private key goes into the environment of every reactor, and into a backup: what it sealed dies with it")
    say("the public key goes to producers: they seal with it and cannot read. To replace a key, see docs/sealing.md")


@app.command(epilog=_example("reactor status --json"))
def status(as_json: Json = False) -> None:
    """The queue's numbers, the listener, the memories. Exit code 1 when Postgres is away."""

    async def work(settings: Settings, dsn: str) -> None:
        [[numbers]] = await _on_one_connection(dsn, "select reactor.status()")
        if as_json:
            _print_json(numbers)
        else:
            _table(["", ""], [[name, _plain(numbers[name])] for name in sorted(numbers)])
        models = set(numbers["models"])
        target = settings.target_model()
        if models - {target}:
            say(f"some tenants' vectors are in {', '.join(sorted(models - {target}))}; the target is {target}")

    _run(work)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def main() -> None:
    """The console script: turns our errors into one line and an exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an embedded server is let go of
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?" instead
    try:
        app()
    except Misuse as exc:
        say(f"reactor: {exc}")
        sys.exit(2)
    except ReactorError as exc:  # Unavailable, and what is sealed with a key that is not here
        say(f"reactor: {exc}")
        sys.exit(1)
    except asyncpg.PostgresError as exc:
        say(f"reactor: {db.sentence_of(exc)}")
        sys.exit(2 if exc.sqlstate in _WRONG_WORDS else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
