-- Sources: the producers' tables, and the triggers that turn their changes into jobs.
--
-- attach compiles a mapping into four functions of the source's own:
--   source_<id>_written()  the trigger, definer: plain inserts of jobs, tombstones and rejected rows, nothing else
--   source_<id>_rows()     reads the mapped rows by id, as whoever calls it
--   source_<id>_ids()      which of the given ids are there, as whoever calls it
--   source_<id>_page()     reads them in order of id, for reconcile
-- The readers ask for the table's name when they run: a table may be renamed, moved, or restored with another oid.
-- Deleting a row (or moving it out of reach) leaves a tombstone, which hides its memories from the producer's commit on.

create table if not exists reactor.sources (
    id int generated always as identity primary key,
    relation regclass not null unique,
    alias name not null,             -- the table's name at attach, which "when" may put before its columns
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
call reactor.put_index('reactor.tombstones_by_row', $$create index tombstones_by_row on reactor.tombstones (tenant_id, source, source_id)$$);

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
call reactor.put_index('reactor.rejected_by_time', $$create index rejected_by_time on reactor.rejected (created_at)$$);

call reactor.protect('reactor.tombstones', 'queue');
call reactor.protect('reactor.sources', 'registry');
call reactor.protect('reactor.rejected', 'registry');
do $$
begin
    call reactor.put_policy('reactor.tombstones', 'reactor_whole_source',
        format('for select to %I using (tenant_id = '''')', reactor.worker_role()));
    call reactor.put_policy('reactor.sources', 'reactor_registry', format('for select to %I using (true)', reactor.worker_role()));
    call reactor.put_policy('reactor.rejected', 'reactor_definer', format('for insert to %I with check (true)', reactor.definer_role()));
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

-- A relation and every partition or child below it, the relation first. Foreign tables are among them.
create or replace function reactor.relations_of(p_relation regclass) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive tree as (
        select $1::oid as relation, 0 as depth
        union all
        select i.inhrelid, t.depth + 1 from pg_inherits i join tree t on i.inhparent = t.relation
    )
    select c.oid::regclass from tree t join pg_class c on c.oid = t.relation group by c.oid order by min(t.depth), c.oid
$$;

-- The relations of a source that lack a trigger of ours and can carry it.
create or replace function reactor.relations_without_triggers(p_source int) returns setof regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select c.oid::regclass
    from reactor.sources s, lateral reactor.relations_of(s.relation) r join pg_class c on c.oid = r
    where s.id = $1 and c.relkind in ('r', 'p')
        and (select count(*) from pg_trigger t
             where t.tgrelid = r and t.tgfoid = to_regproc(format('reactor.source_%s_written', $1))) < 4
$$;

-- Puts the missing triggers of a source on its table, partitions and children, and takes them off partitions that left;
-- returns the relations that got any. Errors: 55P03 when a relation stays locked for longer than lock_timeout.
create or replace function reactor.place_triggers(p_source int) returns setof regclass
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_relation regclass;
    v_trigger name;
    v_event text;
begin
    for v_relation in select reactor.relations_without_triggers(p_source) loop
        foreach v_event in array array['insert', 'update', 'delete', 'truncate'] loop
            execute format('create or replace trigger %I after %s on %s %s for each statement execute function reactor.%I(%L)',
                'reactor_' || v_event, v_event, v_relation,
                case v_event
                    when 'insert' then 'referencing new table as new_rows'
                    when 'update' then 'referencing old table as old_rows new table as new_rows'
                    when 'delete' then 'referencing old table as old_rows'
                    else ''
                end, format('source_%s_written', p_source),
                case when v_relation = (select relation from reactor.sources where id = p_source) then 'whole' else 'part' end);
        end loop;
        return next v_relation;
    end loop;
    for v_relation, v_trigger in
        select t.tgrelid::regclass, t.tgname from pg_trigger t
        where t.tgfoid = to_regproc(format('reactor.source_%s_written', p_source))
            and t.tgrelid not in (select r from reactor.sources s, lateral reactor.relations_of(s.relation) r where s.id = p_source)
    loop
        execute format('drop trigger %I on %s', v_trigger, v_relation);
    end loop;
end
$$;

-- The type of a column, and of the domain under it: a cast to a domain or to varchar(n) would cut a value short, and
-- then one tenant's name would find another's rows.
create or replace function reactor.type_of(p_relation regclass, p_column text) returns oid
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with recursive base as (
        select atttypid as type from pg_attribute where attrelid = $1 and attname = $2 and not attisdropped
        union all
        select t.typbasetype from base b join pg_type t on t.oid = b.type where t.typtype = 'd'
    )
    select b.type from base b join pg_type t on t.oid = b.type where t.typtype <> 'd'
$$;

-- A comparison of two values of a type, as it must be written where the search path does not hold the type's schema.
create or replace function reactor.operator_of(p_type oid, p_name text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce((select format('operator(%I.%s)', n.nspname, $2) from pg_operator o join pg_namespace n on n.oid = o.oprnamespace
        where o.oprname = $2 and o.oprleft = $1 and o.oprright = $1 order by n.nspname = 'pg_catalog' desc limit 1), $2)
$$;

-- A json value as jsonb. What jsonb refuses (\u0000, a surrogate without its other half) is dropped; a value that it
-- refuses all the same becomes its text.
create or replace function reactor.clean_json(p_value json) returns jsonb
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_text text;
begin
    return p_value::jsonb;
exception when others then
    v_text := regexp_replace(p_value::text,
        '(?<!\\)((?:\\\\)*)(?:(\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})|\\u0000|\\ud[89a-f][0-9a-f]{2})', '\1\2', 'gi');
    begin
        return v_text::jsonb;
    exception when others then
        return to_jsonb(v_text);
    end;
end
$$;

-- An expression for a column's value as jsonb, whatever its type.
create or replace function reactor.json_of(p_relation regclass, p_column text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select case reactor.type_of($1, $2)
        when 'jsonb'::regtype then format('s.%I::jsonb', $2)
        when 'json'::regtype then format('reactor.clean_json(s.%I::json)', $2)
        else format('to_jsonb(s.%I)', $2)
    end
$$;

-- Compiles a source's mapping into its functions, and gives them to whom they belong: the trigger to the definer, the
-- reading of rows to the worker. They name no column beyond the mapped ones and p_condition_columns, those of "when".
create or replace function reactor.compile_source(p_source int, p_condition_columns text[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
    v_name constant text := format('source_%s', p_source);
    -- What a session may have set otherwise, and what would change a row's text or hide a table of ours.
    v_settings constant text := 'set search_path = pg_catalog, pg_temp set row_security = on set timezone = ''UTC'' '
        'set datestyle = ''ISO, YMD'' set intervalstyle = postgres set bytea_output = hex';
    v_when text;
    v_id text;
    v_id_type text;
    v_tenant text;
    v_from text;
    v_mine text;
    v_ids text;
    v_time text := 'null::timestamptz';
    v_content text;
    v_metadata text := '''{}''::jsonb';
    v_column text;
    v_named text;
    v_mapped text[];
    v_row text;
    v_hash text;
    v_changed text;
    v_is_key constant text := '%1$s <> '''' and length(%1$s) <= 200';
    v_key text;
    v_rows text;
    v_old text;
    v_new text;
    v_jobs text;
    v_rejected text;
begin
    select * into strict s from reactor.sources where id = p_source;
    v_when := format(E'(%s\n)', coalesce(s.condition, 'true'));
    v_id := quote_ident(s.id_column);
    v_tenant := quote_ident(s.tenant_column);
    v_id_type := format_type(reactor.type_of(s.relation, s.id_column), -1);

    -- The text: title first, then the text columns, then the words of the slides; blank ones left out.
    select string_agg(format('nullif(btrim(s.%I::text, E'' \t\r\n''), '''')', c), ', ' order by place) into v_content
    from (select c, min(place) as place from unnest(s.title_column || s.text_columns) with ordinality as u (c, place)
          where c is not null group by c) texts;
    if s.slides_column is not null then
        v_content := concat_ws(', ', v_content, format('nullif(reactor.json_text(%s), '''')', reactor.json_of(s.relation, s.slides_column)));
    end if;
    v_content := format('concat_ws(E''\n\n'', %s)', v_content);

    -- When it happened, as far as a driver can say it: neither infinity nor the year 20260.
    if s.time_column is not null then
        v_time := format('case when s.%1$I >= ''0001-01-02'' and s.%1$I < ''9999-12-31'' then s.%1$I::timestamptz end', s.time_column);
    end if;

    -- The metadata: an object is merged in, anything else is kept under its column's name; the mapped names win.
    foreach v_column in array s.metadata_columns loop
        v_metadata := v_metadata || format(' || case when s.%2$I is null then ''{}'' when jsonb_typeof(%1$s) = ''object'' then %1$s '
            'else jsonb_build_object(%2$L, %1$s) end', reactor.json_of(s.relation, v_column), v_column);
    end loop;
    for v_column, v_named in
        select * from (values (s.role_column, 'role'), (s.conversation_column, 'conversation_id'), (s.agent_column, 'agent'),
            (s.format_column, 'format')) as named (c, name) where c is not null
    loop
        v_metadata := v_metadata || format(' || case when s.%2$I is null then ''{}'' else jsonb_build_object(%3$L, %1$s) end',
            reactor.json_of(s.relation, v_column), v_column, v_named);
    end loop;

    -- One row as a memory sees it, and the hash that tells whether anything in it changed.
    select array_agg(distinct quote_ident(c)) into v_mapped
    from unnest(array[s.id_column, s.tenant_column, s.time_column, s.title_column, s.format_column, s.slides_column, s.role_column,
        s.conversation_column, s.agent_column, s.kind_column] || s.text_columns || s.metadata_columns) as c where c is not null;
    v_row := format('s.%s::text as source_id, %s::text as kind, %s as content, %s as occurred_at, %s as metadata',
        v_id, case when s.kind_column is null then quote_literal(s.kind) else format('s.%I', s.kind_column) end,
        v_content, v_time, v_metadata);
    v_hash := format('sha256(convert_to(jsonb_build_array(%L, r.kind, r.content, extract(epoch from r.occurred_at), r.metadata)::text, ''UTF8''))',
        concat_ws(' ', s.embed, s.language));
    -- The table's name stands between v_from's two halves when the function runs.
    v_from := format('%L || (select o.relation from reactor.sources o where o.id = %s) || %L', ' from ', p_source, format(' as %I where %s', s.alias, v_when));
    -- As text too: 1.0 and 1.00, or A and a, are one value to some types and two tenants to us.
    v_mine := format(' and %1$I.%2$s %3$s $1::%4$s and %1$I.%2$s::text = $1', s.alias, v_tenant,
        reactor.operator_of(reactor.type_of(s.relation, s.tenant_column), '='), format_type(reactor.type_of(s.relation, s.tenant_column), -1));
    v_ids := format('%s and %I.%s %s any ($2::text[]::%s[])', v_mine, s.alias, v_id,
        reactor.operator_of(reactor.type_of(s.relation, s.id_column), '='), v_id_type);
    execute format('drop function if exists reactor.%I, reactor.%I, reactor.%I', v_name || '_rows', v_name || '_ids', v_name || '_page');
    execute format('create function reactor.%I(text, text[]) '
        'returns table (source_id text, kind text, content text, occurred_at timestamptz, metadata jsonb, row_hash bytea) '
        'language plpgsql stable %s as %L', v_name || '_rows', v_settings,
        format('begin return query execute %L || %s || %L using $1, $2; end',
            format('select r.*, %s from (select %s from (select %s', v_hash, v_row, array_to_string(v_mapped, ', ')), v_from, v_ids || ') s) r'));
    execute format('create function reactor.%I(text, text[]) returns setof text language plpgsql stable %s as %L', v_name || '_ids', v_settings,
        format('begin return query execute %L || %s || %L using $1, $2; end', format('select %I.%s::text', s.alias, v_id), v_from, v_ids));
    execute format('create function reactor.%I(text, text, int) '
        'returns table (source_id text, row_hash bytea, occurred_at timestamptz, relation oid) '
        'language plpgsql stable %s as %L', v_name || '_page', v_settings,
        format('begin return query execute %L || %s || %L using $1, $2, $3; end',
            format('select r.source_id, %s, r.occurred_at, r.relation from (select %s, s.%s as id, s.tableoid as relation from (select %s, %I.tableoid',
                v_hash, v_row, v_id, array_to_string(v_mapped, ', '), s.alias),
            v_from,
            format('%1$s and %2$I.%3$s is not null and ($2 is null or %2$I.%3$s %4$s $2::%5$s) order by %2$I.%3$s limit $3) s) r order by r.id',
                v_mine, s.alias, v_id, reactor.operator_of(reactor.type_of(s.relation, s.id_column), '>'), v_id_type)));

    -- The changed rows. A virtual generated column has no value in a transition table, only its expression.
    select string_agg(case a.attgenerated when 'v' then format('(%s) as %I', pg_get_expr(d.adbin, d.adrelid), a.attname)
            else quote_ident(a.attname) end, ', ') into v_rows
    from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attrelid = s.relation and a.attnum > 0 and (quote_ident(a.attname) = any (v_mapped) or a.attname = any (p_condition_columns));
    -- Compared byte for byte: that needs no equality of the types (json has none), and sees what an equality would not.
    select string_agg('t.' || c, ', ') into v_changed from unnest(v_mapped) as c where c not in (v_id, v_tenant);
    v_named := format('select t.%s::text as id, t.%s::text as tenant, true as here, row(%s) as seen from (select * from (select %s from ',
        v_id, v_tenant, v_changed, v_rows);
    v_old := v_named || format('old_rows) as %I where %s) t', s.alias, v_when);
    v_new := v_named || format('new_rows) as %I where %s) t', s.alias, v_when);

    -- Plain inserts of fresh rows and nothing else, so no producer ever waits for us.
    v_key := format('%s and %s', format(v_is_key, 'c.tenant'), format(v_is_key, 'c.id'));
    v_jobs := format('insert into reactor.jobs (id, type, tenant_id, lane, dedupe_key, payload) '
        'select %%s, ''sync_row'', c.tenant, ''memory'', ''%1$s:'' || c.id, jsonb_build_object(''source'', %1$s, ''id'', c.id) from ', p_source);
    v_rejected := format('insert into reactor.rejected (source, reason, tenant_length, tenant_hash, id_length, id_hash) '
        'select %s, case when %s then ''id'' else ''tenant'' end, length(c.tenant), '
        'left(encode(sha256(convert_to(c.tenant, ''UTF8'')), ''hex''), 16), length(c.id), left(encode(sha256(convert_to(c.id, ''UTF8'')), ''hex''), 16) from ',
        p_source, format(v_is_key, 'c.tenant'));
    execute format('create or replace function reactor.%I() returns trigger language plpgsql security definer %s as %L',
        v_name || '_written', v_settings || ' set enable_mergejoin = off', '  -- nor sorts what hashing joins
#variable_conflict use_column
declare
    v_jobs bigint;
begin
    if tg_op = ''INSERT'' then
        ' || replace(v_jobs, '%s', 'nextval(''reactor.job_ids'')') || '(' || v_new || ') c where ' || v_key || ';
        get diagnostics v_jobs = row_count;
        ' || v_rejected || '(' || v_new || ') c where (' || v_key || ') is not true;
    elsif tg_op = ''UPDATE'' then
        -- A changed key or tenant, and a row that leaves "when", are an old row without its new one.
        with change as materialized (
            select coalesce(n.id, o.id) as id, coalesce(n.tenant, o.tenant) as tenant, n.here is null as is_gone,
                nextval(''reactor.job_ids'') as version
            from (' || v_old || ') o full join (' || v_new || ') n
                on coalesce(o.id, '''') = coalesce(n.id, '''') and coalesce(o.tenant, '''') = coalesce(n.tenant, '''')
            where o.here is null or n.here is null or o.seen operator(pg_catalog.*<>) n.seen
        ), rejected as (
            ' || v_rejected || 'change c where not c.is_gone and (' || v_key || ') is not true
        ), gone as (
            insert into reactor.tombstones (tenant_id, source, source_id, version)
            select c.tenant, ' || p_source || ', c.id, c.version from change c where c.is_gone and ' || v_key || '
        )
        ' || replace(v_jobs, '%s', 'c.version') || 'change c where ' || v_key || ';
        get diagnostics v_jobs = row_count;
    elsif tg_op = ''DELETE'' then
        insert into reactor.tombstones (tenant_id, source, source_id, version)
        select c.tenant, ' || p_source || ', c.id, nextval(''reactor.job_ids'') from (' || v_old || ') c where ' || v_key || ';
        ' || replace(v_jobs, '%s', 'nextval(''reactor.job_ids'')') || '(' || v_old || ') c where ' || v_key || ';
        get diagnostics v_jobs = row_count;
    else
        -- Which rows a partition lost nobody can tell any more: reconcile compares. A whole table lost all of them.
        if tg_argv[0] = ''whole'' and (select c.relkind = ''p'' or not c.relhassubclass from pg_class c where c.oid = tg_relid) then
            insert into reactor.tombstones (tenant_id, source, source_id, version)
            values ('''', ' || p_source || ', '''', nextval(''reactor.job_ids''));
        end if;
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
        values (''reconcile'', '''', ''upkeep'', ''source:' || p_source || ''', ''{"source": ' || p_source || ', "expected": true}'');
        v_jobs := 1;
    end if;
    ' || case when s.notify then 'if v_jobs > 0 then perform reactor.ring(); end if;' else '' end || '
    return null;
exception when others then
    raise warning ''reactor: a change of % was not recorded (SQLSTATE %); reactor.reconcile() finds it'', tg_relid::regclass, sqlstate;
    return null;
end
');

    execute format('revoke all on function reactor.%I, reactor.%I, reactor.%I, reactor.%I from public',
        v_name || '_written', v_name || '_rows', v_name || '_ids', v_name || '_page');
    execute format('grant execute on function reactor.%I, reactor.%I to %I', v_name || '_rows', v_name || '_ids', reactor.worker_role());
    if reactor.definer_role() <> current_user then
        execute format('grant create on schema reactor to %I', reactor.definer_role());
        execute format('alter function reactor.%I() owner to %I', v_name || '_written', reactor.definer_role());
        execute format('revoke create on schema reactor from %I', reactor.definer_role());
    end if;
end
$$;

-- Lets the worker read the mapped columns (and those of "when"), through row level security of the table's own too.
-- The policy stands even while the table has none, so that switching it on later hides nothing from us.
-- Returns the columns that "when" reads.
-- Errors: those of a condition that is none; 0A000 for one that holds a query; 42501 for one that calls what we may not.
create or replace function reactor.grant_source(p_source int) returns text[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.sources;
    v_columns text[];
    v_schemas text[];  -- of what the readers and the trigger name, quoted
    v_schema text;
    v_functions regprocedure[];
    v_role name;
    v_holds_query boolean;
    v_probe text := 'probe_' || pg_backend_pid();
begin
    select * into strict s from reactor.sources where id = p_source;
    -- A view knows what its condition reads; a subquery stands for the triggers' rows, which are not the table itself.
    begin
        execute format(E'create view reactor.%I as select 1 as one from %s as %I where (%s\n)', v_probe, s.relation, s.alias, coalesce(s.condition, 'true'));
        execute format(E'select from (select * from %s limit 0) as %I where (%s\n)', s.relation, s.alias, coalesce(s.condition, 'true'));
    exception when others then
        raise exception 'when => % is not a condition on the columns of %: %', quote_literal(s.condition), s.relation, sqlerrm
            using errcode = sqlstate;
    end;
    select r.ev_action::text like '%{SUBLINK %',
        array(select a.attname::text from pg_attribute a where a.attrelid = s.relation and a.attnum > 0 and not a.attisdropped
              and (r.ev_action::text like '%:varattno 0 %'  -- the row as a whole
                or exists (select from pg_depend d where d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
                    and d.refclassid = 'pg_class'::regclass and d.refobjid = s.relation and d.refobjsubid = a.attnum))),
        array(select d.refobjid::regprocedure from pg_depend d
              where d.classid = 'pg_rewrite'::regclass and d.objid = r.oid and d.refclassid = 'pg_proc'::regclass),
        array(select (pg_identify_object(d.refclassid, d.refobjid, 0)).schema from pg_depend d
              where d.classid = 'pg_rewrite'::regclass and d.objid = r.oid
              union select t.typnamespace::regnamespace::text from unnest(array[s.id_column, s.tenant_column]) c
              join pg_type t on t.oid = reactor.type_of(s.relation, c))
    into v_holds_query, v_columns, v_functions, v_schemas
    from pg_rewrite r where r.ev_class = to_regclass('reactor.' || v_probe);
    execute format('drop view reactor.%I', v_probe);
    if v_holds_query then
        raise exception 'when => % holds a query', quote_literal(s.condition)
            using errcode = '0A000', hint = 'a condition may use only the columns of its own table';
    end if;

    foreach v_role in array array[reactor.worker_role(), reactor.definer_role()] loop
        continue when v_role = current_user;
        foreach v_schema in array v_schemas loop
            if not has_schema_privilege(v_role, v_schema::regnamespace, 'usage') then
                execute format('grant usage on schema %s to %I', v_schema, v_role);
            end if;
        end loop;
        if not (select bool_and(has_function_privilege(v_role, f, 'execute')) from unnest(v_functions) f) then
            raise exception 'when => % calls a function that % may not', quote_literal(s.condition), v_role
                using errcode = '42501', hint = format('grant execute on function %s to %I', array_to_string(v_functions, ', '), v_role);
        end if;
    end loop;
    if reactor.worker_role() <> current_user then
        execute format('revoke select on %s from %I', s.relation, reactor.worker_role());
        execute format('grant select (%s) on %s to %I',
            (select string_agg(distinct quote_ident(c), ', ')
             from unnest(array[s.id_column, s.tenant_column, s.time_column, s.title_column, s.format_column, s.status_column,
                s.metrics_column, s.slides_column, s.role_column, s.conversation_column, s.agent_column, s.kind_column]
                || s.text_columns || s.metadata_columns || v_columns) as c where c is not null),
            s.relation, reactor.worker_role());
    end if;
    call reactor.put_policy(s.relation, 'reactor_reads',
        format('for select to %I using (%I::text = (select nullif(current_setting(''reactor.tenant_id'', true), '''')))',
            reactor.worker_role(), s.tenant_column));
    perform reactor.grant_tokens(s.relation);  -- what was revoked above, where its tokens are in care
    return v_columns;
end
$$;

-- Makes a source work: grants, functions, triggers; then reads it once as the worker will.
-- Errors: what reading a row raises, with the table named.
create or replace function reactor.install_source(p_source int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_before text[];
    v_relation regclass := (select relation from reactor.sources where id = p_source);
begin
    perform reactor.compile_source(p_source, reactor.grant_source(p_source));
    perform reactor.place_triggers(p_source);
    begin
        v_before := reactor.enter_tenant('-');
        perform reactor.source_rows(p_source, null, '{}'), reactor.source_ids(p_source, null, '{}');
        perform reactor.leave_tenant(v_before);
        execute format('select from reactor.%I(null, null, 0)', format('source_%s_page', p_source));
    exception
        when insufficient_privilege then
            raise exception '% cannot be read by %: %', v_relation, reactor.worker_role(), sqlerrm using errcode = sqlstate,
                hint = format('a row level security policy of its own uses what %I may not: grant it, or give the policy a role', reactor.worker_role());
        when others then
            raise exception '% cannot be read as mapped: %', v_relation, sqlerrm using errcode = sqlstate;
    end;
end
$$;

-- Installs every source anew, after a migration. One whose table no longer fits its mapping stays as it is, with a warning.
create or replace function reactor.renew_sources() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    s reactor.sources;
begin
    for s in select * from reactor.sources where reactor.is_readable(id) order by id loop
        begin
            perform reactor.install_source(s.id);
        exception when others then
            raise warning 'reactor: source % needs to be attached again: %', s.relation, sqlerrm;
        end;
    end loop;
end
$$;

-- Nothing, for a table that can carry our triggers and belongs to the caller. p_is_ours: it may stand in our own schema.
-- Errors, each one clear line: 22004 no table, 42809 not a real or a whole one, 42501 not theirs.
create or replace function reactor.check_table(p_relation regclass, p_is_ours boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_class pg_class;
    v_schema name;
    v_owner name;
    v_other regclass;
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
    select r into v_other from reactor.relations_of(p_relation) r join pg_class c on c.oid = r where c.relkind = 'f' limit 1;
    if found then
        raise exception '% has a partition or child that is a foreign table (%) and cannot be attached', p_relation, v_other
            using errcode = '42809', hint = 'Postgres has no triggers with transition tables for it';
    end if;
    select inhparent into v_other from pg_inherits where inhrelid = p_relation limit 1;
    if found then
        raise exception '% is a partition or child of % and cannot be attached alone', p_relation, v_other
            using errcode = '42809', hint = format('what is written through %s fires no trigger here: attach %1$s', v_other);
    end if;
    select pg_get_userbyid(nspowner) into v_owner from pg_namespace where nspname = 'reactor';
    if current_user <> v_owner then
        raise exception 'schema reactor belongs to %: attach as that role', v_owner using errcode = '42501';
    end if;
    if v_schema in ('pg_catalog', 'information_schema') or (v_schema = 'reactor' and not p_is_ours) then
        raise exception '% is not a producer''s table', p_relation using errcode = '42501';
    end if;
    if not pg_has_role(current_user, v_class.relowner, 'usage') then
        raise exception '% belongs to %: only its owner (or a member) can attach it', p_relation, pg_get_userbyid(v_class.relowner)
            using errcode = '42501', hint = format('grant %I to %I, or attach as %1$I', pg_get_userbyid(v_class.relowner), current_user);
    end if;
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
    v_alias name := (select relname from pg_class where oid = p_relation);
    v_other regclass;
    v_column text;
    v_argument text;
    v_since timestamptz := clock_timestamp();
    v_old reactor.sources;
    v_new reactor.sources;
begin
    perform reactor.check_table(p_relation, p_kind_column is not null);
    select s.relation into v_other from reactor.sources s join reactor.relations_of(p_relation) r on s.relation = r
    where s.relation <> p_relation and s.detached_at is null limit 1;
    if found then
        raise exception '% is attached already, and a partition or child of %', v_other, p_relation
            using errcode = '42809', hint = format('reactor.detach(%L) first', v_other);
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
    select a, c into v_argument, v_column
    from (select 'text_columns', c from unnest(p_text) c
        union all select 'metadata_columns', c from unnest(p_metadata) c
        union all values ('tenant_column', p_tenant), ('id_column', p_id)
        union all select * from (values ('time_column', p_time), ('title_column', p_title), ('format_column', p_format),
            ('status_column', p_status), ('metrics_column', p_metrics), ('slides_column', p_slides), ('role_column', p_role),
            ('conversation_column', p_conversation), ('agent_column', p_agent), ('kind_column', p_kind_column)) as optional (a, c)
            where c is not null) as mapped (a, c)
    where not exists (select from pg_attribute where attrelid = p_relation and attname = c and attnum > 0 and not attisdropped) limit 1;
    if found then
        raise exception 'table % has no column %', p_relation, coalesce(quote_ident(v_column), 'null')
            using errcode = '42703', hint = format('%s => ... names the column; its columns are: %s', v_argument,
                (select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
                 where attrelid = p_relation and attnum > 0 and not attisdropped));
    end if;
    if p_time is not null and reactor.type_of(p_relation, p_time) not in ('timestamptz'::regtype, 'timestamp'::regtype, 'date'::regtype) then
        raise exception 'column % of % is a %, not a date or a timestamp', quote_ident(p_time), p_relation,
            format_type(reactor.type_of(p_relation, p_time), null)
            using errcode = '42804', hint = 'time_column => null when the table has none';
    end if;
    if reactor.type_of(p_relation, p_time) = 'date'::regtype then
        v_since := date_trunc('day', v_since, 'UTC');
    end if;
    select * into v_old from reactor.sources where relation = p_relation;
    insert into reactor.sources (relation, alias, kind, text_columns, tenant_column, id_column, embed, language, notify, expected_since)
    values (p_relation, v_alias, p_kind, p_text, p_tenant, p_id, p_embed, p_language, true, v_since)
    on conflict (relation) do nothing;
    update reactor.sources
    set alias = v_alias, kind = p_kind, text_columns = p_text, tenant_column = p_tenant, id_column = p_id, time_column = p_time,
        title_column = p_title, format_column = p_format, status_column = p_status, metrics_column = p_metrics, slides_column = p_slides,
        metadata_columns = coalesce(p_metadata, '{}'), role_column = p_role, conversation_column = p_conversation, agent_column = p_agent,
        kind_column = p_kind_column, condition = nullif(btrim(p_when), ''), embed = p_embed, language = p_language,
        notify = coalesce(p_notify, true), expected_since = case when p_backfill then null else expected_since end, detached_at = null
    where relation = p_relation returning * into v_new;
    perform reactor.install_source(v_new.id);
    -- Rows that are to be there, and rows that read otherwise than before.
    if p_backfill or v_old.id is not null and v_old is distinct from v_new then
        perform reactor.enqueue_job('reconcile', jsonb_build_object('source', v_new.id, 'expected', true), '', format('source:%s', v_new.id), null, 'upkeep', 5);
    end if;
    return v_new.id;
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
    v_relation regclass;
    v_name name;
    v_role name;
begin
    update reactor.sources set detached_at = now() where relation = p_relation and detached_at is null returning id into v_source;
    if not found then
        return false;
    end if;
    -- By function, not by table: a partition may have left the table meanwhile.
    for v_relation, v_name in
        select tgrelid::regclass, tgname from pg_trigger where tgfoid = to_regproc(format('reactor.source_%s_written', v_source))
    loop
        execute format('drop trigger %I on %s', v_name, v_relation);
    end loop;
    if exists (select from pg_policy where polrelid = p_relation and polname = 'reactor_reads') then
        execute format('drop policy reactor_reads on %s', p_relation);
    end if;
    select n.nspname into v_name from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = p_relation;
    if found then
        foreach v_role in array array[reactor.worker_role(), reactor.definer_role()] loop
            continue when v_role = current_user;
            execute format('revoke select on %s from %I', p_relation, v_role);
            if exists (
                select from pg_namespace n, aclexplode(n.nspacl) a
                where n.nspname = v_name and a.grantee = v_role::regrole and pg_has_role(current_user, a.grantor, 'usage')
                    and n.nspname <> 'reactor' and not exists (
                        select from reactor.sources s join pg_class c on c.oid = s.relation
                        where s.detached_at is null and c.relnamespace = n.oid))
            then
                execute format('revoke usage on schema %I from %I', v_name, v_role);
            end if;
        end loop;
        perform reactor.grant_tokens(p_relation);
    end if;
    execute format('drop function if exists reactor.%I, reactor.%I, reactor.%I, reactor.%I', format('source_%s_written', v_source),
        format('source_%s_rows', v_source), format('source_%s_ids', v_source), format('source_%s_page', v_source));
    return true;
end
$$;

-- Takes our triggers, policy and grants off a table; its memories stay. False when it was not attached.
create or replace function reactor.detach(source regclass) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$ select reactor.detach_source($1) $$;

-- Whether a source can be read at all: it is attached and its table is still there.
create or replace function reactor.is_readable(p_source int) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select exists (select from reactor.sources s join pg_class c on c.oid = s.relation where s.id = $1 and s.detached_at is null)
$$;

-- The current rows of a source by id, as its mapping sees them; rows that are gone or outside "when" are missing.
-- An empty set also for a source that is detached, or whose table was dropped.
create or replace function reactor.source_rows(p_source int, p_tenant text, p_ids text[])
returns table (source_id text, kind text, content text, occurred_at timestamptz, metadata jsonb, row_hash bytea)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if reactor.is_readable(p_source) then
        return query execute format('select * from reactor.%I($1, $2)', format('source_%s_rows', p_source)) using p_tenant, p_ids;
    end if;
end
$$;

-- Which of the given ids source_rows would return.
create or replace function reactor.source_ids(p_source int, p_tenant text, p_ids text[]) returns setof text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if reactor.is_readable(p_source) then
        return query execute format('select * from reactor.%I($1, $2)', format('source_%s_ids', p_source)) using p_tenant, p_ids;
    end if;
end
$$;
