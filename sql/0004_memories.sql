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
create index if not exists memories_recent on reactor.memories (tenant_id, occurred_at desc, id desc) where chunk = 0;
call reactor.protect('reactor.memories', 'content');

-- What agents write down themselves (Memory.remember): a source like any other.
create table if not exists reactor.notes (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    kind text not null default 'note',
    content text not null,
    metadata jsonb not null default '{}',
    created_at timestamptz not null default now()
);
create index if not exists notes_by_tenant on reactor.notes (tenant_id, id);
call reactor.protect('reactor.notes', 'content');
do $$
begin
    perform reactor.attach_source('reactor.notes', 'note', '{content}', 'tenant_id', 'id', 'created_at', null, null, null, null, null,
        '{metadata}', null, null, null, null, 'provider', 'portuguese', true, false, 'kind');
end
$$;

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
    insert into reactor.memories (tenant_id, source, source_id, chunk, overlap, kind, content, lexemes, embedding, model,
        metadata, occurred_at, row_hash, version)
    select p_tenant, p_source, p_rows[c.row], c.chunk, c.overlap, c.kind, c.content, to_tsvector(p_language, reactor.fold(c.content)),
        c.embedding, c.model, c.metadata, coalesce(c.occurred_at, now()), c.row_hash, p_versions[c.row]
    from unnest(p_row, p_chunk, p_overlap, p_kind, p_content, p_embedding, p_model, p_metadata, p_occurred, p_hash)
        as c (row, chunk, overlap, kind, content, embedding, model, metadata, occurred_at, row_hash)
    where not exists (
        select from reactor.memories m
        where m.tenant_id = p_tenant and m.source = p_source and m.source_id = p_rows[c.row] and m.version > p_versions[c.row]);
    get diagnostics v_after = row_count;
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

-- Tenants that a source may have rows or memories of.
create or replace function reactor.source_tenants(p_source int) returns setof text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return query execute format('select t from reactor.%I() t where t <> '''' and length(t) <= 200 union select tenant_id from reactor.tenants',
        format('source_%s_tenants', p_source));
end
$$;

-- Compares one page of a tenant's rows with its memories and enqueues what is missing or changed and owed by nobody.
-- Runs as the schema's owner. `last` is where the next page starts, null after the last one.
-- Errors: RX002 when the worker sees fewer rows than the owner (a restrictive policy of the table's own).
create or replace function reactor.reconcile_page(p_source int, p_tenant text, p_after text, p_limit int default 1000)
returns table (enqueued bigint, last text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_source reactor.sources;
    v_ids text[];
    v_hashes bytea[];
    v_expected boolean[];
    v_before text[];
    v_seen bigint;
begin
    select * into strict v_source from reactor.sources where id = p_source;
    perform set_config('reactor.tenant_id', p_tenant, true);
    execute format('select array_agg(p.source_id), array_agg(p.row_hash), array_agg(p.is_expected) from reactor.%I($1, $2, $3, $4, $5) p',
        format('source_%s_page', p_source))
    into v_ids, v_hashes, v_expected
    using p_tenant, p_after, p_limit, v_source.expected_since, v_source.unseen::oid[];
    if v_ids is null then
        return query select 0::bigint, null::text;
        return;
    end if;
    v_before := reactor.enter_tenant(p_tenant);
    select count(*) into v_seen from reactor.source_rows(p_source, p_tenant, v_ids);
    perform reactor.leave_tenant(v_before);
    if v_seen < cardinality(v_ids) then
        raise exception 'source %: % of % rows are hidden from % by row level security of the table''s own', v_source.relation,
            cardinality(v_ids) - v_seen, cardinality(v_ids), reactor.worker_role()
            using errcode = 'RX002', hint = 'a restrictive policy hides them: let it pass ' || reactor.worker_role();
    end if;
    return query
    with owed as (
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
        select 'sync_row', p_tenant, 'memory', p_source || ':' || r.id, jsonb_build_object('source', p_source, 'id', r.id)
        from unnest(v_ids, v_hashes, v_expected) as r (id, row_hash, is_expected)
        left join reactor.memories m on m.tenant_id = p_tenant and m.source = p_source and m.source_id = r.id and m.chunk = 0
        where r.id <> '' and length(r.id) <= 200
            and case when m.id is null then r.is_expected else m.row_hash <> r.row_hash end
            and not exists (
                select from reactor.jobs j
                where j.tenant_id = p_tenant and j.type = 'sync_row' and j.dedupe_key = p_source || ':' || r.id
                    and j.status in ('pending', 'failed', 'running', 'dead'))
        returning 1
    )
    select count(*), case when cardinality(v_ids) >= p_limit then v_ids[cardinality(v_ids)] end from owed;
end
$$;

-- Memories of one tenant whose source row is gone without a tombstone: leaves one and a job. Returns how many.
create or replace function reactor.reconcile_orphans(p_source int, p_tenant text) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids text[];
    v_after text := '';
    v_found bigint := 0;
    v_page bigint;
begin
    perform set_config('reactor.tenant_id', p_tenant, true);
    loop
        select array_agg(m.source_id order by m.source_id) into v_ids
        from (select source_id from reactor.memories
              where tenant_id = p_tenant and source = p_source and chunk = 0 and source_id > v_after
              order by source_id limit 1000) m;
        exit when v_ids is null;
        v_after := v_ids[cardinality(v_ids)];
        with orphan as materialized (
            select id, nextval('reactor.job_ids') as version from unnest(v_ids) as u (id)
            where id not in (select r.source_id from reactor.source_rows(p_source, p_tenant, v_ids) r)
                and not exists (
                    select from reactor.jobs j
                    where j.tenant_id = p_tenant and j.type = 'sync_row' and j.dedupe_key = p_source || ':' || id
                        and j.status in ('pending', 'failed', 'running', 'dead'))
        ), tombstone as (
            insert into reactor.tombstones (tenant_id, source, source_id, version) select p_tenant, p_source, id, version from orphan
        )
        insert into reactor.jobs (id, type, tenant_id, lane, dedupe_key, payload)
        select version, 'sync_row', p_tenant, 'memory', p_source || ':' || id, jsonb_build_object('source', p_source, 'id', id)
        from orphan;
        get diagnostics v_page = row_count;
        v_found := v_found + v_page;
    end loop;
    return v_found;
end
$$;

-- Memories hidden by a TRUNCATE of their whole source, removed for one tenant. Returns how many.
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
        delete from reactor.memories where tenant_id = p_tenant and source = p_source and version < p_version
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

-- Places missing triggers on new partitions of a source and remembers that their rows are still to be looked at.
create or replace function reactor.reconcile_triggers(p_source int) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_new regclass[];
begin
    select array_agg(r) into v_new from reactor.place_triggers(p_source) r;
    if v_new is not null then
        update reactor.sources set unseen = unseen || v_new where id = p_source;
    end if;
    return coalesce(cardinality(v_new), 0);
end
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
    v_scope text := coalesce(current_setting('reactor.tenant_id', true), '');
begin
    for s in select * from reactor.sources where detached_at is null and (p_relation is null or relation = p_relation)
        and exists (select from pg_class c where c.oid = relation) order by id
    loop
        source := s.relation;
        enqueued := 0;
        orphans := 0;
        triggers_placed := reactor.reconcile_triggers(s.id);
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
        update reactor.sources set unseen = '{}' where id = s.id;
        return next;
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
