"""A TCP port before a test server's socket that can fall silent in either direction, refuse, or break off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit

import anyio


class Proxy:
    """What Postgres is to the clients behind it."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        self._socket = f"{query['host'][0]}/.s.PGSQL.{query.get('port', ['5432'])[0]}"
        self._user, self._database = parts.username, parts.path
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], set[str]] = {}  # in which directions each is cut
        self._cut: set[str] = set()
        self.port = 0
        self.refuses: str | None = None  # the SQLSTATE that new connections are told
        self.refuses_if: Callable[[bytes], bool] = lambda _first: True  # asked with a connection's first packet
        self.attempts: list[float] = []  # when each connection was tried
        self.sent = bytearray()  # by all clients

    @property
    def dsn(self) -> str:
        return f"postgresql://{self._user}:@127.0.0.1:{self.port}{self._database}?sslmode=disable"

    @property
    def links(self) -> int:
        return len(self._links)

    def cut(self, *ways: str) -> None:
        """As if a cable were cut, for every connection there is and to come; neither end is told, not even of a close.

        `up`: the server hears no more; `down`: the clients do not.
        """
        self._cut = set(ways)
        for cut in self._links.values():
            cut |= self._cut

    def mend(self) -> None:
        """New connections work; those that were cut stay so for ever."""
        self._cut = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Every connection is reset and new ones are refused."""
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links[link] = cut = set(self._cut)
        self.attempts.append(time.monotonic())
        try:
            with suppress(OSError, asyncio.CancelledError):
                first = await reader.read(65536)
                if self.refuses is not None and self.refuses_if(first):
                    fields = f"SFATAL\0VFATAL\0C{self.refuses}\0Mrefused by the proxy\0\0".encode()
                    writer.write(b"E" + (len(fields) + 4).to_bytes(4, "big") + fields)
                    await writer.drain()
                elif first:
                    await self._join(first, reader, writer, cut)
        finally:
            writer.transport.abort()
            del self._links[link]

    async def _join(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: set[str]
    ) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
        if "up" not in cut:
            server_writer.write(first)
        pumps = [
            asyncio.ensure_future(self._pump("up", reader, server_writer, cut)),
            asyncio.ensure_future(self._pump("down", server_reader, writer, cut)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            server_writer.transport.abort()

    async def _pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: set[str]) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if way == "up":
                    self.sent += data
                if way not in cut:
                    writer.write(data)
                    await writer.drain()
        if way in cut:
            await anyio.sleep_forever()


@asynccontextmanager
async def proxy_to(dsn: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(dsn)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
