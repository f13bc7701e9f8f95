"""What bypassed the triggers is found, once; what merely looks absent is never removed; hidden rows are said loudly."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import anyio
import asyncpg
import pytest
from conftest import connect, make_settings
from producing import owed, removed, role, settle_all, warnings_of

from reactor import db, sources
from reactor.jobs import Jobs
from reactor.loading import load_handlers

DOCS = "create table docs (id int primary key, tenant_id text, body text, created_at timestamptz default clock_timestamp())"


@pytest.fixture
async def docs(conn):
    """An attached table `docs`, never embedded, with nothing owed; returns its source's number."""
    await conn.execute(DOCS)
    return await conn.fetchval("select reactor.attach('docs', 'doc', '{body}', embed => 'none')")


async def work(pool):
    """Run what is due once, with the real handlers, and say how each job ended."""
    handlers = load_handlers(None)
    queue = Jobs(pool, worker="test", lease=timedelta(seconds=60))
    ended = []
    while claimed := await queue.claim({"sync_row": 1000, "reconcile": 10}):
        for job in [job for job in claimed if job.type == "reconcile"]:
            result = await handlers["reconcile"].function(job, pool=pool, log=mock.Mock(), settings=make_settings())
            await pool.execute("select reactor.complete_jobs($1, $2, $3)", [job.id], [job.claim_token], [result])
        if rows := [job for job in claimed if job.type == "sync_row"]:
            await handlers["sync_row"].function(rows, pool=pool, embedders=None)
        ended += claimed
    return ended


async def remembered(conn, tenant):
    """source_id: content of what a tenant's readers can find."""
    return {
        row["source_id"]: row["content"] for row in await conn.fetch("select * from reactor.recent($1, 100)", tenant)
    }


async def behind_the_triggers(conn, *statements):
    """As replication applies it, or a restore."""
    async with conn.transaction():
        await conn.execute("set local session_replication_role = replica")
        for statement in statements:
            await conn.execute(statement)


async def by_sql(conn, pool, table):
    row = await conn.fetchrow("select * from reactor.reconcile($1::text::regclass)", table)
    return {"enqueued": row["enqueued"], "orphans": row["orphans"]}


async def by_python(conn, pool, table):
    found = await sources.reconcile(
        pool, await conn.fetchval("select id from reactor.sources where relation = $1::text::regclass", table)
    )
    return {"enqueued": found["enqueued"], "orphans": found["orphans"]}


both_ways = pytest.mark.parametrize("reconcile", [by_sql, by_python])


@both_ways
async def test_rows_inserted_changed_and_deleted_behind_the_triggers_are_found_once(conn, pool, docs, reconcile):
    await conn.execute(
        "insert into docs select g, 'acme', 'old ' || g from generate_series(1, 4) g; insert into docs values (9, 'beta', 'other')"
    )
    await work(pool)
    await behind_the_triggers(
        conn, "insert into docs values (5, 'acme', 'new'), (1, 'gama', 'of a tenant never heard of') on conflict (id) do update set tenant_id = 'gama'",
        "update docs set body = 'edited' where id = 2", "delete from docs where id = 3", "update docs set id = 40 where id = 4",
    )  # fmt: skip
    unheard = await owed(conn)

    found = await reconcile(conn, pool, "docs")
    again = await reconcile(conn, pool, "docs")
    await work(pool)
    at_rest = await reconcile(conn, pool, "docs")

    assert unheard == []
    assert found == {"enqueued": 4, "orphans": 3}  # 5, 2, 40 and gama's 1; acme's 1, 3 and 4
    assert again == at_rest == {"enqueued": 0, "orphans": 0}
    assert await remembered(conn, "acme") == {"2": "edited", "40": "old 4", "5": "new"}
    assert await remembered(conn, "gama") == {"1": "old 1"}
    assert await remembered(conn, "beta") == {"9": "other"}
    assert await removed(conn) == []


@both_ways
async def test_a_source_whose_triggers_did_their_work_owes_nothing(conn, pool, docs, reconcile):
    await conn.execute(
        "insert into docs values (1, 'acme', 'a'), (2, 'acme', ''), (3, 'acme', null), (4, null, 'x'), (5, '', 'x'), (6, repeat('t', 300), 'x')"
    )
    while_owed = await reconcile(conn, pool, "docs")
    await work(pool)
    await conn.execute("update docs set body = 'b' where id = 1; delete from docs where id = 2")
    while_owed_again = await reconcile(conn, pool, "docs")

    assert while_owed == while_owed_again == await reconcile(conn, pool, "docs") == {"enqueued": 0, "orphans": 0}


