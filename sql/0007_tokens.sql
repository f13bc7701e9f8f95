-- Tokens: whose they are, how they are doing, and the steps of a refresh that survives a crash between any two of them.
--
-- What opens an account stays in the producer's row and nowhere else. Here is its care: one row of reactor.tokens a token,
-- found by (tenant, source, id of the row), without a secret; a fingerprint tells whether the row changed.
--
--            claim                      save (only if row and version are as claimed)
--   active -------> attempt live -----------------------------------------------> active, version + 1
--     ^                  |  \-- refused ----> needs_reconnect, permission, suspended, app_error, key_dead, session_down, expired
--     |                  +----- answer lost -> once more; then needs_reconnect (answer_lost), tried again later
--     +-- the row changed: a person reconnected ---------------------------------------+
--
-- reactor/refresher.py drives these steps; every rule on time and state is here, by the database's clock.

-- A table with tokens in it. attach_tokens compiles the mapping into pieces of SQL over the alias t.
create table if not exists reactor.token_sources (
    id int primary key default nextval('reactor.sources_id_seq'),  -- one numbering with the sources of memories
    relation regclass not null,
    integration text collate "C",          -- of every row; null: each row names its own
    tenant_column text not null,
    id_column text not null,
    columns jsonb not null,                -- what of a token (access_token, expires_at, ...) is in which column
    reads text not null,                   -- the select list
    writes text not null,                  -- the set list, of $3 to $13 (see write_token_row)
    marks text not null,                   -- the same of state, reason and version only; '' where none is mapped
    is_row text not null,                  -- the row with id $2 of tenant $1
    is_account text not null,              -- the rows of tenant $1, integration $2, account $3 (null: any)
    attached_at timestamptz not null default now(),
    unique nulls not distinct (relation, integration)
);

create table if not exists reactor.tokens (
    id bigint generated always as identity primary key,
    source int not null,
    source_id text collate "C" not null,
    tenant_id text collate "C" not null,
    integration text collate "C" not null,
    account text not null,
    version bigint not null,            -- moves with every new token, whoever brought it
    fingerprint bytea not null,         -- of the secrets in the row
    version_at timestamptz,             -- when we first saw this version
    state text not null default 'active' check (state in ('active', 'needs_reconnect', 'permission', 'suspended', 'app_error',
        'key_dead', 'session_down', 'expired')),
    state_reason text,
    issued_at timestamptz,
    expires_at timestamptz,             -- as the row or the provider says
    refresh_expires_at timestamptz,
    can_refresh boolean not null default false,
    lost_answers int not null default 0,-- to refreshes of this version: the provider may have rotated already
    failures int not null default 0,    -- since the last success
    trouble text,                       -- unknown_answer, attempt_elsewhere, key_missing, unknown_integration, not_saved
    retry_at timestamptz,               -- after a failure
    requested_at timestamptz,           -- somebody wants it refreshed before its time
    probed_at timestamptz,
    last_success_at timestamptz,
    last_error text,                    -- a code, never a provider's words
    last_error_at timestamptz,
    ends_at timestamptz,                -- planned: when the access token ends
    late_at timestamptz,                -- planned: when somebody must hear that it is still not refreshed
    deadline_at timestamptz,            -- planned: the end that only a person can move
    alert_at timestamptz,               -- planned: when there will be something to say
    next_at timestamptz,                -- planned: the run_after of its job
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    unique (tenant_id, source, source_id)
) with (fillfactor = 80);
call reactor.put_index('reactor.tokens_by_integration', $$create index tokens_by_integration on reactor.tokens (tenant_id, integration, account)$$);
call reactor.put_index('reactor.tokens_next', $$create index tokens_next on reactor.tokens (next_at) where next_at is not null$$);
call reactor.put_index('reactor.tokens_alert', $$create index tokens_alert on reactor.tokens (alert_at) where alert_at is not null$$);
call reactor.put_index('reactor.tokens_app_error', $$create index tokens_app_error on reactor.tokens (integration) where state = 'app_error'$$);
call reactor.put_index('reactor.tokens_unknown', $$create index tokens_unknown on reactor.tokens (integration) where trouble = 'unknown_integration'$$);
-- For `reactor tokens`: what needs a person, then what ends soonest.
call reactor.put_index('reactor.tokens_unwell', $$create index tokens_unwell on reactor.tokens (id) where state <> 'active' or trouble is not null$$);
call reactor.put_index('reactor.tokens_late', $$create index tokens_late on reactor.tokens (late_at) where state = 'active'$$);
call reactor.put_index('reactor.tokens_deadline', $$create index tokens_deadline on reactor.tokens (deadline_at) where state = 'active'$$);
call reactor.put_index('reactor.tokens_ends', $$create index tokens_ends on reactor.tokens (ends_at)$$);

-- One call to a provider that may change a token. The row is committed before the call is made.
create table if not exists reactor.token_attempts (
    id uuid primary key default gen_random_uuid(),
    token_id bigint not null,
    tenant_id text collate "C" not null,
    from_version bigint not null,
    host text not null,       -- whose journal may hold the answer
    process text not null,
    status text not null default 'live' check (status in ('live', 'saved', 'refused', 'failed', 'lost', 'superseded')),
    replays int not null,     -- answers to this refresh token that were lost before
    code text,
    started_at timestamptz not null,
    deadline timestamptz not null,
    ended_at timestamptz
);
call reactor.put_index('reactor.token_attempts_live', $$create unique index token_attempts_live on reactor.token_attempts (token_id) where status = 'live'$$);
call reactor.put_index('reactor.token_attempts_by_host', $$create index token_attempts_by_host on reactor.token_attempts (host) where status = 'live'$$);
call reactor.put_index('reactor.token_attempts_ended', $$create index token_attempts_ended on reactor.token_attempts (ended_at) where status <> 'live'$$);

-- How many tokens are in which state, as changes a backend: status counts them without reading a million rows, and nobody
-- waits for anybody.
create table if not exists reactor.token_counts (
    state text not null,
    backend int not null default pg_backend_pid(),
    tokens bigint not null,
    primary key (state, backend)
) with (fillfactor = 50);

call reactor.protect('reactor.token_sources', 'registry');
call reactor.protect('reactor.tokens', 'queue');
call reactor.protect('reactor.token_attempts', 'queue');
call reactor.protect('reactor.token_counts', 'registry');
do $$
begin
    call reactor.put_policy('reactor.token_sources', 'reactor_registry', format('for select to %I using (true)', reactor.worker_role()));
    call reactor.put_policy('reactor.token_counts', 'reactor_counts', format('to %I using (true) with check (true)', reactor.worker_role()));
end
$$;

create or replace function reactor.tokens_counted() returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    if tg_op = 'INSERT' then
        insert into reactor.token_counts as c (state, tokens) select state, count(*) from new_rows group by state
        on conflict (state, backend) do update set tokens = c.tokens + excluded.tokens;
    elsif tg_op = 'DELETE' then
        insert into reactor.token_counts as c (state, tokens) select state, -count(*) from old_rows group by state
        on conflict (state, backend) do update set tokens = c.tokens + excluded.tokens;
    else
        insert into reactor.token_counts as c (state, tokens)
        select state, sum(n) from (select state, 1 as n from new_rows union all select state, -1 from old_rows) moved
        group by state having sum(n) <> 0
        on conflict (state, backend) do update set tokens = c.tokens + excluded.tokens;
    end if;
    return null;
end
$$;
do $$
begin
    if not exists (select from pg_trigger where tgrelid = 'reactor.tokens'::regclass and tgname = 'reactor_counted_update') then
        create trigger reactor_counted_insert after insert on reactor.tokens
            referencing new table as new_rows for each statement execute function reactor.tokens_counted();
        create trigger reactor_counted_update after update on reactor.tokens
            referencing old table as old_rows new table as new_rows for each statement execute function reactor.tokens_counted();
        create trigger reactor_counted_delete after delete on reactor.tokens
            referencing old table as old_rows for each statement execute function reactor.tokens_counted();
        if not exists (select from pg_type where typname = 'token_row' and typnamespace = 'reactor'::regnamespace) then
            -- A row of a token source, as its mapping sees it.
            create type reactor.token_row as (
                tenant_id text, source_id text, integration text, account text, access_token text, refresh_token text,
                sealed_access_token text, sealed_refresh_token text, issued_at timestamptz, expires_at timestamptz,
                refresh_expires_at timestamptz, scope text, metadata jsonb, state text, version bigint);
        end if;
    end if;
end
$$;

create or replace function reactor.fingerprint_of(w reactor.token_row) returns bytea
language sql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
    select sha256(convert_to(jsonb_build_array($1.access_token, $1.refresh_token, $1.sealed_access_token, $1.sealed_refresh_token)::text, 'UTF8'))
$$;

-- The current row of a token; nulls where there is none, no secret in it, or no name of an integration. p_locks: nobody may change it until we commit.
create or replace function reactor.read_token_row(p_source int, p_tenant text, p_source_id text, p_locks boolean) returns reactor.token_row
language plpgsql
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set datestyle = 'ISO, YMD'
as $$
declare
    s reactor.token_sources;
    w reactor.token_row;
