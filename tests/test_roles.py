"""Whoever owns the schema, superuser or not: nothing is lost, and no tenant's row reaches another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import anyio
import asyncpg
import pytest
from conftest import Server, command, connect, drained, make_settings, new_server, running_reactor

from reactor import Memory, Unavailable, db, tenant

# What `migrate` may find: the owner's attributes, and where an administrator put pgvector.
OWNERS = {
    "an ordinary owner": ("", "public"),
    "an ordinary owner, and roles of somebody else's": ("", "extensions"),
    "an owner who may create roles": ("createrole", "extensions"),
    "an owner as on Supabase": ("createrole bypassrls", '"Odd ""schema"'),
    "a superuser": ("superuser", "public"),
}
PLAYS_BOTH = {"an ordinary owner", "an ordinary owner, and roles of somebody else's"}


WITHOUT_PRIVILEGES = ["an ordinary owner", "an owner who may create roles"]


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """A cluster of this file's own, where no role of ours exists until a test makes it."""
    with new_server() as server:
        yield server


@pytest.fixture
def cluster(bare: Server) -> Iterator[Server]:
    yield bare
    databases = bare.psql(
        bare.superuser, "select datname from pg_database where not datistemplate and datname <> 'postgres'"
    ).split()
    bare.psql(bare.superuser, "".join(f"drop database {name} with (force);" for name in databases))
    roles = bare.psql(
        bare.superuser, "select quote_ident(rolname) from pg_roles where rolname !~ '^pg_' and rolname <> 'postgres'"
    ).split()
    bare.psql(bare.superuser, "".join(f"drop role {name};" for name in roles))


def make_database(cluster: Server, name: str, *, owner: str, attributes: str = "", vector: str = "public") -> str:
    """A database with pgvector installed by the administrator, and its DSN as the owner's."""
    cluster.psql(cluster.superuser, f"create role {owner} login {attributes}")
    cluster.psql(cluster.superuser, f"create database {name} owner {owner}")
    cluster.psql(
        cluster.dsn(name),
        f"create schema if not exists {vector}; create extension vector with schema {vector}; "
        f"grant usage on schema {vector} to {owner} with grant option;",
    )
    return cluster.dsn(name, user=owner)


