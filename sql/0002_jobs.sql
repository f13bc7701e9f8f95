-- The queue: one row of work owed.
--
--             claim                 done
--   pending ----------> running ----------> done
--      ^  ^               | | |
--      |  +---- snooze ---+ | +-- last attempt, no use in trying, or snoozed for too long --> dead
--      |                    v                                                                  |
--      +-- (due) ------- failed      waiting = pending or failed           pending <-- retry --+
--
-- Triggers only insert. Waiting jobs are unconstrained; the claim collapses twins (same tenant, type, dedupe key):
-- the due one with the lowest id runs, with the newest payload, and absorbs every waiting twin it sees.
-- A waiting job is *ready* when it was last touched at or after its run_after; only ready ones stand in the index that the
-- claim walks, tenant by tenant. One for later stands in another, where the next timer is read, until the claim that finds
-- it due touches it.

create sequence if not exists reactor.job_ids;

create table if not exists reactor.jobs (
    id bigint primary key default nextval('reactor.job_ids'),
    type text collate "C" not null,
    tenant_id text collate "C" not null,    -- '' for work that belongs to no tenant
    lane text collate "C" not null check (lane <> ''),
    dedupe_key text collate "C",
    payload jsonb not null default '{}',
    status text not null default 'pending' check (status in ('pending', 'running', 'failed', 'done', 'dead')),
    attempts int not null default 0,    -- claims that count; a snooze gives its one back
    max_attempts int not null default 5,
    run_after timestamptz not null default now(),
    version bigint not null default 0,  -- the highest job id absorbed by the last claim
    locked_at timestamptz,
    locked_by text,
    lease_until timestamptz,
    claim_token uuid,                   -- one a claim; null unless running, so that it alone fences what a late worker writes
    is_suspect boolean not null default false,  -- its lease ran out: it may have killed its worker, so it runs alone
    snoozed_since timestamptz,          -- set while it does nothing but snooze
    result jsonb,
    last_error text,
    history jsonb,                      -- its last 20 attempts that failed and retries, oldest first: codes, no text of anybody's
    notes jsonb not null default '{}',
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);

do $$  -- of a release before lanes and turns
begin
    if exists (select from pg_attribute where attrelid = 'reactor.jobs'::regclass and attname = 'tenant_id' and attcollation <> '"C"'::regcollation) then
        drop index if exists reactor.jobs_due, reactor.jobs_leases, reactor.jobs_ended;
        drop policy reactor_scope on reactor.jobs;  -- names the column; protect, below, puts it back
        update reactor.jobs set lane = type where lane = '';
        alter table reactor.jobs alter type type text collate "C", alter tenant_id type text collate "C",
            alter lane type text collate "C", add check (lane <> ''), alter dedupe_key type text collate "C",
            add snoozed_since timestamptz, add history jsonb;
        drop function reactor.next_due_s(text[]), reactor.complete_jobs(bigint[], uuid[], jsonb[]), reactor.release_expired_jobs(timestamptz),
            reactor.hold_claims(bigint[], uuid[]), reactor.claim_jobs(text[], int[], text, interval, int[], timestamptz),
            reactor.settle_jobs(bigint[], uuid[], text[], jsonb[], text[], float8[], timestamptz);
    end if;
end
$$;

call reactor.put_index('reactor.jobs_ready', $$create index jobs_ready on reactor.jobs (type, lane, tenant_id, run_after, id) include (status) where status in ('pending', 'failed') and run_after <= updated_at and not is_suspect$$);
call reactor.put_index('reactor.jobs_later', $$create index jobs_later on reactor.jobs (run_after, id) include (status) where status in ('pending', 'failed') and run_after > updated_at$$);
call reactor.put_index('reactor.jobs_suspects', $$create index jobs_suspects on reactor.jobs (type, run_after, id) where is_suspect and status in ('pending', 'failed')$$);
call reactor.put_index('reactor.jobs_waiting_twins', $$create index jobs_waiting_twins on reactor.jobs (tenant_id, type, dedupe_key, id) where status in ('pending', 'failed') and dedupe_key is not null$$);
call reactor.put_index('reactor.jobs_running_once', $$create unique index jobs_running_once on reactor.jobs (tenant_id, type, dedupe_key) where status = 'running'$$);
call reactor.put_index('reactor.jobs_done', $$create index jobs_done on reactor.jobs (updated_at) where status = 'done'$$);
call reactor.put_index('reactor.jobs_dead', $$create index jobs_dead on reactor.jobs (tenant_id, type, dedupe_key) where status = 'dead'$$);