@both_ways
async def test_every_page_of_every_tenant_is_looked_at(conn, pool, reconcile):
    """3,000 rows are pages of 1,000; text ids sort as text, in any collation."""
    await conn.execute("create table keyed (id text primary key, tenant_id text, body text)")
    await conn.execute(
        "select reactor.attach('keyed', 'doc', '{body}', time_column => null, embed => 'none', backfill => true)"
    )
    await settle_all(conn)
    await behind_the_triggers(
        conn,
        "insert into keyed select case g % 3 when 0 then upper(md5(g::text)) when 1 then 'é' || g else g::text end, 't' || g % 2, 'x' from generate_series(1, 6002) g",
    )

    found = await reconcile(conn, pool, "keyed")

    assert found["enqueued"] == 6002
    assert (
        await conn.fetchval("select count(distinct (tenant_id, dedupe_key)) from reactor.jobs where type = 'sync_row'")
        == 6002
    )


async def test_many_orphans_are_found_page_by_page(conn, pool, docs):
    await conn.execute("insert into docs select g, 'acme', 'x' from generate_series(1, 1200) g")
    await work(pool)
    await behind_the_triggers(conn, "delete from docs where id <> 77")

    found = await by_python(conn, pool, "docs")
    await work(pool)

    assert found == {"enqueued": 0, "orphans": 1199}
    assert await remembered(conn, "acme") == {"77": "x"}


@both_ways
async def test_a_dead_job_is_not_enqueued_again_for_ever(conn, pool, docs, reconcile):
    await conn.execute("insert into docs values (1, 'acme', 'poison'), (2, 'acme', 'goes')")
    await work(pool)
    await behind_the_triggers(conn, "update docs set body = 'poison too' where id = 1", "delete from docs where id = 2")
    await reconcile(conn, pool, "docs")
    await conn.execute("update reactor.jobs set status = 'dead' where status = 'pending'")

    assert await reconcile(conn, pool, "docs") == {"enqueued": 0, "orphans": 0}


@both_ways
async def test_rows_that_cannot_be_remembered_are_not_enqueued_for_ever(conn, pool, reconcile):
    await conn.execute("create table keyed (id text, tenant_id text, body text)")
    await conn.execute(
        "select reactor.attach('keyed', 'doc', '{body}', time_column => null, embed => 'none', backfill => true)"
    )
    await settle_all(conn)
    await behind_the_triggers(
        conn,
        "insert into keyed values (null, 'acme', 'x'), ('', 'acme', 'x'), (repeat('i', 201), 'acme', 'x'), ('1', null, 'x'), ('1', '', 'x'), ('1', repeat('t', 201), 'x')",
    )

    assert await reconcile(conn, pool, "keyed") == {"enqueued": 0, "orphans": 0}


@both_ways
async def test_rows_older_than_attach_stay_alone_unless_a_backfill_is_asked_for(conn, pool, reconcile):
    await conn.execute(DOCS)
    await conn.execute("insert into docs values (1, 'acme', 'before'), (2, 'acme', 'before too')")
    await conn.execute("select reactor.attach('docs', 'doc', '{body}', embed => 'none')")
    await conn.execute("update docs set body = 'touched since' where id = 2")
    await work(pool)
    await behind_the_triggers(conn, "insert into docs values (3, 'acme', 'after, unheard')")

    without = await reconcile(conn, pool, "docs")
    await work(pool)
    remembered_without = await remembered(conn, "acme")
    await conn.execute("select reactor.attach('docs', 'doc', '{body}', embed => 'none', backfill => true)")
    await work(pool)

    assert without == {"enqueued": 1, "orphans": 0}
    assert sorted(remembered_without) == ["2", "3"]
    assert sorted(await remembered(conn, "acme")) == ["1", "2", "3"]


async def test_a_row_dated_only_by_its_day_is_found_on_the_day_of_attach(conn, pool):
    await conn.execute("create table daily (id int, tenant_id text, body text, day date)")
    await conn.execute("insert into daily values (1, 'acme', 'last year', '2020-01-01')")
    await conn.execute("select reactor.attach('daily', 'doc', '{body}', time_column => 'day')")
    await behind_the_triggers(
        conn, "insert into daily values (2, 'acme', 'today', (clock_timestamp() at time zone 'UTC')::date)"
    )

    await by_sql(conn, pool, "daily")

    assert await owed(conn) == [("acme", "2")]


