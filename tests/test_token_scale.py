"""Many tokens are cheap: what is asked by the minute or by the call reads as much of a large table as of a small one."""

from __future__ import annotations

import json

import pytest

from reactor.tokens import _SOURCES

MANY = 100_000
POLICY = '{"refreshes": true, "renews_with": "refresh_token", "margin_s": 600, "probes": false, "rotates": false}'


async def care_for(conn, first, last, *, state="active"):
    """Tokens as they are once each was looked at: 20 a tenant, of five integrations, due within the next weeks."""
    await conn.execute("set session_replication_role = replica")  # none of the triggers on them
    await conn.execute(
        """
        insert into public.tokens (tenant_id, integration, account, access_token, refresh_token, issued_at, expires_at, state)
        select 't' || n / 20, (array['x', 'google', 'tiktok', 'linkedin', 'pinterest'])[n % 5 + 1], 'a' || n, 'CANARY-a' || n, 'CANARY-r' || n,
            now() - interval '1 day', now() + n % 1000 * interval '1 hour' + interval '1 day', $3
        from generate_series($1::int, $2::int) n""",
        first,
        last,
        state,
    )
    await conn.execute("set session_replication_role = origin")
    await conn.execute(
        """
        insert into reactor.tokens (source, source_id, tenant_id, integration, account, version, fingerprint, version_at, state, issued_at,
            expires_at, can_refresh, ends_at, late_at, alert_at, next_at)
        select s.id, w.id::text, w.tenant_id, w.integration, w.account, 1, reactor.fingerprint_of(row(w.tenant_id, w.id, w.integration, w.account,
            w.access_token, w.refresh_token, null, null, null, null, null, null, null, null, null)::reactor.token_row), now(), $3, w.issued_at,
            w.expires_at, true, w.expires_at, w.expires_at - interval '5 min', w.expires_at - interval '5 min', w.expires_at - interval '10 min'
        from public.tokens w, reactor.token_sources s
        where substr(w.account, 2)::int between $1 and $2""",
        first,
        last,
        state,
    )
    await conn.execute(
        """
        insert into reactor.jobs (type, tenant_id, lane, dedupe_key, payload, run_after)
        select 'refresh_token', tenant_id, 'tokens:' || integration, format('token:%s:%s', source, source_id),
            jsonb_build_object('source', source, 'id', source_id), next_at
        from reactor.tokens where substr(account, 2)::int between $1 and $2""",
        first,
        last,
    )
    await conn.execute("vacuum analyze public.tokens, reactor.tokens, reactor.jobs")


async def plan(conn, query):
    [[text]] = await conn.fetch(f"explain (analyze, buffers, format json) {query}")
    nodes = [(json.loads(text) if isinstance(text, str) else text)[0]["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    return nodes


async def pages(conn, query):
    """How many 8 kB pages the query reads once plans and caches are warm."""
    for _ in range(7):
        [top, *_] = await plan(conn, query)
    return top["Shared Hit Blocks"] + top["Shared Read Blocks"]


async def looks(conn):
    """The queries whose cost is not to grow, each for the token a7 of the tenant t0."""
    row = await conn.fetchrow(
        "select t.source, t.source_id, t.integration from reactor.tokens t where tenant_id = 't0' and account = 'a7'"
    )
    place = f"{row['source']}, 't0', '{row['source_id']}'"
    [source] = await conn.fetch(_SOURCES)
    fresh = source["look"].replace("$1", "'t0'").replace("$2", f"'{row['integration']}'").replace("$3", "'a7'")
    return {
        "sweep": "select * from reactor.sweep_tokens()",
        "health of a tenant": "select * from reactor.token_health where tenant_id = 't0'",
        "ensure_fresh": fresh,
        "look": f"select * from reactor.look_at_token({place}, '{row['integration']}', '{POLICY}', 'h', 'p', '15 s')",
        "schedule": f"select reactor.schedule_token(t, t.next_at, now()) from reactor.tokens t where tenant_id = 't0' and source = {row['source']} and source_id = '{row['source_id']}'",
        "request": f"select * from reactor.request_refresh('t0', '{row['integration']}')",
        "counts": "select state, sum(tokens) from reactor.token_counts group by state",
    }


@pytest.mark.parametrize("state", ["active", "app_error"])
async def test_100000_tokens_cost_a_look_a_sweep_and_a_read_no_more_than_1000(conn, state):
    await conn.execute("alter table reactor.tokens set (autovacuum_enabled = off)")
    await care_for(conn, 0, 999)
    few = {name: await pages(conn, query) for name, query in (await looks(conn)).items()}

    await care_for(conn, 1000, MANY, state=state)
    many = {name: await pages(conn, query) for name, query in (await looks(conn)).items()}

    levels = 60  # trees of a few levels more, a page for each descent
    assert {name: read for name, read in many.items() if read > few[name] * 1.2 + levels} == {}
    assert await conn.fetchval("select reactor.status() -> 'tokens' -> $1", state) in {MANY + 1, MANY - 999}


async def test_a_reconcile_of_many_finds_what_is_missing_and_nothing_else(conn):
    await care_for(conn, 0, MANY)
    await conn.execute("delete from reactor.jobs where tenant_id = 't0' and type = 'refresh_token'")

    assert await conn.fetchval("select reactor.reconcile_tokens(null)") == 20
    assert await conn.fetchval("select reactor.reconcile_tokens(null)") == 0
