-- What agents call: search, recent, status, and the notes they write. Private functions do the work; public ones carry the
-- contract's names.

-- The words of a question in every language that sources are kept in, any of which may match. Null: none worth looking for.
create or replace function reactor.question(p_query text) returns tsquery
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select string_agg(distinct '''' || regexp_replace(w.lexeme, '([''\\])', '\1\1', 'g') || '''', ' | ')::tsquery
    from (select distinct language from reactor.sources) l,
        lateral unnest(to_tsvector(l.language::regconfig, reactor.fold(left($1, 2000)))) w
$$;

-- The ids of a tenant's memories that a tombstone hides.
create or replace function reactor.hidden_memories(p_tenant text) returns setof bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select m.id from reactor.tombstones t
    join reactor.memories m on m.tenant_id = t.tenant_id and m.source = t.source and m.source_id = t.source_id and m.version < t.version
    where t.tenant_id = $1
    union all
    select m.id from (select source, max(version) as version from reactor.tombstones where tenant_id = '' group by source) t
    join reactor.memories m on m.tenant_id = $1 and m.source = t.source and m.version < t.version
$$;

-- The best memories of a tenant for a question, at most one a source row, best first, by words (p_query), by meaning
-- (p_embedding, of model p_model) or by both: reciprocal rank fusion with k = 60 (Cormack, Clarke, Buettcher 2009) over
-- the top 50 rows of each. The score is 1 for the first of every list asked; by meaning alone it is the cosine similarity.
create or replace function reactor.find_memories(
    p_tenant text, p_query text, p_embedding @extschema:vector@.halfvec, p_model text, p_k int, p_kinds text[] default null,
    p_since timestamptz default null, p_until timestamptz default null, p_metadata jsonb default null
) returns table (memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_k int := least(greatest(coalesce(p_k, 5), 1), 100);
    v_depth int := greatest(50, v_k);
    v_before text[] := reactor.enter_tenant(p_tenant);
    v_words tsquery := reactor.question(p_query);
    v_lists int := (v_words is not null)::int + (p_embedding is not null)::int;
begin
    return query
    with hidden as materialized (
        select h as id from reactor.hidden_memories(p_tenant) h
    ), candidate as not materialized (
        select m.id, m.source, m.source_id, m.lexemes, m.embedding, m.model from reactor.memories m
        where m.tenant_id = p_tenant and m.content <> ''
            and (p_kinds is null or m.kind = any (p_kinds))
            and (p_since is null or m.occurred_at >= p_since)
            and (p_until is null or m.occurred_at < p_until)
            and (p_metadata is null or m.metadata @> p_metadata)
            and m.id not in (select id from hidden)
    ), by_words as (
        -- Of each source row its best chunk, before the cut: a long text must not fill the list alone.
        select id, source, source_id, row_number() over (order by rank desc, id desc) as place, null::float8 as similarity
        from (select distinct on (c.source, c.source_id) c.id, c.source, c.source_id, ts_rank_cd(c.lexemes, v_words) as rank
              from candidate c where c.lexemes @@ v_words
              order by c.source, c.source_id, rank desc, c.id) w
        order by place limit v_depth
    ), by_meaning as (
        select id, source, source_id, row_number() over (order by distance, id desc) as place, 1 - distance as similarity
        from (select distinct on (c.source, c.source_id) c.id, c.source, c.source_id,
                  c.embedding operator(@extschema:vector@.<=>) p_embedding as distance
              from candidate c where p_embedding is not null and c.model = p_model
              order by c.source, c.source_id, distance, c.id) n
        where distance < 'NaN'  -- a question of length zero is near nothing
        order by place limit v_depth
    ), fused as (
        select (array_agg(id order by place, id))[1] as id, max(similarity) as similarity, sum(61e0 / (60 + place)) / v_lists as rank
        from (select * from by_words union all select * from by_meaning) lists
        group by source, source_id
    )
    select m.id, m.kind, m.source_id, m.content,
        case when v_words is null then least(greatest(f.similarity, 0), 1) else f.rank end as score, m.occurred_at, m.metadata
    from fused f join reactor.memories m on m.id = f.id
    order by score desc, m.id desc limit v_k;
    perform reactor.leave_tenant(v_before);
end
$$;

-- A tenant's newest source rows, newest first, each with its whole stored text.
create or replace function reactor.recent_memories(p_tenant text, p_k int, p_kinds text[] default null, p_metadata jsonb default null)
returns table (memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_before text[] := reactor.enter_tenant(p_tenant);
begin
    return query
    with hidden as materialized (
        select h as id from reactor.hidden_memories(p_tenant) h
    )
    select r.id, r.kind, r.source_id,
        (select string_agg(substr(c.content, c.overlap + 1), '' order by c.chunk) from reactor.memories c
         where c.tenant_id = p_tenant and c.source = r.source and c.source_id = r.source_id),
        1::float8, r.occurred_at, r.metadata
    from (
        select m.* from reactor.memories m
        where m.tenant_id = p_tenant and m.chunk = 0 and m.content <> ''
            and (p_kinds is null or m.kind = any (p_kinds))
            and (p_metadata is null or m.metadata @> p_metadata)
            and m.id not in (select id from hidden)
        order by m.occurred_at desc, m.id desc
        limit least(greatest(coalesce(p_k, 10), 1), 100)
    ) r
    order by r.occurred_at desc, r.id desc;
    perform reactor.leave_tenant(v_before);
end
$$;

-- What Python's Memory asks: the hits and, from the same snapshot, the version of the tenant's memories they are true of
-- and the model its vectors are in. One row with a null memory_id when nothing is found.
create or replace function reactor.recall(
    p_tenant text, p_query text, p_embedding @extschema:vector@.halfvec, p_model text, p_k int, p_kinds text[],
    p_since timestamptz, p_until timestamptz, p_metadata jsonb
) returns table (version bigint, model text, memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_before text[] := reactor.enter_tenant(p_tenant);
begin
    return query
    select coalesce(t.version, 0), t.model, h.*
    from (select 1) one
    left join reactor.tenants t on t.tenant_id = p_tenant
    left join lateral (
        select * from reactor.find_memories(p_tenant, p_query, p_embedding, p_model, p_k, p_kinds, p_since, p_until, p_metadata)
        where p_query is not null
        union all
        select * from reactor.recent_memories(p_tenant, p_k, p_kinds, p_metadata) where p_query is null
    ) h on true;
    perform reactor.leave_tenant(v_before);
end
$$;

-- Writes notes of one tenant down (Memory.remember), in one statement and so through any pooler. Returns their ids, in order.
create or replace function reactor.write_notes(p_tenant text, p_kind text[], p_content text[], p_metadata jsonb[]) returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_before text[] := reactor.enter_tenant(p_tenant);
begin
    return query
    insert into reactor.notes (tenant_id, kind, content, metadata)
    select p_tenant, n.kind, n.content, n.metadata
    from unnest(p_kind, p_content, p_metadata) with ordinality as n (kind, content, metadata, place) order by n.place
    returning id;
    perform reactor.leave_tenant(v_before);
end
$$;

-- The memories nearest to a question, best first; k is clamped to 1..100; metadata filters by containment. Never waits for
-- the network. This release searches by words; a later one adds the vectors of questions asked before.
create or replace function reactor.search(
    tenant_id text, query text, k int default 5, kinds text[] default null, since timestamptz default null,
    until timestamptz default null, metadata jsonb default null
) returns table (memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select * from reactor.find_memories($1, coalesce($2, ''), null, null, $3, $4, $5, $6, $7) $$;

-- The memories nearest to a vector of the given model (up to 1024 numbers, zero-padded here), by cosine similarity.
create or replace function reactor.search_by_embedding(
    tenant_id text, embedding float4[], model text, k int default 5, kinds text[] default null, since timestamptz default null,
    until timestamptz default null, metadata jsonb default null
) returns table (memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select * from reactor.find_memories($1, null,
        ($2 || array_fill(0::float4, array[greatest(1024 - cardinality($2), 0)]))::@extschema:vector@.halfvec(1024), $3, $4, $5, $6, $7, $8)
$$;

-- The newest source rows of a tenant, newest first, each with its whole text; k is clamped to 1..100. The score is 1.
create or replace function reactor.recent(tenant_id text, k int default 10, kinds text[] default null, metadata jsonb default null)
returns table (memory_id bigint, kind text, source_id text, content text, score float8, occurred_at timestamptz, metadata jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select * from reactor.recent_memories($1, $2, $3, $4) $$;
