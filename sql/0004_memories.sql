-- Memories: one row a chunk of one source row's text. Only the reactor writes them.
--
-- A memory's version is the job id its writer had absorbed: a write replaces only a lower or equal one, and a tombstone
-- with a higher version hides it. content '' : a row looked at, with nothing in it to remember.

create table if not exists reactor.tenants (
    tenant_id text primary key,
    version bigint not null default 0,      -- moves with every change of the tenant's memories; keys readers' caches
    memories bigint not null default 0,
    model text,                             -- the embedding model in use; null until the first vector
    created_at timestamptz not null default now()
);
call reactor.protect('reactor.tenants', 'queue');

create table if not exists reactor.memories (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    source int not null,
    source_id text not null,
    chunk int not null,
    overlap int not null default 0,         -- characters at the start that repeat the end of the previous chunk
    kind text not null,
    content text not null,
    lexemes tsvector not null,
    embedding @extschema:vector@.halfvec(1024),  -- unit norm; zero-padded from models with fewer dimensions
    model text,
    metadata jsonb not null default '{}',
    occurred_at timestamptz not null,
    row_hash bytea not null,
    version bigint not null,
    created_at timestamptz not null default now(),
    unique (tenant_id, source, source_id, chunk)
);
call reactor.put_index('reactor.memories_recent', $$create index memories_recent on reactor.memories (tenant_id, occurred_at desc, id desc) where chunk = 0$$);
call reactor.protect('reactor.memories', 'content');

-- What agents write down themselves (Memory.remember): a source like any other, attached in the last file.
create table if not exists reactor.notes (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    kind text not null default 'note',
    content text not null,
    metadata jsonb not null default '{}',
    created_at timestamptz not null default now()
);
call reactor.put_index('reactor.notes_by_tenant', $$create index notes_by_tenant on reactor.notes (tenant_id, id)$$);
call reactor.protect('reactor.notes', 'content');

-- Replaces the memories of some rows of one tenant, inside the scope and transaction that hold the rows' claims.
-- One array element a chunk; rows are named again in p_rows with the version of the job that read them.
-- A row without chunks is removed. A row that has a newer memory is left as it is. Moves the tenant's version.
create or replace function reactor.replace_memories(
    p_tenant text, p_source int, p_rows text[], p_versions bigint[],
    p_row int[], p_chunk int[], p_overlap int[], p_kind text[], p_content text[], p_language regconfig,
    p_embedding @extschema:vector@.halfvec[], p_model text[], p_metadata jsonb[], p_occurred timestamptz[], p_hash bytea[]
) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_before bigint;
    v_after bigint;
begin
    with replaced as (
        select r.source_id, r.version from unnest(p_rows, p_versions) as r (source_id, version)
        where not exists (
            select from reactor.memories m
            where m.tenant_id = p_tenant and m.source = p_source and m.source_id = r.source_id and m.version > r.version)
    ), removed as (
        delete from reactor.memories m using replaced r
        where m.tenant_id = p_tenant and m.source = p_source and m.source_id = r.source_id
        returning m.content <> '' as counts
    ), buried as (
        -- A tombstone has done its work once what it hid is gone; one that is newer than our read stays.
        delete from reactor.tombstones t using replaced r
        where t.tenant_id = p_tenant and t.source = p_source and t.source_id = r.source_id and t.version <= r.version
        returning 1
    )
    select count(*) filter (where counts) into v_before from removed;
    with written as (
        insert into reactor.memories (tenant_id, source, source_id, chunk, overlap, kind, content, lexemes, embedding, model,
            metadata, occurred_at, row_hash, version)
        select p_tenant, p_source, p_rows[c.row], c.chunk, c.overlap, c.kind, c.content, to_tsvector(p_language, reactor.fold(c.content)),
            c.embedding, c.model, c.metadata, coalesce(c.occurred_at, now()), c.row_hash, p_versions[c.row]
        from unnest(p_row, p_chunk, p_overlap, p_kind, p_content, p_embedding, p_model, p_metadata, p_occurred, p_hash)
            as c (row, chunk, overlap, kind, content, embedding, model, metadata, occurred_at, row_hash)
        where not exists (
            select from reactor.memories m
            where m.tenant_id = p_tenant and m.source = p_source and m.source_id = p_rows[c.row] and m.version > p_versions[c.row])
        returning content <> '' as counts
    )
    select count(*) filter (where counts) into v_after from written;
    perform reactor.move_version(p_tenant, v_after - v_before);