begin
    select * into s from reactor.token_sources where id = p_source and exists (select from pg_class where oid = relation);
    if not found then
        return null;
    end if;
    execute format('select %s from %s as t where %s %s', s.reads, s.relation, s.is_row, case when p_locks then 'for no key update' else '' end)
        into w using p_tenant, p_source_id;
    if coalesce(w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token) is null
        or (w.integration <> '' and length(w.integration) <= 190) is not true
    then
        return null;
    end if;
    return w;
end
$$;

-- Writes a token, or only its state, back into its row; the trigger there knows that it was us.
create or replace function reactor.write_token_row(r reactor.tokens, w reactor.token_row, p_whole boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set datestyle = 'ISO, YMD'
as $$
declare
    s reactor.token_sources;
begin
    select * into strict s from reactor.token_sources where id = r.source;
    perform set_config('reactor.writes_token', r.source::text, true);
    execute format('update %s as t set %s where %s', s.relation, case when p_whole then s.writes else s.marks end, s.is_row)
        using r.tenant_id, r.source_id, w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token,
            r.issued_at, r.expires_at, r.refresh_expires_at, w.scope, r.state, r.state_reason, r.version;
    perform set_config('reactor.writes_token', '', true);
end
$$;

-- What time alone does to a token, whatever its provider is like: a token that nobody can refresh ends; and when there will
-- be something to say next (see wanted_token_alerts).
create or replace function reactor.mark_time(r reactor.tokens, p_now timestamptz) returns reactor.tokens
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if r.state = 'active' and not r.can_refresh and r.ends_at <= p_now then
        r.state := 'expired';
        r.state_reason := 'its time is up';
    end if;
    r.alert_at := case when r.state = 'active' then (
        select min(a.at) from (
            select r.deadline_at - make_interval(days => d) as at from unnest('{14, 7, 3, 1, 0}'::int[]) d
            union all select r.late_at) a
        where a.at > p_now) end;
    return r;
end
$$;

-- When a token is to be looked at next, and what is to be said about it when. p_policy is its strategy's, in seconds:
-- refreshes, rotates, works_expired, margin_s, minimum_age_s, life_s, probes, probe_every_s.
-- Due at max(issued + minimum age, end - margin), up to a tenth of the margin later, so that not all come at once; the
-- margin is at most half a life. Without a policy (an integration that this reactor does not know) the plan stays, and a look
-- that is due comes again in an hour.
create or replace function reactor.plan_token(r reactor.tokens, p_policy jsonb, p_now timestamptz) returns reactor.tokens
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
    v_margin interval := make_interval(secs => (p_policy ->> 'margin_s')::float8);
    -- A clock or a time zone may be off; null where nobody knows.
    v_issued_at constant timestamptz := case when r.issued_at > p_now then p_now else r.issued_at end;
    v_mature_at constant timestamptz := v_issued_at + make_interval(secs => coalesce((p_policy ->> 'minimum_age_s')::float8, 0));
    v_due timestamptz;
    v_probe timestamptz;
begin
    if p_policy is null then
        r.next_at := greatest(r.next_at, p_now + case when r.next_at > p_now then interval '0' else interval '1 hour' end);
        return r;
    end if;
    r.ends_at := coalesce(r.expires_at, r.issued_at + make_interval(secs => (p_policy ->> 'life_s')::float8));
    r.can_refresh := r.can_refresh and ((p_policy ->> 'works_expired')::boolean or v_mature_at < r.ends_at) is not false;
    if r.can_refresh and r.state_reason = 'its time is up' then  -- said by who did not know how
        r.state := 'active';
        r.state_reason := null;
    end if;
    r.late_at := null;
    if r.can_refresh then
        if r.ends_at is null then
            v_due := case when r.last_success_at is null then p_now end;  -- to learn when it ends
        else
            if v_issued_at < r.ends_at then
                v_margin := least(v_margin, (r.ends_at - v_issued_at) / 2);
            end if;
            r.late_at := greatest(r.ends_at - v_margin / 2, r.version_at + interval '2 minutes');
            v_due := greatest(v_mature_at, r.last_success_at + interval '1 minute',  -- whatever life a provider gives
                r.ends_at - v_margin * (0.9 + 0.1 * (1 - (hashint8(r.id * 31 + r.version) & 1023) / 1024.0)));
        end if;
    end if;
    if (p_policy ->> 'probes')::boolean and (not r.can_refresh or r.ends_at is null) then
        v_probe := coalesce(r.probed_at + make_interval(secs => (p_policy ->> 'probe_every_s')::float8), p_now);
    end if;
    -- The end of a refresh token that each refresh renews is nobody's to move.
    r.deadline_at := case when not r.can_refresh then r.ends_at
        when (p_policy ->> 'rotates')::boolean and v_due < r.refresh_expires_at then null else r.refresh_expires_at end;
    r := reactor.mark_time(r, p_now);
    r.next_at := case
        when r.requested_at is not null and r.state <> 'expired'
            then greatest(p_now, v_mature_at)
        when r.retry_at is not null then r.retry_at
        when r.state = 'active' then coalesce(least(v_due, v_probe), p_now + interval '1 day')
        when r.state in ('key_dead', 'session_down') then v_probe
    end;
    return r;
end
$$;

-- What a person is told to do, in both languages, and who it is.
create or replace function reactor.advise(p_cause text, p_name text, p_days float8 default null) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select jsonb_build_object('who', a.who, 'do', jsonb_build_object(
        'pt', format(a.pt, $2, ceil(greatest($3, 0))), 'en', format(a.en, $2, ceil(greatest($3, 0)))))
    from (values
        ('token_needs_reconnect', 'account owner', 'Conecte %1$s de novo: o acesso foi revogado ou não vale mais.',
            'Connect %1$s again: its access was revoked or is no longer valid.'),
        ('token_expired', 'account owner', 'Conecte %1$s de novo: o acesso venceu.', 'Connect %1$s again: its access has expired.'),
        ('token_expiring', 'account owner', 'Renove ou conecte %1$s de novo: o acesso vence em %2$s dia(s).',
            'Renew or reconnect %1$s: its access ends in %2$s day(s).'),
        ('token_late', 'operator', 'A renovação de %1$s está atrasada: veja se o provedor responde e o último erro.',
            'The refresh of %1$s is late: see whether the provider answers, and the last error.'),
        ('token_permission', 'account owner', 'Conecte %1$s de novo e aceite todas as permissões pedidas.',
            'Connect %1$s again and grant every permission it asks for.'),
        ('token_suspended', 'account owner', 'A conta %1$s não está ativa no provedor: reative-a lá.',
            'The account %1$s is not active at its provider: activate it there.'),
        ('token_key_dead', 'operator', 'A chave de %1$s foi recusada: crie outra no provedor e grave-a.',
            'The key of %1$s is refused: make a new one at the provider and store it.'),
        ('token_session_down', 'account owner', 'A sessão de %1$s caiu (a chave está boa): conecte o aparelho de novo, pelo QR code.',
            'The session of %1$s is down (its key is good): connect the device again, by QR code.'),
        ('app_error', 'operator', 'O provedor recusa o nosso aplicativo (%1$s): confira client_id e client_secret em REACTOR_INTEGRATIONS.',
            'The provider refuses our application (%1$s): check client_id and client_secret in REACTOR_INTEGRATIONS.'),
        ('token_unknown_answer', 'operator', 'O provedor de %1$s responde algo que não conhecemos: veja last_error e o estado da conta.',
            'The provider of %1$s answers something unknown: see last_error and the account.'),
        ('token_attempt_elsewhere', 'operator', 'Outra máquina renovava %1$s e parou: ligue-a de novo, o diário dela pode ter a resposta.',
            'Another host was refreshing %1$s and stopped: start it again, its journal may hold the answer.'),
        ('token_key_missing', 'operator', 'O token de %1$s não abre: acrescente a chave antiga a REACTOR_TOKEN_KEY, ou grave-o de novo se foi selado para outra conta.',
            'The token of %1$s does not open: add the old key to REACTOR_TOKEN_KEY, or store it anew if it was sealed for another account.'),
        ('token_unknown_integration', 'operator', 'Ninguém cuida de %1$s: a integração não está em REACTOR_INTEGRATIONS.',
            'Nobody cares for %1$s: its integration is not in REACTOR_INTEGRATIONS.'),
        ('token_table_broken', 'operator', 'Os tokens da tabela %1$s não podem ser lidos como foram mapeados: execute attach-tokens de novo.',
            'The tokens of table %1$s cannot be read as they are mapped: attach-tokens again.'),
        ('token_not_saved', 'operator', 'O novo token de %1$s está no diário e não pode ser gravado: veja gatilhos e colunas da tabela.',
            'The new token of %1$s is in the journal and cannot be stored: see the triggers and columns of its table.')
    ) as a (cause, who, pt, en) where a.cause = $1
$$;

create or replace function reactor.token_name(r reactor.tokens) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select concat_ws('/', $1.tenant_id, $1.integration, nullif($1.account, '')) $$;

-- What a token's alerts stand under, whatever its row is renamed to.
create or replace function reactor.token_subject(r reactor.tokens) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$ select format('%s (token %s)', $1.tenant_id, $1.id) $$;

-- The alerts that a token deserves: a function of its row and the time, so that none is forgotten and each ends by itself.
-- A child says nothing of its parent's failure; what is the application's is said once, by sweep_tokens.
create or replace function reactor.wanted_token_alerts(r reactor.tokens, p_now timestamptz)
returns table (cause text, threshold text, advice jsonb)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select a.cause, a.threshold, reactor.advise(a.cause, reactor.token_name($1), extract(epoch from $1.deadline_at - $2) / 86400)
    from (
        select 'token_' || $1.state as cause, null as threshold
        where $1.state not in ('active', 'app_error') and $1.state_reason is distinct from 'parent'
        union all
        select 'token_late', null where $1.state = 'active' and $1.can_refresh and $1.late_at <= $2
        union all
        select 'token_expiring', (select min(d) from unnest('{14, 7, 3, 1, 0}'::int[]) d where $1.deadline_at - $2 <= make_interval(days => d))::text
        where $1.state = 'active' and $1.deadline_at - $2 <= interval '14 days'
        union all
        select 'token_' || $1.trouble, null where $1.trouble is not null
    ) a
$$;

-- Opens and closes a token's alerts; returns what is news.
create or replace function reactor.renew_token_alerts(r reactor.tokens, p_now timestamptz)
returns table (event text, cause text, subject text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_subject constant text := reactor.token_subject(r);
    v_causes constant text[] := '{token_needs_reconnect, token_permission, token_suspended, token_key_dead, token_session_down, token_expired,
        token_expiring, token_late, token_unknown_answer, token_attempt_elsewhere, token_key_missing, token_unknown_integration, token_not_saved}';
    v_wanted text[] := '{}';
    a record;
begin
    for a in select * from reactor.wanted_token_alerts(r, p_now) w order by w.cause loop
        v_wanted := v_wanted || a.cause;
        if reactor.open_alert(a.cause, v_subject, a.advice || jsonb_strip_nulls(jsonb_build_object('tenant_id', r.tenant_id,
            'integration', r.integration, 'account', r.account, 'state', r.state, 'reason', coalesce(r.state_reason, r.last_error),
            'ends_at', r.ends_at, 'deadline_at', r.deadline_at, 'threshold', a.threshold)), r.tenant_id)
        then
            return query values ('alert_opened', a.cause, v_subject);
        end if;
    end loop;
    return query
    update reactor.alerts o set resolved_at = now()
    where o.resolved_at is null and o.cause = any (v_causes) and o.cause <> all (v_wanted) and o.subject = v_subject
    returning 'alert_resolved', o.cause, o.subject;
end
$$;

-- Leaves a token's row exactly one waiting job, due at p_at; none where p_at is null. Every change of the row that wrote a
-- job was seen by the caller, for it holds the row.
create or replace function reactor.schedule_token(r reactor.tokens, p_at timestamptz, p_now timestamptz) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_key constant text := format('token:%s:%s', r.source, r.source_id);
    v_ids bigint[] := array(
        select id from reactor.jobs
        where tenant_id = r.tenant_id and type = 'refresh_token' and dedupe_key = v_key and status in ('pending', 'failed')
        order by id for update skip locked);
begin
    if p_at is not null and v_ids = '{}' then
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload, run_after, updated_at)
        values ('refresh_token', r.tenant_id, 'tokens:' || r.integration, v_key,
            jsonb_build_object('source', r.source, 'id', r.source_id), p_at, p_now);
    elsif p_at is not null then
        update reactor.jobs set run_after = p_at, updated_at = p_now, lane = 'tokens:' || r.integration, status = 'pending', snoozed_since = null,
            attempts = case when is_suspect then attempts else 0 end
        where id = v_ids[1];
    end if;
    update reactor.jobs set status = 'done', result = jsonb_build_object('merged_into', v_ids[1]), updated_at = p_now, is_suspect = false
    where id = any (v_ids) and (p_at is null or id <> v_ids[1]);
    perform reactor.ring();
