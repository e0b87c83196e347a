"""Files through whole gateways: killed in the middle, two on one folder, and how much memory a large one takes."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fakes.server import Server

MIB = 1 << 20
HEAD = (
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer none\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: multipart/form-data; boundary=b\r\n\r\n"
)
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="large"\r\n\r\n'


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def connected(server: Server) -> socket.socket:
    url = urlsplit(server.url)
    return socket.create_connection((url.hostname, url.port), 30)


@pytest.mark.slow
def test_a_gateway_that_is_killed_in_an_upload_leaves_what_was_kept_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with Server(tmp_path, command="gateway") as first:
        before = first.client().files.create(file=b"kept", purpose="batch")
        with connected(first) as upload:
            upload.sendall(HEAD + chunk(PURPOSE + FILE) + chunk(b"x" * (3 * MIB)))
            first.wait_until(
                lambda: any(part.stat().st_size >= MIB for part in folder.rglob("*.part")), "it is written"
            )
            first.process.kill()
            first.process.wait()
    assert len(kept(folder)) == 3
    with Server(tmp_path, command="gateway") as second:
        second.wait_until(lambda: len(kept(folder)) == 2, "the part is swept")
        client = second.client()
        assert [one.id for one in client.files.list()] == [before.id]
        assert client.files.content(before.id).content == b"kept"
        with second.anthropic().files.with_streaming_response.download(before.id) as answer:
            assert answer.read() == b"kept"


@pytest.mark.slow
def test_two_gateways_on_one_folder_have_the_same_files(tmp_path: Path) -> None:
    shared = ("--files-folder", str(tmp_path / "shared"))
    with (
        Server(tmp_path / "a", *shared, command="gateway") as one,
        Server(tmp_path / "b", *shared, command="gateway") as other,
    ):
        made = [server.client().files.create(file=b"x", purpose="batch").id for server in (one, other, one)]
        for server in (one, other):
            assert [file.id for file in server.client().files.list(limit=2, order="asc")] == made
        assert other.client().files.content(made[0]).content == b"x"
        other.client().files.delete(made[0])
        assert [file.id for file in one.client().files.list(order="asc")] == made[1:]
    assert len(kept(tmp_path / "shared")) == 4


def memory_bytes(server: Server, what: str) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def pieces(megabytes: int) -> Iterator[bytes]:
    for number in range(megabytes):
        yield number.to_bytes(4, "big") * (MIB // 4)


@pytest.mark.slow
def test_a_large_file_goes_through_a_gateway_that_does_not_grow(tmp_path: Path) -> None:
    megabytes = 160
    with Server(tmp_path, command="gateway") as server:
        client = server.client()
        client.files.delete(client.files.create(file=b"x" * (2 * MIB), purpose="vision").id)
        before = memory_bytes(server, "VmRSS")
        with connected(server) as upload:
            upload.sendall(HEAD + chunk(PURPOSE + FILE))
            for piece in pieces(megabytes):
                upload.sendall(chunk(piece))
            upload.sendall(chunk(b"\r\n--b--\r\n") + b"0\r\n\r\n")
            assert upload.recv(100).startswith(b"HTTP/1.1 200 ")
        (made,) = client.files.list().data
        assert made.bytes == megabytes * MIB
        with client.files.with_streaming_response.content(made.id) as answer:
            for piece, expected in zip(answer.iter_bytes(MIB), pieces(megabytes), strict=True):
                assert piece == expected
        grown = memory_bytes(server, "VmHWM") - before
        print(f"grown by {grown / MIB:.1f} MiB for {megabytes} MiB up and down")
        assert grown < 24 * MIB
