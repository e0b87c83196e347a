"""Certificates in files, and handshakes in memory."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from cryptography import x509

from engine import tls
from engine.config import ConfigError
from engine.tls import Certificate, between
from tests.fakes.certificates import Authority

CLIENT = x509.ExtendedKeyUsageOID.CLIENT_AUTH


def pair(folder: Path) -> Certificate:
    return Certificate("tls", folder / "tls.crt", folder / "tls.key")


def serial(server: ssl.SSLContext, ca: Path) -> str:
    """Number of the certificate that a client sees which knows the CA and wants TLS 1.2 at least."""
    client = ssl.create_default_context(cafile=str(ca))
    client.check_hostname = False
    client.verify_flags &= ~ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    seen = ends[0].getpeercert()
    assert seen is not None
    return str(seen["serialNumber"])


def test_files_that_cannot_be_used_stop_the_start_with_one_line(tmp_path: Path) -> None:
    authority = Authority()
    good, other = authority.issue(tmp_path / "good"), authority.issue(tmp_path / "other")
    old = authority.issue(tmp_path / "old", days=-1)
    locked = authority.issue(tmp_path / "locked", password=b"secret")
    (tmp_path / "text").write_text("hello")
    for cert, key, said in (
        (good / "no.crt", good / "tls.key", f"tls: {good}/no.crt cannot be read: No such file or directory"),
        (good / "tls.crt", other / "tls.key", f"tls: {other}/tls.key is not the key of {good}/tls.crt"),
        (old / "tls.crt", old / "tls.key", f"tls: {old}/tls.crt cannot be used: certificate has expired"),
        (locked / "tls.crt", locked / "tls.key", f"PEM without a password is expected in {locked}/tls.crt, "),
        (tmp_path / "text", good / "tls.key", f"PEM without a password is expected in {tmp_path}/text, "),
    ):
        with pytest.raises(ConfigError) as raised:
            Certificate("tls", cert, key)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
    (good / "ca.crt").write_bytes((Authority().issue(tmp_path / "foreign") / "ca.crt").read_bytes())
    with pytest.raises(ConfigError, match=r"tls.crt cannot be used: certificate signature failure, by .*ca.crt"):
        between(good, serves=True)
    with pytest.raises(ConfigError, match=r"cannot be used: uns.* certificate purpose"):
        between(authority.issue(tmp_path / "client", use=CLIENT), serves=True)


@pytest.mark.parametrize("kinds", [(False, True), (True, False)], ids=["EC to RSA", "RSA to EC"])
def test_new_handshakes_see_new_files_and_broken_ones_are_logged_once(
    tmp_path: Path, kinds: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    authority, ca = Authority(), tmp_path / "ca.crt"
    authority.issue(tmp_path, by_rsa=kinds[0])
    server = pair(tmp_path).listening()
    first = serial(server, ca)
    assert serial(server, ca) == first
    os.rename(tmp_path / "tls.key", tmp_path / "away")  # as between the two writes of a renewal
    assert [serial(server, ca) for _ in range(3)] == [first] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "tls.key cannot be read" in caplog.text
    authority.issue(tmp_path, by_rsa=kinds[1])
    second = serial(server, ca)
    assert second != first
    authority.issue(tmp_path, days=-1)
    assert serial(server, ca) == second
    assert "certificate has expired; the one from before goes on" in caplog.text


def test_files_are_looked_at_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(tls, "_stamp", lambda file: looks.append(file))
    server, ca = pair(Authority().issue(tmp_path)).listening(), tmp_path / "ca.crt"
    for _ in range(3):
        serial(server, ca)
    assert len(looks) == 2


@asynccontextmanager
async def answering(context: ssl.SSLContext) -> AsyncIterator[str]:
    """A server that says from which port it was asked."""

    async def say_port(request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        return web.Response(text=str(request.transport.get_extra_info("peername")[1]))

    server = web.Server(say_port)
    site = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{site.sockets[0].getsockname()[1]}"
    finally:
        site.close()
        await server.shutdown(1.0)


async def connections(url: str, context: ssl.SSLContext) -> int:
    """That a client took for three requests."""
    ports = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        for _ in range(3):
            async with session.post(url) as answer:
                ports.add(await answer.text())
    return len(ports)


async def test_who_has_no_certificate_of_the_ca_is_refused_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "LOOK_S", 0.0)
    old, new = Authority(), Authority()
    engine = between(old.issue(tmp_path / "engine"), serves=True)
    gateway = between(old.issue(tmp_path / "gateway", use=CLIENT), serves=False)
    stranger = between(new.issue(tmp_path / "stranger", use=CLIENT), serves=False)
    assert engine is not None
    assert gateway is not None
    assert stranger is not None
    nobody = ssl.create_default_context(cafile=str(tmp_path / "engine/ca.crt"))
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    careless.load_cert_chain(tmp_path / "stranger/tls.crt", tmp_path / "stranger/tls.key")
    async with asyncio.timeout(30), answering(engine.listening()) as url:
        assert await connections(url, gateway.context()) == 1
        for context in (nobody, careless, stranger.context()):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await connections(url, context)
        lines = [record.getMessage().rpartition(": ")[2] for record in caplog.records if record.name == "engine.tls"]
        assert lines == ["peer did not return a certificate", "certificate signature failure"]
        # Both have moved to another CA: nothing of the old one is trusted any more, and nothing was started again.
        left = gateway.context()
        new.issue(tmp_path / "engine")
        new.issue(tmp_path / "gateway", use=CLIENT)
        assert await connections(url, gateway.context()) == 1
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            await connections(url, left)
