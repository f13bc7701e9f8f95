-- Roles, the tenant's scope, and how every table of ours is protected.
--
-- reactor_worker   nologin; every statement on tenants' rows runs as it, in one transaction scoped to one tenant.
-- reactor_definer  nologin; owns the trigger functions and may only insert jobs, tombstones and rejected rows.
-- Where migrate may not create them (or another owner of this cluster did), the schema's owner plays both parts under
-- the same forced policies. `@extschema:vector@` stands for the schema that holds pgvector: migrate fills it in.

-- Roles belong to the cluster: two databases may migrate at once, and each may find the other's half-made.
do $$
declare
    v_role text;
    v_is_16 boolean := current_setting('server_version_num')::int >= 160000;  -- where SET is a privilege of its own
    v_is_safe boolean;
    v_usable boolean;
    v_part name;
begin
    foreach v_role in array array['reactor_worker', 'reactor_definer'] loop
        v_part := v_role;
        for v_try in 1 .. 20 loop
            begin
                if not exists (select from pg_roles where rolname = v_role) then
                    execute format('create role %I nologin nobypassrls', v_role);
                end if;
                if not pg_has_role(current_user, v_role, 'usage') then
                    execute format('grant %I to current_user %s', v_role, case when v_is_16 then 'with inherit true, set true' end);
                elsif v_is_16 and not pg_has_role(current_user, v_role, 'set') then
                    execute format('grant %I to current_user with set true', v_role);
                end if;
                exit;
            exception
                when insufficient_privilege then exit;
                when duplicate_object or unique_violation or internal_error then
                    if v_try = 20 then raise; end if;
                    perform pg_sleep(0.05);
            end;
        end loop;
        select not (rolsuper or rolbypassrls or rolcanlogin), pg_has_role(current_user, oid, 'usage')
            and case when v_is_16 then pg_has_role(current_user, oid, 'set') else true end
        into v_is_safe, v_usable from pg_roles where rolname = v_role;  -- nulls: there is no such role
        if not v_is_safe then
            raise exception 'role % exists and could log in or pass by row level security', v_role
                using errcode = '42501', hint = format('alter role %I nologin nosuperuser nobypassrls', v_role);
        end if;
        if v_usable is not true and (select rolsuper or rolbypassrls from pg_roles where rolname = current_user) then
            raise exception '% passes by row level security and cannot become %, which does not', current_user, v_role
                using errcode = '42501', hint = format('as an administrator: create role %I nologin (unless it exists), grant %1$I to %I',
                    v_role, current_user);
        end if;
        if v_usable is not true then
            raise warning '% may not be made or used here: % plays its part too, under the same policies', v_role, current_user;
            v_part := current_user;
        end if;
        -- reactor.worker_role() and reactor.definer_role()
        execute format('create or replace function reactor.%I() returns name language sql immutable '
            'set search_path = pg_catalog, pg_temp as $f$ select %L::name $f$', substr(v_role, 9) || '_role', v_part);
        execute format('grant usage on schema reactor to %I', v_part);
    end loop;
end
$$;

-- Producers would stand in line behind a migration that waits for a long transaction: it gives up instead.
set local lock_timeout = '1s';

-- The tenant this transaction is scoped to; null outside a scope, which matches no row.
create or replace function reactor.scope() returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$ select nullif(current_setting('reactor.tenant_id', true), '') $$;

-- Makes the rest of the transaction (or of the calling function, see leave_tenant) the worker's, scoped to one tenant.
-- Returns what leave_tenant needs. Errors: 42501 when already scoped to another tenant.
create or replace function reactor.enter_tenant(p_tenant text) returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_before text[] := array[coalesce(current_setting('reactor.tenant_id', true), ''), current_setting('role')];
begin
    if coalesce(p_tenant, '') = '' then
        raise exception 'a tenant is needed' using errcode = '22023';
    end if;
    if current_user = reactor.worker_role() and v_before[1] not in ('', p_tenant) then
        raise exception 'this transaction is scoped to another tenant' using errcode = '42501';
    end if;
    perform set_config('reactor.tenant_id', p_tenant, true);
    if current_user <> reactor.worker_role() then
        perform set_config('role', reactor.worker_role(), true);
    end if;
    return v_before;
end
$$;

create or replace function reactor.leave_tenant(p_before text[]) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    perform set_config('role', p_before[2], true), set_config('reactor.tenant_id', p_before[1], true);
end
$$;

