"""Tokens in public.tokens before a loopback provider: what their tests arrange, move and ask."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path

import asyncpg
from conftest import make_settings
from providers import Providers

from reactor.refresher import Care, TokenKey
from reactor.tokens import Tokens

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


async def jobs_of(conn):
    """(tenant, row, lane, seconds until it is due) of the waiting jobs of tokens, oldest first."""
    rows = await conn.fetch("""
        select tenant_id, payload ->> 'id', lane, extract(epoch from run_after - clock_timestamp())::float8 from reactor.jobs
        where type = 'refresh_token' and status in ('pending', 'failed') order by id""")
    return [tuple(row) for row in rows]


class Tended:
    """A database, providers, and the settings of the reactors that look after its tokens."""

    def __init__(self, dsn, conn: asyncpg.Connection, providers: Providers, folder: Path) -> None:
        self.dsn, self.conn, self.providers, self.folder = dsn, conn, providers, folder
        self.token_key: str | None = None
        self.source = 0
        self.toml = providers.toml(folder)

    def settings(self, **more):
        values = {
            "database_url": self.dsn,
            "home": self.folder / "home",
            "integrations": self.toml,
            "token_key": self.token_key,
            "voyage_api_key": "none",  # nothing is embedded, unless a test brings a stub
            "voyage_base_url": "http://127.0.0.1:9",
        }
        return make_settings(**(values | more))

    def opened(self, **more):
        """Tokens in this process; their `refresher` does what a reactor's does."""
        return Tokens.open(settings=self.settings(**more))

    async def connect(
        self,
        integration: str,
        *,
        tenant="acme",
        account="",
        ends: timedelta | None = None,
        issued: timedelta | None = None,
        **columns,
    ) -> TokenKey:
        """A user connects an account. `ends` and `issued` are from now; columns win over what the provider gave."""
        granted = self.providers.seed(integration, tenant, account)
        values = {"tenant_id": tenant, "integration": integration, "account": account, **granted, **columns}
        now = await self.now()
        values |= {name: now + span for name, span in (("expires_at", ends), ("issued_at", issued)) if span is not None}
        places = ", ".join(f"${n}" for n in range(1, len(values) + 1))
        row = await self.conn.fetchval(
            f"insert into tokens ({', '.join(values)}) values ({places}) returning id", *values.values()
        )
        return TokenKey(self.source, tenant, str(row))

    async def now(self) -> datetime:
        return await self.conn.fetchval("select clock_timestamp()")

    async def row(self, key: TokenKey):
        return await self.conn.fetchrow("select * from tokens where id = $1", int(key.source_id))

    async def token(self, key: TokenKey):
        return await self.conn.fetchrow(
            "select * from reactor.tokens where source = $1 and source_id = $2 and tenant_id = $3",
            key.source,
            key.source_id,
            key.tenant_id,
        )

    async def state(self, key: TokenKey) -> tuple[str, str | None]:
        token = await self.token(key)
        return token["state"], token["state_reason"]

    async def alerts(self) -> dict[str, dict]:
        """The open ones: cause -> detail."""
        rows = await self.conn.fetch("select cause, detail from reactor.alerts where resolved_at is null order by id")
        return {row["cause"]: row["detail"] for row in rows}

    async def due(self) -> list[datetime]:
        """When each waiting job of a token is due."""
        rows = await self.conn.fetch(
            "select run_after from reactor.jobs where type = 'refresh_token' and status in ('pending', 'failed') order by 1"
        )
        return [row[0] for row in rows]

    async def owed(self):
        return await jobs_of(self.conn)

    async def holds_the_newest(self, key: TokenKey) -> bool:
        """Whether the row holds what its provider issued last, and it works."""
        row = await self.row(key)
        return self.providers.works(row["access_token"]) and self.providers.newest(row["access_token"]) == (
            row["access_token"],
            row["refresh_token"] or None,
        )

    async def tend(
        self, tokens: Tokens, key: TokenKey, integration: str, *, until: datetime, most: int = 1000
    ) -> list[Care]:
        """Look at the token whenever its job is due, until then. The clock is an argument."""
        looks: list[Care] = []
        while (
            (token := await self.token(key)) is not None and token["next_at"] is not None and token["next_at"] <= until
        ):
            looks.append(await tokens.refresher.care(key, integration, now=token["next_at"]))
            assert len(looks) <= most, "it is asked for ever"
        return looks


@asynccontextmanager
async def tended_tokens(dsn, conn, folder, monkeypatch, **options):
    async with Providers(**options) as providers:
        tended = Tended(dsn, conn, providers, folder)
        for name, value in providers.env.items():
            monkeypatch.setenv(name, value)
        tended.source = await conn.fetchval(
            "select id from reactor.token_sources where relation = 'public.tokens'::regclass"
        )
        yield tended
