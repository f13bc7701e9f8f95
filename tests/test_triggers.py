"""A committed row has its job and a rolled-back one has none; producers neither wait for the reactor nor fail because of it."""

from __future__ import annotations

import anyio
import asyncpg
import pytest
from conftest import connect
from producing import impatient, owed, removed, settle_all, warnings_of

from reactor import db

ITEMS = "create table items (id bigint primary key, tenant_id text, body text, views int not null default 0, created_at timestamptz default now())"


@pytest.fixture
async def items(conn):
    """An attached table `items`, empty, with nothing owed."""
    await conn.execute(ITEMS)
    await conn.execute("select reactor.attach('items', 'item', '{body}', embed => 'none')")
    return conn


# --- invariant 1: the promise is written before the effort


async def test_a_committed_row_has_its_job_and_a_rolled_back_one_leaves_nothing(items):
    with pytest.raises(ZeroDivisionError):
        async with items.transaction():
            await items.execute("insert into items values (1, 'acme', 'never')")
            raise ZeroDivisionError
    async with items.transaction():
        await items.execute("insert into items values (2, 'acme', 'kept')")
        with pytest.raises(ZeroDivisionError):
            async with items.transaction():  # a savepoint
                await items.execute("insert into items values (3, 'acme', 'not kept')")
                await items.execute("delete from items where id = 2")
                raise ZeroDivisionError

    assert await owed(items) == [("acme", "2")]
    assert await removed(items) == []


async def test_a_thousand_rows_are_one_insert_and_one_notification(items, dsn):
    heard = []
    listener = await connect(dsn)
    await listener.add_listener("reactor_wake", lambda *_: heard.append(1))
    assert await listener.fetchval("select reactor.arm()") == "armed"  # as a reactor does that sleeps
    await items.execute("""
        create table statements (n int);
        create function count_statements() returns trigger language plpgsql security definer as 'begin insert into public.statements values (1); return null; end';
        create trigger count_statements after insert on reactor.jobs for each statement execute function count_statements()""")

    async with items.transaction():
        await items.execute("insert into items select g, 'acme', 'row ' || g from generate_series(1, 1000) g")
        await items.execute("update items set body = body || '!'")
    await listener.execute("select 1")
    await listener.close()

    assert await items.fetchval("select count(*) from statements") == 2
    assert len(await owed(items)) == 2000
    assert len(heard) == 1


async def test_a_copy_of_fifty_thousand_rows_owes_as_many_jobs(items):
    await items.copy_records_to_table(
        "items", records=[(n, f"t{n % 7}", f"linha {n}") for n in range(50_000)], columns=["id", "tenant_id", "body"]
    )

    assert (
        await items.fetchval("select count(distinct payload ->> 'id') from reactor.jobs where type = 'sync_row'")
        == 50_000
    )


async def test_an_upsert_owes_what_it_inserted_and_what_it_changed(items):
    await items.execute("insert into items values (1, 'acme', 'old'), (2, 'acme', 'same')")
    await settle_all(items)

    await items.execute(
        "insert into items values (1, 'acme', 'new'), (2, 'acme', 'same'), (3, 'acme', 'first') on conflict (id) do update set body = excluded.body, views = 9"
    )
    changed = await owed(items)
    await settle_all(items)
    await items.execute("insert into items values (1, 'acme', 'ignored') on conflict do nothing")

    assert sorted(changed) == [("acme", "1"), ("acme", "3")]
    assert await owed(items) == []


async def test_a_merge_owes_each_of_its_actions(items):
    await items.execute("insert into items values (1, 'acme', 'old'), (2, 'acme', 'goes')")
    await settle_all(items)

    await items.execute("""
        merge into items i using (values (1, 'new'), (2, null), (3, 'first')) v (id, body) on i.id = v.id
        when matched and v.body is null then delete
        when matched then update set body = v.body
        when not matched then insert values (v.id, 'acme', v.body)""")

    assert sorted(await owed(items)) == [("acme", "1"), ("acme", "2"), ("acme", "3")]
    assert await removed(items) == [("acme", "2")]


