"""The loopback providers themselves: rotation, lost answers and clocks behave as the real ones are said to."""

from __future__ import annotations

import urllib.request

import aiohttp
import anyio
import pytest
from providers import Providers


@pytest.fixture
async def providers():
    async with Providers(rotation={"google": "grace"}) as providers:
        yield providers


async def refresh(providers: Providers, token: str, integration: str = "google") -> tuple[int, dict]:
    form = {"grant_type": "refresh_token", "refresh_token": token, "client_id": "reactor"}
    form["client_secret"] = f"CANARY-secret-{integration}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{providers.url}/{integration}/token", data=form) as response,
    ):
        return response.status, await response.json(content_type=None)


async def test_a_spent_refresh_token_works_within_the_grace_by_the_server_s_clock_and_not_after():
    now = 1_000_000.0
    async with Providers(clock=lambda: now, rotation={"google": "grace"}) as providers:
        old = providers.seed("google")["refresh_token"]

        _, first = await refresh(providers, old)
        now += 29
        _, again = await refresh(providers, old)
        now += 2
        status, late = await refresh(providers, old)

        assert again["refresh_token"] == first["refresh_token"] != old
        assert (status, late["error"]) == (400, "invalid_grant")
        assert (await refresh(providers, first["refresh_token"]))[0] == 200


async def test_a_strict_provider_ends_the_family_at_the_first_reuse(providers):
    providers.rotation["google"] = "strict"
    old = providers.seed("google")["refresh_token"]
    _, first = await refresh(providers, old)

    assert (await refresh(providers, old))[0] == 400
    assert (await refresh(providers, first["refresh_token"]))[0] == 400
    assert not providers.works(first["access_token"])


async def test_a_token_ends_with_its_life():
    now = 1_000_000.0
    async with Providers(clock=lambda: now, lives={"google": (60, 100)}) as providers:
        tokens = providers.seed("google", age_s=50)
        assert providers.works(tokens["access_token"])
        now += 10
        assert not providers.works(tokens["access_token"])
        assert (await refresh(providers, tokens["refresh_token"]))[0] == 200
        now += 40
        assert (await refresh(providers, tokens["refresh_token"]))[0] == 400


@pytest.mark.parametrize(("fault", "rotated"), [("reset_before", False), ("reset_after", True), ("truncated", True)])
async def test_an_answer_is_lost_before_or_after_the_provider_s_commit(providers, fault, rotated):
    providers.rotation["google"] = "strict"
    old = providers.seed("google")["refresh_token"]
    providers.fail("google", fault)

    with pytest.raises(aiohttp.ClientError):
        await refresh(providers, old)

    assert providers.calls["google"] == providers.token_calls[old] == 1
    assert (await refresh(providers, old))[0] == (400 if rotated else 200)


async def test_a_page_and_a_scripted_answer_come_instead_and_the_next_call_is_served_again(providers):
    token = providers.seed("google")["refresh_token"]
    providers.fail("google", (429, {"error": "slow"}, {"Retry-After": "7"}), "slow:0")

    assert await refresh(providers, token) == (429, {"error": "slow"})
    assert (await refresh(providers, token))[0] == 200
    assert [call.path for call in providers.log] == ["/google/token", "/google/token"]


async def test_a_provider_that_hangs_lets_its_neighbours_answer_and_the_server_close():
    with anyio.fail_after(60):
        async with Providers() as providers, anyio.create_task_group() as tasks:
            token = providers.seed("google")["refresh_token"]
            providers.fail("google", "hang")
            tasks.start_soon(refresh, providers, token)
            while not providers.log:
                await anyio.lowlevel.checkpoint()

            other = providers.seed("youtube")["refresh_token"]
            assert (await refresh(providers, other, "youtube"))[0] == 200
            tasks.cancel_scope.cancel()


def test_it_runs_in_a_thread_of_its_own():
    with Providers().in_thread() as providers:
        token = providers.seed("static_key")["access_token"]
        request = urllib.request.Request(
            f"{providers.url}/static_key/probe", headers={"Authorization": f"Bearer {token}"}
        )

        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