end
$$;

-- Has the tokens that are derived from a new one (p_policy: children, their integrations) looked at again, where they stand still.
create or replace function reactor.wake_children(r reactor.tokens, p_policy jsonb, p_now timestamptz) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    c reactor.tokens;
begin
    if jsonb_array_length(p_policy -> 'children') > 0 and r.version > (select version from reactor.tokens where id = r.id) then
        for c in
            select * from reactor.tokens
            where tenant_id = r.tenant_id and integration in (select jsonb_array_elements_text(p_policy -> 'children')) and state <> 'active'
            order by id for update
        loop
            update reactor.tokens set requested_at = p_now where id = c.id;
            perform reactor.schedule_token(c, p_now, p_now);
        end loop;
    end if;
end
$$;

-- Plans a token, keeps it, says and schedules what follows. p_row: its row, whose mapped state follows ours. Returns it
-- as it is now; what is news is in p_news. p_writes: its secrets, too. p_next: the next look, whatever the plan says.
create or replace function reactor.keep_token(
    inout r reactor.tokens, p_row reactor.token_row, p_writes boolean, p_policy jsonb, p_now timestamptz,
    p_next timestamptz default null, out p_news jsonb
)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    v_columns constant jsonb := (select columns from reactor.token_sources where id = r.source);
begin
    r := reactor.plan_token(r, p_policy, p_now);
    r.next_at := coalesce(p_next, r.next_at);
    if p_writes or v_columns ? 'state' and p_row.state is distinct from r.state
        or v_columns ? 'version' and p_row.version is distinct from r.version
    then
        begin
            perform reactor.write_token_row(r, p_row, p_writes);
            r.trouble := nullif(r.trouble, 'not_saved');
        exception when others then
            if p_writes or sqlstate ~ '^(40|53|55|57)' then
                raise;
            end if;
            r.trouble := 'not_saved';  -- the table refuses even a word on its state: care goes on without
            r.last_error := 'sqlstate_' || sqlstate;
        end;
    end if;
    perform reactor.wake_children(r, p_policy, p_now);
    update reactor.tokens set (integration, account, version, version_at, fingerprint, state, state_reason, issued_at, expires_at, refresh_expires_at,
            can_refresh, lost_answers, failures, trouble, retry_at, requested_at, probed_at, last_success_at, last_error, last_error_at,
            ends_at, late_at, deadline_at, alert_at, next_at, updated_at)
        = (r.integration, r.account, r.version, r.version_at, r.fingerprint, r.state, r.state_reason, r.issued_at, r.expires_at, r.refresh_expires_at,
            r.can_refresh, r.lost_answers, r.failures, r.trouble, r.retry_at, r.requested_at, r.probed_at, r.last_success_at, r.last_error,
            r.last_error_at, r.ends_at, r.late_at, r.deadline_at, r.alert_at, r.next_at, p_now)
    where id = r.id;
    perform reactor.schedule_token(r, r.next_at, p_now);
    p_news := (select jsonb_agg(to_jsonb(n)) from reactor.renew_token_alerts(r, p_now) n);
end
$$;

-- What a verdict on a provider's answer does to a token (TOKENS section 2); a success is told by who saves it.
create or replace function reactor.judge_token(r reactor.tokens, p_verdict text, p_code text, p_retry_s float8, p_policy jsonb, p_now timestamptz)
returns reactor.tokens
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_retry interval;
begin
    r.failures := r.failures + 1;
    r.last_error := p_code;
    r.last_error_at := p_now;
    r.requested_at := null;
    -- A third of what is left of the token at most, and a minute at least; one that has ended is wanted. What the provider
    -- asks for is the least, while the token lives: nulls are passed over by greatest and least.
    v_retry := greatest(
        case when p_retry_s is not null then least(make_interval(secs => least(greatest(p_retry_s, 0), 86400)),
            case when r.ends_at > p_now then greatest(r.ends_at - p_now - interval '1 minute', interval '1 minute') end) end,
        least(reactor.backoff(r.failures),
            case when r.ends_at > p_now then greatest((r.ends_at - p_now) / 3, interval '1 minute') else interval '15 minutes' end));
    r.retry_at := null;
    case p_verdict
        when 'reconnect' then
            r.state := case when r.ends_at <= p_now and not (p_policy ->> 'works_expired')::boolean then 'expired' else 'needs_reconnect' end;
            r.state_reason := p_code;
        when 'permission', 'key_dead', 'session_down' then
            r.state := p_verdict;
            r.state_reason := p_code;
            if p_verdict <> 'permission' then
                r.retry_at := p_now + case p_verdict when 'session_down' then interval '1 hour'
                    else make_interval(secs => (p_policy ->> 'probe_every_s')::float8) end;
            end if;
        when 'suspended' then
            r.state := p_verdict;
            r.state_reason := p_code;
            r.retry_at := p_now + greatest(v_retry, interval '6 hours');
        when 'app' then
            r.state := 'app_error';
            r.state_reason := p_code;
            r.retry_at := p_now + greatest(v_retry, interval '15 minutes');
        when 'parent' then
            r.state := 'needs_reconnect';
            -- Of a parent that is there its own alert speaks; where there is none, nobody else would.
            r.state_reason := case p_code when 'missing' then 'parent_missing' when 'no_parent' then p_code when 'several_parents' then p_code else 'parent' end;
            r.retry_at := p_now + interval '1 hour';
        when 'ambiguous' then
            r.lost_answers := r.lost_answers + 1;
            if not (p_policy ->> 'rotates')::boolean then
                r.retry_at := p_now + v_retry;
            elsif r.lost_answers < 2 then
                r.retry_at := p_now;  -- once more and promptly: it was never sent, or the provider has a grace
            else
                r.state := 'needs_reconnect';
                r.state_reason := 'answer_lost';
                r.retry_at := p_now + greatest(v_retry, interval '1 hour');  -- no person may be needed after all
            end if;
        when 'unknown' then
            r.retry_at := p_now + case when r.failures < 5 then v_retry else greatest(v_retry, interval '1 day') end;
            r.trouble := case when r.failures < 5 then r.trouble else 'unknown_answer' end;
        else
            r.retry_at := p_now + v_retry;
            if not r.can_refresh and r.failures >= 5 then  -- whether it works, nobody knows
                r.trouble := 'unknown_answer';
            end if;
    end case;
    return r;
