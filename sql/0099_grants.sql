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
    if reactor.definer_role() <> current_user then
        execute format($f$
            revoke all on function reactor.ring from %1$I;
            grant insert on reactor.jobs, reactor.tombstones, reactor.rejected to %1$I;
            grant usage on sequence reactor.job_ids to %1$I;
            grant execute on function reactor.ring to %1$I;
        $f$, reactor.definer_role());
    end if;
    if reactor.worker_role() <> current_user then
        -- pgvector may live in a schema that is not everybody's.
        if not has_schema_privilege(reactor.worker_role(), v_vector, 'usage') then
            execute format('grant usage on schema %s to %I', v_vector, reactor.worker_role());
        end if;
        if not has_schema_privilege(reactor.worker_role(), v_vector, 'usage') then
            raise exception '% may not use schema %, where pgvector is', reactor.worker_role(), v_vector
                using errcode = '42501', hint = format('as its owner: grant usage on schema %s to %I', v_vector, reactor.worker_role());
        end if;
        execute format($f$
            grant select, insert, update on reactor.jobs to %1$I;
            grant usage on sequence reactor.job_ids to %1$I;
            grant select, insert, update, delete on reactor.tokens, reactor.token_attempts to %1$I;
            grant select, insert, update on reactor.token_counts to %1$I;
            grant select on reactor.token_sources, reactor.token_health to %1$I;
            grant select, insert, update on reactor.job_minutes to %1$I;
            grant select, delete on reactor.tombstones to %1$I;
            grant select on reactor.sources to %1$I;
            grant select, insert, update on reactor.tenants to %1$I;
            grant select, insert, update, delete on reactor.memories to %1$I;
            grant select, insert on reactor.notes to %1$I;
            grant select, insert, update on reactor.alerts to %1$I;
            grant execute on function reactor.open_alert, reactor.resolve_alert to %1$I;
            grant execute on function reactor.scope, reactor.worker_role, reactor.enter_tenant, reactor.leave_tenant, reactor.fold,
                reactor.json_text, reactor.clean_json, reactor.complete_jobs, reactor.source_rows, reactor.source_ids,
                reactor.is_readable, reactor.replace_memories, reactor.remove_truncated, reactor.move_version, reactor.model_of,
                reactor.question, reactor.hidden_memories, reactor.find_memories, reactor.recent_memories, reactor.recall,
                reactor.search, reactor.search_by_embedding, reactor.recent, reactor.ring, reactor.backoff, reactor.tokens_counted,
                reactor.fingerprint_of, reactor.read_token_row, reactor.write_token_row, reactor.mark_time, reactor.plan_token, reactor.notice_row, reactor.wake_children, reactor.token_subject,
                reactor.advise, reactor.token_name, reactor.wanted_token_alerts, reactor.renew_token_alerts, reactor.schedule_token,
                reactor.keep_token, reactor.judge_token, reactor.look_at_token, reactor.seal_token, reactor.save_token,
                reactor.settle_probe, reactor.request_token_refresh, reactor.request_refresh to %1$I;
        $f$, reactor.worker_role());
    end if;
    perform reactor.attach_source('reactor.notes', 'note', '{content}', 'tenant_id', 'id', 'created_at', null, null, null, null, null,
        '{metadata}', null, null, null, null, 'provider', 'portuguese', true, false, 'kind');
    perform reactor.renew_sources(), reactor.renew_token_sources();
end
$$;
