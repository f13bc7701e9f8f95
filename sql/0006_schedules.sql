-- Recurring jobs, and the look a minute for what must not fail silently.
--
-- A schedule's next_at is its next tick; whoever moves it to the one after enqueues the job, in one statement, so that each
-- tick runs once however many reactors there are. null: to be computed, for a reactor knows cron and Postgres does not.

create table if not exists reactor.schedules (
    name text primary key check (length(name) between 1 and 200 and octet_length(name) <= 470),  -- part of a dedupe key
    type text not null check (length(type) between 1 and 200),    -- of the job
    cron text not null,                       -- minute hour day-of-month month day-of-week, or @hourly, @daily, ...
    timezone text not null default 'UTC',     -- of these, daylight saving included
    payload jsonb not null default '{}' check (jsonb_typeof(payload) = 'object'),
    tenant_id text not null default '' check (length(tenant_id) <= 200),
    lane text check (length(lane) <= 200),
    missed text not null default 'once' check (missed in ('once', 'skip', 'all')),  -- ticks that no reactor saw
    is_enabled boolean not null default true,
    next_at timestamptz check (next_at between '0001-01-03' and '9999-12-30'),
    last_at timestamptz check (last_at between '0001-01-03' and '9999-12-30'),  -- the last tick that was run
    error text,                               -- why it has no next tick
    created_at timestamptz not null default now()
);
call reactor.protect('reactor.schedules', 'registry');

create or replace function reactor.schedule_written() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if tg_level = 'ROW' then
        if (new.cron, new.timezone, new.is_enabled) is distinct from (old.cron, old.timezone, old.is_enabled) then
            new.next_at := null;
            new.error := null;
        end if;
        return new;
    end if;
    perform pg_notify('reactor_schedules', '');
    return null;
end
$$;
do $$
begin
    if not exists (select from pg_trigger where tgrelid = 'reactor.schedules'::regclass and tgname = 'reactor_changed') then
        create trigger reactor_changed before update on reactor.schedules for each row execute function reactor.schedule_written();
        create trigger reactor_told after insert or delete or update of cron, timezone, is_enabled on reactor.schedules
            for each statement execute function reactor.schedule_written();
    end if;
end
$$;

-- Moves a schedule from the tick p_expected on to p_next and enqueues a job for each of p_ticks. False when it is no
-- longer as p_cron, p_timezone and p_expected say: another reactor was first, or somebody changed it, or holds it in a
-- transaction, which the other schedules do not wait for.
create or replace function reactor.fire_schedule(
    p_name text, p_cron text, p_timezone text, p_expected timestamptz, p_next timestamptz, p_ticks timestamptz[]
) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.schedules;
    v_tick timestamptz;
begin
    update reactor.schedules set next_at = p_next, last_at = coalesce(p_ticks[cardinality(p_ticks)], last_at), error = null
    where name = (
        select name from reactor.schedules
        where name = p_name and cron = p_cron and timezone = p_timezone and is_enabled and next_at is not distinct from p_expected
        for update skip locked)
    returning * into s;
    if not found then
        return false;
    end if;
    foreach v_tick in array p_ticks loop
        -- Runs of one schedule never overlap: they share a key. Unless every tick is owed a run of its own.
        perform reactor.enqueue_job(s.type, s.payload || jsonb_build_object('scheduled_for', v_tick), s.tenant_id,
            'schedule:' || s.name || case when s.missed = 'all' then '@' || extract(epoch from v_tick)::bigint else '' end, null, s.lane, 5);
    end loop;
    return true;
end
$$;

