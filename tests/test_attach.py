"""Any table becomes a source, or is refused in one clear line with nothing half-attached; detach leaves no trace."""

from __future__ import annotations

import asyncpg
import pytest
from conftest import connect
from producing import owed, removed, role, settle_all, warnings_of

from reactor import db


async def rows_of(conn, source, tenant, ids):
    """What the worker reads of a source, by id."""
    async with conn.transaction():
        await conn.execute("select reactor.enter_tenant($1)", tenant)
        return {
            row["source_id"]: row
            for row in await conn.fetch("select * from reactor.source_rows($1, $2, $3)", source, tenant, ids)
        }


async def traces(conn, table):
    """What of ours is on a table: triggers, policies, the worker's column rights."""
    return await conn.fetchval(
        """select jsonb_build_array(
            (select count(*) from pg_trigger where tgrelid = t and not tgisinternal),
            (select count(*) from pg_policy where polrelid = t),
            (select count(*) from pg_attribute where attrelid = t and attnum > 0 and not attisdropped
                and has_column_privilege('reactor_worker', t, attnum, 'select')),
            (select count(*) from reactor.sources where relation = t and detached_at is null))
        from (select to_regclass($1)::oid as t) x""",
        table,
    )


# --- mapping


async def test_a_table_whose_every_name_is_awkward_is_attached(conn):
    await conn.execute('''
        create schema "Conteúdo da ""Marca""";
        create type "Conteúdo da ""Marca"""."Estado %s" as enum ('vivo', 'morto');
        create table "Conteúdo da ""Marca"""."Posts da Márca %s" (
            "order" uuid primary key, "user's" text, "100% corpo" text, "título ""novo""" varchar(40), "select" jsonb, "new" int,
            "old" text, v_jobs text, tg_op text, source_id text, "group" "Conteúdo da ""Marca"""."Estado %s" default 'vivo', "when" timestamp);
        ''')
    source = await conn.fetchval('''select reactor.attach('"Conteúdo da ""Marca"""."Posts da Márca %s"', 'post', array['100% corpo', 'v_jobs'],
        tenant_column => 'user''s', id_column => 'order', time_column => 'when', title_column => 'título "novo"', slides_column => 'select',
        metadata_columns => array['new', 'source_id'], role_column => 'old', agent_column => 'tg_op', format_column => 'group',
        "when" => $$ "Posts da Márca %s"."group" = 'vivo' and "100% corpo" not like '%''nunca%' and new > 0 -- a comment
        $$)''')
    table = '"Conteúdo da ""Marca"""."Posts da Márca %s"'
    one, two, three = (f"00000000-0000-0000-0000-00000000000{n}" for n in (1, 2, 3))

    async with warnings_of(conn) as heard:
        await conn.execute(f"""insert into {table} values ('{one}', 'ac''me', ' 100 % certo ', 'Título', '[{{"t": "slide um"}}, "https://x.y", "slide dois"]', 7,
            'user', 'fim', 'bot', null, 'vivo', '2026-01-02 03:04'), ('{two}', 'ac''me', '%''nunca%', null, null, 7, null, null, null, null, 'vivo', null),
            ('{three}', 'ac''me', 'x', null, null, 7, null, null, null, null, 'morto', null)""")

    assert heard == []
    assert await owed(conn) == [("ac'me", one)]
    [row] = (await rows_of(conn, source, "ac'me", [one, two, three])).values()
    assert row["content"] == "Título\n\n100 % certo\n\nfim\n\nslide um\nslide dois"
    assert row["occurred_at"].isoformat() == "2026-01-02T03:04:00+00:00"
    assert row["metadata"] == {"new": 7, "role": "user", "agent": "bot", "format": "vivo"}


