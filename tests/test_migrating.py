"""`reactor migrate`: safe to repeat, to run twice at once, to run beside producers; all or nothing; one clear line otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import anyio
import asyncpg
import pytest
from conftest import command, connect, drained, eventually, make_settings, running_reactor

from reactor import Memory, Unavailable, db
from reactor.errors import Misuse
from reactor.job import Done
from reactor.jobs import Jobs


@pytest.fixture
async def connected() -> AsyncIterator[Callable[[str], Awaitable[asyncpg.Connection]]]:
    """Opens connections that are closed with the test."""
    async with AsyncExitStack() as stack:

        async def open_one(dsn: str) -> asyncpg.Connection:
            conn = await connect(dsn)
            stack.callback(conn.terminate)
            return conn

        yield open_one


OBJECTS = """
    select n.nspname || '.' || c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname !~ '^pg_' and n.nspname not in ('information_schema', 'reactor')
    union all
    select n.nspname || '.' || p.proname from pg_proc p join pg_namespace n on n.oid = p.pronamespace
    where n.nspname !~ '^pg_' and n.nspname not in ('information_schema', 'reactor')
    union all select nspname from pg_namespace where nspname !~ '^pg_(toast|temp)'
"""


@pytest.fixture
def sql_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of sql/ that migrate reads instead, to stand for another release."""
    folder = shutil.copytree(db.SQL_FOLDER, tmp_path / "sql")
    monkeypatch.setattr(db, "SQL_FOLDER", folder)
    return folder


async def objects(dsn: str) -> set[str]:
    conn = await connect(dsn)
    try:
        return {row[0] for row in await conn.fetch(OBJECTS)}
    finally:
        await conn.close()


async def snapshot(dsn: str) -> list[tuple[object, ...]]:
    """Everything in schema reactor by definition, rights and policies: what an idempotent migration leaves as it was."""
    conn = await connect(dsn)
    try:
        rows = await conn.fetch(
            """
            select 'function', oid::regprocedure::text, md5(prosrc) || coalesce(proacl::text, '') || proowner::text from pg_proc where pronamespace = 'reactor'::regnamespace
            union all select 'table', oid::regclass::text, relkind::text || coalesce(relacl::text, '') || relrowsecurity || relforcerowsecurity from pg_class where relnamespace = 'reactor'::regnamespace
            union all select 'policy', polrelid::regclass || '.' || polname, polroles::text || coalesce(pg_get_expr(polqual, polrelid), '') || coalesce(pg_get_expr(polwithcheck, polrelid), '') from pg_policy
            union all select 'trigger', tgrelid::regclass || '.' || tgname, tgfoid::regproc::text from pg_trigger where not tgisinternal
            union all select 'source', relation::text, kind || detached_at::text from reactor.sources
            """
        )
        return sorted(tuple(row) for row in rows if None not in tuple(row))
    finally:
        await conn.close()


async def test_an_empty_database_is_migrated_and_nothing_outside_schema_reactor_is_touched(empty_dsn):
    before = await objects(empty_dsn)

    first = command("migrate", dsn=empty_dsn)
    second = command("migrate", dsn=empty_dsn)

    assert (first.returncode, first.stdout, first.stderr.splitlines()[-1]) == (0, "", "migrated")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "nothing to do: the schema is up to date\n")
    assert await objects(empty_dsn) - before == {"reactor"}


async def test_applying_every_file_again_changes_nothing(dsn, connected):
    conn = await connected(dsn)
    before = await snapshot(dsn)
    await conn.execute("update reactor.migrations set checksum = 'of another release' where number = 3")

    assert await db.migrate(dsn, with_tables=True) is True

    after = await snapshot(dsn)
    assert after == before
    assert await db.migrate(dsn, with_tables=True) is False


async def test_many_migrators_of_one_database_take_turns(empty_dsn):
    results = []

    async def migrate() -> None:
        results.append(await db.migrate(empty_dsn, with_tables=True))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(migrate)

    assert sorted(results) == [False, False, False, False, True]


async def test_a_migrator_that_waited_sees_what_the_first_one_did_even_where_transactions_are_serializable(
    empty_dsn, server, connected
):
    conn = await connected(empty_dsn)
    await conn.execute(
        f"alter database {await conn.fetchval('select current_database()')} set default_transaction_isolation = 'serializable'"
    )

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(db.migrate, empty_dsn)

    assert await db.migrate(empty_dsn) is False