end
$$;

-- What a person changed in a row: a token, its times, or a state set back to active. p_columns: the mapped ones.
create or replace function reactor.notice_row(r reactor.tokens, w reactor.token_row, p_columns jsonb, p_policy jsonb, p_now timestamptz)
returns reactor.tokens
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if r.fingerprint <> reactor.fingerprint_of(w) then
        r.version := greatest(r.version, coalesce(w.version, 1) - 1) + 1;
        r.fingerprint := reactor.fingerprint_of(w);
        r.version_at := p_now;
        r.issued_at := w.issued_at;
        r.expires_at := w.expires_at;
        r.refresh_expires_at := w.refresh_expires_at;
        r.state := 'active'; r.state_reason := null; r.lost_answers := 0; r.failures := 0; r.trouble := null; r.retry_at := null;
        r.requested_at := null; r.probed_at := null; r.last_success_at := null;
    elsif p_columns ? 'state' and w.state = 'active' and r.state <> 'active' then
        r.state := 'active'; r.state_reason := null; r.failures := 0; r.trouble := null; r.retry_at := null; r.probed_at := null;
        r.requested_at := p_now;
    end if;
    r.integration := w.integration;
    r.account := w.account;
    r.issued_at := case when p_columns ? 'issued_at' then w.issued_at else r.issued_at end;
    r.expires_at := case when p_columns ? 'expires_at' then w.expires_at else r.expires_at end;
    r.refresh_expires_at := case when p_columns ? 'refresh_expires_at' then w.refresh_expires_at else r.refresh_expires_at end;
    if p_policy is null then  -- somebody else may know better
        r.trouble := 'unknown_integration';
        return r;
    end if;
    r.trouble := nullif(r.trouble, 'unknown_integration');
    r.can_refresh := coalesce((p_policy ->> 'refreshes')::boolean, false) and case p_policy ->> 'renews_with'
        when 'refresh_token' then coalesce(w.refresh_token, w.sealed_refresh_token) is not null
        when 'access_token' then coalesce(w.access_token, w.sealed_access_token) is not null
        else true end;
    return r;
end
$$;

-- The first step: takes notice of the row as it is now, and says what is to be done (action) about its token:
--   gone         the row is, or holds no secret any more: nothing is kept of it
--   integration  the row names another one than p_integration: ask again with that one's policy
--   seal         p_seals, and the row holds plain text that it could hold sealed
--   refresh      an attempt has been written down: call the provider now, then save_token
--   probe        call the provider, then settle_probe
--   held         another attempt is under way, until its deadline; or was, by a process that did not end it
--   due          as refresh, but p_claims is false
--   wait         nothing; a job is scheduled for next_at
-- p_wanted: how long the token must be good for, at least; shorter makes it due.
create or replace function reactor.look_at_token(
    p_source int, p_tenant text, p_source_id text, p_integration text, p_policy jsonb, p_host text, p_process text, p_timeout interval,
    p_claims boolean default true, p_seals boolean default false, p_wanted interval default null, p_now timestamptz default null
) returns table (
    action text, token_id bigint, integration text, account text, version bigint, state text, state_reason text, ends_at timestamptz,
    next_at timestamptz, seen_at timestamptz, attempt uuid, host text, process text, deadline timestamptz, access_token text,
    refresh_token text, sealed_access_token text, sealed_refresh_token text, scope text, metadata jsonb, can_seal boolean, news jsonb
)
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '300ms'  -- 55P03 where somebody's transaction holds the row, or the table
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    r reactor.tokens;
    w reactor.token_row;
    h reactor.token_attempts;
    v_columns constant jsonb := (select s.columns from reactor.token_sources s where s.id = p_source);
    v_action text := 'wait';
    v_next timestamptz;      -- of the job that stands in for us, should we not come back
    v_kept record;
    v_news jsonb;
begin
    select * into r from reactor.tokens t where t.tenant_id = p_tenant and t.source = p_source and t.source_id = p_source_id for update;
    if not found and (reactor.read_token_row(p_source, p_tenant, p_source_id, false)).source_id is not null then
        insert into reactor.tokens (source, source_id, tenant_id, integration, account, version, fingerprint)
        values (p_source, p_source_id, p_tenant, '', '', 0, '') on conflict do nothing;
        select * into r from reactor.tokens t where t.tenant_id = p_tenant and t.source = p_source and t.source_id = p_source_id for update;
    end if;
    if r.id is not null then
        w := reactor.read_token_row(p_source, p_tenant, p_source_id, true);
    end if;
    seen_at := v_now;
    token_id := r.id;
    if w.source_id is null then
        action := 'gone';
        integration := r.integration;
        if r.id is not null then
            r.state := 'active'; r.can_refresh := false; r.deadline_at := null; r.trouble := null;  -- deserves no alert
            news := (select jsonb_agg(to_jsonb(n)) from reactor.renew_token_alerts(r, v_now) n);
            delete from reactor.token_attempts a where a.token_id = r.id;
            delete from reactor.tokens t where t.id = r.id;
        end if;
        return next;
        return;
    elsif w.integration is distinct from p_integration then
        action := 'integration';
        integration := w.integration;
        if r.version = 0 then
            delete from reactor.tokens t where t.id = r.id;
        end if;
        return next;
        return;
    end if;
    r := reactor.plan_token(reactor.notice_row(r, w, v_columns, p_policy, v_now), p_policy, v_now);

    select * into h from reactor.token_attempts a where a.token_id = r.id and a.status = 'live';
    if p_seals and v_columns ? 'sealed_access_token' and coalesce(w.access_token, w.refresh_token) is not null then
        v_action := 'seal';
    elsif h.id is not null then
        v_action := 'held';
        if h.host <> p_host and h.deadline <= v_now then  -- its answer may lie in that host's journal
            h.deadline := h.deadline + least(interval '15 minutes', greatest(coalesce(r.ends_at - h.deadline, interval '30 minutes'), '0') / 2);
            r.trouble := 'attempt_elsewhere';
        end if;
        v_next := greatest(h.deadline, v_now + case when p_policy is null then interval '1 hour' else interval '1 second' end);
    elsif p_policy is null then
        v_action := 'wait';
    elsif r.can_refresh and r.state <> 'expired' and (r.next_at <= v_now
        or p_wanted is not null and r.state = 'active' and coalesce(r.ends_at <= v_now
                -- Half a life at most: who wants more would have it refreshed at every call.
                + least(p_wanted, case when r.issued_at < r.ends_at then (r.ends_at - r.issued_at) / 2 end), false)
            and coalesce(r.issued_at + make_interval(secs => coalesce((p_policy ->> 'minimum_age_s')::float8, 0)) <= v_now, true)
            and (r.retry_at <= v_now or r.last_error_at <= v_now - interval '10 seconds' and r.last_error <> 'http_429') is not false)
    then
        -- The state decides what a due time means: a token that only a probe can prove is probed.
        v_action := case when (p_policy ->> 'probes')::boolean and r.ends_at is null and r.last_success_at is not null and r.requested_at is null
            then 'probe' when p_claims then 'refresh' else 'due' end;
    elsif r.next_at <= v_now and (p_policy ->> 'probes')::boolean then
        v_action := 'probe';
    end if;
    if v_action = 'refresh' then
        r.trouble := nullif(r.trouble, 'attempt_elsewhere');
        r.requested_at := null;
        insert into reactor.token_attempts (token_id, tenant_id, from_version, host, process, replays, started_at, deadline)
        values (r.id, r.tenant_id, r.version, p_host, p_process, r.lost_answers, v_now, v_now + p_timeout)
        returning * into h;
        v_next := h.deadline + interval '1 second';  -- should this process not come back to it
    elsif v_action in ('probe', 'due', 'seal') then
        v_next := v_now + p_timeout + interval '1 second';
    elsif r.next_at <= v_now then  -- it was due, and there is nothing that could be done: no call, no probe
        r.retry_at := null;
        r.requested_at := null;
    end if;
    select * into v_kept from reactor.keep_token(r, w, false, p_policy, v_now, v_next);
    r := v_kept.r;
    v_news := v_kept.p_news;
    return query select v_action, r.id, r.integration, r.account, r.version, r.state, r.state_reason, r.ends_at, r.next_at, v_now,
        h.id, h.host, h.process, h.deadline, w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token, w.scope,
        w.metadata, v_columns ? 'sealed_access_token', v_news;
end
$$;

-- Puts sealed text where a row holds plain, or what another key sealed; the same token, so the same version. False when the
-- row is no longer as it was seen.
create or replace function reactor.seal_token(
    p_token bigint, p_version bigint, p_access text, p_refresh text, p_sealed_access text, p_sealed_refresh text
) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '300ms'  -- 55P03 where somebody's transaction holds the row, or the table
as $$
declare
    r reactor.tokens;
    w reactor.token_row;