@pytest.mark.parametrize(
    ("type_", "key"),
    [
        ("uuid", "0c9c1a4e-0000-4000-8000-000000000001"), ("bigint", "-9223372036854775808"), ("int", "7"), ("smallint", "7"), ("text", "a/b c"),
        ("varchar(9)", "abc"), ("char(5)", "ab"), ("numeric", "12.50"), ("date", "2026-07-01"), ("bytea", "\\x00ff"), ("letter", "b"),
        ("code", "abcd"), ("short", "ab"),
    ],
)  # fmt: skip
async def test_ids_and_tenants_of_any_type_are_read_back_as_they_were_written(conn, type_, key):
    await conn.execute(
        "create schema types; create type types.letter as enum ('a', 'b'); create domain types.code as varchar(4) check (value <> 'zzzz')"
    )
    await conn.execute("create domain types.short as types.code; set search_path = public, types")
    await conn.execute(
        f"create table by_id (id {type_} primary key, tenant_id text, body text); create table by_tenant (id int, tenant_id {type_}, body text)"
    )
    await conn.execute("reset search_path")
    by_id = await conn.fetchval("select reactor.attach('by_id', 'x', '{body}', time_column => null)")
    by_tenant = await conn.fetchval("select reactor.attach('by_tenant', 'x', '{body}', time_column => null)")

    async with warnings_of(conn) as heard:
        await conn.execute(
            f"insert into by_id values ('{key}', 'acme', 'a'); insert into by_tenant values (1, '{key}', 'b')"
        )

    assert heard == []
    assert sorted(await owed(conn)) == sorted([("acme", key), (key, "1")])
    assert [row["content"] for row in (await rows_of(conn, by_id, "acme", [key])).values()] == ["a"]
    assert [row["content"] for row in (await rows_of(conn, by_tenant, key, ["1"])).values()] == ["b"]
    assert {
        row["source_table"]: row["enqueued"]
        for row in await conn.fetch("select source_table::text, enqueued from reactor.reconcile()")
    }["by_id"] == 0


@pytest.mark.parametrize("type_", ["varchar(4)", "char(4)", "code"])
async def test_a_longer_tenant_does_not_find_the_rows_of_the_shorter_one_its_column_would_cut_it_to(conn, type_):
    await conn.execute("create domain code as varchar(4)")
    await conn.execute(f"create table cut (id {type_}, tenant_id {type_}, body text)")
    source = await conn.fetchval("select reactor.attach('cut', 'x', '{body}', time_column => null)")
    await conn.execute("insert into cut values ('abcd', 'acme', 'of acme')")

    assert await conn.fetch("select * from reactor.source_rows($1, 'acme brasil', '{abcd}')", source) == []
    assert await conn.fetch("select * from reactor.source_rows($1, 'acme', '{abcdefg}')", source) == []
    assert len(await conn.fetch("select * from reactor.source_rows($1, 'acme', '{abcd}')", source)) == 1


async def test_a_composite_key_keeps_equal_ids_of_two_tenants_apart(conn):
    await conn.execute("create table notes_of (tenant_id text, id int, body text, primary key (tenant_id, id))")
    source = await conn.fetchval("select reactor.attach('notes_of', 'x', '{body}', time_column => null)")
    await conn.execute("insert into notes_of values ('acme', 1, 'a'), ('beta', 1, 'b')")

    assert (await rows_of(conn, source, "acme", ["1"]))["1"]["content"] == "a"
    assert (await rows_of(conn, source, "beta", ["1"]))["1"]["content"] == "b"
    assert sorted(await owed(conn)) == [("acme", "1"), ("beta", "1")]


async def test_metadata_objects_are_merged_and_anything_else_is_kept_under_its_column(conn):
    await conn.execute(
        """create table meta (id int, tenant_id text, body text, a jsonb, b jsonb, c json, d point, e text[], f numeric, g json, h json, role text)"""
    )
    source = await conn.fetchval(
        "select reactor.attach('meta', 'x', '{body}', time_column => null, metadata_columns => '{a,b,c,d,e,f,g,h}', role_column => 'role')"
    )
    await conn.execute(r"""insert into meta values (1, 'acme', 'x', '{"k": 1, "role": "spoofed"}', '[1, 2]', '"plain"', '(1,2)', '{x,y}', 'NaN',
        '{"nul": "a\u0000b", "kept": "\\u0000", "half": "x\ud83dy", "whole": "\ud83d\ude00"}', '1e999999', 'user')""")
    await conn.execute("insert into meta (id, tenant_id, body) values (2, 'acme', 'x')")

    rows = await rows_of(conn, source, "acme", ["1", "2"])

    metadata = rows["1"]["metadata"]
    assert metadata.pop("h").startswith("1e9")
    assert metadata == {
        "k": 1, "role": "user", "b": [1, 2], "c": "plain", "d": "(1,2)", "e": ["x", "y"], "f": "NaN", "nul": "ab", "kept": "\\u0000", "half": "xy", "whole": "😀",
    }  # fmt: skip
    assert rows["2"]["metadata"] == {}


