-- How the reactor is doing, as one object (docs/operating.md). Runs as the schema's owner.
create or replace function reactor.status() returns jsonb
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    with later as (  -- counted as far as 100,000 go: there is one a token, and there may be millions
        select status, count(*) as jobs, min(run_after) as first_at from (
            select status, run_after from reactor.jobs
            where status in ('pending', 'failed') and run_after > updated_at order by run_after, id limit 100000) first
        group by status
    ), beyond as (  -- by the planner's own estimate
        select case when sum(jobs) < 100000 then 1.0
            else greatest((select reltuples from pg_class where oid = 'reactor.jobs_later'::regclass) / sum(jobs), 1.0) end as factor
        from later
    ), waiting as (  -- index only, whatever else the table holds
        select status, count(*) as jobs, min(run_after) as first_at from reactor.jobs
        where status in ('pending', 'failed') and run_after <= updated_at and not is_suspect group by status
        union all
        select status, (jobs * factor)::bigint, first_at from later, beyond
        union all
        select status, count(*), min(run_after) from reactor.jobs
        where is_suspect and status in ('pending', 'failed') and run_after <= updated_at group by status
    ), day as (
        select coalesce(sum(done), 0)::bigint as done, coalesce(sum(dead), 0)::bigint as dead
        from reactor.job_minutes where minute > now() - interval '24 h'
    )
    select jsonb_build_object(
        'pending', (select coalesce(sum(jobs), 0)::bigint from waiting where status = 'pending'),
        'failed', (select coalesce(sum(jobs), 0)::bigint from waiting where status = 'failed'),
        'running', (select count(*) from reactor.jobs where status = 'running'),
        'done_24h', (select done from day),
        'dead', (select count(*) from reactor.jobs where status = 'dead'),
        'dead_24h', (select dead from day),
        'oldest_due_s', (select extract(epoch from now() - min(first_at))::float8 from waiting where first_at <= now()),
        'listener', (select case
                when bool_or(application_name = 'memory-reactor listener') then 'listening'
                when count(*) > 0 or exists (select from reactor.reactors where listener = 'polling' and until > now()) then 'polling'
                else 'down'
            end from pg_stat_activity
            where datname = current_database() and application_name in ('memory-reactor listener', 'memory-reactor worker')),
        'alerts_open', (select count(*) from reactor.alerts where resolved_at is null),
        'memories', (select coalesce(sum(memories), 0)::bigint from reactor.tenants),
        'tenants', (select count(*) from reactor.tenants),
        'sources', (select count(*) from reactor.sources where detached_at is null),
        'rejected_24h', (select count(*) from reactor.rejected where created_at > now() - interval '24 h'),
        'models', (select coalesce(jsonb_object_agg(model, n), '{}') from
            (select model, count(*) as n from reactor.tenants where model is not null group by model) m),
        'tokens', (select coalesce(jsonb_object_agg(state, n), '{}') from
            (select state, sum(tokens)::bigint as n from reactor.token_counts group by state having sum(tokens) > 0) t))
$$;