async def test_two_migrate_commands_at_once_both_succeed(empty_dsn):
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "reactor", "migrate", "--with-tables"],
            env=os.environ | {"DATABASE_URL": empty_dsn},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    words = [process.communicate(timeout=120)[1].splitlines()[-1] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(words) == ["migrated", "nothing to do: the schema is up to date"]


async def test_a_newer_database_is_refused_and_left_as_it_is(dsn, connected):
    conn = await connected(dsn)
    await conn.execute(
        "insert into reactor.migrations (number, name, checksum, release) values (9999, '9999_future.sql', 'x', '7.0.0')"
    )
    before = await snapshot(dsn)

    migrated = command("migrate", dsn=dsn)
    asked = command("status", dsn=dsn)
    ran = command("run", dsn=dsn)

    assert migrated.returncode == asked.returncode == ran.returncode == 2
    assert migrated.stderr.startswith(
        "reactor: this database was migrated by memory-reactor 7.0.0 (file 9999); this is "
    )
    assert asked.stderr == "reactor: this database was migrated by a newer memory-reactor: upgrade the code\n"
    assert ran.stderr.splitlines()[-1] == asked.stderr.strip()
    assert await snapshot(dsn) == before


async def test_a_database_without_our_schema_says_what_to_do(empty_dsn):
    asked = command("status", "--json", dsn=empty_dsn)

    assert (asked.returncode, asked.stdout, asked.stderr) == (
        2,
        "",
        "reactor: this database has no reactor schema yet: run `reactor migrate`\n",
    )


async def test_an_older_database_is_brought_up_with_its_data_and_its_sources_work(empty_dsn, sql_folder, connected):
    new = (sql_folder / "0004_memories.sql").read_text()
    # A release before this one: tenants had no created_at, recent() had no metadata filter, json was read otherwise.
    old = new.replace(
        "    created_at timestamptz not null default now()\n);\ncall reactor.protect('reactor.tenants'",
        "    old_column int\n);\ncall reactor.protect('reactor.tenants'",
    )
    assert old != new
    (sql_folder / "0004_memories.sql").write_text(old)
    await db.migrate(empty_dsn, with_tables=True)
    conn = await connected(empty_dsn)
    settings = make_settings(database_url=empty_dsn)
    await conn.execute("insert into posts (tenant_id, body) values ('sol', 'Bolo de fubá')")
    async with running_reactor(settings):
        await drained(conn)
    await conn.execute("insert into posts (tenant_id, body) values ('sol', 'Escrito enquanto ninguém trabalhava')")
    # This release: adds its column with a guarded alter at the foot of the file, and a file of its own.
    (sql_folder / "0004_memories.sql").write_text(
        new + "\nalter table reactor.tenants add column if not exists created_at timestamptz not null default now();\n"
    )
    (sql_folder / "0009_more.sql").write_text(
        "create table if not exists reactor.more (id int); call reactor.protect('reactor.more', 'registry');"
    )
    with pytest.raises(Misuse, match="of another release: run `reactor migrate`"):
        await db.check_schema(conn)

    migrated = await db.migrate(empty_dsn)

    assert migrated is True
    await db.check_schema(conn)
    assert await conn.fetchval("select created_at is not null from reactor.tenants")
    assert await conn.fetchval("select to_regclass('reactor.more') is not null")
    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await conn.execute("insert into posts (tenant_id, body) values ('sol', 'Escrito depois')")
        await drained(conn)
        assert sorted(hit.content for hit in await memory.recent("sol")) == [
            "Bolo de fubá",
            "Escrito depois",
            "Escrito enquanto ninguém trabalhava",
        ]


# The queue as the release before lanes and turns left it (01af70e).
BEFORE_LANES = """
    drop table reactor.jobs, reactor.job_minutes, reactor.instance;
    create table reactor.jobs (
        id bigint primary key default nextval('reactor.job_ids'), type text not null, tenant_id text not null, lane text not null,
        dedupe_key text, payload jsonb not null default '{}',
        status text not null default 'pending' check (status in ('pending', 'running', 'failed', 'done', 'dead')),
        attempts int not null default 0, max_attempts int not null default 5, run_after timestamptz not null default now(),
        version bigint not null default 0, locked_at timestamptz, locked_by text, lease_until timestamptz, claim_token uuid,
        is_suspect boolean not null default false, result jsonb, last_error text, notes jsonb not null default '{}',
        created_at timestamptz not null default now(), updated_at timestamptz not null default now());
    create index jobs_due on reactor.jobs (type, run_after, id) where status in ('pending', 'failed');
    create index jobs_leases on reactor.jobs (lease_until) where status = 'running';
    create index jobs_ended on reactor.jobs (updated_at) where status in ('done', 'dead');
    create index jobs_waiting_twins on reactor.jobs (tenant_id, type, dedupe_key, id) where status in ('pending', 'failed') and dedupe_key is not null;
    create unique index jobs_running_once on reactor.jobs (tenant_id, type, dedupe_key) where status = 'running';
    create index jobs_suspects on reactor.jobs (type, run_after, id) where is_suspect and status in ('pending', 'failed');
    create index jobs_dead on reactor.jobs (tenant_id, type, dedupe_key) where status = 'dead';
    call reactor.protect('reactor.jobs', 'queue');
    drop function reactor.claim_jobs, reactor.settle_jobs, reactor.complete_jobs, reactor.release_expired_jobs, reactor.look_ahead;
    create function reactor.complete_jobs(p_ids bigint[], p_tokens uuid[], p_results jsonb[]) returns setof bigint language sql as 'select 1::bigint';
    create function reactor.hold_claims(p_ids bigint[], p_tokens uuid[]) returns setof bigint language sql as 'select 1::bigint';
    create function reactor.claim_jobs(p_types text[], p_limits int[], p_worker text, p_lease interval, p_max_attempts int[] default null,
        p_now timestamptz default null) returns setof reactor.jobs language sql as 'select * from reactor.jobs';
    create function reactor.settle_jobs(p_ids bigint[], p_tokens uuid[], p_endings text[], p_results jsonb[] default null,
        p_errors text[] default null, p_delays float8[] default null, p_now timestamptz default clock_timestamp())
        returns table (id bigint, status text, run_after timestamptz, opened_alert text) language sql as 'select null::bigint, null, now(), null';
    create function reactor.release_expired_jobs(p_now timestamptz default clock_timestamp()) returns int language sql as 'select 1';
    create function reactor.next_due_s(p_types text[]) returns float8 language sql as 'select 1::float8';
    update reactor.migrations set checksum = 'before lanes' where number = 2;
"""


async def test_a_queue_of_the_release_before_lanes_is_brought_up_with_every_job_in_it(dsn, connected):
    async def shape(of: str) -> set[tuple[object, ...]]:
        conn = await connected(of)
        return {
            tuple(row)
            for row in await conn.fetch(
                """
                select indexdef, '' from pg_indexes where schemaname = 'reactor'
                union all select attname, attcollation::regcollation || format_type(atttypid, atttypmod) from pg_attribute
                    where attrelid in ('reactor.jobs'::regclass, 'reactor.job_minutes'::regclass) and attnum > 0
                union all select oid::regprocedure::text, pg_get_function_result(oid) from pg_proc
                    where pronamespace = 'reactor'::regnamespace and prokind = 'f'
                union all select pg_get_constraintdef(oid), conname from pg_constraint where conrelid = 'reactor.jobs'::regclass
                union all select polrelid::regclass || polname, pg_get_expr(polqual, polrelid) from pg_policy
                """
            )
        }

    fresh = await shape(dsn)
    conn = await connected(dsn)
    await conn.execute(BEFORE_LANES)
    await conn.execute(
        """insert into reactor.jobs (type, tenant_id, lane, status, run_after, updated_at, attempts, is_suspect, claim_token, lease_until)
        values ('a', 'acme', 'a', 'pending', now() - interval '1 h', now() - interval '1 h', 0, false, null, null),
            ('b', 'ação', '', 'pending', now(), now(), 0, false, null, null),
            ('c', '', 'c', 'failed', now() - interval '1 s', now() - interval '1 min', 2, false, null, null),
            ('d', 'acme', 'd', 'failed', now() - interval '1 s', now() - interval '1 min', 3, true, null, null),
            ('e', 'acme', 'e', 'failed', now() + interval '1 h', now(), 1, false, null, null),
            ('f', 'acme', 'f', 'running', now(), now(), 1, false, gen_random_uuid(), now() - interval '1 min'),
            ('g', 'acme', 'g', 'done', now(), now(), 1, false, null, null)"""
    )

    assert await db.migrate(dsn) is True

    assert await shape(dsn) == fresh
    async with db.create_pool(dsn, application="test", size=2) as pool:
        jobs = Jobs(pool, worker="test", lease=timedelta(seconds=30))
        released = await jobs.release_expired()
        claimed = await jobs.claim(dict.fromkeys("abcdefg", 5))
        await jobs.settle([(job, Done()) for job in claimed])
    assert [job.type for job in released] == ["f"]
    assert {(job.type, job.lane, job.attempts) for job in claimed} == {
        ("a", "a", 1), ("b", "b", 1), ("c", "c", 3), ("d", "d", 4), ("f", "f", 1)
    }  # fmt: skip
    assert (await conn.fetchval("select reactor.status()"))["done_24h"] == 6  # that of the former release, too
    assert await db.migrate(dsn) is False


async def test_sources_are_compiled_again_by_the_new_release(dsn, sql_folder, connected):
    conn = await connected(dsn)
    await conn.execute(
        "create or replace function reactor.source_2_written() returns trigger language plpgsql as 'begin return null; end'"
    )
    await conn.execute("insert into posts (tenant_id, body) values ('sol', 'de uma função velha')")
    assert await conn.fetchval("select count(*) from reactor.jobs where type = 'sync_row'") == 0
    (sql_folder / "0009_more.sql").write_text("select 1;")

    await db.migrate(dsn)

    await conn.execute("insert into posts (tenant_id, body) values ('sol', 'de uma função nova')")
    assert await conn.fetchval("select count(*) from reactor.jobs where type = 'sync_row'") == 1
    assert await conn.fetchval("select prosecdef from pg_proc where oid = 'reactor.source_2_written'::regproc")


async def test_a_failing_file_leaves_nothing_half_applied(empty_dsn, dsn, sql_folder, connected):
    before = await snapshot(dsn)
    (sql_folder / "0003_sources.sql").write_text((sql_folder / "0003_sources.sql").read_text() + "\nselect 1 / 0;\n")

    for address in (empty_dsn, dsn):
        with pytest.raises(asyncpg.DivisionByZeroError):
            await db.migrate(address, with_tables=True)

    assert await snapshot(dsn) == before
    conn = await connected(empty_dsn)
    assert await conn.fetchval(
        "select to_regnamespace('reactor') is null and to_regtype('halfvec') is null and to_regclass('posts') is null"
    )


async def test_a_changed_file_is_applied_again(dsn, sql_folder, connected):
    file = sql_folder / "0008_status.sql"
    file.write_text(file.read_text().replace("'tokens', (", "'new', 1, 'tokens', ("))

    assert await db.migrate(dsn) is True

    conn = await connected(dsn)
    assert (await conn.fetchval("select reactor.status()"))["new"] == 1


async def test_a_file_that_a_release_no_longer_has_does_not_keep_the_schema_out_of_date(dsn, sql_folder):
    (sql_folder / "0000_early.sql").write_text("select 1;")
    await db.migrate(dsn)
    (sql_folder / "0000_early.sql").unlink()

    assert await db.migrate(dsn) is True

    assert await db.migrate(dsn) is False


# --- pgvector ---


@pytest.mark.parametrize("schema", ["public", "extensions", '"odd "" schema"', "reactor"])
async def test_pgvector_may_be_in_any_schema(empty_dsn, schema, connected):
    conn = await connected(empty_dsn)
    await conn.execute(f"create schema if not exists {schema}; create extension vector with schema {schema}")

    await db.migrate(empty_dsn, with_tables=True)

    conn = await connected(empty_dsn)
    settings = make_settings(database_url=empty_dsn)
    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await conn.execute(
            "insert into posts (tenant_id, body) values ('sol', 'O melhor horário para postar é às nove')"
        )
        await drained(conn)
        await memory.warm()
        [hit] = await memory.search("sol", "que horas devo publicar?")
        assert hit.score > 0
        vector = [0.5] * 512
        assert (
            len(await conn.fetch("select * from reactor.search_by_embedding('sol', $1, 'use-multilingual')", vector))
            == 1
        )


@pytest.mark.parametrize(("existing", "home"), [("select 1", "reactor"), ("create schema extensions", "extensions")])
async def test_a_missing_pgvector_is_installed_where_it_disturbs_nobody(empty_dsn, existing, home, connected):
    conn = await connected(empty_dsn)
    await conn.execute(existing)
    before = await objects(empty_dsn)

    await db.migrate(empty_dsn)

    assert (
        await conn.fetchval("select extnamespace::regnamespace::text from pg_extension where extname = 'vector'")
        == home
    )
    assert not {name for name in await objects(empty_dsn) - before if name.startswith("public.")}


async def test_a_missing_pgvector_that_the_role_may_not_install_is_one_clear_line(server, empty_dsn):
    database = empty_dsn.split("?")[0].rsplit("/", 1)[1]
    server.psql(
        server.superuser,
        f"drop role if exists comum; create role comum login; alter database {database} owner to comum",
    )

    migrated = command("migrate", dsn=server.dsn(database, user="comum"))

    server.psql(server.superuser, f"alter database {database} owner to postgres; drop role comum")
    assert (migrated.returncode, migrated.stdout) == (2, "")
    assert migrated.stderr == (
        "reactor: pgvector is not installed and this role may not install it: run `create extension vector` as an "
        "administrator (Supabase: Database > Extensions > vector)\n"
    )


# --- owners ---


async def test_a_schema_of_another_owner_is_refused(server, dsn):
    database = dsn.split("?")[0].rsplit("/", 1)[1]
    server.psql(server.superuser, "drop role if exists outra; create role outra login")
    theirs = server.dsn(database, user="outra")

    refused = [command(*words, dsn=theirs) for words in (("migrate",), ("run",), ("status",))]

    server.psql(server.superuser, "drop role outra")
    assert {(done.returncode, done.stderr.splitlines()[-1]) for done in refused} == {
        (2, "reactor: schema reactor belongs to postgres: migrate and run as that role")
    }


async def test_a_schema_made_by_the_administrator_for_its_owner_is_enough(server, empty_dsn):
    database = empty_dsn.split("?")[0].rsplit("/", 1)[1]
    server.psql(server.superuser, "drop role if exists inquilina; create role inquilina login")
    server.psql(empty_dsn, "create extension vector; create schema reactor authorization inquilina")

    migrated = command("migrate", dsn=server.dsn(database, user="inquilina"))

    server.psql(empty_dsn, "drop owned by inquilina; drop role inquilina")
    assert (migrated.returncode, migrated.stderr.splitlines()[-1]) == (0, "migrated")


# --- --with-tables ---


async def test_producer_tables_are_made_once_and_keep_their_rows(empty_dsn, connected):
    first = command("migrate", "--with-tables", dsn=empty_dsn)
    conn = await connected(empty_dsn)
    await conn.execute("insert into posts (tenant_id, body) values ('sol', 'Bolo')")
    second = command("migrate", "--with-tables", dsn=empty_dsn)

    assert (first.returncode, first.stderr.splitlines()[-1]) == (0, "migrated")
    assert (second.returncode, second.stderr) == (0, "nothing to do: the schema is up to date\n")
    assert await conn.fetchval("select count(*) from posts") == 1
    assert {
        row[0] for row in await conn.fetch("select relation::text from reactor.sources where detached_at is null")
    } == {"reactor.notes", "posts", "chat_messages"}


@pytest.mark.parametrize(
    "theirs",
    [
        "create table public.posts (id int primary key, tenant_id text, body text, created_at timestamptz)",
        "create table public.chat_messages (id int)",
        "create view public.posts as select 1 as id",
        "create sequence public.chat_messages",
    ],
)
async def test_a_taken_name_is_refused_and_nothing_is_half_made(empty_dsn, theirs, connected):
    conn = await connected(empty_dsn)
    await conn.execute(theirs)
    before = await objects(empty_dsn)

    migrated = command("migrate", "--with-tables", dsn=empty_dsn)

    name = "posts" if "public.posts" in theirs else "chat_messages"
    assert migrated.returncode == 2
    assert (
        migrated.stderr.splitlines()[-1]
        == f"reactor: public.{name} exists already: attach it instead (reactor attach --help)"
    )
    assert await objects(empty_dsn) == before


async def test_an_attached_table_of_their_own_named_posts_keeps_its_mapping(empty_dsn, connected):
    conn = await connected(empty_dsn)
    await db.migrate(empty_dsn)
    await conn.execute(
        "create table public.posts (id int primary key, tenant_id text, texto text, created_at timestamptz)"
    )
    await conn.execute("select reactor.attach('public.posts', 'minha', '{texto}')")

    migrated = command("migrate", "--with-tables", dsn=empty_dsn)

    assert migrated.returncode == 2
    assert await conn.fetchrow(
        "select kind, text_columns from reactor.sources where relation = 'public.posts'::regclass"
    ) == ("minha", ["texto"])
    assert not await conn.fetchval("select relrowsecurity from pg_class where oid = 'public.posts'::regclass")


# --- beside producers ---


async def test_a_migration_with_everything_in_place_does_not_lock_the_producers_tables(dsn, sql_folder, connected):
    watcher, gate = await connected(dsn), await connected(dsn)
    await gate.execute("select pg_advisory_lock(7)")  # stops the migration at its end, for us to look
    (sql_folder / "9999_stop.sql").write_text("set local lock_timeout = 0; select pg_advisory_xact_lock(7);")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(db.migrate, dsn)
        await eventually(
            lambda: watcher.fetchval(
                "select exists (select from pg_locks where locktype = 'advisory' and objid = 7 and not granted)"
            )
        )
        held = await watcher.fetch(
            "select relation::regclass::text as name, mode from pg_locks join pg_stat_activity using (pid) join pg_class on pg_class.oid = relation "
            "where application_name = 'memory-reactor migrate' and relkind in ('r', 'p') and relation >= 16384"
        )
        await gate.execute("select pg_advisory_unlock(7)")

    beside_writers = {"AccessShareLock", "RowShareLock", "RowExclusiveLock", "ShareUpdateExclusiveLock"}
    assert {row["name"] for row in held} > {"reactor.jobs", "reactor.migrations"}
    assert [row for row in held if row["mode"] not in beside_writers] == []


async def test_a_migration_gives_up_behind_a_long_transaction_and_changes_nothing(dsn, sql_folder, connected):
    file = sql_folder / "0002_jobs.sql"
    file.write_text(file.read_text() + "\nalter table reactor.jobs add column if not exists later int;\n")
    producer = await connected(dsn)

    async with producer.transaction():
        await producer.execute("insert into posts (tenant_id, body) values ('sol', 'em andamento')")
        with pytest.raises(
            Unavailable, match="a long transaction holds a table: nothing was changed, migrate again later"
        ):
            await db.migrate(dsn)

    assert await producer.fetchval("select count(*) from reactor.jobs where type = 'sync_row'") == 1
    assert await db.migrate(dsn) is True


# --- moved with pg_dump ---


async def test_a_restored_dump_keeps_working(server, dsn, tmp_path, connected):
    conn = await connected(dsn)
    await conn.execute(
        'create schema "App"; create table "App"."Artigos" (chave uuid primary key default gen_random_uuid(), marca text, corpo text, quando timestamptz default now())'
    )
    await conn.execute(
        """select reactor.attach('"App"."Artigos"', 'artigo', '{corpo}', tenant_column => 'marca', id_column => 'chave', time_column => 'quando')"""
    )
    await conn.execute("""insert into "App"."Artigos" (marca, corpo) values ('sol', 'Bolo de fubá')""")
    async with running_reactor(make_settings(database_url=dsn)):
        await drained(conn)
    dump = tmp_path / "dump.sql"
    # The restored database holds other things already: every table gets another oid than it had.
    server.psql(server.superuser, "create database restored template template0")
    restored = server.dsn("restored")
    server.psql(restored, "".join(f"create table filler_{n} (id int); drop table filler_{n};" for n in range(40)))
    subprocess.run([server.programs / "pg_dump", "-f", dump, dsn], check=True, capture_output=True)
    subprocess.run(
        [server.programs / "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-f", dump, restored],
        check=True,
        capture_output=True,
    )

    try:
        assert command("migrate", dsn=restored).stderr == "nothing to do: the schema is up to date\n"
        conn = await connected(restored)
        settings = make_settings(database_url=restored)
        async with running_reactor(settings), Memory.open(settings=settings) as memory:
            assert [hit.content for hit in await memory.recent("sol")] == ["Bolo de fubá"]
            await conn.execute("""insert into "App"."Artigos" (marca, corpo) values ('sol', 'Pão de queijo')""")
            await drained(conn)
            assert sorted(hit.content for hit in await memory.recent("sol")) == ["Bolo de fubá", "Pão de queijo"]
            await conn.execute("""truncate "App"."Artigos" """)
            assert await conn.fetch("select * from reactor.recent('sol')") == [], (
                "the whole table's TRUNCATE hides at once"
            )
            await drained(conn)
            assert await memory.recent("sol") == []
            assert (await conn.fetchval("select reactor.status()"))["alerts_open"] == 0
    finally:
        server.psql(server.superuser, "drop database restored with (force)")