@pytest.mark.parametrize(("type_", "value", "occurred"), [
    ("date", "2026-01-02", "2026-01-02T00:00:00+00:00"), ("timestamp", "2026-01-02 03:04", "2026-01-02T03:04:00+00:00"),
    ("timestamptz", "2026-01-02 03:04-03", "2026-01-02T06:04:00+00:00"), ("timestamptz", "infinity", None), ("timestamp", "20260-01-01", None), ("date", None, None),
])  # fmt: skip
async def test_the_time_of_a_row_is_a_date_or_a_timestamp_or_unknown(conn, type_, value, occurred):
    await conn.execute(
        f"set timezone = 'America/Sao_Paulo'; create table timed (id int, tenant_id text, body text, at {type_})"
    )
    source = await conn.fetchval("select reactor.attach('timed', 'x', '{body}', time_column => 'at')")
    await conn.execute(f"insert into timed values (1, 'acme', 'x', {'null' if value is None else repr(value)})")

    row = (await rows_of(conn, source, "acme", ["1"]))["1"]

    assert (
        row["occurred_at"] == row["occurred_at"] and (row["occurred_at"] and row["occurred_at"].isoformat()) == occurred
    )


async def test_several_text_columns_stand_in_order_with_the_title_first_and_blanks_left_out(conn):
    await conn.execute("create table texts (id int, tenant_id text, a text, b json, c varchar(3), title text)")
    source = await conn.fetchval(
        "select reactor.attach('texts', 'x', '{c,a,b,title,a}', time_column => null, title_column => 'title')"
    )
    await conn.execute(
        """insert into texts values (1, 'acme', ' a ', '"b"', 'c', 'T'), (2, 'acme', E'\t \n', null, '', null)"""
    )

    rows = await rows_of(conn, source, "acme", ["1", "2"])

    assert rows["1"]["content"] == 'T\n\nc\n\na\n\n"b"'
    assert rows["2"]["content"] == ""


async def test_attaching_again_changes_the_mapping_and_owes_the_rows_that_read_otherwise(conn):
    await conn.execute("create table again (id int, tenant_id text, a text, b text, marca text)")
    source = await conn.fetchval("select reactor.attach('again', 'x', '{a}', time_column => null)")
    await conn.execute("insert into again values (1, 'acme', 'old', 'new', 'm')")
    await settle_all(conn)

    again = await conn.fetchval(
        "select reactor.attach('again', 'y', '{b}', tenant_column => 'marca', time_column => null)"
    )
    owed_then = await conn.fetch("select payload from reactor.jobs where type = 'reconcile'")
    await settle_all(conn)
    await conn.fetchval("select reactor.attach('again', 'y', '{b}', tenant_column => 'marca', time_column => null)")
    owed_by_nothing_new = await conn.fetch("select payload from reactor.jobs where type = 'reconcile'")
    await conn.execute("update again set a = 'unmapped now'; update again set b = 'newer'")

    assert again == source
    assert [job["payload"] for job in owed_then] == [{"source": source, "expected": True}]
    assert owed_by_nothing_new == []
    assert await owed(conn) == [("m", "1")]
    assert (await rows_of(conn, source, "m", ["1"]))["1"]["content"] == "newer"
    assert not await conn.fetchval("select has_column_privilege('reactor_worker', 'again', 'a', 'select')")


# --- refusals: one clear line, nothing half-attached


