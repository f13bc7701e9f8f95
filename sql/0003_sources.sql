-- Sources: the producers' tables, and the triggers that turn their changes into jobs.
--
-- attach compiles a mapping into three functions of the source's own:
--   source_<id>_written()  the trigger, definer: plain inserts of jobs, tombstones and rejected rows, nothing else
--   source_<id>_rows()     reads the mapped rows by id, as whoever calls it
--   source_<id>_page()     reads them in order of id, for reconcile
-- Deleting a row (or moving it out of reach) leaves a tombstone, which hides its memories from the producer's commit on.

create table if not exists reactor.sources (
    id int generated always as identity primary key,
    relation regclass not null unique,
    kind text not null,
    text_columns text[] not null,
    tenant_column text not null,
    id_column text not null,
    time_column text,
    title_column text,
    format_column text,
    status_column text,
    metrics_column text,
    slides_column text,
    metadata_columns text[] not null default '{}',
    role_column text,
    conversation_column text,
    agent_column text,
    kind_column text,                -- only the built-in notes carry a kind a row
    condition text,                  -- attach's "when"
    embed text not null check (embed in ('provider', 'local', 'none')),
    language text not null,
    notify boolean not null,
    expected_since timestamptz,      -- older rows were there before attach and are no promise of ours; null: all rows are
    unseen regclass[] not null default '{}',  -- partitions found by reconcile whose rows it has not been through yet
    attached_at timestamptz not null default now(),
    detached_at timestamptz
);

-- A removed row: its memories with a lower version are hidden at once and deleted soon after.
-- tenant_id '' and source_id '' : every row of the source (TRUNCATE).
create table if not exists reactor.tombstones (
    tenant_id text not null,
    source int not null,
    source_id text not null,
    version bigint not null,
    created_at timestamptz not null default now()
);
create index if not exists tombstones_by_row on reactor.tombstones (tenant_id, source, source_id);

-- Rows that cannot be remembered because their tenant or id is null, empty or over 200 characters.
create table if not exists reactor.rejected (
    id bigint generated always as identity primary key,
    source int not null,
    reason text not null,
    tenant_length int,
    tenant_hash text,
    id_length int,
    id_hash text,
    created_at timestamptz not null default now()
);
create index if not exists rejected_by_time on reactor.rejected (created_at);

call reactor.protect('reactor.tombstones', 'queue');
drop policy if exists reactor_whole_source on reactor.tombstones;
do $$
declare
    v_table regclass;