-- Notes that a schedule's cron expression or time zone is none; true when that is news. Nothing once they were changed.
create or replace function reactor.refuse_schedule(p_name text, p_cron text, p_timezone text, p_error text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    update reactor.schedules set error = p_error, next_at = null
    where name = (
        select name from reactor.schedules
        where name = p_name and cron = p_cron and timezone = p_timezone and is_enabled and error is distinct from p_error
        for update skip locked);
    return exists (select from reactor.schedules where name = p_name and is_enabled and error = p_error)
        and not exists (select from reactor.alerts where cause = 'bad_schedule' and subject = p_name and resolved_at is null)
        and reactor.open_alert('bad_schedule', p_name, jsonb_build_object('error', p_error));
end
$$;

-- Closes the alerts of schedules that are in order again, or off, renamed or gone; returns their names.
create or replace function reactor.resolve_mended_schedules() returns setof text
language sql
set search_path = pg_catalog, pg_temp
as $$
    update reactor.alerts a set resolved_at = now()
    where a.cause = 'bad_schedule' and a.resolved_at is null
        and not exists (select from reactor.schedules s where s.name = a.subject and s.is_enabled and s.error is not null)
    returning a.subject
$$;

-- Owes a look at every source and every token p_every from now, unless one is owed already.
create or replace function reactor.owe_reconcile(p_every interval) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
    select reactor.enqueue_job(t, '{}', '', 'all', now() + $1, 'upkeep', 5) from unnest('{reconcile, reconcile_tokens}'::text[]) t
    where not exists (select from reactor.jobs
        where tenant_id = '' and type = t and dedupe_key = 'all' and status in ('pending', 'failed'))
$$;

-- The reactors that said so of late, and how they hear of work (reactor.check_health). What sessions are called says it
-- sooner, but not behind a transaction pooler.
create table if not exists reactor.reactors (
    name text primary key,
    host text not null,
    listener text not null check (listener in ('listening', 'polling', 'down')),
    reason text not null,       -- why it does not listen
    is_deaf boolean not null,   -- for so long that a person should know
    until timestamptz not null  -- unless it says so again, it is gone
);
call reactor.protect('reactor.reactors', 'registry');

-- Opens and closes the alerts of what stands still: types with a job due for longer than p_stuck (nobody handles it, or
-- too much waits), lanes whose dependency has been away for long (p_away; p_well are in order), hosts with a reactor that
-- has heard no notifications for long (p_is_deaf, p_reason). Returns what is news.
create or replace function reactor.check_health(
    p_name text, p_host text, p_listener text, p_reason text, p_is_deaf boolean, p_away text[], p_well text[], p_stuck interval,
    p_until interval
) returns table (event text, cause text, subject text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_wrong jsonb;
begin
    insert into reactor.reactors values (p_name, p_host, p_listener, p_reason, p_is_deaf, now() + p_until)
    on conflict (name) do update
    set listener = excluded.listener, reason = excluded.reason, is_deaf = excluded.is_deaf, until = excluded.until;
    delete from reactor.reactors where name in (
        select name from reactor.reactors where until < now() for update skip locked);
    select coalesce(jsonb_object_agg(w.cause || ' ' || w.subject, w.detail), '{}') into v_wrong from (
        select 'stuck_jobs' as cause, j.type as subject, jsonb_build_object('jobs', count(*), 'oldest', min(j.run_after)) as detail
        from (
            select w.type, w.run_after from reactor.jobs w
            where w.status in ('pending', 'failed') and w.run_after <= w.updated_at and not w.is_suspect and w.run_after < now() - p_stuck
            union all
            select w.type, w.run_after from reactor.jobs w
            where w.is_suspect and w.status in ('pending', 'failed') and w.run_after < now() - p_stuck
        ) j
        group by j.type
        union all select 'lane_away', l, '{}' from unnest(p_away) l
        union all select 'listener_lost', r.host, jsonb_build_object('listener', min(r.listener), 'reason', min(r.reason))
        from reactor.reactors r where r.is_deaf group by r.host
    ) w;
    return query
    select 'alert_opened', split_part(w.key, ' ', 1), substr(w.key, strpos(w.key, ' ') + 1) from jsonb_each(v_wrong) w
    where reactor.open_alert(split_part(w.key, ' ', 1), substr(w.key, strpos(w.key, ' ') + 1), w.value);
    return query
    update reactor.alerts a set resolved_at = now()
    where a.resolved_at is null and not v_wrong ? (a.cause || ' ' || a.subject)
        and (a.cause in ('stuck_jobs', 'listener_lost') or a.cause = 'lane_away' and a.subject = any (p_well))
    returning 'alert_resolved', a.cause, a.subject;
end
$$;
