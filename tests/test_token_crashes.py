"""A token survives kill -9 at every step of its refresh, or somebody is told: tables of where, before which provider."""

from __future__ import annotations

from datetime import timedelta

import anyio
import pytest
from conftest import eventually
from token_cases import scene_of


@pytest.fixture
async def scene(dsn, conn, tmp_path, monkeypatch):
    async with scene_of(dsn, conn, tmp_path, monkeypatch) as scene:
        await scene.attach()
        yield scene


async def looked_after(scene, tokens, key, provider):
    """What the reactors of this host do from now on: recover at start, then come back whenever they planned to."""
    await tokens.refresher.recover()
    token = await scene.token(key)
    if token["retry_at"] is not None and token["state"] == "active":
        await tokens.refresher.care(key, provider, now=token["retry_at"])


@pytest.mark.parametrize(
    ("point",     "provider", "calls", "state",           "alerts",                  "version", "attempts"),
    [
        # Claimed, and nothing sent: once more is the first time for the provider.
        ("claimed",   "strict", 1, "active",          set(),                     2, ["lost", "saved"]),
        ("claimed",   "grace",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("claimed",   "plain",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "strict", 1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "grace",  1, "active",          set(),                     2, ["lost", "saved"]),
        ("reserved",  "plain",  1, "active",          set(),                     2, ["lost", "saved"]),
        # The provider has done it and its answer died with the process: nobody can bring it back from a strict one.
        ("sent",      "strict", 2, "needs_reconnect", {"token_needs_reconnect"}, 1, ["lost", "refused"]),
        ("sent",      "grace",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("sent",      "plain",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("answered",  "strict", 2, "needs_reconnect", {"token_needs_reconnect"}, 1, ["lost", "refused"]),
        ("answered",  "grace",  2, "active",          set(),                     2, ["lost", "saved"]),
        ("answered",  "plain",  2, "active",          set(),                     2, ["lost", "saved"]),
        # From the journal on it is safe, and the provider is not asked again.
        ("journaled", "strict", 1, "active",          set(),                     2, ["saved"]),
        ("journaled", "grace",  1, "active",          set(),                     2, ["saved"]),
        ("journaled", "plain",  1, "active",          set(),                     2, ["saved"]),
        ("saving",    "strict", 1, "active",          set(),                     2, ["saved"]),
        ("saving",    "grace",  1, "active",          set(),                     2, ["saved"]),
        ("saving",    "plain",  1, "active",          set(),                     2, ["saved"]),
        ("saved",     "strict", 1, "active",          set(),                     2, ["saved"]),
        ("saved",     "grace",  1, "active",          set(),                     2, ["saved"]),
        ("saved",     "plain",  1, "active",          set(),                     2, ["saved"]),
    ],
)  # fmt: skip
async def test_kill_9_at_each_step(scene, point, provider, calls, state, alerts, version, attempts):
    key = await scene.connect(provider)
    before = await scene.row(key)

    await scene.dies(key, provider, point)
    async with scene.opened() as tokens:
        await looked_after(scene, tokens, key, provider)

    token = await scene.token(key)
    assert scene.providers.calls[provider] == calls
    assert (token["state"], token["version"]) == (state, version)
    assert await scene.alerts() == alerts
    assert await scene.attempts() == attempts
    assert scene.journal() == []
    if state == "active":
        assert await scene.holds_the_newest(key)
        assert await scene.waiting() == [token["next_at"]]
    else:
        assert await scene.row(key) == before
        assert await scene.waiting() == []  # only a person can help: the alert is open