begin
    execute format('create policy reactor_whole_source on reactor.tombstones for select to %I using (tenant_id = '''')',
        reactor.worker_role());
    foreach v_table in array array['reactor.sources', 'reactor.rejected']::regclass[] loop
        execute format('alter table %s enable row level security', v_table);
        execute format('alter table %s force row level security', v_table);
        execute format('drop policy if exists reactor_owner on %s', v_table);
        execute format('create policy reactor_owner on %s to %I using (true) with check (true)', v_table, current_user);
    end loop;
    drop policy if exists reactor_registry on reactor.sources;
    execute format('create policy reactor_registry on reactor.sources for select to %I using (true)', reactor.worker_role());
    drop policy if exists reactor_definer on reactor.rejected;
    execute format('create policy reactor_definer on reactor.rejected for insert to %I with check (true)', reactor.definer_role());
end
$$;

-- The strings inside a JSON value, in order, one a line, without links: the words of a carousel's slides.
create or replace function reactor.json_text(p_value jsonb) returns text
language sql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
    select string_agg(v.item #>> '{}', E'\n' order by v.place)
    from jsonb_path_query($1, 'strict $.**') with ordinality as v (item, place)
    where jsonb_typeof(v.item) = 'string' and v.item #>> '{}' !~ '^https?://\S+$'
$$;

-- A relation and every partition or child below it that can carry our triggers, the relation first.
create or replace function reactor.relations_of(p_relation regclass) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive tree as (
        select $1::oid as relation, 0 as depth
        union all
        select i.inhrelid, t.depth + 1 from pg_inherits i join tree t on i.inhparent = t.relation
    )
    select c.oid::regclass from tree t join pg_class c on c.oid = t.relation
    where c.relkind in ('r', 'p') group by c.oid order by min(t.depth), c.oid
$$;

-- Puts the missing triggers of a source on its table, partitions and children; returns the relations that got any.
-- Errors: 55P03 when a relation stays locked for 5 s.
create or replace function reactor.place_triggers(p_source int) returns setof regclass
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    v_function text := format('source_%s_written', p_source);
    v_relation regclass;
    v_event text;
    v_is_missing boolean;
begin
    for v_relation in
        select r from reactor.sources s, lateral reactor.relations_of(s.relation) r where s.id = p_source
    loop
        v_is_missing := false;
        foreach v_event in array array['insert', 'update', 'delete', 'truncate'] loop
            continue when exists (
                select from pg_trigger where tgrelid = v_relation and tgname = 'reactor_' || v_event
                    and tgfoid = to_regproc('reactor.' || v_function));
            v_is_missing := true;
            execute format('create or replace trigger %I after %s on %s %s for each statement execute function reactor.%I()',
                'reactor_' || v_event, v_event, v_relation,
                case v_event
                    when 'insert' then 'referencing new table as new_rows'
                    when 'update' then 'referencing old table as old_rows new table as new_rows'
                    when 'delete' then 'referencing old table as old_rows'
                    else ''
                end, v_function);
        end loop;
        if v_is_missing then
            return next v_relation;
        end if;
    end loop;
end
$$;

-- One column of a source, checked to exist, as a quoted name. Errors: 42703.
create or replace function reactor.column_of(p_relation regclass, p_column text, p_argument text) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (select from pg_attribute where attrelid = p_relation and attname = p_column and attnum > 0 and not attisdropped) then
        raise exception 'table % has no column %', p_relation, coalesce(quote_ident(p_column), 'null')
            using errcode = '42703', hint = format('%s => ... names the column; its columns are: %s', p_argument,
                (select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
                 where attrelid = p_relation and attnum > 0 and not attisdropped));
    end if;
    return quote_ident(p_column);
end
$$;

-- A column's value as jsonb, whatever its type: \u0000, which jsonb refuses, is dropped from json.
create or replace function reactor.json_of(p_relation regclass, p_column text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case format_type(atttypid, null)
        when 'jsonb' then format('s.%I', $2)
        when 'json' then format('regexp_replace(s.%I::text, ''(?<!\\)((?:\\\\)*)\\u0000'', ''\1'', ''g'')::jsonb', $2)
        else format('to_jsonb(s.%I)', $2)
    end
    from pg_attribute where attrelid = $1 and attname = $2
$$;

-- Compiles a source's mapping into its functions.
create or replace function reactor.compile_source(p_source int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
    v_alias text;
    v_when text;
    v_id text;
    v_id_type text;
    v_tenant text;
    v_tenant_type text;
    v_time text;
    v_content text;
    v_metadata text := '''{}''::jsonb';
    v_column text;
    v_name text;
    v_mapped text[];
    v_row text;
    v_hashed text;
    v_compared text[];
    v_changed text := '';
    v_is_key constant text := 'coalesce(%1$s <> '''' and length(%1$s) <= 200, false)';
    v_old text;
    v_new text;
    v_record text;
begin
    select * into strict s from reactor.sources where id = p_source;
    select quote_ident(relname) into v_alias from pg_class where oid = s.relation;
    v_when := format(E'(%s\n)', coalesce(s.condition, 'true'));
    v_id := quote_ident(s.id_column);
    v_tenant := quote_ident(s.tenant_column);
    select format_type(atttypid, atttypmod) into v_id_type from pg_attribute where attrelid = s.relation and attname = s.id_column;
    select format_type(atttypid, atttypmod) into v_tenant_type from pg_attribute where attrelid = s.relation and attname = s.tenant_column;
    v_time := coalesce(format('s.%I::timestamptz', s.time_column), 'null::timestamptz');

    -- The text: title first, then the text columns, then the words of the slides; blank ones left out.
    select string_agg(format('nullif(btrim(s.%I::text, E'' \t\r\n''), '''')', c), ', ' order by place) into v_content
    from (select c, min(place) as place from unnest(s.title_column || s.text_columns) with ordinality as u (c, place)
          where c is not null group by c) texts;
    if s.slides_column is not null then
        v_content := concat_ws(', ', v_content, format('nullif(reactor.json_text(%s), '''')', reactor.json_of(s.relation, s.slides_column)));
    end if;
    v_content := format('concat_ws(E''\n\n'', %s)', v_content);

    -- The metadata: an object is merged in, anything else is kept under its column's name; the mapped names win.
    foreach v_column in array s.metadata_columns loop
        v_metadata := v_metadata || format(' || case when s.%2$I is null then ''{}'' when jsonb_typeof(%1$s) = ''object'' then %1$s '
            'else jsonb_build_object(%2$L, %1$s) end', reactor.json_of(s.relation, v_column), v_column);
    end loop;
    for v_column, v_name in
        select * from (values (s.role_column, 'role'), (s.conversation_column, 'conversation_id'), (s.agent_column, 'agent'),
            (s.format_column, 'format')) as named (c, name) where c is not null
    loop
        v_metadata := v_metadata || format(' || case when s.%2$I is null then ''{}'' else jsonb_build_object(%3$L, %1$s) end',
            reactor.json_of(s.relation, v_column), v_column, v_name);
    end loop;

    -- One row as a memory sees it, and the hash that tells whether anything in it changed.
    select array_agg(distinct quote_ident(c)) into v_mapped
    from unnest(array[s.id_column, s.tenant_column, s.time_column, s.title_column, s.format_column, s.slides_column, s.role_column,
        s.conversation_column, s.agent_column, s.kind_column] || s.text_columns || s.metadata_columns) as c where c is not null;
    v_row := format('select s.%s::text as source_id, %s::text as kind, %s as content, %s as occurred_at, %s as metadata',
        v_id, case when s.kind_column is null then quote_literal(s.kind) else format('s.%I', s.kind_column) end,
        v_content, v_time, v_metadata);
    v_hashed := format('select r.source_id, r.kind, r.content, r.occurred_at, r.metadata, sha256(convert_to(jsonb_build_array('
        '%L, r.kind, r.content, extract(epoch from r.occurred_at), r.metadata)::text, ''UTF8''))', concat_ws(' ', s.embed, s.language));
    execute format('create or replace function reactor.%I(text, text[]) '
        'returns table (source_id text, kind text, content text, occurred_at timestamptz, metadata jsonb, row_hash bytea) '
        'language plpgsql stable set search_path = pg_catalog, pg_temp set timezone = ''UTC'' as %L',
        format('source_%s_rows', p_source),
        format(E'#variable_conflict use_column\nbegin\nreturn query %s\nfrom (%s\nfrom (select %s from %s as %s where %s) s\n'
            'where s.%s = $1::%s and s.%s = any ($2::text[]::%s[])) r;\nend',
            v_hashed, v_row, array_to_string(v_mapped, ', '), s.relation, v_alias, v_when, v_tenant, v_tenant_type, v_id, v_id_type));
    execute format('create or replace function reactor.%I(text, text, int, timestamptz, oid[]) '
        'returns table (source_id text, kind text, content text, occurred_at timestamptz, metadata jsonb, row_hash bytea, is_expected boolean) '
        'language plpgsql stable set search_path = pg_catalog, pg_temp set timezone = ''UTC'' as %L',
        format('source_%s_page', p_source),
        format(E'#variable_conflict use_column\nbegin\nreturn query %s, r.is_expected\nfrom (%s, s.%s as id,\n'
            '$4 is null or coalesce(%s >= $4, false) or s.tableoid = any ($5) as is_expected\n'
            'from (select %s, %s.tableoid from %s as %s where %s) s\n'
            'where s.%s = $1::%s and ($2 is null or s.%s > $2::%s)) r\norder by r.id limit $3;\nend',
            v_hashed, v_row, v_id, v_time, array_to_string(v_mapped, ', '), v_alias, s.relation, v_alias, v_when,
            v_tenant, v_tenant_type, v_id, v_id_type));
    execute format('create or replace function reactor.%I() returns setof text language plpgsql stable '
        'set search_path = pg_catalog, pg_temp as %L', format('source_%s_tenants', p_source),
        format('begin return query select distinct s.%s::text from %s s where s.%s is not null; end', v_tenant, s.relation, v_tenant));

    -- What an update must change to matter. A type without a default equality is compared as text.
    for v_column in select c from unnest(v_mapped) as c where c not in (v_id, v_tenant) order by c loop
        v_compared := v_compared || format('t.%s%s as c%s', v_column,
            (select case when exists (
                    select from pg_opclass o join pg_am m on m.oid = o.opcmethod
                    where m.amname = 'btree' and o.opcdefault and o.opcintype = a.atttypid) then '' else '::text' end
             from pg_attribute a where a.attrelid = s.relation and quote_ident(a.attname) = v_column),
            coalesce(cardinality(v_compared), 0) + 1);
        v_changed := v_changed || format(' or o.c%1$s is distinct from n.c%1$s', cardinality(v_compared));
    end loop;
    v_name := format('t.%s::text as id, t.%s::text as tenant, true as here%s', v_id, v_tenant,
        coalesce(', ' || array_to_string(v_compared, ', '), ''));
    v_old := format('select %s from (select * from old_rows as %s where %s) t', v_name, v_alias, v_when);
    v_new := format('select %s from (select * from new_rows as %s where %s) t', v_name, v_alias, v_when);

    -- Plain inserts of fresh rows and nothing else, so no producer ever waits for us. %%s: the changed rows.
    v_record := format('
        with change as materialized (
            select c.id, c.tenant, c.is_gone, %s as tenant_ok, %s as id_ok, nextval(''reactor.job_ids'') as version from (%%s) c
        ), rejected as (
            insert into reactor.rejected (source, reason, tenant_length, tenant_hash, id_length, id_hash)
            select %3$s, case when tenant_ok then ''id'' else ''tenant'' end, length(tenant),
                left(encode(sha256(convert_to(tenant, ''UTF8'')), ''hex''), 16), length(id),
                left(encode(sha256(convert_to(id, ''UTF8'')), ''hex''), 16)
            from change where not is_gone and not (tenant_ok and id_ok)
        ), gone as (
            insert into reactor.tombstones (tenant_id, source, source_id, version)
            select tenant, %3$s, id, version from change where is_gone and tenant_ok and id_ok
        )
        insert into reactor.jobs (id, type, tenant_id, lane, dedupe_key, payload)
        select version, ''sync_row'', tenant, ''memory'', ''%3$s:'' || id, jsonb_build_object(''source'', %3$s, ''id'', id)
        from change where tenant_ok and id_ok', format(v_is_key, 'c.tenant'), format(v_is_key, 'c.id'), p_source);
    execute format('create or replace function reactor.%I() returns trigger language plpgsql security definer '
        'set search_path = pg_catalog, pg_temp as %L', format('source_%s_written', p_source), format('
#variable_conflict use_column
declare
    v_jobs bigint;
begin
    if tg_op = ''INSERT'' then %s;
    elsif tg_op = ''UPDATE'' then %s;
    elsif tg_op = ''DELETE'' then %s;
    else
        -- Which rows a partition lost nobody can tell any more: reconcile compares. A whole table lost all of them.
        if tg_relid = %s and (select c.relkind = ''p'' or not c.relhassubclass from pg_class c where c.oid = tg_relid) then
            insert into reactor.tombstones (tenant_id, source, source_id, version)
            values ('''', %5$s, '''', nextval(''reactor.job_ids''));
        end if;
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
        values (''reconcile'', '''', ''upkeep'', ''source:%5$s'', jsonb_build_object(''source'', %5$s, ''expected'', true));
    end if;
    get diagnostics v_jobs = row_count;
    %6$s
    return null;
exception when others then
    raise warning ''reactor: a change of %% was not recorded (SQLSTATE %%); reactor.reconcile() finds it'', tg_relid::regclass, sqlstate;
    return null;
end
',
        format(v_record, format('select id, tenant, false as is_gone from (%s) t', v_new)),
        -- A changed key or tenant, and a row that leaves "when", are an old row without its new one.
        format(v_record, format('select coalesce(n.id, o.id) as id, coalesce(n.tenant, o.tenant) as tenant, n.here is null as is_gone '
            'from (%s) o full join (%s) n on o.id = n.id and o.tenant = n.tenant where o.here is null or n.here is null%s',
            v_old, v_new, v_changed)),
        format(v_record, format('select id, tenant, true as is_gone from (%s) t', v_old)),
        s.relation::oid, p_source,
        case when s.notify then 'if v_jobs > 0 then perform reactor.ring(); end if;' else '' end));