async def test_an_update_of_an_unrelated_column_or_to_the_same_text_writes_nothing(items):
    await items.execute("insert into items values (1, 'acme', 'x'), (2, null, 'no tenant'), (3, '', 'no tenant')")
    await settle_all(items)
    rejected = await items.fetchval("select count(*) from reactor.rejected")

    await items.execute("update items set views = views + 1, body = body")

    assert await owed(items) == await removed(items) == []
    assert await items.fetchval("select count(*) from reactor.rejected") == rejected


async def test_a_changed_key_and_text_is_a_removal_and_a_new_row(items):
    await items.execute("insert into items values (1, 'acme', 'x')")
    await settle_all(items)

    await items.execute("update items set id = 2, body = 'y'")

    assert await removed(items) == [("acme", "1")]
    assert sorted(await owed(items)) == [("acme", "1"), ("acme", "2")]


async def test_a_changed_tenant_is_a_removal_there_and_a_new_row_here(items):
    await items.execute("insert into items values (1, 'acme', 'x')")
    await settle_all(items)

    await items.execute("update items set tenant_id = 'beta'")

    assert await removed(items) == [("acme", "1")]
    assert sorted(await owed(items)) == [("acme", "1"), ("beta", "1")]


async def test_two_rows_that_swap_their_ids_are_both_owed_and_none_is_removed(conn):
    await conn.execute("create table pairs (id int primary key deferrable, tenant_id text, body text)")
    await conn.execute("select reactor.attach('pairs', 'pair', '{body}', time_column => null)")
    await conn.execute("insert into pairs values (1, 'acme', 'a'), (2, 'acme', 'b')")
    await settle_all(conn)

    await conn.execute("update pairs set id = 3 - id")

    assert sorted(await owed(conn)) == [("acme", "1"), ("acme", "2")]
    assert await removed(conn) == []


async def test_a_row_deleted_and_inserted_again_in_one_transaction_is_newer_than_its_tombstone(items):
    await items.execute("insert into items values (1, 'acme', 'x')")
    await settle_all(items)

    async with items.transaction():
        await items.execute("delete from items")
        await items.execute("insert into items values (1, 'acme', 'y')")

    newest_job = await items.fetchval("select max(id) from reactor.jobs")
    assert await removed(items) == [("acme", "1")]
    assert await items.fetchval("select max(version) from reactor.tombstones") < newest_job


async def test_rows_enter_and_leave_the_condition(conn):
    await conn.execute(ITEMS)
    await conn.execute(
        "select reactor.attach('items', 'item', '{body}', \"when\" => $$ views > 0 and body like '%\\%%' $$)"
    )

    await conn.execute(
        "insert into items values (1, 'acme', '10 % off', 0), (2, 'acme', '20 % off', 1), (3, 'acme', 'nothing off', 1)"
    )
    inserted = await owed(conn)
    await settle_all(conn)
    await conn.execute("update items set views = 1 - views where id in (1, 2)")
    moved, left = await owed(conn), await removed(conn)
    await settle_all(conn)
    await conn.execute("update items set body = 'still nothing' where id = 3; delete from items where id in (2, 3)")

    assert inserted == [("acme", "2")]
    assert sorted(moved) == [("acme", "1"), ("acme", "2")]
    assert left == [("acme", "2")]
    assert await owed(conn) == await removed(conn) == []


async def test_a_cascading_delete_removes_the_children(conn):
    await conn.execute("create table parents (id int primary key)")
    await conn.execute(
        "create table children (id int primary key, parent int references parents on delete cascade, tenant_id text, body text)"
    )
    await conn.execute("select reactor.attach('children', 'child', '{body}', time_column => null)")
    await conn.execute("insert into parents values (1), (2)")
    await conn.execute("insert into children values (10, 1, 'acme', 'a'), (11, 1, 'acme', 'b'), (20, 2, 'acme', 'c')")
    await settle_all(conn)

    await conn.execute("delete from parents where id = 1")

    assert sorted(await removed(conn)) == [("acme", "10"), ("acme", "11")]
    assert sorted(await owed(conn)) == [("acme", "10"), ("acme", "11")]