@both_ways
async def test_the_backfill_of_a_uuid_tenant_does_not_trip_over_other_sources_tenants(conn, pool, reconcile):
    one = "0c9c1a4e-0000-4000-8000-000000000001"
    await conn.execute(
        "insert into posts (tenant_id, body) values ('acme', 'x'); update reactor.sources set embed = 'none'"
    )
    await conn.execute("create table docs (id uuid primary key, tenant_id uuid, body text)")
    await conn.execute(f"insert into docs values ('{one}', '{one}', 'mine')")
    await conn.execute(
        "select reactor.attach('docs', 'doc', '{body}', time_column => null, embed => 'none', backfill => true)"
    )
    await work(pool)

    assert await remembered(conn, one) == {one: "mine"}
    assert await reconcile(conn, pool, "docs") == {"enqueued": 0, "orphans": 0}
    await behind_the_triggers(conn, "delete from docs")
    assert await reconcile(conn, pool, "docs") == {"enqueued": 0, "orphans": 1}


async def test_no_edit_that_lands_during_the_look_is_called_missed(conn, pool, docs, dsn):
    """Rows come, change and go, and are synced, while reconcile looks again and again."""
    await conn.execute("insert into docs select g, 'acme', 'x' from generate_series(1, 300) g")
    await work(pool)
    found = []
    done = anyio.Event()

    async def produce():
        async with db.create_pool(dsn, application="test", size=2) as mine:
            for n in range(60):
                await mine.execute("update docs set body = body || 'y' where id % 10 = $1", n % 10)
                await mine.execute("delete from docs where id = $1", 290 + n % 5)
                await mine.execute("insert into docs values ($1, 'acme', 'again')", 290 + n % 5)
                await work(mine)
        done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        while not done.is_set():
            found.append(await by_python(conn, pool, "docs"))

    assert len(found) > 3
    assert [one for one in found if one != {"enqueued": 0, "orphans": 0}] == []


# --- partitions


PARTS = """
    create table events (id bigint, tenant_id text, body text, created_at timestamptz default clock_timestamp()) partition by list (tenant_id);
    create table events_acme partition of events for values in ('acme')"""


@both_ways
async def test_rows_put_straight_into_a_new_partition_and_those_it_came_with_are_found(conn, pool, reconcile):
    await conn.execute(PARTS)
    await conn.execute("insert into events values (1, 'acme', 'older than attach', '2020-01-01')")
    await conn.execute("select reactor.attach('events', 'event', '{body}', embed => 'none')")
    await conn.execute("""create table events_beta (like events); insert into events_beta values (2, 'beta', 'came with it', '2020-01-01');
        alter table events attach partition events_beta for values in ('beta');
        create table events_gama partition of events for values in ('gama') partition by range (id);
        create table events_gama_low partition of events_gama for values from (0) to (100);
        insert into events_gama_low values (3, 'gama', 'straight in')""")
    unheard = await owed(conn)

    found = await reconcile(conn, pool, "events")
    await work(pool)
    await conn.execute(
        "insert into events_gama_low values (4, 'gama', 'heard'); insert into events_beta values (5, 'beta', 'heard')"
    )
    heard = await owed(conn)
    await work(pool)

    assert unheard == []
    assert found["enqueued"] == 2
    assert heard == [("gama", "4"), ("beta", "5")]
    assert sorted(await remembered(conn, "beta")) == ["2", "5"]
    assert sorted(await remembered(conn, "gama")) == ["3", "4"]
    assert await remembered(conn, "acme") == {}
    assert await conn.fetchval("select unseen from reactor.sources where relation = 'events'::regclass") == []
    assert await reconcile(conn, pool, "events") == {"enqueued": 0, "orphans": 0}


@both_ways
async def test_a_partition_that_left_takes_its_memories_along_and_loses_our_triggers(conn, pool, reconcile):
    await conn.execute(PARTS + "; create table events_beta partition of events for values in ('beta')")
    await conn.execute("select reactor.attach('events', 'event', '{body}', embed => 'none')")
    await conn.execute("insert into events values (1, 'acme', 'a'), (2, 'beta', 'b')")
    await work(pool)
    await conn.execute("alter table events detach partition events_beta")

    found = await reconcile(conn, pool, "events")
    await work(pool)
    await conn.execute("select reactor.reconcile_triggers(id) from reactor.sources where relation = 'events'::regclass")
    await conn.execute("insert into events_beta values (3, 'beta', 'elsewhere')")

    assert found == {"enqueued": 0, "orphans": 1}
    assert await remembered(conn, "beta") == {}
    assert await remembered(conn, "acme") == {"1": "a"}
    assert await owed(conn) == []