# What attach is given, the SQLSTATE it answers with and what it says.
MISTAKES = [
    ("'x', '{nope}'", "42703", "no column nope"),
    ("'x', '{body,null}'", "42703", "no column null"),
    ("'x', '{}'", "22023", "text_columns"),
    ("'x', null", "22023", "text_columns"),
    ("'', '{body}'", "22023", "kind"),
    ("'x', '{body}', tenant_column => 'inquilino'", "42703", "inquilino"),
    ("'x', '{body}', id_column => null", "42703", "no column null"),
    ("'x', '{body}', time_column => 'body'", "42804", "not a date or a timestamp"),
    ("'x', '{body}', metadata_columns => '{gone}'", "42703", "no column gone"),
    ("'x', '{body}', embed => 'openai'", "22023", "provider, local or none"),
    ("'x', '{body}', embed => null", "22023", "provider, local or none"),
    ("'x', '{body}', language => 'klingon'", "42704", "klingon"),
    ("'x', '{body}', \"when\" => 'views'", "42804", "must be type boolean"),
    ("'x', '{body}', \"when\" => 'nope = 1'", "42703", "nope"),
    ("'x', '{body}', \"when\" => 'views >'", "42601", "syntax error"),
    ("'x', '{body}', \"when\" => 'other.views = 1'", "42P01", "other"),
    ("'x', '{body}', \"when\" => 'max(views) = 1'", "42803", "aggregate"),
    ("'x', '{body}', \"when\" => 'id in (select id from public.posts)'", "0A000", "holds a query"),
    ("'x', '{body}', \"when\" => 'id in (select id from public.plain)'", "0A000", "holds a query"),
    ("'x', '{body}', \"when\" => 'ctid is not null'", "42703", "ctid"),
    ("'x', '{body}', \"when\" => 'public.guarded(views)'", "42501", "grant execute"),
    ("'x', '{body}', \"when\" => '$1 is null'", "42P02", "parameter"),
    ("'x', '{body}', \"when\" => 'true); select 1; select (true'", "42601", "syntax error"),
]  # fmt: skip


async def test_a_wrong_mapping_is_one_clear_error_and_attaches_nothing(conn):
    await conn.execute("create table plain (id int, tenant_id text, body text, views int, created_at timestamptz)")
    await conn.execute("""create function picky(plain) returns boolean language sql as 'select true';
        create function guarded(int) returns boolean language sql as 'select true'; revoke execute on function guarded(int) from public""")

    for arguments, sqlstate, words in MISTAKES:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await conn.execute(f"select reactor.attach('plain', {arguments})")

        message = refused.value.args[0]
        assert refused.value.sqlstate == sqlstate, (arguments, message)
        assert words in message + str(refused.value.hint), (arguments, message)
        assert "\n" not in message
        assert await traces(conn, "plain") == [0, 0, 0, 0]
    assert await conn.fetchval("select count(*) from pg_class where relname like 'probe%'") == 0


@pytest.mark.parametrize(
    "condition",
    [
        "true) or (true",
        "public.picky(plain)",
        "views = 1 -- one",
        "plain is not null",
        "plain.views > 0 and body like '%x%'",
    ],
)
async def test_a_condition_is_any_boolean_expression_on_the_table_s_columns(conn, condition):
    await conn.execute("create table plain (id int, tenant_id text, body text, views int)")
    await conn.execute("create function picky(plain) returns boolean language sql as 'select $1.views = 1'")
    source = await conn.fetchval(
        "select reactor.attach('plain', 'x', '{body}', time_column => null, \"when\" => $1)", condition
    )

    await conn.execute("insert into plain values (1, 'acme', 'x', 1)")

    assert await owed(conn) == [("acme", "1")]
    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


IMPOSSIBLE = [
    ("a_view", "is a view"), ("a_matview", "is a materialized view"), ("a_temp", "is a temporary table"), ("a_foreign", "is a foreign table"),
    ("with_foreign", "foreign table (public.a_foreign_leaf)"), ("a_leaf", "attach public.parted"), ("a_child", "attach public.a_parent"),
    ("a_sequence", "relation without rows"), ("pg_catalog.pg_class", "not a producer's table"), ("reactor.jobs", "not a producer's table"),
    ("information_schema.sql_features", "not a producer's table"), ("posts_pkey", "relation without rows"),
]  # fmt: skip