async def test_truncating_a_table_hides_all_of_it_and_owes_a_look(items):
    await items.execute("insert into items values (1, 'acme', 'x'), (2, 'beta', 'y')")
    await settle_all(items)

    await items.execute("truncate items")

    assert await removed(items) == [("", "")]
    assert await items.fetchval("select count(*) from reactor.jobs where type = 'reconcile'") == 1


PARTITIONED = """
    create table events (id bigint, tenant_id text, body text, views int default 0, created_at timestamptz default now(), primary key (tenant_id, id)) partition by list (tenant_id);
    create table events_acme partition of events for values in ('acme') partition by range (id);
    create table events_acme_low partition of events_acme for values from (0) to (100);
    create table events_acme_high partition of events_acme for values from (100) to (1000);
    create table events_beta partition of events for values in ('beta');"""


async def test_rows_written_through_any_level_of_partitions_are_owed_once(conn):
    await conn.execute(PARTITIONED)
    await conn.execute("select reactor.attach('events', 'event', '{body}')")

    await conn.execute("insert into events values (1, 'acme', 'a'), (1, 'beta', 'b')")
    await conn.execute("insert into events_acme values (2, 'acme', 'c')")
    await conn.execute("insert into events_acme_high values (200, 'acme', 'd')")
    inserted = await owed(conn)
    await settle_all(conn)
    await conn.execute("update events_acme set id = 150 where id = 2")  # moves to another leaf
    await conn.execute("delete from events_beta")
    await conn.execute("update events set views = 1")

    assert inserted == [("acme", "1"), ("beta", "1"), ("acme", "2"), ("acme", "200")]
    assert sorted(await owed(conn)) == [("acme", "150"), ("acme", "2"), ("beta", "1")]
    assert sorted(await removed(conn)) == [("acme", "2"), ("beta", "1")]


async def test_a_new_partition_is_covered_through_the_parent_at_once(conn):
    await conn.execute(PARTITIONED)
    await conn.execute("select reactor.attach('events', 'event', '{body}')")
    await conn.execute("create table events_gama partition of events for values in ('gama')")

    await conn.execute("insert into events values (1, 'gama', 'a')")

    assert await owed(conn) == [("gama", "1")]


@pytest.mark.parametrize(
    ("statement", "hides_all"),
    [
        ("truncate events", True),
        ("truncate events_beta", False),
        ("truncate events_acme", False),
        ("truncate only tales", False),
        ("truncate tales", False),
    ],
)
async def test_truncating_a_part_of_a_source_owes_a_look_and_hides_only_what_is_surely_gone(conn, statement, hides_all):
    await conn.execute(PARTITIONED)
    await conn.execute(
        "create table tales (id int, tenant_id text, body text); create table tales_more () inherits (tales)"
    )
    await conn.execute(
        "select reactor.attach('events', 'event', '{body}'), reactor.attach('tales', 'tale', '{body}', time_column => null)"
    )

    await conn.execute(statement)

    assert await removed(conn) == ([("", "")] if hides_all else [])
    assert await conn.fetchval("select count(distinct dedupe_key) from reactor.jobs where type = 'reconcile'") == 1


async def test_rows_of_inheritance_children_are_owed(conn):
    await conn.execute(
        "create table tales (id int, tenant_id text, body text); create table tales_more (extra int) inherits (tales)"
    )
    await conn.execute("select reactor.attach('tales', 'tale', '{body}', time_column => null)")

    await conn.execute("insert into tales values (1, 'acme', 'a'); insert into tales_more values (2, 'acme', 'b', 5)")
    await conn.execute("update tales set body = body || '!'")  # both, through the parent
    await conn.execute("update tales_more set extra = 6")

    assert await owed(conn) == [("acme", "1"), ("acme", "2"), ("acme", "1"), ("acme", "2")]


