"""Accounts in care before a loopback provider, the processes that look after them, and what can be seen of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from conftest import make_settings
from providers import Providers

from reactor.refresher import TokenKey
from reactor.tokens import Tokens

PROGRAMS = Path(__file__).with_name("token_programs.py")

# How each treats a refresh token that was used before.
ROTATION = {"strict": "strict", "grace": "grace", "plain": "none"}
TOML = {
    name: {"strategy": "oauth2", "rotates": rotation != "none", "margin_s": 900} for name, rotation in ROTATION.items()
}

ACCOUNTS = """
create table accounts (
    id bigint generated always as identity primary key, tenant_id text not null, provider text not null,
    access_token text, refresh_token text, sealed_access_token text, sealed_refresh_token text, expires_at timestamptz
);
"""
ATTACH = """
select reactor.attach_tokens('accounts', integration_column => 'provider', refresh_token_column => 'refresh_token',
    expires_at_column => 'expires_at')
"""
ATTACH_SEALED = ATTACH.replace(
    "expires_at_column",
    "sealed_access_token_column => 'sealed_access_token', sealed_refresh_token_column => 'sealed_refresh_token', expires_at_column",
)


class Scene:
    """A database with the table `accounts` in care, providers, and a home for each host."""

    def __init__(self, dsn, conn, providers: Providers, folder: Path) -> None:
        self.dsn, self.conn, self.providers, self.folder = dsn, conn, providers, folder
        self.source = 0
        self.key: str | None = None

    async def attach(self, sql: str = ATTACH) -> None:
        self.source = await self.conn.fetchval(sql)

    async def connect(self, provider: str = "strict", *, ends_in_s: float | None = 600.0) -> TokenKey:
        """A user connects an account whose token is due: it ends within its margin of 15 min. None: nobody knows."""
        grant = self.providers.seed(provider)
        row = await self.conn.fetchval(
            "insert into accounts (tenant_id, provider, access_token, refresh_token, expires_at) "
            "values ('acme', $1, $2, $3, clock_timestamp() + $4) returning id",
            provider,
            grant["access_token"],
            grant["refresh_token"],
            None if ends_in_s is None else timedelta(seconds=ends_in_s),
        )
        return TokenKey(self.source, "acme", str(row))

    async def reconnect(self, key: TokenKey) -> dict[str, str]:
        """The user connects the account again, for an hour. Returns what the row holds now."""
        provider = await self.conn.fetchval("select provider from accounts where id = $1", int(key.source_id))
        grant = self.providers.seed(provider)
        await self.conn.execute(
            "update accounts set access_token = $2, refresh_token = $3, expires_at = clock_timestamp() + interval '1 hour' "
            "where id = $1",
            int(key.source_id),
            grant["access_token"],
            grant["refresh_token"],
        )
        return grant

    def env(self, home: str = "home", **more: str) -> dict[str, str]:
        """The environment of a process on the host whose home this is."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("REACTOR_", "VOYAGE_"))}
        ours = {
            "DATABASE_URL": self.dsn,
            "REACTOR_HOME": str(self.folder / home),
            "REACTOR_INTEGRATIONS": str(self.folder / "integrations.toml"),
            "VOYAGE_API_KEY": "none",  # nothing is embedded here
            "REACTOR_VOYAGE_BASE_URL": "http://127.0.0.1:9",
        }
        keyed = {} if self.key is None else {"REACTOR_TOKEN_KEY": self.key}
        return clean | ours | keyed | self.providers.env | more

    def settings(self, home: str = "home", **more):
        values = {"home": self.folder / home, "integrations": self.folder / "integrations.toml", "token_key": self.key}
        return make_settings(**({"database_url": self.dsn} | values | more))

    def opened(self, home: str = "home", **more):
        """Tokens in this process, on the host whose home this is."""
        settings = self.settings(home, **more)
        return Tokens.open(settings.database_url.get_secret_value(), settings=settings)

    @asynccontextmanager
    async def process(self, code: str, *arguments: str, home: str = "home", **env: str):
        """A real process that runs one of token_programs.py; killed on the way out if it still lives."""
        async with await anyio.open_process(
            [sys.executable, str(PROGRAMS), code, *arguments],
            env=self.env(home, **env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    process.kill()

    async def dies(self, key: TokenKey, provider: str, point: str, *, home: str = "home", **env: str) -> None:
        """A process of its own looks after the token, and kills itself at this point of it."""
        async with self.process("die", point, provider, str(key.source), key.source_id, home=home, **env) as process:
            with anyio.fail_after(60):
                code = await process.wait()
            assert code == -signal.SIGKILL, await said(process)

    # What can be seen.

    async def row(self, key: TokenKey):
        return await self.conn.fetchrow("select * from accounts where id = $1", int(key.source_id))

    async def token(self, key: TokenKey):
        return await self.conn.fetchrow(
            "select * from reactor.tokens where source = $1 and source_id = $2", key.source, key.source_id
        )

    async def is_at_version(self, key: TokenKey, version: int) -> bool:
        token = await self.token(key)
        return token is not None and token["version"] == version

    async def alerts(self) -> set[str]:
        """The causes of those that are open."""
        return {r[0] for r in await self.conn.fetch("select cause from reactor.alerts where resolved_at is null")}

    async def live(self):
        """The attempt under way, or None."""
        return await self.conn.fetchrow("select * from reactor.token_attempts where status = 'live'")

    async def attempts(self) -> list[str]:
        """What became of each, oldest first."""
        return [r[0] for r in await self.conn.fetch("select status from reactor.token_attempts order by started_at")]

    async def waiting(self) -> list:
        """When each waiting job of a token is due."""
        return [
            r[0]
            for r in await self.conn.fetch(
                "select run_after from reactor.jobs where type = 'refresh_token' and status in ('pending', 'failed') order by 1"
            )
        ]

    async def jobs_due(self) -> int:
        """How many looks at a token are due: a claim makes one of twins."""
        return await self.conn.fetchval(
            "select count(distinct dedupe_key) from reactor.jobs "
            "where type = 'refresh_token' and status in ('pending', 'failed') and run_after <= clock_timestamp()"
        )

    def journal(self, home: str = "home") -> list[str]:
        return sorted(path.suffix for path in (self.folder / home / "journal").glob("*.answer"))

    async def holds_the_newest(self, key: TokenKey) -> bool:
        """Whether the row holds what its provider issued last, and it works."""
        row = await self.row(key)
        return self.providers.works(row["access_token"]) and self.providers.newest(row["access_token"]) == (
            row["access_token"],
            row["refresh_token"],
        )


@asynccontextmanager
async def scene_of(dsn, conn, folder: Path, monkeypatch, **options):
    await conn.execute(ACCOUNTS)
    async with Providers(rotation=ROTATION, **options) as providers:
        providers.toml(folder, **TOML)
        for name, value in providers.env.items():
            monkeypatch.setenv(name, value)
        yield Scene(dsn, conn, providers, folder)


async def line_of(process: Process) -> str:
    """The next line that a process writes."""
    return (await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 65536)).decode()


async def said(process: Process) -> str:
    """All that a process wrote and has not been read; it need not live on."""
    with suppress(ProcessLookupError):
        process.kill()
    texts = []
    for stream in (process.stdout, process.stderr):
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            while True:
                texts.append((await stream.receive()).decode())
    return "".join(texts)
