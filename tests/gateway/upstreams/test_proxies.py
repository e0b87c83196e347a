"""Upstreams behind a proxy that the environment names."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp.connector
import pytest

from engine.config import ConfigError
from gateway.app import upstream_proxies
from gateway.config import Settings, UpstreamSettings
from gateway.types import Tenant, UpstreamRequest
from gateway.upstreams.connections import Connections, find_proxy, read_some
from tests.fakes.certificates import certificate

HTTPS, HTTP = "https://api.example.com/v1", "http://vllm.internal:8000/v1"


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        (HTTPS, {}, None),
        (HTTPS, {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        (HTTPS, {"HTTPS_PROXY": "http://big:1", "https_proxy": "http://small:1"}, "http://small:1"),
        (HTTPS, {"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        (HTTPS, {"HTTPS_PROXY": "http://user:pass@proxy:3128"}, "http://user:pass@proxy:3128"),
        (HTTPS, {"HTTP_PROXY": "http://proxy:3128"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        (HTTP, {"ALL_PROXY": "https://proxy"}, "https://proxy"),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "localhost, .internal"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "vllm.internal:8000"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "*"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "*.internal"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "no_proxy": "vllm.internal:8001, 10.0.0.0/8"}, "http://proxy:3128"),
        ("http://10.1.2.3:8000/v1", {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "a, 10.0.0.0/8"}, None),
        ("http://11.1.2.3:8000/v1", {"HTTP_PROXY": "proxy:3128", "NO_PROXY": "a, 10.0.0.0/8"}, "http://proxy:3128"),
        ("http://[fd00::1]:8000/v1", {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "fd00::/8,::1"}, None),
        (HTTP, {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "nal,api.example.com"}, "http://proxy:3128"),
        (HTTP, {"HTTP_PROXY": " "}, None),
    ],
)
def test_the_environment_names_the_proxy_of_an_upstream(url: str, environ: dict[str, str], proxy: str | None) -> None:
    assert find_proxy(url, environ) == proxy


@pytest.mark.parametrize("proxy", ["socks5://user:secret@proxy:1", "http://", "://secret"])
def test_a_proxy_that_cannot_be_used_stops_the_start_without_showing_it(proxy: str) -> None:
    settings = Settings(upstreams=(UpstreamSettings(name="up", url=HTTPS, models=("m",)),))
    with pytest.raises(ConfigError, match="HTTPS_PROXY") as refused:
        upstream_proxies(settings, {"HTTPS_PROXY": proxy})
    assert "secret" not in str(refused.value)


class Proxy:
    """Connects to whatever it is asked for, and remembers the first lines of requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.headers: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *headers = head.split("\r\n")
        self.asked.append(first)
        self.headers += headers
        host, _, port = first.split(" ")[1].rpartition(":")
        there, there_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        await asyncio.gather(_pump(reader, there_writer), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while await reader.readuntil(b"{}"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nfine")
    writer.close()
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()


@asynccontextmanager
async def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Proxy, str, str]]:
    """A proxy, its URL, and that of an upstream with TLS."""
    pem, proxy = certificate(folder), Proxy()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=str(pem)))
    async with (
        await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=context) as upstream,
        await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (listening, upstream)]
        yield proxy, f"http://user:pass@127.0.0.1:{ports[0]}", f"https://127.0.0.1:{ports[1]}"


async def ask(url: str, environ: dict[str, str]) -> bytes:
    settings = UpstreamSettings(name="up", url=url, models=("m",))
    connections, now = Connections(settings, "sk-secret", find_proxy(url, environ)), time.monotonic()
    request = UpstreamRequest("r", Tenant("a"), "openai", "m", "/v1/x", "", (), b"{}", {}, now, now + 10)
    try:
        with closing(await connections.send(request, "m", b"{}", request.deadline_s)) as response:
            return await read_some(response)
    finally:
        await connections.close()


async def test_an_upstream_with_tls_is_asked_through_the_proxy_which_sees_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(30), served(tmp_path, monkeypatch) as (proxy, proxy_url, url):
        assert await ask(url, {"HTTPS_PROXY": proxy_url}) == b"fine"
        assert proxy.asked == [f"CONNECT {url.removeprefix('https://')} HTTP/1.1"]
        assert "Proxy-Authorization: Basic dXNlcjpwYXNz" in proxy.headers
        assert "sk-secret" not in " ".join(proxy.headers)


async def test_an_upstream_that_no_proxy_lists_is_asked_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(30), served(tmp_path, monkeypatch) as (proxy, proxy_url, url):
        assert await ask(url, {"HTTPS_PROXY": proxy_url, "NO_PROXY": "127.0.0.1"}) == b"fine"
        assert proxy.asked == []