async def test_what_cannot_carry_our_triggers_is_refused_in_one_line(conn):
    await conn.execute("""
        create view a_view as select 1 as id, 'acme' as tenant_id, 'x' as body;
        create materialized view a_matview as select * from a_view;
        create temp table a_temp (id int, tenant_id text, body text);
        create foreign data wrapper nothing; create server nowhere foreign data wrapper nothing;
        create foreign table a_foreign (id int, tenant_id text, body text) server nowhere;
        create table with_foreign (id int, tenant_id text, body text) partition by list (tenant_id);
        create foreign table a_foreign_leaf partition of with_foreign for values in ('far') server nowhere;
        create table parted (id int, tenant_id text, body text) partition by list (tenant_id);
        create table a_leaf partition of parted for values in ('acme');
        create table a_parent (id int, tenant_id text, body text); create table a_child () inherits (a_parent);
        create sequence a_sequence""")

    for table, words in IMPOSSIBLE:
        with pytest.raises(asyncpg.PostgresError) as refused:
            await conn.execute(f"select reactor.attach('{table}', 'x', '{{body}}', time_column => null)")

        message = refused.value.args[0]
        assert refused.value.sqlstate in ("42809", "42501"), message
        assert words in message + str(refused.value.hint), message
        assert "\n" not in message


async def test_a_parent_of_an_attached_table_is_refused_until_that_is_detached(conn):
    await conn.execute(
        "create table parted (id int, tenant_id text, body text) partition by list (tenant_id); create table part (id int, tenant_id text, body text)"
    )
    await conn.execute("select reactor.attach('part', 'x', '{body}', time_column => null)")
    await conn.execute("alter table parted attach partition part for values in ('acme')")

    with pytest.raises(asyncpg.WrongObjectTypeError, match="part is attached already"):
        await conn.execute("select reactor.attach('parted', 'x', '{body}', time_column => null)")
    await conn.execute("select reactor.detach('part'), reactor.attach('parted', 'x', '{body}', time_column => null)")
    await conn.execute("insert into part values (1, 'acme', 'x')")

    assert await owed(conn) == [("acme", "1")]


async def test_someone_else_s_table_and_someone_else_s_reactor_are_refused(conn, server, empty_dsn):
    await conn.execute("create table plain (id int, tenant_id text, body text)")
    admin = await connect(empty_dsn)
    async with role(admin, "t_owner"):
        await admin.execute(
            "create extension vector; grant create on database "
            + await admin.fetchval("select current_database()")
            + " to t_owner"
        )
        mine = server.dsn(await admin.fetchval("select current_database()"), user="t_owner")
        await admin.execute(
            "grant reactor_worker, reactor_definer to t_owner with admin option, inherit true, set true"
        )
        await db.migrate(mine)
        await admin.execute("create table theirs (id int, tenant_id text, body text)")
        owner = await connect(mine)

        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="theirs belongs to postgres") as not_mine:
            await owner.execute("select reactor.attach('theirs', 'x', '{body}', time_column => null)")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="schema reactor belongs to t_owner"):
            await admin.execute("select reactor.attach('theirs', 'x', '{body}', time_column => null)")
        await owner.close()

        assert "grant postgres to t_owner" in not_mine.value.hint
        await admin.execute("drop schema reactor cascade")
    await admin.close()


async def test_a_condition_may_use_types_and_functions_of_the_table_s_own_schema(conn):
    await conn.execute("""
        create schema app; create type app.state as enum ('draft', 'live'); create schema lib;
        create function lib.is_long(text) returns boolean language sql immutable as 'select length($1) > 2';
        create table app.docs (id int, tenant_id text, body text, state app.state)""")
    source = await conn.fetchval(
        """select reactor.attach('app.docs', 'x', '{body}', time_column => null, "when" => 'state = ''live''::app.state and lib.is_long(docs.body)')"""
    )

    async with warnings_of(conn) as heard:
        await conn.execute(
            "insert into app.docs values (1, 'acme', 'long', 'live'), (2, 'acme', 'no', 'live'), (3, 'acme', 'draft', 'draft')"
        )

    assert heard == []
    assert await owed(conn) == [("acme", "1")]
    assert list(await rows_of(conn, source, "acme", ["1", "2", "3"])) == ["1"]


# --- detach