@pytest.mark.parametrize(
    "statement", ["truncate events", "truncate events_beta", "truncate tales", "truncate only tales"]
)
async def test_what_a_truncate_took_is_gone_and_what_it_left_stays(conn, pool, statement):
    await conn.execute(PARTS + "; create table events_beta partition of events for values in ('beta')")
    await conn.execute(
        "create table tales (id int, tenant_id text, body text); create table tales_more () inherits (tales)"
    )
    await conn.execute(
        "select reactor.attach('events', 'event', '{body}', embed => 'none'), reactor.attach('tales', 'tale', '{body}', time_column => null, embed => 'none')"
    )
    await conn.execute(
        "insert into events values (1, 'acme', 'a'), (2, 'beta', 'b'); insert into tales values (3, 'acme', 'c'); insert into tales_more values (4, 'acme', 'd')"
    )
    await work(pool)

    await conn.execute(statement)
    await conn.execute(
        "insert into events select 2, 'beta', 'again' where not exists (select from events where id = 2)"
    )
    await work(pool)

    left = {row["id"] for row in await conn.fetch("select id::text from events union select id::text from tales")}
    assert {**await remembered(conn, "acme"), **await remembered(conn, "beta")}.keys() == left
    assert (await remembered(conn, "beta"))["2"] == ("again" if "events" in statement else "b")
    assert await removed(conn) == []
    assert await conn.fetchval("select count(*) from reactor.alerts where resolved_at is null") == 0


async def test_a_job_that_read_its_row_before_a_truncate_brings_nothing_back(conn, pool, docs):
    await conn.execute("insert into docs values (1, 'acme', 'x')")
    queue = Jobs(pool, worker="slow", lease=timedelta(seconds=60))
    [slow] = await queue.claim({"sync_row": 1})
    reads, truncated = anyio.Event(), anyio.Event()
    handler = load_handlers(None)["sync_row"].function

    class SlowPool:
        """Lets the handler read, and holds it before it writes."""

        turns = 0

        def acquire(self, **kwargs):
            return _Turn(self, pool.acquire(**kwargs))

    class _Turn:
        def __init__(self, owner, inner):
            self._owner, self._inner = owner, inner

        async def __aenter__(self):
            self._owner.turns += 1
            if self._owner.turns == 2:
                reads.set()
                await truncated.wait()
            return await self._inner.__aenter__()

        async def __aexit__(self, *exc):
            return await self._inner.__aexit__(*exc)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: handler([slow], pool=SlowPool(), embedders=None))
        with anyio.fail_after(10):
            await reads.wait()
        await conn.execute("truncate docs")
        await work(pool)  # the whole look at the source ends while the slow one sleeps
        truncated.set()

    assert await remembered(conn, "acme") == {}
    await by_python(conn, pool, "docs")
    assert await remembered(conn, "acme") == {}
    assert await removed(conn) == []


async def test_reconcile_leaves_a_busy_partition_s_triggers_to_the_next_time(conn, pool, dsn):
    await conn.execute(PARTS)
    source = await conn.fetchval("select reactor.attach('events', 'event', '{body}', embed => 'none')")
    await conn.execute("create table events_beta partition of events for values in ('beta')")
    busy = await connect(dsn)
    writing = busy.transaction()
    await writing.start()
    await busy.execute("insert into events_beta values (1, 'beta', 'x')")

    async with warnings_of(conn) as heard:
        placed_while_busy = await conn.fetchval("select reactor.reconcile_triggers($1)", source)
    await writing.commit()
    await busy.close()

    assert placed_while_busy == 0
    assert "busy" in heard[0].message
    assert await conn.fetchval("select reactor.reconcile_triggers($1)", source) == 1


# --- row level security of the table's own


