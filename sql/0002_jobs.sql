-- The queue: one row of work owed.
--
--             claim                 done
--   pending ----------> running ----------> done
--      ^  ^               | | |
--      |  +---- snooze ---+ | +-- last attempt, or no use in trying --> dead
--      |                    v
--      +-- (due) ------- failed      waiting = pending or failed
--
-- Triggers only insert. Waiting jobs are unconstrained; the claim collapses twins (same tenant, type, dedupe key):
-- the due one with the lowest id runs, with the newest payload, and absorbs every waiting twin it sees.

create sequence if not exists reactor.job_ids;

create table if not exists reactor.jobs (
    id bigint primary key default nextval('reactor.job_ids'),
    type text not null,
    tenant_id text not null,            -- '' for work that belongs to no tenant
    lane text not null,
    dedupe_key text,
    payload jsonb not null default '{}',
    status text not null default 'pending' check (status in ('pending', 'running', 'failed', 'done', 'dead')),
    attempts int not null default 0,    -- claims that count; a snooze gives its one back
    max_attempts int not null default 5,
    run_after timestamptz not null default now(),
    version bigint not null default 0,  -- the highest job id absorbed by the last claim
    locked_at timestamptz,
    locked_by text,
    lease_until timestamptz,
    claim_token uuid,
    is_suspect boolean not null default false,  -- its lease ran out: it may have killed its worker, so it runs alone
    result jsonb,
    last_error text,
    notes jsonb not null default '{}',
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now()
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);

call reactor.put_index('reactor.jobs_due', $$create index jobs_due on reactor.jobs (type, run_after, id) where status in ('pending', 'failed')$$);
call reactor.put_index('reactor.jobs_waiting_twins', $$create index jobs_waiting_twins on reactor.jobs (tenant_id, type, dedupe_key, id) where status in ('pending', 'failed') and dedupe_key is not null$$);
call reactor.put_index('reactor.jobs_running_once', $$create unique index jobs_running_once on reactor.jobs (tenant_id, type, dedupe_key) where status = 'running'$$);
call reactor.put_index('reactor.jobs_suspects', $$create index jobs_suspects on reactor.jobs (type, run_after, id) where is_suspect and status in ('pending', 'failed')$$);
call reactor.put_index('reactor.jobs_leases', $$create index jobs_leases on reactor.jobs (lease_until) where status = 'running'$$);
call reactor.put_index('reactor.jobs_ended', $$create index jobs_ended on reactor.jobs (updated_at) where status in ('done', 'dead')$$);
call reactor.put_index('reactor.jobs_dead', $$create index jobs_dead on reactor.jobs (tenant_id, type, dedupe_key) where status = 'dead'$$);

call reactor.protect('reactor.jobs', 'queue');

-- Wakes whoever listens. The payload is empty: the table is the truth.
create or replace function reactor.ring() returns void
language sql
set search_path = pg_catalog, pg_temp
as $$ select pg_notify('reactor_wake', '') $$;