call reactor.protect('reactor.jobs', 'queue');

-- What ended in each minute, a row a settling backend: backends never wait for each other here.
create table if not exists reactor.job_minutes (
    minute timestamptz not null,
    backend int not null default pg_backend_pid(),
    done bigint not null,
    dead bigint not null,
    primary key (minute, backend)
) with (fillfactor = 50);
call reactor.protect('reactor.job_minutes', 'registry');
insert into reactor.job_minutes (minute, done, dead)  -- of a release that did not count
select date_trunc('minute', updated_at), count(*) filter (where status = 'done'), count(*) filter (where status = 'dead')
from reactor.jobs where status in ('done', 'dead') and updated_at > now() - interval '25 h' and not exists (select from reactor.job_minutes)
group by 1;
do $$
begin
    call reactor.put_policy('reactor.job_minutes', 'reactor_counts', format('to %I using (true) with check (true)', reactor.worker_role()));
end
$$;

-- This database among others: part of every job's key.
create table if not exists reactor.instance (
    id uuid not null default gen_random_uuid(),
    is_only boolean primary key default true check (is_only)
);
call reactor.protect('reactor.instance', 'registry');
insert into reactor.instance default values on conflict do nothing;

-- Wakes a sleeping reactor; says nothing, and takes no part in NOTIFY's commit lock, while none sleeps. A reactor sleeps
-- holding this lock alone (arm); a producer that stays silent holds it shared until its commit can be seen. Proven in
-- tests/wake_model.py; the payload is empty, for the table is the truth.
create or replace function reactor.ring() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    -- A queue of notifications that is full, because some listener sits in a transaction, would fail the producer's commit.
    if not pg_try_advisory_xact_lock_shared('reactor.jobs'::regclass::oid::int, 2) and pg_notification_queue_usage() < 0.9 then
        perform pg_notify('reactor_wake', '');
    end if;
end
$$;

create sequence if not exists reactor.watches;

-- Before sleeping, on the session that listens. armed: whoever writes from now on rings; in_flight: somebody's silent
-- transaction is about to commit, look again soon; watched N: another reactor is armed. Who has looked since it was told of
-- watch N has seen all that was written silently before it; under another number there may be more, of a type that the
-- armed one does not handle.
create or replace function reactor.arm() returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if pg_try_advisory_lock('reactor.jobs'::regclass::oid::int, 2) then
        perform nextval('reactor.watches');
        return 'armed';
    elsif pg_try_advisory_lock_shared('reactor.jobs'::regclass::oid::int, 2) then
        perform pg_advisory_unlock_shared('reactor.jobs'::regclass::oid::int, 2);
        return 'in_flight';
    end if;
    return 'watched ' || (select last_value from reactor.watches);
end
$$;