# --- invariant 2: producers do not feel us


@pytest.mark.parametrize("tenant", ["' or true --", "100%", "_", "%s %1$s", 'a"b', "a\\b", "ção 😀", " ", "x" * 200])
async def test_a_tenant_of_any_letters_is_taken_as_it_is(items, tenant):
    await items.execute("insert into items values (1, $1, 'x')", tenant)

    assert await owed(items) == [(tenant, "1")]


@pytest.mark.parametrize(("tenant", "length"), [(None, None), ("", 0), ("y" * 300, 300)])
async def test_a_row_of_an_impossible_tenant_is_accepted_and_one_rejected_row_says_why(items, tenant, length):
    await items.execute("insert into items values (1, $1, 'segredo')", tenant)

    [rejected] = await items.fetch("select * from reactor.rejected")
    assert (rejected["reason"], rejected["tenant_length"], rejected["id_length"]) == ("tenant", length, 1)
    assert "segredo" not in str(dict(rejected)) and "yyyy" not in str(dict(rejected))
    assert await owed(items) == []
    assert (await items.fetchval("select reactor.status()"))["rejected_24h"] == 1


async def test_an_id_that_is_null_empty_or_over_200_characters_is_rejected_and_its_neighbours_are_not(conn):
    await conn.execute("create table keyed (id text, tenant_id text, body text)")
    await conn.execute("select reactor.attach('keyed', 'key', '{body}', time_column => null)")

    await conn.execute(
        "insert into keyed values (null, 'acme', 'a'), ('', 'acme', 'b'), (repeat('i', 201), 'acme', 'c'), (repeat('i', 200), 'acme', 'd')"
    )
    await conn.execute("update keyed set body = 'changed' where id is null")
    await conn.execute("delete from keyed where id = '' or id is null")

    assert [tenant_and_id[1] for tenant_and_id in await owed(conn)] == ["i" * 200]
    assert await conn.fetchval("select array_agg(reason) from reactor.rejected") == ["id"] * 4
    assert await removed(conn) == []


@pytest.mark.parametrize(
    "body", ["", "   \t\n", "😀😀", "<p>&nbsp;</p>", "\u200b\u200d", "e\u0301", "a" * 5_000_000, None]
)
async def test_any_text_is_a_job(items, body):
    await items.execute("insert into items values (1, 'acme', $1)", body)
    await items.execute("update items set body = coalesce($1, '') || 'x'", body)

    assert await owed(items) == [("acme", "1"), ("acme", "1")]


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_strict_producer_meets_no_serialization_failure_beside_a_claiming_reactor(items, dsn, isolation):
    reactor = await connect(dsn)
    await items.execute("insert into items values (1, 'acme', 'a'), (2, 'acme', 'b')")

    async with impatient(dsn) as producer, producer.transaction(isolation=isolation):
        await producer.execute("select count(*) from items")  # the snapshot
        claimed = await reactor.fetch("select * from reactor.claim_jobs('{sync_row}', '{10}', 'test', '30 s')")
        await producer.execute("update items set body = body || '!'")
        await producer.execute("delete from items where id = 2; insert into items values (3, 'acme', 'c')")
        await reactor.execute(
            "select reactor.complete_jobs($1, $2, $3)",
            [j["id"] for j in claimed],
            [j["claim_token"] for j in claimed],
            [None] * len(claimed),
        )
    await reactor.close()

    assert await owed(items) == [("acme", "1"), ("acme", "2"), ("acme", "2"), ("acme", "3")]


async def test_two_serializable_producers_of_one_tenant_do_not_make_each_other_fail(items, dsn):
    async with impatient(dsn) as one, impatient(dsn) as other:
        first, second = one.transaction(isolation="serializable"), other.transaction(isolation="serializable")
        await first.start()
        await second.start()
        await one.execute("insert into items values (1, 'acme', 'a')")
        await other.execute("insert into items values (2, 'acme', 'b')")
        await first.commit()
        await second.commit()

    assert sorted(await owed(items)) == [("acme", "1"), ("acme", "2")]