begin
    select * into r from reactor.tokens where id = p_token and version = p_version for update;
    w := reactor.read_token_row(r.source, r.tenant_id, r.source_id, true);
    if w.source_id is null or r.fingerprint <> reactor.fingerprint_of(w)
        or (w.access_token, w.refresh_token) is distinct from (p_access, p_refresh)
    then
        return false;
    end if;
    w.access_token := null;
    w.refresh_token := null;
    w.sealed_access_token := p_sealed_access;
    w.sealed_refresh_token := p_sealed_refresh;
    perform reactor.write_token_row(r, w, true);
    update reactor.tokens set fingerprint = reactor.fingerprint_of(w) where id = r.id;
    return true;
end
$$;

-- The last step: what the provider's answer to an attempt means for its token, in one transaction with the end of the
-- attempt, the job of the next look and the alerts. p_fresh: what a success brought, as strings to store (access_token,
-- refresh_token, sealed_access_token, sealed_refresh_token) with expires_in_s, refresh_expires_in_s, scope; a refresh token
-- that is missing is kept.
-- outcome: saved; refused, failed or lost (see state); superseded (the row changed meanwhile: ours is dropped);
-- closed (somebody ended this attempt already).
create or replace function reactor.save_token(
    p_attempt uuid, p_verdict text, p_code text, p_fresh jsonb, p_retry_s float8, p_policy jsonb, p_now timestamptz default null
) returns table (
    outcome text, token_id bigint, version bigint, state text, state_reason text, ends_at timestamptz, next_at timestamptz, news jsonb
)
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '300ms'  -- 55P03 where somebody's transaction holds the row, or the table
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    a reactor.token_attempts;
    r reactor.tokens;
    w reactor.token_row;
    v_status text := 'superseded';
    v_kept record;
    v_news jsonb;
begin
    select t.* into r from reactor.tokens t join reactor.token_attempts o on o.token_id = t.id where o.id = p_attempt for update of t;
    -- A good answer lands however late, even to an attempt that was given up for lost.
    select * into a from reactor.token_attempts o
    where o.id = p_attempt and (o.status = 'live' or o.status = 'lost' and p_verdict = 'success');
    if not found then
        return query select 'closed', r.id, r.version, r.state, r.state_reason, r.ends_at, r.next_at, null::jsonb;
        return;
    end if;
    w := reactor.read_token_row(r.source, r.tenant_id, r.source_id, true);
    -- The row is as it was claimed: sealing it moved no version. Or an answer to an earlier attempt has come home meanwhile: what
    -- the provider issued last is what works.
    if reactor.fingerprint_of(w) = r.fingerprint and (r.version = a.from_version
        or p_verdict = 'success' and r.version = a.from_version + 1 and exists (
            select from reactor.token_attempts o where o.token_id = r.id and o.from_version = a.from_version and o.status = 'saved'
                and o.started_at < a.started_at))
    then
        v_status := case when p_verdict = 'success' then 'saved' when p_verdict = 'ambiguous' then 'lost'
            when p_verdict in ('transient', 'unknown', 'parent') then 'failed' else 'refused' end;
    end if;
    update reactor.token_attempts o set status = v_status, code = p_code, ended_at = v_now where o.id = a.id;
    if v_status = 'superseded' then
        if w.source_id is not null then  -- by a person: look at what they brought
            perform reactor.schedule_token(r, v_now, v_now);
        end if;
    elsif v_status = 'saved' then
        w.access_token := p_fresh ->> 'access_token';
        w.sealed_access_token := p_fresh ->> 'sealed_access_token';
        if p_fresh ?| '{refresh_token, sealed_refresh_token}' then
            w.refresh_token := p_fresh ->> 'refresh_token';
            w.sealed_refresh_token := p_fresh ->> 'sealed_refresh_token';
        end if;
        w.scope := coalesce(p_fresh ->> 'scope', w.scope);
        r.issued_at := a.started_at;  -- by this clock, and before the provider began to count
        r.expires_at := a.started_at + make_interval(secs => coalesce((p_fresh ->> 'expires_in_s')::float8, (p_policy ->> 'life_s')::float8));
        r.refresh_expires_at := case
            when p_fresh ? 'refresh_expires_in_s' then a.started_at + make_interval(secs => (p_fresh ->> 'refresh_expires_in_s')::float8)
            when (p_fresh ->> 'is_rotated')::boolean and p_policy ? 'refresh_life_s'
                then a.started_at + make_interval(secs => (p_policy ->> 'refresh_life_s')::float8)
            else r.refresh_expires_at end;
        r.version := r.version + 1;
        r.version_at := v_now;
        r.fingerprint := reactor.fingerprint_of(w);
        r.state := 'active'; r.state_reason := null; r.lost_answers := 0; r.failures := 0; r.trouble := null; r.retry_at := null;
        r.requested_at := null; r.probed_at := v_now; r.last_success_at := v_now;
        select * into v_kept from reactor.keep_token(r, w, true, p_policy, v_now);
        r := v_kept.r;
        v_news := v_kept.p_news;
    else
        r := reactor.notice_row(r, w, (select s.columns from reactor.token_sources s where s.id = r.source), p_policy, v_now);
        r := reactor.judge_token(r, p_verdict, p_code, p_retry_s, p_policy, v_now);
        select * into v_kept from reactor.keep_token(r, w, false, p_policy, v_now);
        r := v_kept.r;
        v_news := v_kept.p_news;
    end if;
    return query select v_status, r.id, r.version, r.state, r.state_reason, r.ends_at, r.next_at, v_news;
end
$$;