-- Awake: producers may be silent again. p_hand_over rings those who slept relying on us; where the queue of notifications
-- is nearly full they find out by trying to arm.
create or replace function reactor.disarm(p_hand_over boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    perform pg_advisory_unlock('reactor.jobs'::regclass::oid::int, 2);
    if p_hand_over and pg_notification_queue_usage() < 0.9 then
        perform pg_notify('reactor_wake', '');
    end if;
end
$$;

create or replace function reactor.enqueue_job(
    p_type text, p_payload jsonb, p_tenant text, p_key text, p_run_after timestamptz, p_lane text, p_max_attempts int
) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id bigint;
begin
    if coalesce(p_type, '') = '' or length(p_type) > 200 or p_tenant is null or length(p_tenant) > 200 then
        raise exception 'a job needs a type and a tenant of at most 200 characters ('''' for none)' using errcode = '22023';
    end if;
    if length(p_lane) > 200 or octet_length(p_key) > 500 then  -- what fits into an entry of an index
        raise exception 'a job''s lane has at most 200 characters, its dedupe_key 500 bytes' using errcode = '22023';
    end if;
    if jsonb_typeof(coalesce(p_payload, '{}')) <> 'object' then
        raise exception 'a job''s payload is a JSON object' using errcode = '22023';
    end if;
    insert into reactor.jobs (type, payload, tenant_id, dedupe_key, run_after, lane, max_attempts)
    values (p_type, coalesce(p_payload, '{}'), p_tenant, p_key,
        greatest(least(coalesce(p_run_after, now()), '9999-12-30'), '0001-01-03'),  -- what drivers can say
        coalesce(nullif(p_lane, ''), p_type),
        greatest(coalesce(p_max_attempts, 5), 1))
    returning id into v_id;
    perform reactor.ring();
    return v_id;
end
$$;

-- Adds one job and returns its id. A waiting job of the same tenant, type and dedupe_key may absorb it at the claim.
-- Errors: 22023 for a blank type, what is too long for an index, a payload that is not an object.
create or replace function reactor.enqueue(
    type text, payload jsonb, tenant_id text, dedupe_key text default null,
    run_after timestamptz default now(), lane text default null, max_attempts int default 5
) returns bigint
language sql
set search_path = pg_catalog, pg_temp
as $$ select reactor.enqueue_job($1, $2, $3, $4, $5, $6, $7) $$;

-- How long a job waits after failed attempt n: 1 min, 5 min, 15 min, 1 h, 6 h, each within 10 %.
create or replace function reactor.backoff(p_attempts int) returns interval
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
    select make_interval(secs => (array[60, 300, 900, 3600, 21600])[least(greatest($1, 1), 5)] * (0.9 + 0.2 * random()))
$$;

-- Leases due jobs of p_types[i], up to p_limits[i] in each of its lanes, or p_lanes -> type -> lane -> "room" where the
-- caller knows better; there "after" is the tenant served last. Of suspects, one of a type runs at a time (the caller gives
-- it a call of its own), beside the others. p_max_attempts[i], where there is one, becomes the max_attempts of what is claimed.
-- Claims take turns (one advisory lock, held for this call only), so that two never collapse the same twins crosswise.
-- An empty set means nothing is due. The plan is forced: it must not wait for statistics of a table that was just filled.
create or replace function reactor.claim_jobs(
    p_types text[], p_limits int[], p_worker text, p_lease interval, p_max_attempts int[] default null, p_lanes jsonb default '{}',
    p_now timestamptz default null
) returns table (
    id bigint, type text, tenant_id text, payload jsonb, attempts int, max_attempts int, dedupe_key text, lane text, version bigint,
    claim_token uuid, notes jsonb, is_suspect boolean
)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan  -- planning it anew would take longer than running it
as $$
#variable_conflict use_column
declare
    v_token constant uuid := gen_random_uuid();
    v_is_late boolean;
    v_suspects text[];       -- types with some
    v_ready bigint[];        -- the first two that wait, to tell none and one from many
    v_type text;
    v_lane text;
    v_room int;
    v_after text;            -- the tenant served last
    v_more bigint[];
    v_picked bigint[] := '{}';
    v_twins boolean;         -- among what was picked last
    v_has_twins boolean := false;
    v_versions bigint[];     -- of what was picked, where twins change it
    v_suspicions boolean[];
begin
    -- A server that crashes may forget a claim that has just been made: the job is due again, and its token fences the one
    -- who still runs it. What that one notes or settles waits for the disk, and so for the claim before it.
    perform pg_advisory_xact_lock('reactor.jobs'::regclass::oid::int, 1), set_config('synchronous_commit', 'off', true);
    p_now := coalesce(p_now, clock_timestamp());  -- now that it is our turn
    select exists (select from reactor.jobs j where j.status in ('pending', 'failed') and j.run_after > j.updated_at and j.run_after <= p_now),
        array(select distinct j.type from reactor.jobs j where j.is_suspect and j.status in ('pending', 'failed') and j.type = any (p_types)),
        array(select j.id from reactor.jobs j
            where j.type = any (p_types) and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect limit 2)
    into v_is_late, v_suspects, v_ready;
    if v_ready = '{}' and v_suspects = '{}' and not v_is_late then
        return;
    end if;
    if v_is_late then
        update reactor.jobs j set updated_at = p_now where j.id = any (array(
            select j.id from reactor.jobs j where j.status in ('pending', 'failed') and j.run_after > j.updated_at and j.run_after <= p_now
            order by j.run_after, j.id limit 1000 for update skip locked));
    end if;
    foreach v_type in array v_suspects loop
        v_has_twins := true;  -- perhaps
        v_picked := v_picked || array(
            select j.id from reactor.jobs j
            where j.type = v_type and j.is_suspect and j.status in ('pending', 'failed') and j.run_after <= p_now
                and coalesce((p_lanes -> j.type -> j.lane ->> 'room')::int, p_limits[array_position(p_types, v_type)]) > 0
                and not exists (select from reactor.jobs r where r.status = 'running' and r.type = v_type and r.is_suspect)
                and (j.dedupe_key is null or (select 1 from reactor.jobs r
                    where r.status = 'running' and r.tenant_id = j.tenant_id and r.type = j.type and r.dedupe_key = j.dedupe_key limit 1) is null)
            order by j.run_after, j.id limit 1 for update skip locked);
    end loop;
    if cardinality(v_ready) = 1 and v_suspects = '{}' and not v_is_late then  -- a quiet queue: no turns to take
        select array[j.id], (select 1 from reactor.jobs t
            where t.tenant_id = j.tenant_id and t.type = j.type and t.dedupe_key = j.dedupe_key and t.id <> j.id
                and t.status in ('pending', 'failed') and t.dedupe_key is not null limit 1) is not null
        into v_picked, v_has_twins
        from reactor.jobs j
        where j.id = v_ready[1] and j.status in ('pending', 'failed') and j.run_after <= p_now
            and coalesce((p_lanes -> j.type -> j.lane ->> 'room')::int, p_limits[array_position(p_types, j.type)]) > 0
            and (j.dedupe_key is null or (select 1 from reactor.jobs r
                where r.status = 'running' and r.tenant_id = j.tenant_id and r.type = j.type and r.dedupe_key = j.dedupe_key limit 1) is null)
        for update of j skip locked;
        v_picked := coalesce(v_picked, '{}');
    else
        for v_type, v_lane in
            with recursive lane as (
                select t.type collate "C" as type, '' collate "C" as lane from unnest(p_types) as t (type)
                union all
                select l.type, n.lane from lane l, lateral (
                    select j.lane from reactor.jobs j
                    where j.type = l.type and j.lane > l.lane and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect
                    order by j.lane limit 1) n
            )
            select l.type, l.lane from lane l where l.lane <> ''
        loop
            v_room := coalesce((p_lanes -> v_type -> v_lane ->> 'room')::int, p_limits[array_position(p_types, v_type)]);
            continue when v_room <= 0;
            v_after := coalesce(p_lanes -> v_type -> v_lane ->> 'after', '');
            -- Equal shares of the tenants that wait, from the one after v_after on and around. Passes over what runs already under
            -- the same key, and twins of suspects. Costs what it returns, not what waits.
            with recursive turn as (  -- a loose index scan: one probe a tenant, and only as far as it is read
                select v_after collate "C" as tenant_id, false as is_around, false as is_waiting
                union all
                select n.tenant_id, n.is_around, true from turn t, lateral (
                    (select j.tenant_id, t.is_around from reactor.jobs j
                     where j.type = v_type and j.lane = v_lane and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect
                        and j.tenant_id > t.tenant_id and j.tenant_id <= case when t.is_around then v_after else repeat(chr(1114111), 201) end
                     order by j.tenant_id limit 1)
                    union all
                    (select j.tenant_id, true from reactor.jobs j
                     where j.type = v_type and j.lane = v_lane and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect
                        and j.tenant_id <= v_after and not t.is_around
                     order by j.tenant_id limit 1)
                    limit 1
                ) n
            ), share as materialized (
                select ceil(v_room::float8 / greatest(count(*), 1))::int as jobs from (select from turn where is_waiting limit v_room) t
            ), picked as (
                select d.* from turn t cross join share, lateral (
                    select j.id, (select 1 from reactor.jobs t
                        where t.tenant_id = j.tenant_id and t.type = j.type and t.dedupe_key = j.dedupe_key and t.id <> j.id
                            and t.status in ('pending', 'failed') and t.dedupe_key is not null limit 1) is not null as has_twin
                    from reactor.jobs j
                    where j.type = v_type and j.lane = v_lane and j.tenant_id = t.tenant_id
                        and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect and j.run_after <= p_now
                        -- Scalar, so that each is a probe of its index and never a join with all that runs.
                        and (j.dedupe_key is null or (select 1 from reactor.jobs r
                            where r.status = 'running' and r.tenant_id = j.tenant_id and r.type = j.type and r.dedupe_key = j.dedupe_key limit 1) is null)
                        and (v_type <> all (v_suspects) or (select 1 from reactor.jobs s
                            where s.is_suspect and s.status in ('pending', 'failed') and s.type = j.type and s.tenant_id = j.tenant_id
                                and s.dedupe_key = j.dedupe_key limit 1) is null)
                    order by j.run_after, j.id limit share.jobs for update of j skip locked
                ) d
                where t.is_waiting limit v_room
            )
            select array_agg(p.id), coalesce(bool_or(p.has_twin), false) into v_more, v_twins from picked p;
            v_picked := v_picked || v_more;
            v_has_twins := v_has_twins or v_twins;
        end loop;
    end if;
    if v_picked = '{}' then
        return;
    end if;
    if v_has_twins then
        with picked as materialized (
            select j.id, j.tenant_id, j.type, j.dedupe_key, greatest(j.id, j.version) as version, j.is_suspect
            from unnest(v_picked) p (id) join reactor.jobs j on j.id = p.id
        ), key as materialized (
            select distinct on (p.tenant_id, p.type, p.dedupe_key) p.tenant_id, p.type, p.dedupe_key, p.id as first_id, p.version, p.is_suspect
            from picked p where p.dedupe_key is not null order by p.tenant_id, p.type, p.dedupe_key, p.id
        ), twin as materialized (  -- seldom any; windows, for a join would grow with the square of a batch
            select k.first_id, t.id, least(k.first_id, min(t.id) filter (where t.is_due) over family) as lead_id,
                greatest(k.version, max(t.version) over family) as version, k.is_suspect or bool_or(t.is_suspect) over family as is_suspect
            from key k, lateral (
                select j.id, j.run_after <= p_now as is_due, greatest(j.id, j.version) as version, j.is_suspect from reactor.jobs j
                where j.tenant_id = k.tenant_id and j.type = k.type and j.dedupe_key = k.dedupe_key
                    and j.status in ('pending', 'failed') and j.dedupe_key is not null and j.id <> k.first_id
                order by j.id  -- the order of the twins' own index, which is then the cheaper one
                -- The oldest; a run is owed for the others. A claim that takes too long would be given up, again and again.
                limit 100 + 20000 / (select count(*) from key) for update skip locked
            ) t
            window family as (partition by k.first_id)
        ), lead as materialized (
            select k.first_id as id, k.version, k.is_suspect from key k where k.first_id not in (select t.first_id from twin t)
            union all
            select p.id, p.version, p.is_suspect from picked p where p.dedupe_key is null
            union all
            select distinct t.lead_id, t.version, t.is_suspect from twin t
        ), absorbed as (
            update reactor.jobs j
            set status = 'done', result = jsonb_build_object('merged_into', f.lead_id), updated_at = p_now
            from (select distinct t.first_id as id, t.lead_id from twin t where t.first_id <> t.lead_id
                  union all
                  select t.id, t.lead_id from twin t where t.id <> t.lead_id) f
            where j.id = f.id
            returning j.id
        ), counted as (
            insert into reactor.job_minutes as m (minute, done, dead)
            select date_trunc('minute', p_now), count(*), 0 from absorbed having count(*) > 0
            on conflict (minute, backend) do update set done = m.done + excluded.done
        )
        select array_agg(l.id), array_agg(l.version), array_agg(l.is_suspect) into v_picked, v_versions, v_suspicions from lead l;
    end if;
    return query
    update reactor.jobs j
    set status = 'running', attempts = j.attempts + 1, max_attempts = coalesce(
            p_max_attempts[array_position(p_types, j.type)], j.max_attempts),
        version = coalesce(l.version, greatest(j.id, j.version)), is_suspect = coalesce(l.is_suspect, j.is_suspect),
        payload = case when l.version <> greatest(j.id, j.version)
            then coalesce((select p.payload from reactor.jobs p where p.id = l.version), j.payload) else j.payload end,
        locked_at = p_now, locked_by = p_worker, lease_until = p_now + p_lease, claim_token = v_token, updated_at = p_now
    from unnest(v_picked, v_versions, v_suspicions) l (id, version, is_suspect)
    where j.id = l.id
    returning j.id, j.type, j.tenant_id, j.payload, j.attempts, j.max_attempts, j.dedupe_key, j.lane, j.version, j.claim_token,
        nullif(j.notes, '{}'), j.is_suspect;
end
$$;

-- Jobs whose lease has run out: due again at once, as suspects. The attempt counts only for one that ran as a suspect: the
-- others were merely beside it. Returns what each became.
create or replace function reactor.release_expired_jobs(p_now timestamptz default clock_timestamp())
returns table (id bigint, type text, tenant_id text, attempts int, status text, opened_alert text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    v_ids bigint[];
    v_tokens uuid[];
    v_alerts text[];
begin
    select array_agg(e.id), array_agg(e.claim_token) into v_ids, v_tokens
    from (
        select j.id, j.claim_token from reactor.jobs j
        where j.status = 'running' and j.lease_until < p_now
        limit 1000 for update skip locked
    ) e;
    if v_ids is null then
        return;
    end if;
    select array_agg(s.id), array_agg(s.opened_alert) into v_ids, v_alerts
    from reactor.settle_jobs(v_ids, v_tokens, array_fill('expired'::text, array[cardinality(v_ids)]), null,
        array_fill('lease_expired: the worker went silent'::text, array[cardinality(v_ids)]),
        array_fill(0::float8, array[cardinality(v_ids)]), p_now => p_now) s;
    return query  -- in a statement of its own, which sees them settled
    select j.id, j.type, j.tenant_id, j.attempts, j.status, s.opened_alert
    from unnest(v_ids, v_alerts) s (id, opened_alert) join reactor.jobs j on j.id = s.id;
end
$$;

-- Marks jobs done, in the caller's transaction; returns the ids of those whose claim still held. A handler's write stands
-- in one transaction with this check.
create or replace function reactor.complete_jobs(
    p_ids bigint[], p_tokens uuid[], p_results jsonb[], p_now timestamptz default clock_timestamp()
) returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
    with completed as (
        update reactor.jobs j
        set status = 'done', result = e.result, snoozed_since = null, is_suspect = false, locked_by = null, lease_until = null,
            claim_token = null, updated_at = p_now
        from unnest(p_ids, p_tokens, p_results) as e (id, token, result)
        where j.id = e.id and j.claim_token = e.token and j.status not in ('pending', 'failed', 'done', 'dead')  -- by an operator
        returning j.id
    ), counted as (
        insert into reactor.job_minutes as m (minute, done, dead)
        select date_trunc('minute', p_now), count(*), 0 from completed having count(*) > 0
        on conflict (minute, backend) do update set done = m.done + excluded.done
    )
    select id from completed;
end
$$;

-- Ends running jobs, one array element each; p_endings: done, failed, snoozed, given_back (as if not claimed),
-- dead, expired (see release_expired_jobs).
-- A failed one waits p_delays[i] seconds, at most a day (null: the backoff), or is dead when that was its last attempt; a snoozed one
-- waits p_delays[i] seconds and gets its attempt back, or is dead when it has done nothing else for p_snooze_limit.
-- Returns what the others than the done ones became, with a null status for jobs whose claim token is no longer the given
-- one: those are not touched. Dead ones open an alert a type and error code; opened_alert names it on one of the jobs that
-- made it new.
create or replace function reactor.settle_jobs(
    p_ids bigint[], p_tokens uuid[], p_endings text[], p_results jsonb[] default null, p_errors text[] default null,
    p_delays float8[] default null, p_snooze_limit interval default '7 d', p_now timestamptz default clock_timestamp()
) returns table (id bigint, status text, run_after timestamptz, opened_alert text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan  -- planning it anew would take longer than running it
set lock_timeout = '1s'  -- 55P03 where somebody's transaction holds a row
as $$
#variable_conflict use_column
begin
    if p_endings <@ '{done}' then  -- as nearly always
        return query
        select l.id, null::text, null::timestamptz, null::text from unnest(p_ids) l (id)
        where l.id not in (select c from reactor.complete_jobs(p_ids, p_tokens, p_results, p_now) c);
        return;
    end if;
    return query
    with ending as materialized (
        select e.id, e.token, e.result, case when g.up then 'dead' else e.ending end as ending,
            case when g.up then concat('snoozed_too_long: ', e.error) else e.error end as error,
            -- Whatever number a handler came up with: the others must settle.
            case when e.delay_s is not null then make_interval(secs => least(greatest(e.delay_s, 0), 366 * 86400)) end as delay
        from unnest(p_ids, p_tokens, p_endings, p_results, p_errors, p_delays) as e (id, token, ending, result, error, delay_s)
        left join reactor.jobs j on e.ending = 'snoozed' and j.id = e.id
        cross join lateral (select j.snoozed_since < p_now - p_snooze_limit as up) g
    ), settled as (
        update reactor.jobs j
        set status = case
                when e.ending in ('snoozed', 'given_back') or e.ending = 'expired' and not j.is_suspect then 'pending'
                when e.ending in ('failed', 'expired') and j.attempts >= j.max_attempts then 'dead'
                when e.ending = 'expired' then 'failed'
                else e.ending
            end,
            attempts = j.attempts - (e.ending in ('snoozed', 'given_back') or e.ending = 'expired' and not j.is_suspect)::int,
            is_suspect = e.ending = 'expired' or e.ending = 'given_back' and j.is_suspect,
            snoozed_since = case e.ending when 'snoozed' then coalesce(j.snoozed_since, p_now) when 'given_back' then j.snoozed_since end,
            run_after = case
                when e.ending in ('snoozed', 'given_back') then p_now + coalesce(e.delay, '0')
                when e.ending in ('failed', 'expired') then p_now + least(coalesce(e.delay, reactor.backoff(j.attempts)), '24 h')
                else j.run_after
            end,
            result = e.result,
            last_error = coalesce(e.error, j.last_error),
            history = case when e.ending in ('done', 'snoozed', 'given_back') then j.history
                else reactor.remember(j.history, jsonb_build_object('at', p_now, 'attempt', j.attempts, 'error', left(e.error, 200))) end,
            locked_by = null, lease_until = null, claim_token = null, updated_at = p_now
        from ending e
        where j.id = e.id and j.claim_token = e.token and j.status not in ('pending', 'failed', 'done', 'dead')  -- by an operator
        returning j.id, j.status, j.run_after, j.type, j.last_error
    ), counted as (
        insert into reactor.job_minutes as m (minute, done, dead)
        select date_trunc('minute', p_now), count(*) filter (where s.status = 'done'), count(*) filter (where s.status = 'dead')
        from settled s where s.status in ('done', 'dead') having count(*) > 0
        on conflict (minute, backend) do update set done = m.done + excluded.done, dead = m.dead + excluded.dead
    ), dead as materialized (
        select g.last_id, g.subject, reactor.open_alert('dead_jobs', g.subject,
            jsonb_build_object('type', g.type, 'error', g.error, 'job_id', g.last_id, 'jobs', g.jobs)) as is_new
        from (select s.type, reactor.name_death(s.type, s.last_error) as subject, max(s.last_error) as error,
                max(s.id) as last_id, count(*) as jobs
              from settled s where s.status = 'dead' group by 1, 2 order by 2) g  -- two settlers lock alerts in one order
    )
    select s.id, s.status, s.run_after, d.subject
    from settled s left join dead d on d.last_id = s.id and d.is_new
    where s.status <> 'done'
    union all
    select e.id, null, null, null from ending e where e.id not in (select s.id from settled s);
    if p_endings && '{failed, snoozed, given_back, expired}' then  -- others may have to run them: we may be full by then, or gone
        perform reactor.ring();
    end if;
end
$$;

-- What jobs that died of the same have in common: the subject of their alert.
create or replace function reactor.name_death(p_type text, p_error text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select left($1 || ' ' || split_part(coalesce($2, 'unknown'), ':', 1), 250) $$;

-- A job's history with one entry more; the oldest make room.
create or replace function reactor.remember(p_history jsonb, p_entry jsonb) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select (coalesce($1, '[]') || $2) - case when jsonb_array_length($1) >= 20 then 0 else 99 end $$;

-- Makes jobs due now with all their attempts before them: the given dead or failed ones, or the dead ones of a type, or
-- (both null) every dead one. Returns their ids; their history and last error stay.
create or replace function reactor.retry_jobs(p_ids bigint[] default null, p_type text default null, p_now timestamptz default clock_timestamp())
returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[];
begin
    if p_ids is null then  -- by the index of the dead: history may be long
        v_ids := array(select j.id from reactor.jobs j where j.status = 'dead' and (p_type is null or j.type = p_type) order by j.id for update);
    else
        v_ids := array(select j.id from reactor.jobs j
            where j.id = any (p_ids) and (p_type is null or j.type = p_type) and j.status in ('dead', 'failed') order by j.id for update);
    end if;
    return query
    update reactor.jobs j
    set status = 'pending', attempts = 0, run_after = p_now, updated_at = p_now, snoozed_since = null,
        history = reactor.remember(j.history, jsonb_build_object('at', p_now, 'retried', true))
    where j.id = any (v_ids)
    returning j.id;
    perform reactor.resolve_cured_jobs(), reactor.ring();
end
$$;

-- Closes the alerts of dead jobs that are none any more.
create or replace function reactor.resolve_cured_jobs() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    -- As settlers lock them, and in a statement of its own: the next one then sees what those died of.
    perform from reactor.alerts a where a.cause = 'dead_jobs' and a.resolved_at is null order by a.subject for update;
    update reactor.alerts a set resolved_at = now()
    where a.cause = 'dead_jobs' and a.resolved_at is null and not exists (
        select from reactor.jobs j where j.status = 'dead' and reactor.name_death(j.type, j.last_error) = a.subject);
end
$$;

-- Extends the leases still held; returns the ids of those that were. A job that its handler's own transaction has locked
-- is passed over: nobody can release it meanwhile, and waiting for it crosswise would deadlock.
create or replace function reactor.extend_leases(
    p_ids bigint[], p_tokens uuid[], p_lease interval, p_now timestamptz default clock_timestamp()
) returns setof bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    update reactor.jobs j set lease_until = $4 + $3
    where j.id in (
        select h.id from reactor.jobs h
        join unnest($1, $2) as held (id, token) on h.id = held.id and h.claim_token = held.token
        for update of h skip locked)
    returning j.id
$$;

-- Merges a note into a running job; false when the claim has passed to another worker.
create or replace function reactor.note_job(p_id bigint, p_token uuid, p_note jsonb) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    with noted as (
        update reactor.jobs set notes = notes || $3, updated_at = clock_timestamp()
        where id = $1 and claim_token = $2
        returning id
    )
    select exists (select from noted)
$$;

-- What a worker that found nothing to claim may sleep on: the next timer (a job for later, or the end of a lease) in
-- seconds by the database's clock, null when there is none; whether ready jobs wait in lanes without room (p_lanes, as
-- for the claim); whether some wait although there is room, for a twin to end.
create or replace function reactor.look_ahead(p_types text[], p_lanes jsonb default '{}')
returns table (due_s float8, is_crowded boolean, is_blocked boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
    with recursive lane as (
        select t.type collate "C" as type, '' collate "C" as lane from unnest(p_types) as t (type)
        union all
        select l.type, n.lane from lane l, lateral (
            select j.lane from reactor.jobs j
            where j.type = l.type and j.lane > l.lane and j.status in ('pending', 'failed') and j.run_after <= j.updated_at and not j.is_suspect
            order by j.lane limit 1) n
    ), waiting as (
        select coalesce((p_lanes -> type -> lane ->> 'room')::int, 1) > 0 as has_room from lane where lane <> ''
        union all
        select coalesce((p_lanes -> s.type -> s.lane ->> 'room')::int, 1) > 0 from reactor.jobs s
        where s.is_suspect and s.status in ('pending', 'failed') and s.run_after <= s.updated_at and s.type = any (p_types)
    )
    select (select greatest(extract(epoch from n.next_at - clock_timestamp()), 0)::float8 from (select least(
            (select j.run_after from reactor.jobs j where j.status in ('pending', 'failed') and j.run_after > j.updated_at
             order by j.run_after, j.id limit 1),
            -- One that has run out and could not be released, for its handler's own transaction holds it, is no reason to spin.
            (select greatest(min(j.lease_until), clock_timestamp() + interval '1 s') from reactor.jobs j
             where j.status = 'running' having count(*) > 0)) as next_at) n
         where n.next_at is not null),  -- greatest() would make a null 0
        coalesce(bool_or(not has_room), false), coalesce(bool_or(has_room), false)
    from waiting;
end
$$;
