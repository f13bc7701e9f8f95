-- Who may do what, said once and in full; nobody else may anything. Then the notes are attached, and every source is
-- compiled by this release.
revoke all on all tables in schema reactor from public;
revoke all on all sequences in schema reactor from public;

do $$
declare
    v_routine regprocedure;
    v_vector regnamespace := (select extnamespace from pg_extension where extname = 'vector');
begin
    for v_routine in  -- pgvector may live in this schema too, and stays as it is
        select p.oid from pg_proc p where p.pronamespace = 'reactor'::regnamespace
            and not exists (select from pg_depend d where d.classid = 'pg_proc'::regclass and d.objid = p.oid and d.deptype = 'e')
    loop
        execute format('revoke all on routine %s from public', v_routine);
        if reactor.worker_role() <> current_user then
            execute format('revoke all on routine %s from %I', v_routine, reactor.worker_role());
        end if;
    end loop;
    if reactor.worker_role() <> current_user then
        -- pgvector may live in a schema that is not everybody's.
        if not has_schema_privilege(reactor.worker_role(), v_vector, 'usage') then
            execute format('grant usage on schema %s to %I', v_vector, reactor.worker_role());
        end if;
        if not has_schema_privilege(reactor.worker_role(), v_vector, 'usage') then
            raise exception '% may not use schema %, where pgvector is', reactor.worker_role(), v_vector
                using errcode = '42501', hint = format('as its owner: grant usage on schema %s to %I', v_vector, reactor.worker_role());
        end if;
        execute format('grant select, update on reactor.jobs to %I', reactor.worker_role());
        execute format('grant select, insert, update on reactor.job_minutes to %I', reactor.worker_role());
        execute format('grant select, delete on reactor.tombstones to %I', reactor.worker_role());
        execute format('grant select on reactor.sources to %I', reactor.worker_role());
        execute format('grant select, insert, update on reactor.tenants to %I', reactor.worker_role());
        execute format('grant select, insert, update, delete on reactor.memories to %I', reactor.worker_role());
        execute format('grant select, insert on reactor.notes to %I', reactor.worker_role());
        execute format('grant execute on function reactor.scope(), reactor.worker_role(), reactor.enter_tenant(text), '
            'reactor.leave_tenant(text[]), reactor.fold(text), reactor.json_text(jsonb), reactor.clean_json(json), reactor.hold_claims(bigint[], uuid[]), '
            'reactor.complete_jobs(bigint[], uuid[], jsonb[]), reactor.source_rows(int, text, text[]), reactor.source_ids(int, text, text[]), reactor.is_readable(int), '
            'reactor.move_version(text, bigint), reactor.model_of(text, text), reactor.question(text), reactor.hidden_memories(text) to %I',
            reactor.worker_role());
        execute (select format('grant execute on function %s to %I', string_agg(oid::regprocedure::text, ', '), reactor.worker_role())
            from pg_proc where pronamespace = 'reactor'::regnamespace and proname in ('replace_memories', 'find_memories', 'recent_memories',
                'recall', 'search', 'search_by_embedding', 'recent', 'remove_truncated'));
    end if;
    if reactor.definer_role() <> current_user then
        execute format('grant insert on reactor.jobs, reactor.tombstones, reactor.rejected to %I', reactor.definer_role());
        execute format('grant usage on sequence reactor.job_ids to %I', reactor.definer_role());
        execute format('grant execute on function reactor.ring() to %I', reactor.definer_role());
    end if;
    perform reactor.attach_source('reactor.notes', 'note', '{content}', 'tenant_id', 'id', 'created_at', null, null, null, null, null,
        '{metadata}', null, null, null, null, 'provider', 'portuguese', true, false, 'kind');
    perform reactor.renew_sources();
end
$$;