@both_ways
async def test_a_restrictive_policy_that_hides_rows_is_said_loudly_and_costs_no_memory(conn, pool, docs, reconcile):
    await conn.execute("insert into docs values (1, 'acme', 'a'), (2, 'acme', 'b')")
    await work(pool)
    await conn.execute(
        "alter table docs enable row level security; create policy theirs on docs as restrictive using (id <> 1)"
    )

    with pytest.raises(asyncpg.PostgresError) as hidden:
        await reconcile(conn, pool, "docs")
    await conn.execute("update docs set body = body || '!'")
    await work(pool)
    remembered_hidden = await remembered(conn, "acme")
    await conn.execute("alter policy theirs on docs using (id <> 1 or pg_has_role('reactor_worker', 'usage'))")
    found = await reconcile(conn, pool, "docs")
    await work(pool)

    assert hidden.value.sqlstate == "RX002"
    assert "1 of 2 rows are hidden" in hidden.value.args[0]
    assert remembered_hidden == {"1": "a", "2": "b!"}
    assert found == {"enqueued": 1, "orphans": 0}
    assert await remembered(conn, "acme") == {"1": "a!", "2": "b!"}


@both_ways
async def test_permissive_policies_enabled_or_forced_hide_nothing_from_reconcile(conn, pool, docs, reconcile):
    await conn.execute("insert into docs values (1, 'acme', 'a')")
    await work(pool)
    await conn.execute(
        "alter table docs enable row level security, force row level security; create policy theirs on docs using (false)"
    )
    await behind_the_triggers(conn, "insert into docs values (2, 'acme', 'b')")

    assert await reconcile(conn, pool, "docs") == {"enqueued": 1, "orphans": 0}
    await work(pool)
    assert sorted(await remembered(conn, "acme")) == ["1", "2"]


@pytest.mark.parametrize("may_create_roles", [True, False])
@pytest.mark.parametrize("force", ["", ", force row level security"])
async def test_an_ordinary_owner_s_table_with_row_level_security_loses_nothing(
    server, empty_dsn, force, may_create_roles
):
    """Where it is forced on its owner too, reconcile cannot list the rows: it says so, and removes nothing."""
    admin = await connect(empty_dsn)
    database = await admin.fetchval("select current_database()")
    async with role(admin, "t_owner"):
        await admin.execute(
            f"create extension vector; grant create on database {database} to t_owner; grant create on schema public to t_owner"
        )
        if may_create_roles:
            await admin.execute("grant reactor_worker, reactor_definer to t_owner with inherit true, set true")
        dsn = server.dsn(database, user="t_owner")
        await db.migrate(dsn)
        owner = await connect(dsn)
        await owner.execute(
            DOCS
            + f"; alter table docs enable row level security {force}; create policy theirs on docs using (tenant_id = current_setting('app.tenant', true))"
        )
        await owner.execute("create policy writes on docs for insert with check (true)")
        await owner.execute("select reactor.attach('docs', 'doc', '{body}', embed => 'none')")
        await owner.execute("insert into docs values (1, 'acme', 'a'), (2, 'beta', 'b')")
        async with db.create_pool(dsn, application="test", size=4) as pool:
            await pool.execute("delete from reactor.jobs where type = 'reconcile'")
            await work(pool)
            before = await remembered(owner, "acme")
            if force:
                with pytest.raises(asyncpg.PostgresError, match="hides rows from t_owner") as hidden:
                    await by_sql(owner, pool, "docs")
                with pytest.raises(asyncpg.PostgresError, match="hides rows from t_owner"):
                    await by_python(owner, pool, "docs")
                with pytest.raises(asyncpg.PostgresError, match="hides rows from t_owner"):
                    await owner.execute(
                        "select reactor.reconcile_orphans(id, 'acme') from reactor.sources where relation = 'docs'::regclass"
                    )
                assert hidden.value.sqlstate == "RX002"
            else:
                assert await by_python(owner, pool, "docs") == {"enqueued": 0, "orphans": 0}
                assert await by_sql(owner, pool, "docs") == {"enqueued": 0, "orphans": 0}
            await work(pool)
            notes = await pool.fetchrow(
                "select * from reactor.reconcile('reactor.notes')"
            )  # ours are forced, and still fine
            after = await remembered(owner, "acme")
            await owner.execute("select set_config('app.tenant', 'acme', false)")
            await owner.execute("delete from docs where id = 1")
            await work(pool)

            assert before == after == {"1": "a"}
            assert notes["enqueued"] == notes["orphans"] == 0
            assert await remembered(owner, "acme") == {}
            assert await remembered(owner, "beta") == {"2": "b"}
        await owner.close()
    await admin.close()