-- What a probe, or a failure without an attempt (parent, key_missing, not_saved), says of a token; nothing when its version moved on.
create or replace function reactor.settle_probe(
    p_token bigint, p_version bigint, p_verdict text, p_code text, p_retry_s float8, p_policy jsonb, p_now timestamptz default null
) returns table (outcome text, token_id bigint, version bigint, state text, state_reason text, ends_at timestamptz, next_at timestamptz, news jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '300ms'  -- 55P03 where somebody's transaction holds the row, or the table
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    r reactor.tokens;
    w reactor.token_row;
    v_kept record;
    v_news jsonb;
begin
    select * into r from reactor.tokens t where t.id = p_token and t.version = p_version for update;
    w := reactor.read_token_row(r.source, r.tenant_id, r.source_id, true);
    if w.source_id is null or reactor.fingerprint_of(w) <> r.fingerprint then
        return query select 'superseded', p_token, r.version, r.state, r.state_reason, r.ends_at, r.next_at, v_news;
        return;
    end if;
    r := reactor.notice_row(r, w, (select s.columns from reactor.token_sources s where s.id = r.source), p_policy, v_now);
    if p_verdict = 'success' then
        r.state := 'active'; r.state_reason := null; r.failures := 0; r.trouble := null; r.retry_at := null; r.last_success_at := v_now;
        r.requested_at := case when r.can_refresh then r.requested_at end;  -- of a key nobody can refresh, this was all
    elsif p_verdict in ('key_missing', 'not_saved') then
        r.trouble := p_verdict;
        r.last_error := p_code;
        r.last_error_at := v_now;
        r.requested_at := null;
        r.retry_at := v_now + interval '15 minutes';
        -- The answer that is here only has to be saved: no other host may take it for lost meanwhile.
        update reactor.token_attempts o set deadline = greatest(o.deadline, r.retry_at + interval '1 minute')
        where o.token_id = r.id and o.status = 'live';
    else
        r := reactor.judge_token(r, p_verdict, p_code, p_retry_s, p_policy, v_now);
        if r.can_refresh and p_verdict in ('key_dead', 'reconnect') then  -- derive it again from its parent
            r.state := 'active'; r.state_reason := null; r.retry_at := null; r.requested_at := v_now;
        end if;
    end if;
    r.probed_at := v_now;
    select * into v_kept from reactor.keep_token(r, w, false, p_policy, v_now);
    r := v_kept.r;
    v_news := v_kept.p_news;
    return query select case when p_verdict = 'success' then 'probed' else 'refused' end, r.id, r.version, r.state, r.state_reason, r.ends_at,
        r.next_at, v_news;
end
$$;

-- Whether a token has a job; one that died since p_dead_since has its alert. One look an index: they are partial, and no one of them has every status.
create or replace function reactor.has_token_job(p_tenant text, p_key text, p_dead_since timestamptz) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
    return exists (select from reactor.jobs where tenant_id = p_tenant and type = 'refresh_token' and dedupe_key = p_key and status in ('pending', 'failed'))
        or exists (select from reactor.jobs where tenant_id = p_tenant and type = 'refresh_token' and dedupe_key = p_key and status = 'running')
        or exists (select from reactor.jobs
            where tenant_id = p_tenant and type = 'refresh_token' and dedupe_key = p_key and status = 'dead' and updated_at > p_dead_since);
end
$$;

-- The look a minute, whose cost does not grow with the tokens: what has come to be said by time alone; what is overdue and
-- has lost its job (as far as 5,000 show it; reconcile_tokens sees all); those of p_integrations that nobody knew before; the
-- alerts of applications. Only one reactor at a time. Returns what is news.
create or replace function reactor.sweep_tokens(p_now timestamptz default null, p_integrations text[] default '{}') returns table (event text, cause text, subject text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_now timestamptz := coalesce(p_now, clock_timestamp());
    r reactor.tokens;
    v_was text;
begin
    if not pg_try_advisory_xact_lock('reactor.tokens'::regclass::oid::int, 1) then
        return;
    end if;
    for r in select * from reactor.tokens t where t.alert_at <= v_now order by t.alert_at limit 1000 for update skip locked loop
        v_was := r.state;
        r := reactor.mark_time(r, v_now);
        return query select * from reactor.renew_token_alerts(r, v_now);
        update reactor.tokens t set alert_at = r.alert_at, state = r.state, state_reason = r.state_reason where t.id = r.id;
        if r.state <> v_was then
            perform reactor.schedule_token(r, v_now, v_now);  -- its row is told by who looks at it
        end if;
    end loop;
    for r in
        select * from reactor.tokens t where t.id in (
            select o.id from (
                select * from reactor.tokens d where d.next_at < v_now - interval '5 minutes' order by d.next_at limit 5000) o
            where not reactor.has_token_job(o.tenant_id, format('token:%s:%s', o.source, o.source_id), v_now - interval '1 hour')
            union all
            (select u.id from reactor.tokens u
            where u.trouble = 'unknown_integration' and u.integration = any (p_integrations) limit 1000))
        for update skip locked
    loop
        perform reactor.schedule_token(r, v_now, v_now);
    end loop;
    return query
    with recursive i as (  -- each integration by one descent of the index, however many tokens stand in it
        (select t.integration from reactor.tokens t where t.state = 'app_error' order by t.integration limit 1)
        union all
        select (select t.integration from reactor.tokens t where t.state = 'app_error' and t.integration > i.integration order by t.integration limit 1)
        from i where i.integration is not null
    )
    select 'alert_opened', 'app_error', i.integration from i
    where i.integration is not null and reactor.open_alert('app_error', i.integration, reactor.advise('app_error', i.integration) || jsonb_build_object('integration', i.integration));
    return query
    update reactor.alerts o set resolved_at = now()
    where o.cause = 'app_error' and o.resolved_at is null
        and not exists (select from reactor.tokens t where t.state = 'app_error' and t.integration = o.subject)
    returning 'alert_resolved', o.cause, o.subject;
end
$$;

-- The scheduled look at everything: rows whose change bypassed the triggers, tokens whose row is gone, tokens that nothing would
-- come back to, and what p_key_id (null: no key) did not seal; each gets a job. Old attempts go. Returns how many jobs.
create or replace function reactor.reconcile_tokens(p_key_id text, p_retention interval default '7 d') returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp set timezone = 'UTC' set lock_timeout = '5s'
as $$
declare
    s reactor.token_sources;
    v_rows bigint;
    v_jobs bigint := 0;
begin
    for s in select * from reactor.token_sources where exists (select from pg_class where oid = relation) order by id loop
        begin
            if exists (select from reactor.relations_of(s.relation) o where (select count(*) from pg_trigger t
                where t.tgrelid = o and t.tgfoid = to_regproc(format('reactor.token_source_%s_written', s.id))) < 4)
            then
                perform reactor.compile_token_source(s.id);  -- a partition came since
            end if;
            execute format('insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
                select ''refresh_token'', coalesce(w.tenant_id, r.tenant_id), ''tokens:'' || coalesce(w.integration, r.integration),
                    ''token:%1$s:'' || coalesce(w.source_id, r.source_id), jsonb_build_object(''source'', %1$s, ''id'', coalesce(w.source_id, r.source_id))
                from (select %2$s from %3$s as t) w
                full join (select * from reactor.tokens where source = %1$s) r on r.tenant_id = w.tenant_id and r.source_id = w.source_id
                where coalesce(w.tenant_id, r.tenant_id) <> '''' and coalesce(w.integration, r.integration) <> ''''
                    and length(coalesce(w.tenant_id, r.tenant_id)) <= 200 and length(coalesce(w.integration, r.integration)) <= 193
                    and case when coalesce(w.access_token, w.refresh_token, w.sealed_access_token, w.sealed_refresh_token) is null then r.id is not null
                    else r.id is null and not reactor.has_token_job(w.tenant_id, ''token:%1$s:'' || w.source_id, ''-infinity'')
                    or r.fingerprint <> reactor.fingerprint_of(row(w.*)::reactor.token_row) or $1 is not null and (%4$s or concat_ws('' '', w.sealed_access_token, w.sealed_refresh_token) <> ''''
                        and split_part(coalesce(w.sealed_access_token, w.sealed_refresh_token), ''.'', 2) <> $1)
                    or r.next_at is not null and not reactor.has_token_job(r.tenant_id, ''token:%1$s:'' || r.source_id, ''-infinity'') end',
                s.id, s.reads, s.relation,
                case when s.columns ? 'sealed_access_token' then 'coalesce(w.access_token, w.refresh_token) is not null' else 'false' end)
            using p_key_id;
            get diagnostics v_rows = row_count;
            v_jobs := v_jobs + v_rows;
            perform reactor.resolve_alert('token_table_broken', s.relation::text);
        exception when others then  -- a column is gone, or the table is locked: the others are looked at all the same
            if sqlstate !~ '^(40|53|55|57)' then
                perform reactor.open_alert('token_table_broken', s.relation::text,
                    reactor.advise('token_table_broken', s.relation::text) || jsonb_build_object('sqlstate', sqlstate));
            end if;
        end;
    end loop;
    insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
    select 'refresh_token', r.tenant_id, 'tokens:' || r.integration, format('token:%s:%s', r.source, r.source_id),
        jsonb_build_object('source', r.source, 'id', r.source_id)
    from reactor.tokens r
    where not exists (select from reactor.token_sources o join pg_class c on c.oid = o.relation where o.id = r.source);
    get diagnostics v_rows = row_count;
    delete from reactor.token_attempts where status <> 'live' and ended_at < now() - p_retention;
    with gone as (
        delete from reactor.token_counts where backend <> 0 and backend not in (select pid from pg_stat_activity) returning state, tokens
    )
    insert into reactor.token_counts as c (state, backend, tokens) select state, 0, sum(tokens) from gone group by state
    on conflict (state, backend) do update set tokens = c.tokens + excluded.tokens;
    if v_jobs + v_rows > 0 then
        perform reactor.ring();
    end if;
    return v_jobs + v_rows;
end
$$;

-- Whether a table that could hold its tokens sealed holds one in plain text. One that cannot be read has an alert of its own.
create or replace function reactor.holds_plain_tokens() returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.token_sources;
    v_is_plain boolean;
begin
    for s in
        select t.* from reactor.token_sources t join pg_class c on c.oid = t.relation where t.columns ? 'sealed_access_token' order by t.id
    loop
        begin
            execute format('select exists (select from (select %s from %s as t) w where coalesce(w.access_token, w.refresh_token) is not null)',
                s.reads, s.relation) into v_is_plain;
            if v_is_plain then
                return true;
            end if;
        exception when undefined_column or datatype_mismatch or undefined_function then
            null;  -- reconcile_tokens says so
        end;
    end loop;
    return false;
end
$$;

-- Owes a look at all tokens, now: not by who attaches a table, whose lock its producers would wait for.
create or replace function reactor.owe_token_look() returns bigint
language sql
set search_path = pg_catalog, pg_temp
as $$ select reactor.enqueue_job('reconcile_tokens', '{}', '', 'all', null, 'upkeep', 5) $$;

-- Which attempts of a host are under way, for the one of its processes that finds their own dead.
create or replace function reactor.live_attempts(p_host text) returns table (attempt uuid, process text, source int, tenant_id text, source_id text, integration text)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select a.id, a.process, t.source, t.tenant_id, t.source_id, t.integration
    from reactor.token_attempts a join reactor.tokens t on t.id = a.token_id where a.status = 'live' and a.host = $1
$$;

-- How each token is doing; no secret. days_left: to the end that only a person can move; null where there is none.
create or replace view reactor.token_health with (security_invoker = true) as
select t.tenant_id, t.integration, t.account, t.state, t.state_reason, t.ends_at as expires_at, t.refresh_expires_at, t.next_at as next_refresh,
    t.last_success_at as last_success, t.last_error as last_error_class, t.last_error_at, t.failures, t.trouble,
    (extract(epoch from t.deadline_at - now()) / 86400)::float8 as days_left,
    case
        when t.state = 'app_error' then 'operator'
        when t.state_reason = 'parent' then 'nobody'
        else coalesce((select w.advice ->> 'who' from reactor.wanted_token_alerts(t, now()) w order by w.cause = 'token_expiring', w.cause limit 1), 'nobody')
    end as who_must_act,
    t.version, t.can_refresh, t.id as token_id
from reactor.tokens t;

create or replace function reactor.request_token_refresh(p_tenant text, p_integration text)
returns table (account text, state text, expires_at timestamptz)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_before text[] := reactor.enter_tenant(p_tenant);
    v_now constant timestamptz := clock_timestamp();
    r reactor.tokens;
begin
    for r in select * from reactor.tokens t where t.tenant_id = p_tenant and t.integration = p_integration order by t.id for update loop
        update reactor.tokens t set requested_at = v_now where t.id = r.id;
        perform reactor.schedule_token(r, v_now, v_now);
        return query select r.account, r.state, r.ends_at;
    end loop;
    perform reactor.leave_tenant(v_before);
end
$$;

-- Asks for a refresh now, of each of the tenant's tokens of an integration, as soon as its provider allows. Returns how they
-- are, never a token; no row where none is known.
create or replace function reactor.request_refresh(tenant_id text, integration text) returns table (account text, state text, expires_at timestamptz)
language sql
set search_path = pg_catalog, pg_temp
as $$ select * from reactor.request_token_refresh($1, $2) $$;

-- Lets the worker read and write back a table's tokens, one tenant's at a time, through row level security of its own too.
create or replace function reactor.grant_tokens(p_relation regclass) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.token_sources;
    v_columns text;
    v_schema regnamespace := (select relnamespace from pg_class where oid = p_relation);
begin
    for s in select * from reactor.token_sources where relation = p_relation loop
        select string_agg(distinct quote_ident(c), ', ') into v_columns
        from (select s.tenant_column as c union all select s.id_column union all select value from jsonb_each_text(s.columns)) mapped;
        if reactor.worker_role() <> current_user then
            if not has_schema_privilege(reactor.worker_role(), v_schema, 'usage') then
                execute format('grant usage on schema %s to %I', v_schema, reactor.worker_role());
            end if;
            execute format('grant select (%1$s), update (%1$s) on %2$s to %3$I', v_columns, s.relation, reactor.worker_role());
        end if;
        call reactor.put_policy(s.relation, 'reactor_tokens',
            format('to %I using (%2$I::text = (select nullif(current_setting(''reactor.tenant_id'', true), ''''))) '
                'with check (%2$I::text = (select nullif(current_setting(''reactor.tenant_id'', true), '''')))',
                reactor.worker_role(), s.tenant_column));
    end loop;
end
$$;

-- Compiles a token source: the pieces of SQL, its trigger on the table and every partition, and the worker's rights.
create or replace function reactor.compile_token_source(p_source int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
    s reactor.token_sources;
    v_name constant text := format('token_source_%s_written', p_source);
    v_tenant text;
    v_id text;
    v_integration text;
    v_account text;
    v_secrets text;
    v_seen text;
    v_change text;
    v_good constant text := 'coalesce(c.tenant <> '''' and length(c.tenant) <= 200 and c.id <> '''' and length(c.id) <= 200 '
        'and c.integration <> '''' and length(c.integration) <= 190, false)';
    v_relation regclass;
    v_event text;
    v_jobs text;
    v_sides text;
    v_rejected text;
begin
    select * into strict s from reactor.token_sources where id = p_source;
    v_tenant := format('t.%I', s.tenant_column);
    v_id := format('t.%I', s.id_column);
    v_integration := case when s.integration is null then format('t.%I::text', s.columns ->> 'integration') else quote_literal(s.integration) || '::text' end;
    v_account := case when s.columns ? 'account' then format('coalesce(t.%I::text, '''')', s.columns ->> 'account') else '''''::text' end;
    select 'coalesce(' || string_agg(format('nullif(t.%I::text, '''')', s.columns ->> n), ', ') || ')' into v_secrets
    from unnest('{access_token, refresh_token, sealed_access_token, sealed_refresh_token}'::text[]) n where s.columns ? n;
    s.reads := format('%s::text collate "C" as tenant_id, %s::text collate "C" as source_id, %s collate "C" as integration, %s as account',
        v_tenant, v_id, v_integration, v_account) || (
        select string_agg(case
            when not s.columns ? n.name then format(', null::%s as %I', n.type, n.name)
            when n.type = 'timestamptz' then format(', case when t.%1$I >= ''0001-01-02'' and t.%1$I < ''9999-12-31'' then t.%1$I::timestamptz end as %2$I',
                s.columns ->> n.name, n.name)
            when n.type = 'jsonb' then format(', case jsonb_typeof(to_jsonb(t.%1$I)) when ''object'' then to_jsonb(t.%1$I) else ''{}'' end as %2$I',
                s.columns ->> n.name, n.name)
            when n.type = 'bigint' then format(', t.%I::bigint as %I', s.columns ->> n.name, n.name)
            -- A pasted key may bring its line's end along.
            else format(', nullif(btrim(t.%I::text, E'' \t\r\n''), '''') as %I', s.columns ->> n.name, n.name) end, '' order by n.place)
        from (values (1, 'access_token', 'text'), (2, 'refresh_token', 'text'), (3, 'sealed_access_token', 'text'), (4, 'sealed_refresh_token', 'text'),
            (5, 'issued_at', 'timestamptz'), (6, 'expires_at', 'timestamptz'), (7, 'refresh_expires_at', 'timestamptz'), (8, 'scope', 'text'),
            (9, 'metadata', 'jsonb'), (10, 'state', 'text'), (11, 'version', 'bigint')) as n (place, name, type));
    -- Secrets that are not stored sealed are never emptied: their columns may not be nullable.
    select string_agg(case when n.place <= 4 and not s.columns ? 'sealed_access_token' then format('%1$I = coalesce($%2$s, t.%1$I)', c.name, n.place + 2)
            when n.place <= 4 then format('%1$I = $%2$s', c.name, n.place + 2)
            else format('%I = $%s::%s', c.name, n.place + 2, format_type(reactor.type_of(s.relation, c.name), -1)) end, ', ' order by n.place),
        coalesce(string_agg(format('%I = $%s::%s', c.name, n.place + 2, format_type(reactor.type_of(s.relation, c.name), -1)), ', ' order by n.place)
            filter (where n.place >= 9), '')
    into s.writes, s.marks
    from unnest('{access_token, refresh_token, sealed_access_token, sealed_refresh_token, issued_at, expires_at, refresh_expires_at, scope, state,
        state_reason, version}'::text[]) with ordinality as n (name, place), lateral (select s.columns ->> n.name) as c (name)
    where c.name is not null;
    -- As text too: 1.0 and 1.00, or A and a, are one value to some types and two tenants to us.
    s.is_row := format('%1$s %2$s $1::text::%3$s and %1$s::text = $1::text', v_tenant,
        reactor.operator_of(reactor.type_of(s.relation, s.tenant_column), '='), format_type(reactor.type_of(s.relation, s.tenant_column), -1));
    s.is_account := format('%s and %s = $2::text and ($3::text is null or %s = $3::text)', s.is_row,
        case when s.integration is null and reactor.type_of(s.relation, s.columns ->> 'integration') = 'text'::regtype
            then format('t.%I', s.columns ->> 'integration') else v_integration end, v_account);
    s.is_row := format('%s and %s %s $2::text::%s', s.is_row, v_id, reactor.operator_of(reactor.type_of(s.relation, s.id_column), '='),
        format_type(reactor.type_of(s.relation, s.id_column), -1));
    update reactor.token_sources set reads = s.reads, writes = s.writes, marks = s.marks, is_row = s.is_row, is_account = s.is_account where id = s.id;

    select string_agg(format('t.%I', c), ', ') into v_seen
    from (select distinct value as c from jsonb_each_text(s.columns) where key not in ('state_reason', 'version')) mapped;
    v_change := replace(format('select %s::text as tenant, %s::text as id, %s as integration, %s is not null as is_one, row(%s)::text as seen, ',
        v_tenant, v_id, v_integration, v_secrets, v_seen), '%', '%%') || '%L::boolean as is_new from %I as t';
    v_jobs := format('insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload)
        select distinct on (c.tenant, c.id) ''refresh_token'', c.tenant, ''tokens:'' || c.integration, ''token:%1$s:'' || c.id,
            jsonb_build_object(''source'', %1$s, ''id'', c.id)
        from (%%s) c where c.is_one and %2$s order by c.tenant, c.id, c.is_new desc', s.id, v_good);
    v_rejected := format('insert into reactor.rejected (source, reason, tenant_length, id_length)
        select %s, ''token'', length(c.tenant), length(c.id) from (%%s) c where c.is_one and c.is_new and not %s', s.id, v_good);
    v_sides := format('select c1.* from (select n.*, count(*) over (partition by n.tenant, n.id, n.integration, n.is_one, n.seen) as sides from (%s union all %s) n) c1 where c1.sides = 1',
        format(v_change, true, 'new_rows'), format(v_change, false, 'old_rows'));
    execute format('create or replace function reactor.%I() returns trigger language plpgsql security definer '
        'set search_path = pg_catalog, pg_temp set timezone = ''UTC'' set datestyle = ''ISO, YMD'' as %L', v_name, '
#variable_conflict use_column
declare
    v_jobs bigint;
begin
    if current_setting(''reactor.writes_token'', true) = ''' || s.id || ''' then  -- we wrote it, and have seen to what follows
        return null;
    end if;
    if tg_op = ''INSERT'' then
        ' || format(v_jobs, format(v_change, true, 'new_rows')) || ';
        get diagnostics v_jobs = row_count;
        ' || format(v_rejected, format(v_change, true, 'new_rows')) || ';
    elsif tg_op = ''UPDATE'' then  -- rows that stand on one side only, as far as their mapped columns go
        ' || format(v_jobs, v_sides) || ';
        get diagnostics v_jobs = row_count;
        ' || format(v_rejected, v_sides) || ';
    elsif tg_op = ''DELETE'' then
        ' || format(v_jobs, format(v_change, false, 'old_rows')) || ';
        get diagnostics v_jobs = row_count;
    else
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key) values (''reconcile_tokens'', '''', ''upkeep'', ''all'');
        v_jobs := 1;
    end if;
    if v_jobs > 0 then perform reactor.ring(); end if;
    return null;
exception when others then
    raise warning ''reactor: a change of the tokens in % was not recorded (SQLSTATE %); the scheduled look finds it, or attach_tokens again where a column is gone'', tg_relid::regclass, sqlstate;
    return null;
end
');
    execute format('revoke all on function reactor.%I from public', v_name);
    if reactor.definer_role() <> current_user then
        execute format('grant create on schema reactor to %I', reactor.definer_role());
        execute format('alter function reactor.%I() owner to %I', v_name, reactor.definer_role());
        execute format('revoke create on schema reactor from %I', reactor.definer_role());
    end if;
    for v_relation in
        select r from reactor.relations_of(s.relation) r
        where (select count(*) from pg_trigger t where t.tgrelid = r and t.tgfoid = to_regproc('reactor.' || v_name)) < 4
    loop
        foreach v_event in array array['insert', 'update', 'delete', 'truncate'] loop
            execute format('create or replace trigger %I after %s on %s %s for each statement execute function reactor.%I()',
                format('reactor_token_%s_%s', s.id, v_event), v_event, v_relation,
                case v_event when 'insert' then 'referencing new table as new_rows'
                    when 'update' then 'referencing old table as old_rows new table as new_rows'
                    when 'delete' then 'referencing old table as old_rows' else '' end, v_name);
        end loop;
    end loop;
    perform reactor.grant_tokens(s.relation);
end
$$;

-- Compiles every token source anew, after a migration.
create or replace function reactor.renew_token_sources() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    s reactor.token_sources;
begin
    for s in select t.* from reactor.token_sources t join pg_class c on c.oid = t.relation order by t.id loop
        begin
            perform reactor.compile_token_source(s.id);
        exception when others then
            raise warning 'reactor: the tokens of % need to be attached again: %', s.relation, sqlerrm;
        end;
    end loop;
end
$$;

create or replace function reactor.attach_token_source(p_relation regclass, p_integration text, p_tenant text, p_id text, p_columns jsonb) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    v_columns constant jsonb := jsonb_strip_nulls(p_columns);
    v_argument text;
    v_column text;
    v_type oid;
    v_limit int;
    v_source int;
begin
    perform reactor.check_table(p_relation, false);
    if (p_integration is null) = not v_columns ? 'integration' then
        raise exception 'integration => ... names the integration of every row, or integration_column => ... the column with it' using errcode = '22023';
    end if;
    if (select relforcerowsecurity from pg_class where oid = p_relation)
        and not (select rolsuper or rolbypassrls from pg_roles where rolname = current_user)
    then
        raise exception '% forces row level security on its owner, who would not see its tokens', p_relation
            using errcode = '42501', hint = format('alter table %s no force row level security', p_relation);
    end if;
    if p_integration = '' or length(p_integration) > 190 then
        raise exception 'an integration''s name has 1 to 190 characters' using errcode = '22023';
    end if;
    for v_argument, v_column in
        select key || '_column', value from jsonb_each_text(v_columns || jsonb_build_object('tenant', p_tenant, 'id', p_id)) order by 1
    loop
        select reactor.type_of(p_relation, attname), nullif(atttypmod, -1) into v_type, v_limit
        from pg_attribute where attrelid = p_relation and attname = v_column and attnum > 0 and not attisdropped;
        if not found then
            raise exception 'table % has no column %', p_relation, coalesce(quote_ident(v_column), 'null')
                using errcode = '42703', hint = format('%s => ... names the column; its columns are: %s', v_argument,
                    (select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
                     where attrelid = p_relation and attnum > 0 and not attisdropped));
        end if;
        if v_argument like '%access\_token\_column' or v_argument like '%refresh\_token\_column' then
            if v_type not in ('text'::regtype, 'varchar'::regtype) or v_limit is not null then
                raise exception 'column % of % is a %, into which a longer token could not be saved', quote_ident(v_column), p_relation,
                    format_type(v_type, v_limit) using errcode = '42804', hint = format('alter table %s alter %I type text', p_relation, v_column);
            end if;
        elsif v_argument like '%\_at\_column' and v_type not in ('timestamptz'::regtype, 'timestamp'::regtype) then
            raise exception 'column % of % is a %, not a timestamp', quote_ident(v_column), p_relation, format_type(v_type, null)
                using errcode = '42804', hint = format('%s => null when the table has none', v_argument);
        end if;
    end loop;
    for v_argument, v_column in
        select n || '_column', v_columns ->> n from unnest('{access_token, refresh_token, sealed_access_token, sealed_refresh_token, issued_at,
            expires_at, refresh_expires_at, scope, state, state_reason, version}'::text[]) n where v_columns ? n
    loop
        if (select count(*) from (values (p_tenant), (p_id)) m (c) where c = v_column)
            + (select count(*) from jsonb_each_text(v_columns) where value = v_column) > 1
        then
            raise exception 'column % of % is named twice', quote_ident(v_column), p_relation using errcode = '22023',
                hint = format('%s => null when the table has none', v_argument);
        end if;
        if exists (select from pg_attribute where attrelid = p_relation and attname = v_column and (attgenerated <> '' or attidentity = 'a')) then
            raise exception 'column % of % is generated and cannot be written', quote_ident(v_column), p_relation using errcode = '42804';
        end if;
        if v_columns ? 'sealed_access_token' and v_argument in ('access_token_column', 'refresh_token_column')
            and exists (select from pg_attribute where attrelid = p_relation and attname = v_column and attnotnull)
        then
            raise exception 'column % of % is not null, and what stands there in plain text is to be emptied once it is sealed',
                quote_ident(v_column), p_relation using errcode = '42804',
                hint = format('alter table %s alter %I drop not null', p_relation, v_column);
        end if;
    end loop;
    if (v_columns ? 'sealed_access_token') <> (v_columns ? 'sealed_refresh_token') then
        raise exception 'sealed tokens need both sealed_access_token_column and sealed_refresh_token_column' using errcode = '22023';
    end if;
    insert into reactor.token_sources as s (relation, integration, tenant_column, id_column, columns, reads, writes, marks, is_row, is_account)
    values (p_relation, p_integration, p_tenant, p_id, v_columns, '', '', '', '', '')
    on conflict (relation, integration) do update
    set tenant_column = excluded.tenant_column, id_column = excluded.id_column, columns = excluded.columns
    returning id into v_source;
    perform reactor.compile_token_source(v_source), reactor.owe_token_look();
    return v_source;
end
$$;

-- Takes the tokens of an existing table into care (docs/tokens.md): what is refreshed is written back into its row. One call
-- an integration where the table has a column each, or integration_column where its rows name theirs. Attaching again changes
-- the mapping. Returns the source's id. Nothing is written to columns that are not named.
-- Errors, each one clear line: 42703 no such column, 42804 one that cannot hold a token or a time, and those of attach.
create or replace function reactor.attach_tokens(
    source regclass, integration text default null, tenant_column text default 'tenant_id', id_column text default 'id',
    access_token_column text default 'access_token', refresh_token_column text default null, issued_at_column text default null,
    expires_at_column text default null, refresh_expires_at_column text default null, scope_column text default null,
    account_column text default null, integration_column text default null, metadata_column text default null, state_column text default null,
    state_reason_column text default null, version_column text default null, sealed_access_token_column text default null,
    sealed_refresh_token_column text default null
) returns int
language sql
set search_path = pg_catalog, pg_temp
as $$
    select reactor.attach_token_source($1, $2, $3, $4, jsonb_build_object('access_token', $5, 'refresh_token', $6, 'issued_at', $7,
        'expires_at', $8, 'refresh_expires_at', $9, 'scope', $10, 'account', $11, 'integration', $12, 'metadata', $13, 'state', $14,
        'state_reason', $15, 'version', $16, 'sealed_access_token', $17, 'sealed_refresh_token', $18))
$$;

create or replace function reactor.detach_token_sources(p_relation regclass, p_integration text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
    v_source int;
    v_relation regclass;
    v_name name;
    v_found boolean := false;
begin
    for v_source in
        delete from reactor.token_sources where relation = p_relation and (p_integration is null or integration = p_integration) returning id
    loop
        v_found := true;
        for v_relation, v_name in
            select tgrelid::regclass, tgname from pg_trigger where tgfoid = to_regproc(format('reactor.token_source_%s_written', v_source))
        loop
            execute format('drop trigger %I on %s', v_name, v_relation);
        end loop;
        execute format('drop function reactor.%I()', format('token_source_%s_written', v_source));
    end loop;
    if v_found and exists (select from pg_class where oid = p_relation) then
        if not exists (select from reactor.token_sources where relation = p_relation) then
            execute format('drop policy if exists reactor_tokens on %s', p_relation);
        end if;
        if reactor.worker_role() <> current_user then
            execute format('revoke select, update on %s from %I', p_relation, reactor.worker_role());
            if exists (select from reactor.sources where relation = p_relation and detached_at is null) then
                perform reactor.grant_source(id) from reactor.sources where relation = p_relation;
            end if;
            perform reactor.grant_tokens(p_relation);
        end if;
    end if;
    perform reactor.owe_token_look();
    return v_found;
end
$$;

-- Takes a table's tokens out of care, all of them or those of one integration; the table stays as it is. False when there
-- were none.
create or replace function reactor.detach_tokens(source regclass, integration text default null) returns boolean
language sql
set search_path = pg_catalog, pg_temp
as $$ select reactor.detach_token_sources($1, $2) $$;
