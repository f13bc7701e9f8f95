"""What the processes of token_cases.py run: `python token_programs.py <program> <arguments>`."""

from __future__ import annotations

import datetime as dt
import os
import resource
import signal
import sys
import time
from contextlib import asynccontextmanager
from datetime import datetime

import anyio
import anyio.to_thread

from reactor import db, log, refresher
from reactor.refresher import Refresher, TokenKey
from reactor.tokens import Tokens


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(point: str) -> None:
    """From now on this process dies where `point` says. The code under test knows nothing of it."""
    import aiohttp  # noqa: PLC0415

    send, start, tenant = refresher._send, aiohttp.ClientResponse.start, db.tenant
    call, write_down = Refresher._call, Refresher._write_down
    saving = False

    async def sends(*arguments):
        if point == "reserved":
            _die()
        answer = await send(*arguments)
        if point == "answered":
            _die()
        return answer

    async def starts(self, connection):
        await start(self, connection)
        if point == "sent":  # the provider has done it; its answer is on its way
            _die()
        return self

    async def calls(self, *arguments):
        nonlocal saving
        if point == "claimed":
            _die()
        reading = await call(self, *arguments)
        saving = True
        return reading

    async def writes_down(self, *arguments):
        await write_down(self, *arguments)
        if point == "journaled":
            _die()

    @asynccontextmanager
    async def tenants(*arguments):
        async with tenant(*arguments) as conn:
            yield conn
            if saving and point == "saving":
                _die()
        if saving and point == "saved":
            _die()

    refresher._send, aiohttp.ClientResponse.start, db.tenant = sends, starts, tenants
    Refresher._call, Refresher._write_down = calls, writes_down


async def _care(provider: str, source: str, row: str) -> None:
    async with Tokens.open() as tokens:
        await tokens.refresher.care(TokenKey(int(source), "acme", row), provider, wanted_s=86_400)


async def _ask(provider: str) -> None:
    """Say ready, wait for a line, ask for a fresh token, print it."""
    async with Tokens.open() as tokens:
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        print(str(await tokens.ensure_fresh("acme", provider, min_ttl_s=1200, deadline_s=120)), flush=True)


def _shift_clock(hours: str) -> None:
    """Whatever Python says of the time from now on is so many hours off."""
    real, offset_s = time.time, 3600.0 * int(hours)

    class Shifted(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.fromtimestamp(real() + offset_s, tz)

    time.time, dt.datetime = (lambda: real() + offset_s), Shifted
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("reactor") and getattr(module, "datetime", None) is datetime:
            module.datetime = Shifted


def main(code: str, *arguments: str) -> None:
    log.configure(sys.stderr)
    match code:
        case "die":
            point, *arguments = arguments
            _die_at(point)
            anyio.run(_care, *arguments)
        case "wrong_clock":
            hours, *arguments = arguments
            _shift_clock(hours)
            print(dt.datetime.now(dt.UTC).isoformat(), flush=True)
            anyio.run(_care, *arguments)
        case "no_room":
            resource.setrlimit(resource.RLIMIT_FSIZE, (65535, 65535))
            anyio.run(_care, *arguments)
        case "ask":
            anyio.run(_ask, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