@pytest.fixture(params=OWNERS)
def kind_of_owner(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def owned(cluster: Server, kind_of_owner: str) -> str:
    """The DSN of a migrated database as its owner of some kind, who has a table of its own in another schema."""
    attributes, vector = OWNERS[kind_of_owner]
    if kind_of_owner.endswith("somebody else's"):
        cluster.psql(cluster.superuser, "create role reactor_worker nologin; create role reactor_definer nologin;")
    dsn = make_database(cluster, "pipeline", owner="dona", attributes=attributes, vector=vector)
    await db.migrate(dsn)
    cluster.psql(cluster.superuser, "create role editor login")
    cluster.psql(
        dsn,
        """
        create schema "App";
        create table "App"."Artigos" (chave uuid primary key default gen_random_uuid(), marca text, corpo text, quando timestamptz default now());
        alter table "App"."Artigos" enable row level security;
        create policy own on "App"."Artigos" to editor using (marca = current_setting('app.marca')) with check (true);
        grant usage on schema "App" to editor;
        grant all on "App"."Artigos" to editor;
        insert into "App"."Artigos" (marca, corpo) values ('sol', 'Antes de tudo havia um bolo de fubá');
        """,
    )
    return dsn


ATTACH = (
    "attach",
    '"App"."Artigos"',
    "--kind",
    "post",
    "--text-columns",
    "corpo",
    "--tenant-column",
    "marca",
    "--id-column",
    "chave",
    "--time-column",
    "quando",
)


async def contents(memory: Memory, tenant_id: str) -> list[str]:
    return sorted(hit.content for hit in await memory.recent(tenant_id))


async def test_the_whole_product_works_and_no_tenant_sees_another(cluster, owned, kind_of_owner):
    attached = command(*ATTACH, "--backfill", dsn=owned)
    assert attached.returncode == 0, attached.stderr
    owner = await connect(owned)
    editor = await connect(cluster.dsn("pipeline", user="editor"))
    settings = make_settings(database_url=owned)

    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await editor.execute(
            """insert into "App"."Artigos" (marca, corpo) values ('sol', 'Pão de queijo sai às nove'), ('sol', 'Vaga de confeiteiro'),
               ('lua', 'Pão de queijo da concorrência')"""
        )
        await drained(owner)
        await memory.warm()
        assert await contents(memory, "sol") == [
            "Antes de tudo havia um bolo de fubá",
            "Pão de queijo sai às nove",
            "Vaga de confeiteiro",
        ]
        assert await contents(memory, "lua") == ["Pão de queijo da concorrência"]
        assert [hit.content for hit in await memory.search("sol", "pão de queijo", k=1)] == [
            "Pão de queijo sai às nove"
        ]
        assert {hit.content for hit in await memory.search("lua", "pão de queijo", k=100)} == {
            "Pão de queijo da concorrência"
        }
        found = command("search", "lua", "queijo", "--json", dsn=owned)
        assert [hit["content"] for hit in json.loads(found.stdout)] == ["Pão de queijo da concorrência"], found.stderr
        rows = await owner.fetch("select content from reactor.search('lua', 'pão de queijo', 100)")
        assert [row["content"] for row in rows] == ["Pão de queijo da concorrência"]

        await editor.execute("set app.marca = 'sol'")
        await editor.execute(
            """update "App"."Artigos" set corpo = 'Pão de queijo sai às dez' where corpo like '%nove'"""
        )
        await editor.execute("""delete from "App"."Artigos" where corpo like 'Vaga%'""")
        await drained(owner)
        assert await contents(memory, "sol") == ["Antes de tudo havia um bolo de fubá", "Pão de queijo sai às dez"]
        note = await memory.remember("sol", "A dona prefere títulos curtos")
        await drained(owner)
        assert str(note) in {hit.source_id for hit in await memory.search("sol", "títulos curtos", kinds=["note"])}

        await owner.execute("""truncate "App"."Artigos" """)
        assert {hit["kind"] for hit in await owner.fetch("select kind from reactor.recent('sol')")} == {"note"}, (
            "hidden from the commit on"
        )
        await drained(owner)
        assert await contents(memory, "lua") == []
        assert await contents(memory, "sol") == ["A dona prefere títulos curtos"]

    [[status]] = await owner.fetch("select reactor.status()")
    assert (status["dead"], status["failed"], status["alerts_open"], status["rejected_24h"]) == (0, 0, 0, 0)
    await editor.close()
    await owner.close()


async def test_nobody_reads_memories_outside_a_tenants_scope(cluster, owned, kind_of_owner):
    command(*ATTACH, "--backfill", dsn=owned)
    settings = make_settings(database_url=owned)
    owner = await connect(owned)
    async with running_reactor(settings), db.create_pool(owned, application="test", size=2) as pool:
        await drained(owner)
        async with tenant(pool, "sol") as conn:
            assert await conn.fetchval("select count(*) from reactor.memories") == 1
            assert await conn.fetchval("select count(*) from reactor.jobs where tenant_id <> 'sol'") == (
                await owner.fetchval("select count(*) from reactor.jobs where tenant_id <> 'sol'")
                if kind_of_owner in PLAYS_BOTH
                else 0
            )
        async with tenant(pool, "lua") as conn:
            assert await conn.fetchval("select count(*) from reactor.memories") == 0
        async with tenant(pool, "so") as conn:
            assert await conn.fetchval("select count(*) from reactor.memories") == 0, "a prefix is no tenant"
        with pytest.raises(asyncpg.InvalidParameterValueError):
            async with tenant(pool, ""):
                pass

    if kind_of_owner in PLAYS_BOTH or kind_of_owner == "an owner who may create roles":
        assert await owner.fetchval("select count(*) from reactor.memories") == 0, "forced on the owner too"
    if kind_of_owner not in PLAYS_BOTH:
        async with owner.transaction():
            await owner.execute("set local role reactor_worker")
            for scope in ("", "so", "%", "sol'"):
                await owner.execute("select set_config('reactor.tenant_id', $1, true)", scope)
                for table in ("memories", "notes", "jobs", "tenants"):
                    assert await owner.fetchval(f"select count(*) from reactor.{table}") == 0, (scope, table)
            await owner.execute("select set_config('reactor.tenant_id', 'lua', true)")
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
                await owner.execute("insert into reactor.notes (tenant_id, content) values ('sol', 'plantado')")
    await owner.close()


@pytest.mark.parametrize("kind_of_owner", WITHOUT_PRIVILEGES, indirect=True)
async def test_a_stranger_gains_nothing_from_naming_a_tenant(cluster, owned):
    command(*ATTACH, "--backfill", dsn=owned)
    settings = make_settings(database_url=owned)
    owner = await connect(owned)
    async with running_reactor(settings):
        await drained(owner)
    stranger = await connect(cluster.dsn("pipeline", user="editor"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await stranger.fetch("select * from reactor.search('sol', 'bolo')")

    # Not even where a careless owner granted it everything.
    await owner.execute("grant usage on schema reactor to editor; grant all on all tables in schema reactor to editor")
    await owner.execute("grant execute on all functions in schema reactor to editor")
    await stranger.execute("select set_config('reactor.tenant_id', 'sol', false)")

    for table in await owner.fetch(
        "select relname from pg_class where relnamespace = 'reactor'::regnamespace and relkind = 'r'"
    ):
        assert await stranger.fetchval(f"select count(*) from reactor.{table['relname']}") == 0, table
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await stranger.fetch("select * from reactor.search('sol', 'bolo')")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await stranger.execute(f"set role {await owner.fetchval('select reactor.worker_role()')}")
    await stranger.close()
    await owner.close()


@pytest.mark.parametrize("kind_of_owner", WITHOUT_PRIVILEGES, indirect=True)
async def test_a_source_that_forces_row_level_security_on_its_owner_loses_nothing(cluster, owned):
    command(*ATTACH, dsn=owned)
    owner = await connect(owned)
    await owner.execute("""alter table "App"."Artigos" force row level security""")
    editor = await connect(cluster.dsn("pipeline", user="editor"))
    settings = make_settings(database_url=owned)

    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await editor.execute(
            """insert into "App"."Artigos" (marca, corpo) values ('sol', 'Pão de queijo'), ('lua', 'Sorvete')"""
        )
        await drained(owner)
        reconciled = command("reconcile", "--json", dsn=owned)
        await drained(owner)

        assert reconciled.returncode in (0, 1), reconciled.stderr
        assert "Pão de queijo" in await contents(memory, "sol")
        assert await contents(memory, "lua") == ["Sorvete"]
    await editor.close()
    await owner.close()


async def test_two_databases_of_one_cluster_migrate_at_once_before_any_role_exists(cluster):
    for owner, attributes in (("dona", "superuser"), ("dono", "createrole")):
        cluster.psql(cluster.superuser, f"create role {owner} login {attributes}")
    for round_ in range(3):
        names = [f"r{round_}_{n}" for n in range(4)]
        for n, name in enumerate(names):
            cluster.psql(cluster.superuser, f"create database {name} owner {['dona', 'dono'][n % 2]}")
            cluster.psql(cluster.dsn(name), "create extension vector")
        dsns = [cluster.dsn(name, user=["dona", "dono"][n % 2]) for n, name in enumerate(names)]

        async with anyio.create_task_group() as tasks:
            for dsn in [*dsns, *dsns]:
                tasks.start_soon(db.migrate, dsn)

        for dsn in dsns:
            assert await db.migrate(dsn) is False
        cluster.psql(cluster.superuser, "".join(f"drop database {name} with (force);" for name in names))
        cluster.psql(cluster.superuser, "drop role reactor_worker, reactor_definer")


async def test_an_owner_who_passes_by_row_level_security_is_refused_the_workers_part(cluster):
    dsn = make_database(cluster, "pipeline", owner="dona", attributes="bypassrls")

    migrated = command("migrate", dsn=dsn)

    assert migrated.returncode == 2
    assert migrated.stderr.splitlines()[-1].startswith(
        "reactor: this role may not migrate: dona passes by row level security"
    )
    assert "create role reactor_worker nologin" in migrated.stderr.splitlines()[-1]


async def test_a_worker_role_that_could_log_in_is_refused(cluster):
    cluster.psql(cluster.superuser, "create role reactor_worker login")
    dsn = make_database(cluster, "pipeline", owner="dona", attributes="createrole")

    migrated = command("migrate", dsn=dsn)

    assert migrated.returncode == 2
    assert "role reactor_worker exists and could log in" in migrated.stderr.splitlines()[-1]


async def test_a_schema_of_pgvector_that_the_worker_may_not_use_is_one_clear_line(cluster):
    dsn = make_database(cluster, "pipeline", owner="dona", attributes="createrole", vector="locked")
    cluster.psql(cluster.dsn("pipeline"), "revoke grant option for usage on schema locked from dona")

    migrated = command("migrate", dsn=dsn)

    assert migrated.returncode == 2
    assert migrated.stderr.splitlines()[-1] == (
        "reactor: this role may not migrate: reactor_worker may not use schema locked, where pgvector is "
        "(as its owner: grant usage on schema locked to reactor_worker)"
    )
    cluster.psql(cluster.dsn("pipeline"), "revoke usage on schema locked from dona")
    assert "pgvector is in schema locked, which this role may not use" in command("migrate", dsn=dsn).stderr


async def test_roles_made_available_later_take_over_with_the_next_change(cluster, tmp_path, monkeypatch):
    dsn = make_database(cluster, "pipeline", owner="dona")
    await db.migrate(dsn, with_tables=True)
    cluster.psql(dsn, "insert into posts (tenant_id, body) values ('sol', 'Bolo')")
    cluster.psql(
        cluster.superuser,
        "create role reactor_worker; create role reactor_definer; grant reactor_worker, reactor_definer to dona",
    )
    monkeypatch.setattr(db, "SQL_FOLDER", shutil.copytree(db.SQL_FOLDER, tmp_path / "sql"))
    (tmp_path / "sql" / "0999_later.sql").write_text("select 1;")

    await db.migrate(dsn)

    owner = await connect(dsn)
    settings = make_settings(database_url=dsn)
    async with running_reactor(settings), Memory.open(settings=settings) as memory:
        await owner.execute("insert into posts (tenant_id, body) values ('sol', 'Pão')")
        await drained(owner)
        assert await contents(memory, "sol") == ["Bolo", "Pão"]
    assert await owner.fetchval("select reactor.worker_role()") == "reactor_worker"
    assert await owner.fetchval(
        "select bool_and(proowner = 'reactor_definer'::regrole) from pg_proc where prosecdef and pronamespace = 'reactor'::regnamespace"
    )
    await owner.close()


# --- the catalog of a database migrated by a superuser ---


async def test_every_table_of_ours_forces_row_level_security(conn):
    open_tables = await conn.fetch(
        "select relname from pg_class where relnamespace = 'reactor'::regnamespace and relkind in ('r', 'p') "
        "and not (relrowsecurity and relforcerowsecurity)"
    )

    assert open_tables == []
    assert await conn.fetchval(
        "select relrowsecurity and not relforcerowsecurity from pg_class where oid = 'public.posts'::regclass"
    )


OURS = """
    from pg_proc p where p.pronamespace = 'reactor'::regnamespace
    and not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e')
"""


async def test_no_function_of_ours_is_anybodys_to_execute(conn):
    await conn.execute(
        "create table public.outra (id int primary key, tenant_id text, texto text, created_at timestamptz)"
    )
    await conn.execute("select reactor.attach('public.outra', 'outra', '{texto}')")
    await conn.execute("create role passante")

    executable = await conn.fetch(
        f"select p.oid::regprocedure {OURS} and has_function_privilege('passante', p.oid, 'execute')"
    )

    await conn.execute("drop role passante")
    assert executable == []


async def test_every_function_of_ours_fixes_its_search_path(conn):
    loose = await conn.fetch(
        f"select p.oid::regprocedure {OURS} and not exists (select from unnest(p.proconfig) c where c = 'search_path=pg_catalog, pg_temp')"
    )

    assert loose == []


async def test_definer_functions_are_only_the_triggers_and_belong_to_the_definer(conn):
    definers = await conn.fetch(
        f"select p.proname, p.prorettype::regtype::text as returns, pg_get_userbyid(proowner) as owner {OURS} and prosecdef"
    )

    assert {row["proname"] for row in definers} == {
        "source_1_written",
        "source_2_written",
        "source_3_written",
        "token_source_4_written",
    }
    assert {row["returns"] for row in definers} == {"trigger"}
    assert {row["owner"] for row in definers} == {"reactor_definer"}


async def test_the_definer_may_only_insert_what_triggers_write(conn):
    held = await conn.fetch(
        "select c.relname, a.privilege_type from pg_class c, aclexplode(c.relacl) a "
        "where a.grantee = 'reactor_definer'::regrole and c.relnamespace = 'reactor'::regnamespace"
    )

    assert {tuple(row) for row in held} == {
        ("jobs", "INSERT"),
        ("tombstones", "INSERT"),
        ("rejected", "INSERT"),
        ("job_ids", "USAGE"),
    }
    assert not await conn.fetchval("select has_schema_privilege('reactor_definer', 'reactor', 'create')")
    assert await conn.fetchval("select count(*) from pg_auth_members where member = 'reactor_definer'::regrole") == 0
    assert not await conn.fetchval("select exists (select from pg_class where relowner = 'reactor_definer'::regrole)")


ARGUMENTS = {
    "attach": "source kind text_columns tenant_column id_column time_column title_column format_column status_column metrics_column "
    "slides_column metadata_columns role_column conversation_column agent_column when embed language notify backfill",
    "detach": "source",
    "enqueue": "type payload tenant_id dedupe_key run_after lane max_attempts",
    "recent": "tenant_id k kinds metadata",
    "reconcile": "source",
    "search": "tenant_id query k kinds since until metadata",
    "search_by_embedding": "tenant_id embedding model k kinds since until metadata",
    "status": "",
}
HITS = "TABLE(memory_id bigint, kind text, source_id text, content text, score double precision, occurred_at timestamp with time zone, metadata jsonb)"
RETURNS = {
    "attach": "integer",
    "detach": "boolean",
    "enqueue": "bigint",
    "recent": HITS,
    "search": HITS,
    "search_by_embedding": HITS,
    "status": "jsonb",
}


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_public_function_keeps_its_argument_names_and_reads_no_table_itself(conn, name):
    [function] = await conn.fetch(
        f"select p.oid, p.proargnames[1 : p.pronargs] as names, p.prosrc, p.provolatile, pg_get_function_result(p.oid) as returns {OURS} and p.proname = $1",
        name,
    )

    assert (function["names"] or []) == ARGUMENTS[name].split()
    assert function["returns"] == RETURNS.get(name, function["returns"])
    if name != "status":  # it has no argument that could become a column
        body = function["prosrc"]
        # One call by position: `select [* from] reactor.private($1, $2, ...)`. An argument's name in it would be read as a column.
        assert not set(ARGUMENTS[name].split()) & set(_words(body)), body
        tables = await conn.fetch(
            "select relname from pg_class where relnamespace = 'reactor'::regnamespace and relkind in ('r', 'v')"
        )
        assert not {table["relname"] for table in tables} & set(_words(body)), body


def _words(body: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in body).split()


async def test_the_worker_may_read_only_the_mapped_columns_of_a_source(conn):
    await conn.execute(
        "create table public.segredos (id int primary key, tenant_id text, texto text, senha text, created_at timestamptz)"
    )
    await conn.execute("select reactor.attach('public.segredos', 'nota', '{texto}')")

    async with conn.transaction():
        await conn.execute("set local role reactor_worker")
        await conn.fetch("select id, tenant_id, texto, created_at from public.segredos")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with conn.transaction():
                await conn.fetch("select senha from public.segredos")


# --- tenant() ---


async def test_a_transaction_scoped_to_one_tenant_cannot_turn_to_another(pool):
    async with tenant(pool, "sol") as conn:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with conn.transaction():
                await conn.execute("select reactor.enter_tenant('lua')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with conn.transaction():
                await conn.fetch("select * from reactor.search('lua', 'pão')")

    async with pool.acquire() as conn:
        assert await conn.fetchval(
            "select current_user = session_user and coalesce(current_setting('reactor.tenant_id', true), '') = ''"
        )


@pytest.mark.parametrize("error", [FileNotFoundError("a handler's own file"), TimeoutError("a handler's own call")])
async def test_an_error_of_the_handlers_own_is_not_taken_for_postgres_being_away(pool, error):
    with pytest.raises(type(error)) as caught:
        async with tenant(pool, "sol") as conn:
            await conn.execute("insert into reactor.notes (tenant_id, content) values ('sol', 'a meio caminho')")
            raise error

    assert caught.value is error
    async with tenant(pool, "sol") as conn:
        assert await conn.fetchval("select count(*) from reactor.notes") == 0


async def test_a_connection_cut_inside_a_scope_is_postgres_being_away(pool, conn):
    with pytest.raises(Unavailable):
        async with tenant(pool, "sol") as scoped:
            pid = await scoped.fetchval("select pg_backend_pid()")
            await conn.execute("select pg_terminate_backend($1)", pid)
            await scoped.execute("select 1")