async def test_two_producers_writing_the_same_keys_in_opposite_order_neither_wait_nor_deadlock(conn, dsn):
    await conn.execute("create table log (id int, tenant_id text, body text)")  # no key of its own to wait for
    await conn.execute("select reactor.attach('log', 'log', '{body}', time_column => null)")

    async with impatient(dsn) as one, impatient(dsn) as other:
        first, second = one.transaction(), other.transaction()
        await first.start()
        await second.start()
        await one.execute("insert into log values (1, 'acme', 'a')")
        await other.execute("insert into log values (2, 'acme', 'b')")
        await one.execute("insert into log values (2, 'acme', 'c')")
        await other.execute("insert into log values (1, 'acme', 'd')")
        await second.commit()
        await first.commit()

    assert len(await owed(conn)) == 4


async def test_a_producer_beside_a_reactor_frozen_in_mid_batch_does_not_wait(items, dsn):
    await items.execute("insert into items values (1, 'acme', 'a'), (2, 'acme', 'b'), (3, 'acme', 'c')")
    frozen = await connect(dsn)
    stuck = frozen.transaction()
    await stuck.start()
    claimed = await frozen.fetch("select * from reactor.claim_jobs('{sync_row}', '{10}', 'test', '30 s')")
    source = claimed[0]["payload"]["source"]
    await frozen.execute("select reactor.enter_tenant('acme')")
    held = await frozen.fetch(
        "select reactor.complete_jobs($1, $2, $3)",
        [j["id"] for j in claimed],
        [j["claim_token"] for j in claimed],
        [None] * len(claimed),
    )
    current = await frozen.fetch("select * from reactor.source_rows($1, 'acme', '{1,2,3}')", source)
    await frozen.execute(
        """select reactor.replace_memories('acme', $1, '{1}', array[$2::bigint], '{1}', '{0}', '{0}', '{item}', '{a}', 'portuguese',
            array[null]::vector_or_not[], '{null}', array['{}'::jsonb], array[now()], array['\\x00'::bytea])""".replace(
            "vector_or_not",
            f"{await items.fetchval('select extnamespace::regnamespace from pg_extension where extname = $1', 'vector')}.halfvec",
        ),
        source,
        claimed[0]["id"],
    )

    async with impatient(dsn) as producer:
        await producer.execute("update items set body = 'edited' where id = 1")
        await producer.execute("delete from items where id = 2")
        await producer.execute("insert into items values (4, 'acme', 'd')")
        await producer.execute("update items set id = 5, tenant_id = 'beta' where id = 3")
        owed_meanwhile = await owed(items)
    await stuck.rollback()
    await frozen.close()

    assert len(held) == len(current) == 3
    assert owed_meanwhile[-4:-2] == [("acme", "2"), ("acme", "4")]
    assert sorted(owed_meanwhile[-2:]) == [("acme", "3"), ("beta", "5")]


async def test_a_producer_beside_a_migration_that_has_just_run_in_an_open_transaction_does_not_wait(items, dsn):
    migrating = await connect(dsn)
    stuck = migrating.transaction()
    await stuck.start()
    await migrating.execute("select reactor.renew_sources()")

    async with impatient(dsn) as producer:
        await producer.execute("insert into items values (1, 'acme', 'a')")
        await producer.execute("insert into posts (tenant_id, body) values ('acme', 'b')")
    await stuck.rollback()
    await migrating.close()

    assert len(await owed(items)) == 2