async def test_notes_are_reconciled_like_any_source(conn, pool):
    await conn.execute("update reactor.sources set embed = 'none'")
    await conn.execute("insert into reactor.notes (tenant_id, kind, content) values ('acme', 'note', 'one')")
    await work(pool)
    await behind_the_triggers(
        conn,
        "insert into reactor.notes (tenant_id, kind, content) values ('acme', 'idea', 'two'), ('beta', 'note', 'three')",
    )

    assert await by_python(conn, pool, "reactor.notes") == {"enqueued": 2, "orphans": 0}
    await work(pool)
    assert [row["kind"] for row in await conn.fetch("select * from reactor.recent('acme')")] == ["idea", "note"]


# --- what the rest of the house feels


async def test_reconcile_beside_producers_makes_none_of_them_wait(conn, pool, docs, dsn):
    await conn.execute(PARTS)
    await conn.execute("select reactor.attach('events', 'event', '{body}', embed => 'none')")
    looking = await connect(dsn)
    stuck = looking.transaction()
    await stuck.start()
    await looking.execute("insert into docs values (1, 'acme', 'x'); select reactor.reconcile()")

    await conn.execute("set lock_timeout = '300ms'")
    await conn.execute(
        "insert into docs values (2, 'acme', 'y'); insert into events values (1, 'acme', 'z'); update docs set body = 'w'; delete from events"
    )
    await stuck.rollback()
    await looking.close()

    assert len(await owed(conn)) == 4


async def test_reconcile_keeps_the_scope_of_its_session(conn, docs):
    async with conn.transaction():
        await conn.execute("select set_config('reactor.tenant_id', 'mine', true)")
        await conn.execute("insert into docs values (1, 'acme', 'x'); select reactor.reconcile()")

        assert await conn.fetchval("select current_setting('reactor.tenant_id')") == "mine"
        assert await conn.fetchval("select current_user = session_user")


async def test_a_look_at_a_source_does_not_scan_the_history_of_jobs(conn, docs):
    await conn.execute("""insert into reactor.jobs (type, tenant_id, lane, dedupe_key, status)
        select 'sync_row', 'acme', 'memory', 'x:' || g, 'done' from generate_series(1, 20000) g; analyze reactor.jobs""")
    await behind_the_triggers(conn, "insert into docs select g, 'acme', 'x' from generate_series(1, 100) g")
    await conn.execute("select pg_stat_force_next_flush()")
    before = await conn.fetchval("select seq_scan from pg_stat_user_tables where relname = 'jobs'")

    await conn.execute("select reactor.reconcile('docs')")

    await conn.execute("select pg_stat_force_next_flush()")
    assert await conn.fetchval("select seq_scan from pg_stat_user_tables where relname = 'jobs'") == before


async def test_tenants_that_are_equal_to_their_type_but_not_as_text_stay_apart(conn):
    await conn.execute("create table prices (id int primary key, tenant_id numeric, body text)")
    await conn.execute("select reactor.attach('prices', 'x', '{body}', time_column => null, backfill => true)")
    await conn.execute("insert into prices values (1, 1.0, 'um'), (2, 1.00, 'outro')")
    await conn.execute("delete from reactor.jobs")

    await conn.execute("select reactor.reconcile('prices')")

    owed = await conn.fetch(
        "select tenant_id, payload ->> 'id' as id from reactor.jobs where type = 'sync_row' order by id"
    )
    assert [tuple(job) for job in owed] == [("1.0", "1"), ("1.00", "2")]


async def test_a_truncate_beside_a_running_job_is_looked_at_again(conn):
    await conn.execute("insert into posts (tenant_id, body) values ('acme', 'bolo')")
    await conn.fetch("select * from reactor.claim_jobs('{sync_row}', '{10}', 'busy', '1 hour')")
    await conn.execute("truncate posts")
    await conn.execute("update reactor.jobs set status = 'done' where type = 'reconcile'")
    source = await conn.fetchval("select id from reactor.sources where relation = 'posts'::regclass")

    start = await conn.fetchrow("select * from reactor.start_reconcile($1)", source)
    await conn.execute("select reactor.end_reconcile($1, $2, $3, $4)", source, *start.values())

    assert start["buries_all"] is False
    assert await conn.fetchval("select count(*) from reactor.jobs where type = 'reconcile' and status = 'pending'") == 1