async def test_detach_takes_all_of_ours_off_and_leaves_the_memories(conn):
    await conn.execute(
        "create schema app; create table app.docs (id int, tenant_id text, body text, state text) partition by list (tenant_id)"
    )
    await conn.execute("create table app.docs_acme partition of app.docs for values in ('acme')")
    source = await conn.fetchval(
        "select reactor.attach('app.docs', 'x', '{body}', time_column => null, \"when\" => 'state <> ''x''')"
    )
    attached = await traces(conn, "app.docs")
    await conn.execute(
        "insert into reactor.memories (tenant_id, source, source_id, chunk, kind, content, lexemes, occurred_at, row_hash, version) values ('acme', $1, '1', 0, 'x', 'x', '', now(), '', 1)",
        source,
    )
    await conn.execute(
        "alter table app.docs detach partition app.docs_acme"
    )  # a leaf that left keeps its triggers until now

    detached = await conn.fetchval("select reactor.detach('app.docs')")
    again = await conn.fetchval("select reactor.detach('app.docs')")
    await conn.execute("insert into app.docs_acme values (1, 'acme', 'x', 'y')")

    assert attached == [4, 1, 4, 1]
    assert (detached, again) == (True, False)
    assert await traces(conn, "app.docs") == await traces(conn, "app.docs_acme") == [0, 0, 0, 0]
    assert (
        await conn.fetchval(
            "select count(*) from pg_proc where pronamespace = 'reactor'::regnamespace and proname like $1",
            f"source\\_{source}\\_%",
        )
        == 0
    )
    assert not await conn.fetchval("select has_schema_privilege('reactor_worker', 'app', 'usage')")
    assert await conn.fetchval("select count(*) from reactor.memories") == 1
    assert await owed(conn) == []


async def test_a_schema_stays_open_to_the_worker_while_another_of_its_tables_is_attached(conn):
    await conn.execute(
        "create schema app; create table app.one (id int, tenant_id text, body text); create table app.two (like app.one)"
    )
    await conn.execute("select reactor.attach('app.one', 'x', '{body}', time_column => null)")
    source = await conn.fetchval("select reactor.attach('app.two', 'x', '{body}', time_column => null)")

    await conn.execute("select reactor.detach('app.one'); insert into app.two values (1, 'acme', 'x')")

    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


async def test_a_detached_table_attached_again_owes_what_came_in_between_too(conn):
    await conn.execute(
        "create table docs (id int, tenant_id text, body text, created_at timestamptz default clock_timestamp())"
    )
    await conn.execute("select reactor.attach('docs', 'x', '{body}', backfill => true); select reactor.detach('docs')")
    await conn.execute("insert into docs values (1, 'acme', 'in between')")
    await conn.execute("select reactor.attach('docs', 'x', '{body}')")
    await conn.execute("insert into docs values (2, 'acme', 'after')")
    await conn.execute("select reactor.reconcile('docs')")

    assert sorted(await owed(conn)) == [("acme", "1"), ("acme", "2")]


# --- what happens to a table afterwards


async def test_a_table_renamed_or_moved_keeps_being_a_source(conn):
    await conn.execute("create schema archive; create table docs (id int, tenant_id text, body text)")
    source = await conn.fetchval(
        "select reactor.attach('docs', 'x', '{body}', time_column => null, \"when\" => 'docs.id > 0')"
    )
    await conn.execute('alter table docs rename to "Os Docs"')
    renamed = await rows_of(conn, source, "acme", ["1"])
    await conn.execute("insert into \"Os Docs\" values (1, 'acme', 'x')")
    renamed = await rows_of(conn, source, "acme", ["1"])
    await conn.execute('alter table "Os Docs" set schema archive')
    async with warnings_of(conn) as heard:
        await conn.execute("""insert into archive."Os Docs" values (2, 'acme', 'y')""")
        await conn.execute("select reactor.renew_sources()")  # what migrate does

    assert heard == []
    assert list(renamed) == ["1"]
    assert await owed(conn) == [("acme", "1"), ("acme", "2")]
    assert sorted(await rows_of(conn, source, "acme", ["1", "2"])) == ["1", "2"]


async def test_a_table_moved_to_a_closed_schema_is_read_again_after_the_next_reconcile(conn):
    await conn.execute("create schema archive; create table docs (id int, tenant_id text, body text)")
    source = await conn.fetchval("select reactor.attach('docs', 'x', '{body}', time_column => null, backfill => true)")
    await conn.execute("insert into docs values (1, 'acme', 'x'); alter table docs set schema archive")

    await conn.execute("select reactor.reconcile('archive.docs')")

    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


