"""Whoever asks for a token at once, and whatever a person does meanwhile: one call of the provider, and nobody's newer token is lost."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import anyio
import pytest
from conftest import eventually, reactor_process
from test_worker import Output
from token_cases import line_of, said, scene_of

from reactor import Unavailable


@pytest.fixture
async def scene(dsn, conn, tmp_path, monkeypatch):
    async with scene_of(dsn, conn, tmp_path, monkeypatch) as scene:
        await scene.attach()
        yield scene


@pytest.fixture
async def flight(scene):
    """A refresh in this process whose provider has rotated and keeps its answer back until the gate is set."""
    async with scene.opened() as tokens:
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        task = asyncio.create_task(tokens.refresher.care(key, "strict"))
        await eventually(lambda: scene.providers.calls["strict"] == 1)
        yield scene, tokens, key, task


async def landed(scene, task):
    scene.providers.gate.set()
    with anyio.fail_after(30):
        return await task


class TestManyAsk:
    async def test_twenty_processes_make_one_call_and_all_get_its_token(self, scene):
        key = await scene.connect("strict")
        async with AsyncExitStack() as stack:
            processes = [await stack.enter_async_context(scene.process("ask", "strict")) for _ in range(20)]
            with anyio.fail_after(240):
                for process in processes:
                    assert await line_of(process) == "ready", await said(process)
                scene.providers.fail("strict", "gate")
                for process in processes:
                    await process.stdin.send(b"go\n")
                await eventually(lambda: scene.providers.calls["strict"] == 1)
                scene.providers.gate.set()
                tokens = [await line_of(process) for process in processes]
                codes = [await process.wait() for process in processes]

        row = await scene.row(key)
        assert tokens == [row["access_token"]] * 20
        assert codes == [0] * 20
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]
        assert await scene.waiting() == [(await scene.token(key))["next_at"]]

    async def test_a_thousand_callers_in_one_process_make_one_call(self, scene):
        key = await scene.connect("strict")
        async with scene.opened() as tokens:
            with anyio.fail_after(120):
                got = await asyncio.gather(
                    *(tokens.ensure_fresh("acme", "strict", min_ttl_s=1200, deadline_s=100) for _ in range(1000))
                )

        assert set(got) == {(await scene.row(key))["access_token"]}
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)

    async def test_two_reactors_and_a_publisher_make_one_call(self, scene):
        scene.providers.fail("strict", "gate")
        async with AsyncExitStack() as stack:
            for home in ("home", "another home"):
                output = Output(stack.enter_context(reactor_process(scene.dsn, **scene.env(home))))
                await output.saw("listener_ready", timeout_s=60)
            tokens = await stack.enter_async_context(scene.opened())
            key = await scene.connect("strict")
            asking = asyncio.create_task(tokens.ensure_fresh("acme", "strict", min_ttl_s=1200, deadline_s=60))
            await eventually(lambda: scene.providers.calls["strict"] == 1)
            scene.providers.gate.set()
            with anyio.fail_after(60):
                token = await asking

        assert token == (await scene.row(key))["access_token"]
        assert scene.providers.calls["strict"] == 1
        assert await scene.holds_the_newest(key)
        assert await scene.attempts() == ["saved"]

    async def test_a_caller_that_is_cancelled_in_mid_call_loses_nothing(self, scene):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        async with scene.opened() as tokens:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: tokens.ensure_fresh("acme", "strict", min_ttl_s=1200))
                await eventually(lambda: scene.providers.calls["strict"] == 1)
                tasks.cancel_scope.cancel()
            scene.providers.gate.set()

        assert await scene.holds_the_newest(key)
        assert (await scene.token(key))["version"] == 2
        assert scene.providers.calls["strict"] == 1

    async def test_a_deadline_that_passes_is_an_error_for_its_caller_and_the_answer_is_saved(self, scene):
        key = await scene.connect("strict")
        scene.providers.fail("strict", "gate")
        async with scene.opened() as tokens:
            with pytest.raises(Unavailable, match="in time"):
                await tokens.ensure_fresh("acme", "strict", min_ttl_s=1200, deadline_s=0.2)
            await eventually(lambda: scene.providers.calls["strict"] == 1)
            scene.providers.gate.set()

        assert await scene.holds_the_newest(key)


class TestAPersonMeanwhile:
    async def test_who_reconnects_keeps_their_token_and_ours_is_dropped(self, flight):
        scene, _tokens, key, task = flight
        theirs = await scene.reconnect(key)

        care = await landed(scene, task)

        row = await scene.row(key)
        assert care.action == "superseded"
        assert (row["access_token"], row["refresh_token"]) == (theirs["access_token"], theirs["refresh_token"])
        assert await scene.attempts() == ["superseded"]
        assert await scene.jobs_due() == 1
        assert scene.journal() == []

    async def test_the_look_that_follows_takes_the_new_token_for_what_it_is(self, flight):
        scene, tokens, key, task = flight
        await scene.reconnect(key)
        await landed(scene, task)

        care = await tokens.refresher.care(key, "strict")

        token = await scene.token(key)
        assert (care.action, token["state"], token["version"]) == ("wait", "active", 2)
        assert token["ends_at"] == (await scene.row(key))["expires_at"]
        assert await scene.waiting() == [token["next_at"]]
        assert scene.providers.calls["strict"] == 1

    async def test_a_row_deleted_in_mid_call_stays_deleted_and_nothing_is_kept_of_it(self, flight):
        scene, tokens, key, task = flight
        await scene.conn.execute("delete from accounts")

        care = await landed(scene, task)
        after = await tokens.refresher.care(key, "strict")

        assert care.action in {"superseded", "closed"}
        assert after.action == "gone"
        assert await scene.row(key) is None
        assert await scene.token(key) is None
        assert await scene.attempts() == []
        assert scene.journal() == []
        assert await scene.alerts() == set()

    async def test_a_row_deleted_and_looked_at_in_mid_call_too(self, flight):
        scene, _tokens, key, task = flight
        await scene.conn.execute("delete from accounts")
        async with scene.opened("another home") as others:
            gone = await others.refresher.care(key, "strict")

        care = await landed(scene, task)

        assert (gone.action, care.action) == ("gone", "closed")
        assert await scene.token(key) is None
        assert scene.journal() == []

    async def test_an_invalid_grant_that_comes_after_they_reconnected_revokes_nobody(self, scene):
        key = await scene.connect("strict")
        scene.providers.revoke((await scene.row(key))["refresh_token"])
        scene.providers.fail("strict", "gate")
        async with scene.opened() as tokens:
            task = asyncio.create_task(tokens.refresher.care(key, "strict"))
            await eventually(lambda: scene.providers.calls["strict"] == 1)
            theirs = await scene.reconnect(key)
            care = await landed(scene, task)
            fresh = await tokens.ensure_fresh("acme", "strict")

        assert care.action == "superseded"
        assert fresh == theirs["access_token"]
        assert (await scene.token(key))["state"] == "active"
        assert await scene.alerts() == set()

    async def test_who_writes_only_another_column_in_mid_call_changes_nothing_of_ours(self, flight):
        scene, _tokens, key, task = flight
        await scene.conn.execute("update accounts set expires_at = expires_at + interval '1 minute'")

        care = await landed(scene, task)

        assert care.action == "saved"
        assert await scene.holds_the_newest(key)

    async def test_who_reconnects_while_it_needs_them_ends_the_alert(self, scene):
        key = await scene.connect("strict")
        scene.providers.revoke((await scene.row(key))["refresh_token"])
        async with scene.opened() as tokens:
            await tokens.refresher.care(key, "strict")
            alerts = await scene.alerts()
            theirs = await scene.reconnect(key)
            jobs = await scene.jobs_due()
            await tokens.refresher.care(key, "strict")
            fresh = await tokens.ensure_fresh("acme", "strict")

        assert alerts == {"token_needs_reconnect"}
        assert jobs == 1
        assert await scene.alerts() == set()
        assert fresh == theirs["access_token"]