create or replace function reactor.enqueue_job(
    p_type text, p_payload jsonb, p_tenant text, p_key text, p_run_after timestamptz, p_lane text, p_max_attempts int
) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id bigint;
begin
    if coalesce(p_type, '') = '' or p_tenant is null or length(p_tenant) > 200 or length(p_key) > 500 then
        raise exception 'a job needs a type and a tenant of at most 200 characters (''''  for none)' using errcode = '22023';
    end if;
    if jsonb_typeof(coalesce(p_payload, '{}')) <> 'object' then
        raise exception 'a job''s payload is a JSON object' using errcode = '22023';
    end if;
    insert into reactor.jobs (type, payload, tenant_id, dedupe_key, run_after, lane, max_attempts)
    values (p_type, coalesce(p_payload, '{}'), p_tenant, p_key, coalesce(p_run_after, now()), coalesce(p_lane, p_type),
        greatest(coalesce(p_max_attempts, 5), 1))
    returning id into v_id;
    perform reactor.ring();
    return v_id;
end
$$;

-- Adds one job and returns its id. A waiting job of the same tenant, type and dedupe_key may absorb it at the claim.
-- Errors: 22023 for a blank type, a tenant over 200 characters, a payload that is not an object.
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

-- Leases up to p_limits[i] due jobs of p_types[i], oldest first. Expired leases are returned to the queue first; of the
-- suspects they leave, one of a type runs at a time (the caller gives it a call of its own), beside the others.
-- p_max_attempts[i], where there is one, becomes the max_attempts of what is claimed.
-- Claims take turns (one advisory lock, held for this call only), so that two never collapse the same twins crosswise.
-- An empty set means nothing is due.
create or replace function reactor.claim_jobs(
    p_types text[], p_limits int[], p_worker text, p_lease interval, p_max_attempts int[] default null,
    p_now timestamptz default null
) returns setof reactor.jobs
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    i int;
begin
    perform pg_advisory_xact_lock('reactor.jobs'::regclass::oid::int, 1);
    p_now := coalesce(p_now, clock_timestamp());  -- now that it is our turn
    perform reactor.release_expired_jobs(p_now);
    for i in 1 .. cardinality(p_types) loop
        continue when p_limits[i] <= 0;
        return query
        with suspects as materialized (  -- few, by an index of their own
            select j.id, j.tenant_id, j.dedupe_key
            from reactor.jobs j
            where j.type = p_types[i] and j.is_suspect and j.status in ('pending', 'failed') and j.run_after <= p_now
        ), suspect as materialized (
            select j.id, j.tenant_id, j.dedupe_key
            from reactor.jobs j
            where j.type = p_types[i] and j.is_suspect and j.status in ('pending', 'failed') and j.run_after <= p_now
                and not exists (
                    select from reactor.jobs r
                    where r.status = 'running' and r.type = j.type
                        and (r.is_suspect or r.tenant_id = j.tenant_id and r.dedupe_key = j.dedupe_key)
                )
            order by j.run_after, j.id
            limit 1
            for update skip locked
        ), ready as materialized (
            select j.id, j.tenant_id, j.dedupe_key
            from reactor.jobs j
            where j.type = p_types[i] and j.status in ('pending', 'failed') and not j.is_suspect and j.run_after <= p_now
                and not exists (
                    select from reactor.jobs r
                    where r.status = 'running' and r.tenant_id = j.tenant_id and r.type = j.type
                        and r.dedupe_key = j.dedupe_key
                )
                and not exists (select from suspects s where s.tenant_id = j.tenant_id and s.dedupe_key = j.dedupe_key)
            order by j.run_after, j.id
            limit p_limits[i] - (select count(*) from suspect)
            for update skip locked
        ), due as (
            select * from suspect union all select * from ready
        ), twin as materialized (  -- key by key: a fresh table without statistics is joined the wrong way round
            select t.* from (select distinct d.tenant_id, d.dedupe_key from due d where d.dedupe_key is not null) k,
            lateral (
                select t.id, t.tenant_id, t.dedupe_key, t.payload, t.run_after <= p_now as is_due
                from reactor.jobs t
                where t.tenant_id = k.tenant_id and t.type = p_types[i] and t.dedupe_key = k.dedupe_key
                    and t.status in ('pending', 'failed') and t.dedupe_key is not null
                order by t.id  -- the order of the twins' own index, which is then the cheaper one
                for update skip locked
            ) t
        ), family as materialized (  -- windows, not joins: a batch costs what it is long
            select t.id, t.payload, min(t.id) filter (where t.is_due) over w as lead_id, max(t.id) over w as version
            from twin t window w as (partition by t.tenant_id, t.dedupe_key)
        ), lead as (
            select f.lead_id as id, f.version, f.payload from family f where f.id = f.version
            union all
            select d.id, d.id, null from due d where d.dedupe_key is null
        ), absorbed as (
            update reactor.jobs j
            set status = 'done', result = jsonb_build_object('merged_into', f.lead_id), updated_at = p_now
            from family f
            where j.id = f.id and f.id <> f.lead_id
            returning j.id
        )
        update reactor.jobs j
        set status = 'running', attempts = j.attempts + 1, max_attempts = coalesce(p_max_attempts[i], j.max_attempts),
            version = greatest(j.version, l.version),
            payload = coalesce(l.payload, j.payload),
            locked_at = p_now, locked_by = p_worker, lease_until = p_now + p_lease, claim_token = gen_random_uuid(),
            updated_at = p_now
        from lead l
        where j.id = l.id
        returning j.*;
    end loop;
end
$$;

-- Jobs whose lease has run out: due again at once, as suspects. The attempt counts only for one that ran as a suspect: the
-- others were merely beside it. Returns how many.
create or replace function reactor.release_expired_jobs(p_now timestamptz default clock_timestamp()) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_ids bigint[];
    v_tokens uuid[];
begin
    select array_agg(id), array_agg(claim_token) into v_ids, v_tokens
    from (
        select j.id, j.claim_token from reactor.jobs j
        where j.status = 'running' and j.lease_until < p_now
        order by j.lease_until limit 1000 for update skip locked
    ) expired;
    if v_ids is null then
        return 0;
    end if;
    perform reactor.settle_jobs(v_ids, v_tokens, array_fill('expired'::text, array[cardinality(v_ids)]), null,
        array_fill('lease_expired: the worker went silent'::text, array[cardinality(v_ids)]),
        array_fill(0::float8, array[cardinality(v_ids)]), p_now);
    return cardinality(v_ids);
end
$$;

-- Ends running jobs, one array element each; p_endings: done, failed, snoozed, dead, expired (see release_expired_jobs).
-- A failed one waits p_delays[i] seconds (null: the backoff), or is dead when that was its last attempt; a snoozed one
-- waits p_delays[i] seconds and gets its attempt back. Returns what each became; a job whose claim token is no longer
-- the given one is not touched and not returned. Dead ones open an alert a type and error code; opened_alert names it
-- on one of the jobs that made it new.
create or replace function reactor.settle_jobs(
    p_ids bigint[], p_tokens uuid[], p_endings text[], p_results jsonb[] default null, p_errors text[] default null,
    p_delays float8[] default null, p_now timestamptz default clock_timestamp()
) returns table (id bigint, status text, run_after timestamptz, opened_alert text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with ending as (
        select * from unnest(p_ids, p_tokens, p_endings, p_results, p_errors, p_delays)
            as e (id, token, ending, result, error, delay_s)
    ), settled as (
        update reactor.jobs j
        set status = case
                when e.ending = 'snoozed' or e.ending = 'expired' and not j.is_suspect then 'pending'
                when e.ending in ('failed', 'expired') and j.attempts >= j.max_attempts then 'dead'
                when e.ending = 'expired' then 'failed'
                else e.ending
            end,
            attempts = j.attempts - (e.ending = 'snoozed' or e.ending = 'expired' and not j.is_suspect)::int,
            is_suspect = e.ending = 'expired',
            run_after = case
                when e.ending = 'snoozed' then p_now + make_interval(secs => e.delay_s)
                when e.ending in ('failed', 'expired') then p_now + coalesce(make_interval(secs => e.delay_s), reactor.backoff(j.attempts))
                else j.run_after
            end,
            result = e.result, last_error = coalesce(e.error, j.last_error),
            locked_by = null, lease_until = null, claim_token = null, updated_at = p_now
        from ending e
        where j.id = e.id and j.claim_token = e.token and j.status = 'running'
        returning j.id, j.status, j.run_after, j.type, j.last_error
    ), dead as materialized (
        select g.last_id, g.subject, reactor.open_alert('dead_jobs', g.subject,
            jsonb_build_object('type', g.type, 'error', g.error, 'job_id', g.last_id, 'jobs', g.jobs)) as is_new
        from (select s.type, s.type || ' ' || split_part(s.last_error, ':', 1) as subject, max(s.last_error) as error,
                max(s.id) as last_id, count(*) as jobs
              from settled s where s.status = 'dead' group by 1, 2 order by 2) g  -- two settlers lock alerts in one order
    )
    select s.id, s.status, s.run_after, d.subject
    from settled s left join dead d on d.last_id = s.id and d.is_new;
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
        where h.status = 'running' for update of h skip locked)
    returning j.id
$$;

-- Locks the given jobs until the transaction ends and returns the ids of those whose claim still holds: a handler's
-- write stands in one transaction with this check.
create or replace function reactor.hold_claims(p_ids bigint[], p_tokens uuid[]) returns setof bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    select j.id from reactor.jobs j
    join unnest($1, $2) as held (id, token) on j.id = held.id and j.claim_token = held.token
    where j.status = 'running'
    order by j.id for update of j
$$;

-- Marks held jobs done inside the handler's own transaction.
create or replace function reactor.complete_jobs(p_ids bigint[], p_tokens uuid[], p_results jsonb[]) returns setof bigint
language sql
set search_path = pg_catalog, pg_temp
as $$
    update reactor.jobs j
    set status = 'done', result = e.result, locked_by = null, lease_until = null, claim_token = null,
        updated_at = clock_timestamp()
    from unnest($1, $2, $3) as e (id, token, result)
    where j.id = e.id and j.claim_token = e.token and j.status = 'running'
    returning j.id
$$;

-- Merges a note into a running job; false when the claim has passed to another worker.
create or replace function reactor.note_job(p_id bigint, p_token uuid, p_note jsonb) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$
    with noted as (
        update reactor.jobs set notes = notes || $3, updated_at = clock_timestamp()
        where id = $1 and claim_token = $2 and status = 'running'
        returning id
    )
    select exists (select from noted)
$$;

-- Seconds, by the database's clock, until the next waiting job of these types or the next lease's end is due; never
-- negative; null when nothing waits.
create or replace function reactor.next_due_s(p_types text[]) returns float8
language sql
set search_path = pg_catalog, pg_temp
as $$
    select greatest(extract(epoch from n.next_at - clock_timestamp()), 0)::float8
    from (select least(
        (select min(due.run_after) from unnest($1) as t (type), lateral (
            select j.run_after from reactor.jobs j
            where j.type = t.type and j.status in ('pending', 'failed')
            order by j.run_after limit 1) due),
        (select min(lease_until) from reactor.jobs where status = 'running')
    ) as next_at) n
    where n.next_at is not null  -- greatest() would make a null 0
$$;