@pytest.mark.parametrize("change", ["rename column body to corpo", "drop column body", "rename column meta to dados"])
async def test_a_mapped_column_renamed_or_dropped_costs_producers_a_warning_and_migrations_go_on(conn, dsn, change):
    await conn.execute("create table docs (id int, tenant_id text, body text, meta jsonb, other int)")
    await conn.execute(
        "select reactor.attach('docs', 'x', '{body}', time_column => null, metadata_columns => '{meta}')"
    )
    await conn.execute(f"alter table docs {change}")

    async with warnings_of(conn) as heard:
        await conn.execute("insert into docs (id, tenant_id, other) values (1, 'acme', 5)")
        await conn.execute("update docs set other = 6")
    await conn.execute("delete from reactor.migrations where number = 3")
    migrated = await db.migrate(dsn)
    with pytest.raises(asyncpg.UndefinedColumnError):
        await conn.execute("select reactor.reconcile('docs')")
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'x')")

    assert [message.message.partition(" was")[0] for message in heard][:1] == ["reactor: a change of public.docs"]
    assert migrated is True
    assert ("acme", "1") in await owed(conn)


@pytest.mark.parametrize("virtual", ["", ", loud text generated always as (upper(body)) virtual"])
async def test_unmapped_columns_may_come_and_go(conn, virtual):
    if virtual and await conn.fetchval("select current_setting('server_version_num')::int < 180000"):
        virtual = virtual.replace("virtual", "stored")
    await conn.execute(
        f"create table docs (id int, tenant_id text, body text, a int, b int, state int default 1 {virtual})"
    )
    source = await conn.fetchval(
        "select reactor.attach('docs', 'x', $1, time_column => null, \"when\" => 'state = 1')",
        ["body", "loud"] if virtual else ["body"],
    )

    await conn.execute(
        "alter table docs drop column a, add column c int default 7; alter table docs rename column b to d"
    )
    async with warnings_of(conn) as heard:
        await conn.execute("insert into docs (id, tenant_id, body) values (1, 'acme', 'x'); update docs set body = 'y'")
        await conn.execute("update docs set c = 8; delete from docs where id = 2")

    assert heard == []
    assert await owed(conn) == [("acme", "1")] * 2
    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