-- Gives a table a policy; p_rest is what follows `create policy name on table`, kept as its comment. Nothing, and no lock,
-- where it has that very policy: producers do not wait for a migration that finds everything in place.
create or replace procedure reactor.put_policy(p_table regclass, p_name text, p_rest text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if exists (select from pg_policy where polrelid = p_table and polname = p_name and obj_description(oid, 'pg_policy') = p_rest) then
        return;
    end if;
    execute format('drop policy if exists %I on %s', p_name, p_table);
    execute format('create policy %I on %s %s', p_name, p_table, p_rest);
    execute format('comment on policy %I on %s is %L', p_name, p_table, p_rest);
end
$$;

-- Makes an index unless it is there; `create index if not exists` would first lock producers out, and then look.
create or replace procedure reactor.put_index(p_index text, p_statement text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if to_regclass(p_index) is null then
        execute p_statement;
    end if;
end
$$;

-- Row level security, enabled and forced, with the policies of its class:
--   queue     ids and numbers: the owner sees all rows, the worker its tenant's, the definer may insert
--   content   tenants' text and vectors: the worker sees its tenant's, and nobody anything else
--   registry  what belongs to no tenant: the owner only
create or replace procedure reactor.protect(p_table regclass, p_class text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if not (select relrowsecurity and relforcerowsecurity from pg_class where oid = p_table) then
        execute format('alter table %s enable row level security, force row level security', p_table);
    end if;
    if p_class in ('queue', 'content') then
        call reactor.put_policy(p_table, 'reactor_scope', format('to %I using (tenant_id = (select reactor.scope())) '
            'with check (tenant_id = (select reactor.scope()))', reactor.worker_role()));
    end if;
    if p_class in ('queue', 'registry') then
        call reactor.put_policy(p_table, 'reactor_owner', format('to %I using (true) with check (true)', current_user));
    end if;
    if p_class = 'queue' then
        call reactor.put_policy(p_table, 'reactor_definer', format('for insert to %I with check (true)', reactor.definer_role()));
    end if;
end
$$;

-- One row a file of sql/ that this database has taken.
create table if not exists reactor.migrations (
    number int primary key,
    name text not null,
    checksum text not null,
    release text not null,
    applied_at timestamptz not null default now()
);
call reactor.protect('reactor.migrations', 'registry');

-- Letters as they are compared: lower case, without accents. Immutable, so that an index may hold its result.
create or replace function reactor.fold(p_text text) returns text
language sql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
as $$ select regexp_replace(lower(normalize(p_text, nfkd)), '[\u0300-\u036f]', '', 'g') $$;

-- What a person must see to: one open row a cause, subject and tenant ('': the operator's own, which no tenant sees).
--   open --(cured)--> resolved
-- Its news are what a webhook is owed: that it opened, that its detail's `threshold` is another, that it was resolved.
-- Whoever closes a row by whatever statement owes the last of them: `owes` is reckoned, not kept.
create table if not exists reactor.alerts (
    id bigint generated always as identity primary key,
    cause text not null,
    subject text not null default '',
    detail jsonb not null default '{}',
    occurrences bigint not null default 1,
    opened_at timestamptz not null default now(),
    seen_at timestamptz not null default now(),
    resolved_at timestamptz,
    tenant_id text not null default '',
    news bigint not null default 1,                -- the occurrence at which it last became news
    told bigint not null default 0,                -- the news last told; its end is news + 1
    failures int not null default 0,               -- of telling what is owed, in a row
    tell_at timestamptz not null default now(),    -- when what is owed is tried (again), or the end of the teller's lease
    owes bigint generated always as (news + (resolved_at is not null)::int - told) stored  -- something, when positive
);
do $$
begin
    if not exists (select from pg_attribute where attrelid = 'reactor.alerts'::regclass and attname = 'owes') then  -- of an earlier release
        alter table reactor.alerts
            add column tenant_id text not null default '', add column news bigint not null default 1,
            add column told bigint not null default 0, add column failures int not null default 0,
            add column tell_at timestamptz not null default now();
        alter table reactor.alerts
            add column owes bigint generated always as (news + (resolved_at is not null)::int - told) stored;
        drop index reactor.alerts_open;
        drop function reactor.open_alert(text, text, jsonb), reactor.resolve_alert(text, text);
    end if;
end
$$;
call reactor.put_index('reactor.alerts_open',
    $$create unique index alerts_open on reactor.alerts (cause, subject, tenant_id) where resolved_at is null$$);
call reactor.put_index('reactor.alerts_owed', $$create index alerts_owed on reactor.alerts (tell_at, id) where owes > 0$$);
call reactor.protect('reactor.alerts', 'registry');
call reactor.put_policy('reactor.alerts', 'reactor_scope', format('to %I using (tenant_id = (select reactor.scope())) '
    'with check (tenant_id = (select reactor.scope()))', reactor.worker_role()));

-- The webhook as all reactors know it: one row, from the first one on that has an address.
create table if not exists reactor.alert_webhook (
    is_it boolean primary key default true check (is_it),
    seen_at timestamptz not null,                  -- when a reactor had one, to the hour
    is_away boolean not null default false         -- what was tried for the first time failed, and nothing was told since
);
call reactor.protect('reactor.alert_webhook', 'registry');

create or replace function reactor.alert_owes() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_notification_queue_usage() < 0.9 then  -- as in reactor.ring
        perform pg_notify('reactor_alerts', '');
    end if;
    return null;
end
$$;
do $$
begin
    if not exists (select from pg_trigger where tgrelid = 'reactor.alerts'::regclass and tgname = 'reactor_opened') then
        create trigger reactor_opened after insert on reactor.alerts for each row execute function reactor.alert_owes();
        create trigger reactor_owes after update on reactor.alerts for each row when (new.owes > old.owes)
            execute function reactor.alert_owes();
    end if;
end
$$;

-- Opens an alert of a tenant ('': the operator's own), or counts one more occurrence of the open one. True when that is
-- news: it is new, or its detail's `threshold` is another than before.
create or replace function reactor.open_alert(p_cause text, p_subject text, p_detail jsonb default '{}', p_tenant text default '')
returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    insert into reactor.alerts as a (cause, subject, detail, tenant_id) values ($1, $2, $3, $4)
    on conflict (cause, subject, tenant_id) where resolved_at is null
    do update set occurrences = a.occurrences + 1, seen_at = now(), detail = excluded.detail,
        news = case when a.detail -> 'threshold' is distinct from excluded.detail -> 'threshold' then a.occurrences + 1 else a.news end
    returning occurrences = news
$$;

-- Closes the open alert of a cause and subject, of a tenant or (null) whosever; true when there was one.
create or replace function reactor.resolve_alert(p_cause text, p_subject text, p_tenant text default null) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    with closed as (
        update reactor.alerts set resolved_at = now()
        where cause = $1 and subject = $2 and (tenant_id = $3 or $3 is null) and resolved_at is null
        returning id
    )
    select exists (select from closed)
$$;

-- Says that a reactor has a webhook. Where none had one for a day, what was over before is told to nobody.
create or replace function reactor.expect_webhook() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_seen_at timestamptz := (select seen_at from reactor.alert_webhook);
begin
    if v_seen_at > now() - interval '1 h' then
        return;
    end if;
    if v_seen_at is null or v_seen_at < now() - interval '1 d' then
        update reactor.alerts set told = news + 1 where resolved_at is not null and told = 0;
    end if;
    insert into reactor.alert_webhook (seen_at) values (now()) on conflict (is_it) do update set seen_at = excluded.seen_at;
end
$$;

-- Leases the alert whose news has been due for longest to a teller, who must have done with it within p_lease; an earlier
-- alert of the same must have been told to its end. One row: the news and its stable key; or, with a null id, the seconds
-- until it is worth a look (null: nothing is owed).
create or replace function reactor.claim_alert(p_lease interval)
returns table (
    id bigint, event text, news bigint, key text, leased_until timestamptz, wait_s float8,
    cause text, subject text, tenant_id text, detail jsonb, opened_at timestamptz, resolved_at timestamptz, occurrences bigint
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    a reactor.alerts;
    v_news bigint;
begin
    for a in
        select o.* from reactor.alerts o
        where o.owes > 0 and not exists (
            select from reactor.alerts e
            where e.owes > 0 and e.cause = o.cause and e.subject = o.subject and e.tenant_id = o.tenant_id and e.id < o.id)
        order by o.tell_at, o.id
    loop
        if a.tell_at > now() then
            wait_s := least(wait_s, extract(epoch from a.tell_at - now()));
            exit;
        end if;
        update reactor.alerts u set tell_at = now() + p_lease
        where u.id = (select l.id from reactor.alerts l where l.id = a.id and l.tell_at = a.tell_at and l.owes > 0 for update skip locked)
        returning u.* into a;
        if found then
            v_news := case when a.told < a.news then a.news else a.news + 1 end;
            return query
            select a.id, case when a.told < a.news then 'alert_opened' else 'alert_resolved' end, v_news,
                format('%s-alert-%s-%s', left(i.id::text, 8), a.id, v_news), a.tell_at, null::float8,
                a.cause, a.subject, a.tenant_id, a.detail, a.opened_at, case when a.told >= a.news then a.resolved_at end, a.occurrences
            from reactor.instance i;
            return;
        end if;
        wait_s := 1;  -- somebody holds it: for an instant, or in a transaction of theirs
    end loop;
    return next;
end
$$;

-- The webhook has taken this news.
create or replace function reactor.alert_told(p_id bigint, p_news bigint) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    update reactor.alerts set told = greatest(told, $2), failures = 0, tell_at = now() where id = $1;
    update reactor.alert_webhook set is_away = false where is_away;
$$;

-- The webhook has not taken what was leased until then: tries again after 5 s, 30 s, 2 min, 10 min, and every hour, and
-- not before p_least_s. True where that begins an outage.
create or replace function reactor.alert_not_told(p_id bigint, p_leased_until timestamptz, p_least_s float8) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_failures int;
begin
    update reactor.alerts set failures = failures + 1,
        tell_at = now() + make_interval(secs => greatest((array[5, 30, 120, 600, 3600])[least(failures + 1, 5)], p_least_s))
    where id = p_id and tell_at = p_leased_until  -- another may hold it by now
    returning failures into v_failures;
    if v_failures is distinct from 1 then
        return false;
    end if;
    update reactor.alert_webhook set is_away = true where not is_away;
    return found;
end
$$;