@pytest.mark.parametrize(
    "damage",
    [
        "alter table reactor.jobs rename to elsewhere",
        "drop table reactor.jobs cascade",
        "revoke insert on reactor.jobs from reactor_definer",
    ],
)
async def test_a_trigger_that_fails_costs_the_producer_nothing_but_a_warning_that_quotes_no_row(items, damage):
    await items.execute("insert into items values (9, 'acme', 'before')")
    await items.execute(damage)

    async with warnings_of(items) as heard:
        await items.execute("insert into items values (1, 'inquilino', 'segredo')")
        await items.execute("update items set body = 'segredo novo' where id = 1")
        await items.execute("delete from items where id = 9")
        await items.execute("truncate items")

    assert len(heard) == 4
    assert all("items" in message.message and "SQLSTATE" in message.message for message in heard)
    assert "segredo" not in str([message.as_dict() for message in heard])
    assert "inquilino" not in str([message.as_dict() for message in heard])


async def test_a_row_missed_by_a_failing_trigger_is_found_by_reconcile(items):
    await items.execute("alter table reactor.jobs rename to elsewhere")
    await items.execute("insert into items values (1, 'acme', 'a')")
    await items.execute("alter table reactor.elsewhere rename to jobs")

    await items.execute("select reactor.reconcile('items')")

    assert await owed(items) == [("acme", "1")]


@pytest.mark.parametrize(
    "setting",
    [
        "row_security = off",
        "search_path = pg_temp",
        "datestyle = 'German'",
        "standard_conforming_strings = off",
        "bytea_output = escape",
    ],
)
async def test_a_producer_s_own_settings_do_not_reach_the_trigger(conn, setting):
    """pg_restore, for one, switches row security off, which would make every insert under ours an error."""
    await conn.execute("create table odd (id bytea, tenant_id date, body text)")
    await conn.execute(
        "select reactor.attach('odd', 'odd', '{body}', time_column => null, \"when\" => $$ body like '%x%' $$)"
    )

    await conn.execute(f"set {setting}")
    async with warnings_of(conn) as heard:
        await conn.execute(
            "insert into public.odd values ('\\x00ff'::bytea, '2026-01-02', 'x')".replace(
                "\\x", "\\\\x" if "standard" in setting else "\\x"
            )
        )
    await conn.execute("reset all")

    assert heard == []
    assert await owed(conn) == [("2026-01-02", "\\x00ff")]