async def test_a_dropped_table_leaves_reconcile_migrate_status_and_detach_working(conn, dsn):
    await conn.execute("create table docs (id int, tenant_id text, body text)")
    source = await conn.fetchval("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    await conn.execute("insert into docs values (1, 'acme', 'x')")
    oid = await conn.fetchval("select 'docs'::regclass::oid::text")
    await conn.execute("drop table docs")

    reconciled = await conn.fetch("select * from reactor.reconcile()")
    await conn.execute("delete from reactor.migrations where number = 3")

    assert await db.migrate(dsn) is True
    assert len(reconciled) == 3
    assert (await conn.fetchval("select reactor.status()"))["pending"] == 1
    assert await rows_of(conn, source, "acme", ["1"]) == {}
    assert await conn.fetchval(f"select reactor.detach('{oid}')") is True


async def test_migrating_again_keeps_every_source_working(conn, dsn):
    await conn.execute("create table docs (id int, tenant_id text, body text, extra json)")
    source = await conn.fetchval(
        "select reactor.attach('docs', 'x', '{body}', time_column => null, metadata_columns => '{extra}')"
    )
    await conn.execute("delete from reactor.migrations where number = 3")

    await db.migrate(dsn)
    async with warnings_of(conn) as heard:
        await conn.execute("""insert into docs values (1, 'acme', 'x', '"\\u0000"')""")

    assert heard == []
    assert (await rows_of(conn, source, "acme", ["1"]))["1"]["metadata"] == {"extra": ""}
    assert await conn.fetchval("select count(*) from reactor.jobs where type = 'reconcile'") == 0


# --- row level security of the table's own


@pytest.mark.parametrize(
    "policies",
    [
        "",
        "create policy theirs on docs to public using (false)",
        "create policy theirs on docs using (tenant_id = current_setting('app.tenant', true))",
    ],
)
async def test_the_worker_reads_through_row_level_security_of_the_table_s_own(conn, policies):
    await conn.execute(
        f"create table docs (id int, tenant_id text, body text); alter table docs enable row level security, force row level security; {policies}"
    )
    source = await conn.fetchval("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    await conn.execute("insert into docs values (1, 'acme', 'a'), (2, 'beta', 'b')")

    assert list(await rows_of(conn, source, "acme", ["1", "2"])) == ["1"]
    assert await owed(conn) == [("acme", "1"), ("beta", "2")]


async def test_row_level_security_switched_on_later_hides_nothing_from_the_worker(conn):
    await conn.execute("create table docs (id int, tenant_id text, body text)")
    source = await conn.fetchval("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    await conn.execute(
        "insert into docs values (1, 'acme', 'a'); alter table docs enable row level security, force row level security"
    )

    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


async def test_a_policy_that_reads_a_table_closed_to_the_worker_is_said_at_attach_with_the_way_out(conn):
    """`to public using (... in (select ... from members))` is what many Supabase tables have."""
    await conn.execute("""create table members (tenant_id text, who text);
        create table docs (id int, tenant_id text, body text); alter table docs enable row level security;
        create policy theirs on docs using (tenant_id in (select tenant_id from members where who = current_user))""")

    with pytest.raises(
        asyncpg.InsufficientPrivilegeError,
        match="docs cannot be read by reactor_worker: permission denied for table members",
    ) as refused:
        await conn.execute("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    left = await traces(conn, "docs")
    await conn.execute("grant select on members to reactor_worker")
    source = await conn.fetchval("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    await conn.execute("insert into docs values (1, 'acme', 'a')")

    assert "grant it" in refused.value.hint
    assert left == [0, 1, 0, 0]  # the policy is theirs
    assert list(await rows_of(conn, source, "acme", ["1"])) == ["1"]


async def test_the_worker_sees_one_tenant_only_and_nothing_without_a_scope(conn):
    await conn.execute(
        "create table docs (id int, tenant_id text, body text, secret text); alter table docs enable row level security"
    )
    await conn.execute("select reactor.attach('docs', 'x', '{body}', time_column => null)")
    await conn.execute("insert into docs values (1, 'acme', 'a'), (2, 'acme_', 'b'), (3, '', 'c'), (4, null, 'd')")

    async with conn.transaction():
        await conn.execute("set local role reactor_worker")
        unscoped = await conn.fetch("select id from docs")
        await conn.execute("select set_config('reactor.tenant_id', '', true)")
        emptied = await conn.fetch("select id from docs")
        await conn.execute("select reactor.enter_tenant('acme')")
        scoped = await conn.fetch("select id from docs")

    assert unscoped == emptied == []
    assert [row["id"] for row in scoped] == [1]
    assert not await conn.fetchval("select has_column_privilege('reactor_worker', 'docs', 'secret', 'select')")


# --- reading by id


@pytest.mark.parametrize("type_", ["uuid", "bigint", "text"])
async def test_reading_rows_by_id_uses_the_primary_key(conn, type_):
    value = {"uuid": "gen_random_uuid()", "bigint": "g", "text": "'k' || g"}[type_]
    await conn.execute(
        f"create table big (id {type_} primary key, tenant_id text, body text); alter table big enable row level security"
    )
    await conn.execute(f"insert into big select {value}, 'acme', 'x' from generate_series(1, 20000) g; analyze big")
    source = await conn.fetchval("select reactor.attach('big', 'x', '{body}', time_column => null)")
    ids = [str(row["id"]) for row in await conn.fetch("select id from big limit 50")]
    await conn.execute("select pg_stat_force_next_flush()")
    before = await conn.fetchrow("select seq_scan, idx_scan from pg_stat_user_tables where relname = 'big'")

    found = await rows_of(conn, source, "acme", ids)

    await conn.execute("select pg_stat_force_next_flush()")
    after = await conn.fetchrow("select seq_scan, idx_scan from pg_stat_user_tables where relname = 'big'")
    assert len(found) == 50
    assert after["seq_scan"] == before["seq_scan"]
    assert after["idx_scan"] > before["idx_scan"]


async def test_removal_of_a_renamed_key_reaches_the_tombstones(conn):
    await conn.execute("create table docs (id text primary key, tenant_id text, body text)")
    await conn.execute(
        "select reactor.attach('docs', 'x', '{body}', time_column => null); insert into docs values ('a', 'acme', 'x')"
    )

    await conn.execute("update docs set id = 'b'")

    assert await removed(conn) == [("acme", "a")]
