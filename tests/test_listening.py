"""Listening: what is rung is heard, whatever happens to the connection, and a doorbell rings once however often it is pressed."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
from conftest import drained, eventually, make_settings, running_reactor
from test_worker import wire_to

from reactor.listener import Listener, Wakeup
from reactor.log import get_log


@asynccontextmanager
async def listening(dsn, *, channels=("reactor_wake",), beat_s=30.0):
    """A listener at work: what it heard, and how often it was ready and lost."""
    told = {"heard": [], "ready": 0, "lost": 0}

    def count(name):
        told[name] += 1

    hears = {channel: lambda payload, channel=channel: told["heard"].append((channel, payload)) for channel in channels}
    listener = Listener(
        dsn, hears, log=get_log(), on_ready=lambda: count("ready"), on_lost=lambda: count("lost"), beat_s=beat_s
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.run)
        await until(lambda: told["ready"] == 1)
        yield told
        tasks.cancel_scope.cancel()


async def until(check):
    async def ask():
        return check()

    await eventually(ask)


KILL = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'memory-reactor listener' and datname = current_database()"


class TestListener:
    async def test_what_is_sent_on_each_channel_is_heard_with_its_payload(self, conn, dsn):
        async with listening(dsn, channels=("reactor_wake", "reactor_versions")) as told:
            await conn.execute("select reactor.ring(), pg_notify('reactor_versions', 'abc:1')")
            await until(lambda: len(told["heard"]) == 2)

        assert set(told["heard"]) == {("reactor_wake", ""), ("reactor_versions", "abc:1")}

    async def test_a_connection_that_is_killed_is_made_again_and_hears_again(self, conn, dsn, events):
        async with listening(dsn) as told:
            for round_ in range(3):
                await conn.execute(KILL)
                await until(lambda round_=round_: told["ready"] == round_ + 2)
            await conn.execute("select reactor.ring()")
            await until(lambda: told["heard"])

        assert told["lost"] == 3
        assert len(events.named("listener_lost")) == 3
        assert len(events.named("listener_ready")) == 4

    async def test_a_half_open_connection_that_says_nothing_is_found_out(self, dsn, events):
        async with wire_to(dsn) as wire, listening(wire.dsn, beat_s=0.2) as told:
            wire.freeze()
            await until(lambda: told["lost"] == 1)
            await wire.close()
            await wire.open()
            await until(lambda: told["ready"] == 2)

        assert len(events.named("listener_lost")) >= 1

    async def test_an_outage_is_told_once_and_a_start_without_postgres_too(self, dsn, events):
        async with wire_to(dsn) as wire:
            async with listening(wire.dsn) as told:
                await wire.close()
                await until(lambda: told["lost"] == 1)
                await wire.open()
                await until(lambda: told["ready"] == 2)

        assert [e["reason"] for e in events.named("listener_lost")] == ["the connection was closed"]


class TestWakeup:
    async def test_many_rings_are_one(self):
        wakeup = Wakeup()
        for _ in range(3):
            wakeup.ring()

        assert await wakeup.wait(5)
        wakeup.clear()
        assert not await wakeup.wait(0.01)

    async def test_a_ring_before_the_wait_is_not_lost(self):
        wakeup = Wakeup()
        wakeup.clear()
        wakeup.ring()

        with anyio.fail_after(5):
            assert await wakeup.wait(60)

    async def test_every_sleeper_wakes(self):
        wakeup, woken = Wakeup(), []

        async def sleep():
            woken.append(await wakeup.wait(60))

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(sleep)
                tasks.start_soon(sleep)
                await anyio.wait_all_tasks_blocked()
                wakeup.ring()

        assert woken == [True, True]


async def test_rows_inserted_while_nobody_listened_are_found_when_it_listens_again(conn, dsn):
    async with running_reactor(make_settings(database_url=dsn, poll_s=60)):
        await conn.execute("insert into posts (tenant_id, body) values ('acme', 'um')")
        await drained(conn)
        async with conn.transaction():  # the notification comes with the commit, when the listener is gone
            await conn.execute("insert into posts (tenant_id, body) values ('acme', 'dois')")
            await conn.execute(KILL)
        await drained(conn)

    assert {r["content"] for r in await conn.fetch("select content from reactor.recent('acme')")} == {"um", "dois"}


async def test_the_floor_finds_what_no_notification_told(conn, dsn):
    await conn.execute("select reactor.attach('posts', 'post', '{body}', notify => false)")
    async with running_reactor(make_settings(database_url=dsn, poll_s=0.3)):
        await conn.execute("insert into posts (tenant_id, body) values ('acme', 'um')")
        await drained(conn)

    assert [r["content"] for r in await conn.fetch("select content from reactor.recent('acme')")] == ["um"]