async def test_a_producer_with_rights_on_its_table_only_succeeds_and_cannot_read_ours(items, dsn, server):
    await items.execute(
        "create role t_producer login; grant insert, update, delete on items to t_producer; grant select (id) on items to t_producer"
    )
    try:
        producer = await connect(server.dsn(await items.fetchval("select current_database()"), user="t_producer"))
        async with warnings_of(producer) as heard:
            await producer.execute("insert into items values (1, 'acme', 'a'), (2, 'acme', 'b')")
            await producer.execute("update items set body = 'c' where id = 1; delete from items where id = 2")
        for table in ("jobs", "tombstones", "memories", "sources", "rejected"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await producer.fetch(f"select * from reactor.{table}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await producer.fetch("select reactor.source_rows(1, 'acme', '{1}')")
        await producer.close()

        assert heard == []
        assert await owed(items) == [("acme", "1"), ("acme", "2"), ("acme", "1"), ("acme", "2")]
    finally:
        await items.execute("drop owned by t_producer; drop role t_producer")


async def test_with_notify_off_nothing_rings_and_the_jobs_are_there(conn, dsn):
    heard = []
    listener = await connect(dsn)
    await listener.add_listener("reactor_wake", lambda *_: heard.append(1))
    await conn.execute(ITEMS)
    await conn.execute("select reactor.attach('items', 'item', '{body}', notify => false)")

    await conn.execute("insert into items values (1, 'acme', 'a')")
    await conn.execute("update items set body = 'b'; delete from items; truncate items")
    await listener.execute("select 1")
    quiet = list(heard)
    await conn.execute("select pg_notify('reactor_wake', '')")
    await listener.execute("select 1")
    await listener.close()

    assert quiet == []
    assert heard == [1]
    assert len(await owed(conn)) == 3


async def test_a_statement_that_writes_no_row_rings_nobody(items, dsn):
    heard = []
    listener = await connect(dsn)
    await listener.add_listener("reactor_wake", lambda *_: heard.append(1))

    await items.execute(
        "insert into items select 1, 'acme', 'x' where false; update items set body = 'x'; delete from items"
    )
    await listener.execute("select 1")
    await listener.close()

    assert heard == []


# --- what counts as a change


@pytest.mark.parametrize(
    ("type_", "before", "after"),
    [
        ("json", '{"a": 1}', '{"a": 2}'),
        ("json", '"\\u0000"', '"\\u0000\\u0000"'),
        ("point", "(1,2)", "(1,3)"),
        ("numeric", "1.0", "1.00"),  # equal, and yet they read differently
        ("text[]", "{a}", "{b}"),
        ("mood", "sad", "glad"),
        ("short_text", "a", "b"),
        ("varchar(5)", "a", "b"),
    ],
)
async def test_a_change_is_seen_whatever_the_type_of_the_column(conn, type_, before, after):
    await conn.execute(
        "create type mood as enum ('sad', 'glad'); create domain short_text as text check (length(value) < 9)"
    )
    await conn.execute(f"create table typed (id int, tenant_id text, body text, extra {type_}, other int)")
    await conn.execute(
        "select reactor.attach('typed', 'typed', '{body}', time_column => null, metadata_columns => '{extra}')"
    )
    await conn.execute(f"insert into typed values (1, 'acme', 'x', '{before}')")
    await settle_all(conn)

    async with warnings_of(conn) as heard:
        await conn.execute(f"update typed set other = 1, extra = '{before}'")
        unrelated = await owed(conn)
        await conn.execute(f"update typed set extra = '{after}'")

    assert heard == []
    assert unrelated == []
    assert await owed(conn) == [("acme", "1")]


async def test_a_generated_column_is_seen_to_change_with_what_it_is_made_of(conn):
    virtual = (
        "virtual" if await conn.fetchval("select current_setting('server_version_num')::int >= 180000") else "stored"
    )
    await conn.execute(f"""create table made (id int, tenant_id text, first text, last text,
        "full %s" text generated always as (first || ' ' || last) {virtual},
        is_long boolean generated always as (length(first) > 3) {virtual}, kept text generated always as (upper(last)) stored)""")
    await conn.execute(
        """select reactor.attach('made', 'person', array['full %s', 'kept'], time_column => null, "when" => 'is_long')"""
    )

    async with warnings_of(conn) as heard:
        await conn.execute("insert into made values (1, 'acme', 'Maria', 'Silva'), (2, 'acme', 'Ana', 'Souza')")
        inserted = await owed(conn)
        await settle_all(conn)
        await conn.execute("update made set first = 'Mariana' where id = 1")
        changed = await owed(conn)
        await conn.execute("update made set first = 'Ana' where id = 1")
    source = await conn.fetchval("select id from reactor.sources where relation = 'made'::regclass")
    await conn.execute("update made set first = 'Maria' where id = 1")

    assert heard == []
    assert inserted == changed == [("acme", "1")]
    assert await removed(conn) == [("acme", "1")]
    assert (
        await conn.fetchval("select content from reactor.source_rows($1, 'acme', '{1}')", source)
        == "Maria Silva\n\nSILVA"
    )


async def test_the_rows_of_ten_producers_at_once_all_have_their_jobs(items, dsn):
    async with db.create_pool(dsn, application="test", size=10) as pool, anyio.create_task_group() as tasks:

        async def produce(worker):
            for n in range(20):
                await pool.execute("insert into items values ($1, $2, 'x')", worker * 100 + n, f"t{n % 3}")

        for worker in range(10):
            tasks.start_soon(produce, worker)

    assert (
        await items.fetchval(
            "select count(*) from items i where not exists (select from reactor.jobs where payload ->> 'id' = i.id::text and tenant_id = i.tenant_id)"
        )
        == 0
    )
    assert len(await owed(items)) == 200
