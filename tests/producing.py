"""What the tests of triggers, attach and reconcile ask a database, and the producers they are."""

from __future__ import annotations

from contextlib import asynccontextmanager

from conftest import connect


async def owed(conn):
    """(tenant, id) of the sync jobs waiting, oldest first."""
    rows = await conn.fetch(
        "select tenant_id, payload ->> 'id' from reactor.jobs where type = 'sync_row' and status = 'pending' order by id"
    )
    return [tuple(row) for row in rows]


async def removed(conn):
    """(tenant, id) of the tombstones, oldest first."""
    return [
        tuple(row) for row in await conn.fetch("select tenant_id, source_id from reactor.tombstones order by version")
    ]


async def settle_all(conn):
    await conn.execute("delete from reactor.jobs; delete from reactor.tombstones")


@asynccontextmanager
async def impatient(dsn):
    """A producer to whom any wait is an error."""
    conn = await connect(dsn)
    try:
        await conn.execute("set lock_timeout = '300ms'; set deadlock_timeout = '50ms'")
        yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def warnings_of(conn):
    """The WARNINGs of ours that a session hears."""
    heard = []

    def listen(_conn, message):
        if message.severity_en == "WARNING" and message.message.startswith("reactor"):
            heard.append(message)

    conn.add_log_listener(listen)
    yield heard
    conn.remove_log_listener(listen)


@asynccontextmanager
async def role(conn, name, attributes="login"):
    """A role of this test's own, gone afterwards with all it has in this database."""
    await conn.execute(f"create role {name} {attributes}")
    try:
        yield name
    finally:
        await conn.execute(f"reset role; drop owned by {name} cascade; drop role {name}")