end
$$;

-- Lets the worker read the mapped columns (and those of "when"), through row level security of the table's own too.
-- The policy stands even while the table has none, so that switching it on later hides nothing from us.
-- Errors: those of a condition that is none; 0A000 for one that reads other tables.
create or replace function reactor.grant_source(p_source int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
    v_alias text;
    v_schema name;
    v_columns text[];
    v_others text;
    v_probe text := 'probe_' || pg_backend_pid();
    v_probe_id oid;
begin
    select * into strict s from reactor.sources where id = p_source;
    select quote_ident(c.relname), n.nspname into v_alias, v_schema
    from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = s.relation;
    -- A view knows which columns its condition reads.
    begin
        execute format(E'create view reactor.%I as select 1 as one from %s as %s where (%s\n)', v_probe, s.relation, v_alias, coalesce(s.condition, 'true'));
    exception when syntax_error or undefined_column or datatype_mismatch or undefined_function or undefined_table
            or invalid_text_representation or ambiguous_column or grouping_error or feature_not_supported or ambiguous_function then
        raise exception 'when => % is not a condition on the columns of %: %', quote_literal(s.condition), s.relation, sqlerrm
            using errcode = sqlstate;
    end;
    v_probe_id := to_regclass('reactor.' || v_probe);
    select string_agg(distinct d.refobjid::regclass::text, ', ') filter (where d.refobjid <> s.relation),
        array_agg(distinct a.attname::text) filter (where d.refobjid = s.relation and (a.attnum = d.refobjsubid or d.refobjsubid = 0))
    into v_others, v_columns
    from pg_depend d
    join pg_rewrite r on r.oid = d.objid and r.ev_class = v_probe_id
    left join pg_attribute a on a.attrelid = d.refobjid and a.attnum > 0 and not a.attisdropped
    where d.classid = 'pg_rewrite'::regclass and d.refclassid = 'pg_class'::regclass and d.refobjid <> v_probe_id;
    execute format('drop view reactor.%I', v_probe);
    if v_others is not null then
        raise exception 'when => % reads other tables (%)', quote_literal(s.condition), v_others
            using errcode = '0A000', hint = 'a condition may use only the columns of its own table';
    end if;
    if reactor.worker_role() <> current_user then
        if not has_schema_privilege(reactor.worker_role(), v_schema, 'usage') then
            execute format('grant usage on schema %I to %I', v_schema, reactor.worker_role());
        end if;
        execute format('grant select (%s) on %s to %I',
            (select string_agg(distinct quote_ident(c), ', ')
             from unnest(array[s.id_column, s.tenant_column, s.time_column, s.title_column, s.format_column, s.status_column,
                s.metrics_column, s.slides_column, s.role_column, s.conversation_column, s.agent_column, s.kind_column]
                || s.text_columns || s.metadata_columns || v_columns) as c where c is not null),
            s.relation, reactor.worker_role());
    end if;
    execute format('drop policy if exists reactor_reads on %s', s.relation);
    execute format('create policy reactor_reads on %s for select to %I using (%I::text = (select current_setting(''reactor.tenant_id'', true)))',
        s.relation, reactor.worker_role(), s.tenant_column);
end
$$;

-- Makes a table a source, or changes the mapping of one. Returns the source's id. p_kind_column: see sources.
create or replace function reactor.attach_source(
    p_relation regclass, p_kind text, p_text text[], p_tenant text, p_id text, p_time text, p_title text, p_format text,
    p_status text, p_metrics text, p_slides text, p_metadata text[], p_role text, p_conversation text, p_agent text,
    p_when text, p_embed text, p_language text, p_notify boolean, p_backfill boolean, p_kind_column text default null
) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    v_class pg_class;
    v_schema name;
    v_column text;
    v_argument text;
    v_source int;
begin
    select * into v_class from pg_class where oid = p_relation;
    if not found then
        raise exception 'attach needs a table' using errcode = '22004';
    end if;
    select nspname into v_schema from pg_namespace where oid = v_class.relnamespace;
    if v_class.relkind not in ('r', 'p') or v_class.relpersistence = 't' then
        raise exception '% is a % and cannot be attached', p_relation,
            case v_class.relkind when 'v' then 'view' when 'm' then 'materialized view' when 'f' then 'foreign table'
                when 'r' then 'temporary table' when 'p' then 'temporary table' else 'relation without rows' end
            using errcode = '42809', hint = 'triggers need a real table: attach the table underneath it';
    end if;
    if v_schema in ('pg_catalog', 'information_schema') or (v_schema = 'reactor' and p_kind_column is null) then
        raise exception '% is not a producer''s table', p_relation using errcode = '42501';
    end if;
    if not pg_has_role(current_user, v_class.relowner, 'usage') then
        raise exception '% belongs to %: only its owner (or a member) can attach it', p_relation, pg_get_userbyid(v_class.relowner)
            using errcode = '42501', hint = format('grant %I to %I, or attach as %1$I', pg_get_userbyid(v_class.relowner), current_user);
    end if;
    if coalesce(btrim(p_kind), '') = '' or length(p_kind) > 100 then
        raise exception 'kind => ... names what these rows are (post, chat, ...), in at most 100 characters' using errcode = '22023';
    end if;
    if coalesce(cardinality(p_text), 0) = 0 then
        raise exception 'text_columns => ... names at least one column to remember' using errcode = '22023';
    end if;
    if coalesce(p_embed, '') not in ('provider', 'local', 'none') then
        raise exception 'embed => % is not provider, local or none', quote_nullable(p_embed) using errcode = '22023';
    end if;
    if not exists (select from pg_ts_config where cfgname = p_language and cfgnamespace = 'pg_catalog'::regnamespace) then
        raise exception 'language => % is not a text search configuration of this server', quote_nullable(p_language)
            using errcode = '42704', hint = 'portuguese, english, spanish, simple, ...';
    end if;
    for v_argument, v_column in
        select 'text_columns', c from unnest(p_text) c
        union all select 'metadata_columns', c from unnest(p_metadata) c
        union all select * from (values ('tenant_column', p_tenant), ('id_column', p_id)) needed
        union all select * from (values ('time_column', p_time), ('title_column', p_title), ('format_column', p_format),
            ('status_column', p_status), ('metrics_column', p_metrics), ('slides_column', p_slides), ('role_column', p_role),
            ('conversation_column', p_conversation), ('agent_column', p_agent), ('kind_column', p_kind_column)) as optional (a, c) where c is not null
    loop
        perform reactor.column_of(p_relation, v_column, v_argument);
    end loop;
    insert into reactor.sources as s (relation, kind, text_columns, tenant_column, id_column, time_column, title_column, format_column,
        status_column, metrics_column, slides_column, metadata_columns, role_column, conversation_column, agent_column, kind_column,
        condition, embed, language, notify, expected_since)
    values (p_relation, p_kind, p_text, p_tenant, p_id, p_time, p_title, p_format, p_status, p_metrics, p_slides,
        coalesce(p_metadata, '{}'), p_role, p_conversation, p_agent, p_kind_column, nullif(btrim(p_when), ''), p_embed, p_language,
        coalesce(p_notify, true), case when p_backfill then null else clock_timestamp() end)
    on conflict (relation) do update set (kind, text_columns, tenant_column, id_column, time_column, title_column, format_column,
        status_column, metrics_column, slides_column, metadata_columns, role_column, conversation_column, agent_column, kind_column,
        condition, embed, language, notify, expected_since, detached_at) = (excluded.kind, excluded.text_columns, excluded.tenant_column,
        excluded.id_column, excluded.time_column, excluded.title_column, excluded.format_column, excluded.status_column,
        excluded.metrics_column, excluded.slides_column, excluded.metadata_columns, excluded.role_column, excluded.conversation_column,
        excluded.agent_column, excluded.kind_column, excluded.condition, excluded.embed, excluded.language, excluded.notify,
        case when p_backfill then null else s.expected_since end, null)
    returning id into v_source;
    perform reactor.grant_source(v_source);
    perform reactor.compile_source(v_source);
    perform reactor.place_triggers(v_source);
    perform reactor.hand_over(v_source);
    if p_backfill then
        perform reactor.enqueue_job('reconcile', jsonb_build_object('source', v_source, 'expected', true), '', format('source:%s', v_source), null, 'upkeep', 5);
    end if;
    return v_source;
end
$$;

-- Gives a source's functions to whom they belong: the trigger to the definer, the reading of rows to the worker.
create or replace function reactor.hand_over(p_source int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_name text := format('source_%s', p_source);
begin
    execute format('revoke all on function reactor.%I(), reactor.%I(text, text[]), reactor.%I(text, text, int, timestamptz, oid[]), reactor.%I() from public',
        v_name || '_written', v_name || '_rows', v_name || '_page', v_name || '_tenants');
    execute format('grant execute on function reactor.%I(text, text[]) to %I', v_name || '_rows', reactor.worker_role());
    if reactor.definer_role() <> current_user then
        execute format('grant create on schema reactor to %I', reactor.definer_role());
        execute format('alter function reactor.%I() owner to %I', v_name || '_written', reactor.definer_role());
        execute format('revoke create on schema reactor from %I', reactor.definer_role());
    end if;
end
$$;

-- Makes an existing table a source of memories (docs/attach.md). Attaching again changes the mapping. Returns the source's id.
-- Errors, each one clear line: 42703 no such column, 42809 not a real table, 42501 not yours, 22023 and 42704 a wrong value.
create or replace function reactor.attach(
    source regclass, kind text, text_columns text[], tenant_column text default 'tenant_id', id_column text default 'id',
    time_column text default 'created_at', title_column text default null, format_column text default null,
    status_column text default null, metrics_column text default null, slides_column text default null,
    metadata_columns text[] default '{}', role_column text default null, conversation_column text default null,
    agent_column text default null, "when" text default null, embed text default 'provider', language text default 'portuguese',
    notify boolean default true, backfill boolean default false
) returns int
language sql
set search_path = pg_catalog, pg_temp
as $$
    select reactor.attach_source($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)
$$;

create or replace function reactor.detach_source(p_relation regclass) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    v_source int;
    v_name text;
    v_relation regclass;
    v_event text;
begin
    update reactor.sources set detached_at = now() where relation = p_relation and detached_at is null returning id into v_source;
    if not found then
        return false;
    end if;
    v_name := format('source_%s', v_source);
    for v_relation in select r from reactor.relations_of(p_relation) r loop
        foreach v_event in array array['insert', 'update', 'delete', 'truncate'] loop
            execute format('drop trigger if exists %I on %s', 'reactor_' || v_event, v_relation);
        end loop;
    end loop;
    execute format('drop policy if exists reactor_reads on %s', p_relation);
    if reactor.worker_role() <> current_user then
        execute format('revoke select on %s from %I', p_relation, reactor.worker_role());
    end if;
    execute format('drop function if exists reactor.%I(), reactor.%I(text, text[]), reactor.%I(text, text, int, timestamptz, oid[]), reactor.%I()',
        v_name || '_written', v_name || '_rows', v_name || '_page', v_name || '_tenants');
    return true;
end
$$;

-- Takes our triggers, policy and grants off a table; its memories stay. False when it was not attached.
create or replace function reactor.detach(source regclass) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$ select reactor.detach_source($1) $$;

-- The current rows of a source by id, as its mapping sees them; rows that are gone or outside "when" are missing.
-- An empty set also for a source that is detached.
create or replace function reactor.source_rows(p_source int, p_tenant text, p_ids text[])
returns table (source_id text, kind text, content text, occurred_at timestamptz, metadata jsonb, row_hash bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regproc(format('reactor.source_%s_rows', p_source)) is not null then
        return query execute format('select * from reactor.%I($1, $2)', format('source_%s_rows', p_source)) using p_tenant, p_ids;
    end if;
end
$$;