end
$$;

-- Moves a tenant's version, last before commit, and tells readers. The hash names the tenant to those who know it only.
create or replace function reactor.move_version(p_tenant text, p_added bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_version bigint;
begin
    insert into reactor.tenants as t (tenant_id, version, memories) values (p_tenant, 1, greatest(p_added, 0))
    on conflict (tenant_id) do update set version = t.version + 1, memories = greatest(t.memories + p_added, 0)
    returning version into v_version;
    perform pg_notify('reactor_versions', encode(sha256(convert_to(p_tenant, 'UTF8')), 'hex') || ':' || v_version);
end
$$;

-- The model a tenant's vectors are made with: p_target is taken when it has none yet.
create or replace function reactor.model_of(p_tenant text, p_target text) returns text
language sql
set search_path = pg_catalog, pg_temp
as $$
    insert into reactor.tenants as t (tenant_id, model) values ($1, $2)
    on conflict (tenant_id) do update set model = coalesce(t.model, excluded.model)
    returning model
$$;

-- Errors: RX002 when row level security of a source's table holds for its owner too, who then cannot tell what is missing.
create or replace function reactor.check_owner_sees_all(p_source int) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
set row_security = on
as $$
declare
    v_relation regclass;
begin
    -- The notes force it too; their tenants are known otherwise.
    select relation into v_relation from reactor.sources where id = p_source and kind_column is null and row_security_active(relation);
    if found then
        raise exception 'source %: row level security of the table''s own hides rows from %', v_relation, current_user
            using errcode = 'RX002', hint = format('alter table %s no force row level security, or reconcile as a role with bypassrls', v_relation);
    end if;
end
$$;

-- Tenants that a source has rows or memories of. Errors: RX002 when the owner does not see all rows.
create or replace function reactor.source_tenants(p_source int) returns setof text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
    v_tenants text[];
    v_tenant text;
    v_scope text := coalesce(current_setting('reactor.tenant_id', true), '');
begin
    select * into strict s from reactor.sources where id = p_source;
    perform reactor.check_owner_sees_all(p_source);
    -- A table that was moved to a schema closed to the worker is opened again.
    if not (select has_schema_privilege(reactor.worker_role(), c.relnamespace, 'usage') from pg_class c where c.oid = s.relation) then
        perform reactor.grant_source(p_source);
    end if;
    execute format('select array_agg(t) from (select distinct %I::text as t from %s) d where t <> '''' and length(t) <= 200',
        s.tenant_column, s.relation) into v_tenants;
    return query select unnest(v_tenants);
    for v_tenant in select tenant_id from reactor.tenants where tenant_id not in (select unnest(v_tenants)) loop
        perform set_config('reactor.tenant_id', v_tenant, true);
        if s.kind_column is not null or exists (select from reactor.memories where tenant_id = v_tenant and source = p_source) then
            return next v_tenant;
        end if;
    end loop;
    perform set_config('reactor.tenant_id', v_scope, true);
end
$$;

-- One page of a tenant's rows, read as the table's owner. One snapshot with the caller's statement.
-- Errors: RX002 when the owner does not see all rows, or the worker fewer (a restrictive policy of the table's own).
create or replace function reactor.owner_page(p_source int, p_tenant text, p_after text, p_limit int)
returns table (source_id text, row_hash bytea, occurred_at timestamptz, relation oid)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids text[];
    v_hashes bytea[];
    v_times timestamptz[];
    v_relations oid[];
    v_before text[];
    v_hidden bigint;
begin
    perform reactor.check_owner_sees_all(p_source);
    execute format('select array_agg(p.source_id), array_agg(p.row_hash), array_agg(p.occurred_at), array_agg(p.relation) from reactor.%I($1, $2, $3) p',
        format('source_%s_page', p_source))
    into v_ids, v_hashes, v_times, v_relations using p_tenant, p_after, p_limit;
    v_before := reactor.enter_tenant(p_tenant);
    select cardinality(v_ids) - count(*) into v_hidden from reactor.source_ids(p_source, p_tenant, v_ids);
    perform reactor.leave_tenant(v_before);
    if v_hidden > 0 then
        raise exception 'source %: % of % rows are hidden from % by row level security of the table''s own',
            (select s.relation from reactor.sources s where s.id = p_source), v_hidden, cardinality(v_ids), reactor.worker_role()
            using errcode = 'RX002', hint = 'a restrictive policy hides them: let it pass ' || reactor.worker_role();
    end if;
    return query select * from unnest(v_ids, v_hashes, v_times, v_relations);
end
$$;

-- Compares one page of a tenant's rows with its memories and enqueues what is missing or changed and owed by nobody; one
-- statement, so that an edit that lands meanwhile is seen with its job or not at all.
-- Runs as the schema's owner. `last` is where the next page starts, null after the last one. Errors: RX002, see owner_page.
create or replace function reactor.reconcile_page(p_source int, p_tenant text, p_after text, p_limit int default 1000)
returns table (enqueued bigint, last text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
begin
    select * into strict s from reactor.sources where id = p_source;
    perform set_config('reactor.tenant_id', p_tenant, true);
    return query
    with page as materialized (
        select p.source_id, p.row_hash, p.ordinality, p_source || ':' || p.source_id as key,
            s.expected_since is null or coalesce(p.occurred_at >= s.expected_since, false) or p.relation = any (s.unseen::oid[]) as is_expected
        from reactor.owner_page(p_source, p_tenant, p_after, p_limit) with ordinality p
    ), unsettled as materialized (
        select k from reactor.unsettled_keys(p_tenant, array(select p.key from page p)) k
    ), owed as (
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
        select 'sync_row', p_tenant, 'memory', r.key, jsonb_build_object('source', p_source, 'id', r.source_id)
        from page r
        left join reactor.memories m on m.tenant_id = p_tenant and m.source = p_source and m.source_id = r.source_id and m.chunk = 0
        where r.source_id <> '' and length(r.source_id) <= 200
            and case when m.id is null then r.is_expected else m.row_hash <> r.row_hash end
            and r.key not in (select u.k from unsettled u)
        returning 1
    )
    select (select count(*) from owed), (select p.source_id from page p where p.ordinality = p_limit);
end
$$;

-- Which of the given keys some sync_row job stands for, waiting, running or dead (a person decides about those): key by
-- key, each status by its own index. The order by leads to it where there are no statistics yet, as in a first backfill.
create or replace function reactor.unsettled_keys(p_tenant text, p_keys text[]) returns setof text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select k from unnest($2) k, lateral (
        (select from reactor.jobs j where j.tenant_id = $1 and j.type = 'sync_row' and j.dedupe_key = k
            and j.status in ('pending', 'failed') order by j.id limit 1)
        union all
        (select from reactor.jobs j where j.tenant_id = $1 and j.type = 'sync_row' and j.dedupe_key = k and j.status = 'running' limit 1)
        union all
        (select from reactor.jobs j where j.tenant_id = $1 and j.type = 'sync_row' and j.dedupe_key = k and j.status = 'dead' limit 1)
    ) unsettled
$$;

-- Memories of one tenant whose source row is gone without a tombstone: leaves one and a job. Returns how many.
-- Errors: RX002 when the owner does not see all rows.
create or replace function reactor.reconcile_orphans(p_source int, p_tenant text) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_after text := '';
    v_found bigint := 0;
    v_page bigint;
begin
    perform reactor.check_owner_sees_all(p_source);
    perform set_config('reactor.tenant_id', p_tenant, true);
    while v_after is not null loop
        with page as materialized (
            select source_id, p_source || ':' || source_id as key from reactor.memories
            where tenant_id = p_tenant and source = p_source and chunk = 0 and source_id > v_after order by source_id limit 1000
        ), present as materialized (
            select i from reactor.source_ids(p_source, p_tenant, array(select p.source_id from page p)) i
        ), unsettled as materialized (
            select k from reactor.unsettled_keys(p_tenant, array(select p.key from page p)) k
        ), orphan as materialized (
            select p.source_id as id, p.key, nextval('reactor.job_ids') as version from page p
            where p.source_id not in (select i from present) and p.key not in (select k from unsettled)
        ), tombstone as (
            insert into reactor.tombstones (tenant_id, source, source_id, version) select p_tenant, p_source, id, version from orphan
        ), owed as (
            insert into reactor.jobs (id, type, tenant_id, lane, dedupe_key, payload)
            select version, 'sync_row', p_tenant, 'memory', key, jsonb_build_object('source', p_source, 'id', id) from orphan
        )
        select (select count(*) from orphan), max(source_id) into v_page, v_after from page;
        v_found := v_found + v_page;
    end loop;
    return v_found;
end
$$;

-- Memories hidden by a TRUNCATE of their whole source, removed for one tenant. Returns how many. One that a sync_row is
-- replacing at this moment is left to it: waiting for it crosswise would deadlock.
create or replace function reactor.remove_truncated(p_source int, p_tenant text, p_version bigint) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_before text[] := reactor.enter_tenant(p_tenant);
    v_rows bigint;
    v_counted bigint;
begin
    with removed as (
        delete from reactor.memories where id in (
            select id from reactor.memories where tenant_id = p_tenant and source = p_source and version < p_version
            for update skip locked)
        returning content <> '' as counts
    )
    select count(*), count(*) filter (where counts) into v_rows, v_counted from removed;
    if v_rows > 0 then
        perform reactor.move_version(p_tenant, -v_counted);
    end if;
    perform reactor.leave_tenant(v_before);
    return v_rows;
end
$$;

-- Places missing triggers on new partitions of a source and remembers that their rows are still to be looked at. A
-- partition that is busy for a second is left to the next look: producers would queue up behind us. Returns how many.
create or replace function reactor.reconcile_triggers(p_source int) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1s'
as $$
declare
    v_new regclass[];
begin
    v_new := array(select reactor.place_triggers(p_source));
    update reactor.sources set unseen = array(select distinct u from unnest(unseen || v_new) u) where id = p_source and v_new <> '{}';
    return cardinality(v_new);
exception when lock_not_available then
    raise warning 'reactor: a partition of source % was busy: its triggers are left to the next reconcile', p_source;
    return 0;
end
$$;

-- Where a look at a source begins: partitions whose rows are all expected, the newest TRUNCATE, and whether its tombstone
-- may go afterwards: not while a job claimed before it could still write what it read.
create or replace function reactor.start_reconcile(p_source int)
returns table (unseen text[], truncated_at bigint, buries_all boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select s.unseen::oid[]::text[], t.version, not exists (
        select from reactor.jobs j where j.status = 'running' and j.type = 'sync_row' and j.id < t.version
            and starts_with(j.dedupe_key, s.id || ':'))
    from reactor.sources s
    left join (select max(version) as version from reactor.tombstones where tenant_id = '' and source = $1) t on true
    where s.id = $1
$$;

-- Where it ends, with what start_reconcile said.
create or replace function reactor.end_reconcile(p_source int, p_unseen text[], p_truncated_at bigint, p_buries_all boolean) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update reactor.sources set unseen = array(select u from unnest(unseen) u where not u::oid::text = any ($2)) where id = $1 and $2 <> '{}';
    delete from reactor.tombstones where tenant_id = '' and source = $1 and version <= $3 and $4;
    select reactor.enqueue_job('reconcile', jsonb_build_object('source', $1, 'expected', true), '', 'source:' || $1,
        now() + interval '5 s', 'upkeep', 5) where $3 is not null and not $4;
    select reactor.ring();
$$;

-- The whole of one source (or of all) in one transaction, for psql; the reactor does the same page by page.
create or replace function reactor.reconcile_sources(p_relation regclass)
returns table (source regclass, enqueued bigint, orphans bigint, triggers_placed bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    s reactor.sources;
    v_tenant text;
    v_after text;
    v_page record;
    v_new regclass[];
    v_scope text := coalesce(current_setting('reactor.tenant_id', true), '');
begin
    for s in select * from reactor.sources where reactor.is_readable(id) and (p_relation is null or relation = p_relation) order by id loop
        source := s.relation;
        enqueued := 0;
        orphans := 0;
        v_new := array(select reactor.relations_without_triggers(s.id));
        -- All rows of a partition without our triggers are expected.
        update reactor.sources set unseen = unseen || v_new where id = s.id and v_new <> '{}';
        for v_tenant in select t from reactor.source_tenants(s.id) t loop
            v_after := null;
            loop
                select * into v_page from reactor.reconcile_page(s.id, v_tenant, v_after);
                enqueued := enqueued + v_page.enqueued;
                v_after := v_page.last;
                exit when v_after is null;
            end loop;
            orphans := orphans + reactor.reconcile_orphans(s.id, v_tenant);
        end loop;
        triggers_placed := cardinality(v_new);
        if v_new = '{}' then
            update reactor.sources set unseen = '{}' where id = s.id and unseen <> '{}';
        end if;
        return next;
    end loop;
    -- Last, for a trigger's lock on its table lasts to the end. Rows may have come between the look and the triggers.
    for s in select * from reactor.sources where reactor.is_readable(id) and (p_relation is null or relation = p_relation)
        and exists (select from reactor.relations_without_triggers(id)) order by id
    loop
        perform reactor.reconcile_triggers(s.id);
        perform reactor.enqueue_job('reconcile', jsonb_build_object('source', s.id, 'expected', true), '', format('source:%s', s.id), null, 'upkeep', 5);
    end loop;
    perform set_config('reactor.tenant_id', v_scope, true), reactor.ring();
end
$$;

-- Finds what bypassed the triggers: rows without a memory, changed or gone rows, partitions without our triggers.
create or replace function reactor.reconcile(source regclass default null)
returns table (source_table regclass, enqueued bigint, orphans bigint, triggers_placed bigint)
language sql
set search_path = pg_catalog, pg_temp
as $$ select * from reactor.reconcile_sources($1) $$;

-- Deletes up to p_limit ended things older than p_keep: done jobs, rejected rows, resolved alerts; returns how many. Closes
-- the alerts of dead jobs that are none any more.
create or replace function reactor.prune(p_keep interval, p_limit int) returns bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    select reactor.resolve_cured_jobs();
    delete from reactor.job_minutes where minute < now() - interval '25 h';
    with jobs as (
        delete from reactor.jobs where id = any (array(select id from reactor.jobs where status = 'done' and updated_at < now() - $1 order by updated_at limit $2))
        returning 1
    ), rejected as (
        delete from reactor.rejected where id = any (array(select id from reactor.rejected where created_at < now() - $1 order by created_at limit $2))
        returning 1
    ), alerts as (
        delete from reactor.alerts where id = any (array(select id from reactor.alerts where resolved_at < now() - $1 order by resolved_at limit $2))
        returning 1
    )
    select (select count(*) from jobs) + (select count(*) from rejected) + (select count(*) from alerts)
$$;
