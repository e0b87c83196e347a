"""Forms with a file in: names, parts in any order, and bodies that are cut anywhere, or are no forms."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any, cast
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader, web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.uploads import Form, disposition, read_form
from gateway.errors import BadRequestError
from gateway.types import StoredFile

BOUNDARY = "bound"


class Sink:
    """An upload that only remembers."""

    def __init__(self) -> None:
        self.purpose = ""
        self.data = b""
        self.expected = 0

    def expect(self, num_bytes: int) -> None:
        self.expected = num_bytes

    async def write(self, data: bytes) -> None:
        self.data += data

    async def finish(self, filename: str, mime_type: str, ttl_s: float | None) -> StoredFile:
        """Reading a form ends before this."""
        raise NotImplementedError


def part(name: str, data: bytes, *, filename: str | None = None, extra: str = "") -> bytes:
    named = "" if filename is None else f'; filename="{filename}"'
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n{extra}\r\n'
    return head.encode("utf-8", "surrogateescape") + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def asked(pieces: list[bytes], *, ended: bool = True, **headers: str) -> web.Request:
    """A request whose body arrives in these pieces."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.transport = Mock()
    payload = StreamReader(protocol, 2**16, loop=loop)
    for piece in pieces:
        payload.feed_data(piece)
    if ended:
        payload.feed_eof()
    given = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **headers}
    return make_mocked_request("POST", "/v1/files", given, payload=payload, transport=cast("Any", Mock()))


async def read(*pieces: bytes, **headers: str) -> tuple[Form, bytes, list[tuple[str, str]]]:
    """The form, the file's bytes, and what was told of the other parts."""
    sink, told = Sink(), list[tuple[str, str]]()
    form = await read_form(asked(list(pieces), **headers), sink, 5.0, lambda name, value: told.append((name, value)))
    return form, sink.data, told


FRAGMENTS = st.sampled_from((b"\r\n", b"--", BOUNDARY.encode(), b"--bound", b"\r\n--boun", b"\r", b"\n", b"\x00", b"x"))
CONTENTS = st.one_of(
    st.binary(max_size=300),
    st.lists(FRAGMENTS, max_size=30).map(b"".join),
    st.integers(60_000, 70_000).map(lambda size: b"\r\n--boun" * (size // 8)),
).filter(lambda data: b"\r\n--bound" not in b"\r\n" + data)


@settings(max_examples=200)
@given(content=CONTENTS, order=st.permutations(range(3)), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_a_form_is_read_the_same_however_it_is_cut_and_ordered(
    content: bytes, order: list[int], cuts: list[int]
) -> None:
    parts = [part("purpose", b"batch"), part("note", "ü".encode()), part("file", content, filename="ü.bin")]
    body = b"".join(parts[index] for index in order) + END
    places = sorted({0, *(min(cut, len(body)) for cut in cuts), len(body)})
    pieces = [body[start:end] for start, end in itertools.pairwise(places)]
    form, data, told = asyncio.run(read(*pieces))
    assert data == content
    assert form == Form("ü.bin", "application/octet-stream", {"purpose": "batch", "note": "ü"})
    assert sorted(told) == [("note", "ü"), ("purpose", "batch")]


@settings(max_examples=200)
@given(
    body=st.one_of(
        st.binary(max_size=200),
        st.lists(st.one_of(FRAGMENTS, st.sampled_from((END, part("a", b"b"), b"Content-Type: multipart/mixed")))).map(
            b"".join
        ),
        st.integers(0, 200).map(lambda cut: (part("file", b"x" * 20, filename="x") + part("a", b"b") + END)[:cut]),
    )
)
def test_whatever_comes_is_a_form_or_a_bad_request(body: bytes) -> None:
    with suppress(BadRequestError):
        form, _, _ = asyncio.run(read(body))
        assert form.filename is not None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ('form-data; name="purpose"', ("purpose", None)),
        ("form-data; name=purpose", ("purpose", None)),
        ('form-data; name="file"; filename="a.jsonl"', ("file", "a.jsonl")),
        ('form-data; filename="a.jsonl"; name="file"', ("file", "a.jsonl")),
        ('form-data; name="file"; filename="a; b; c.jsonl"', ("file", "a; b; c.jsonl")),
        ('form-data; name="file"; filename="say %22hi%22.txt"', ("file", 'say "hi".txt')),
        (r'form-data; name="file"; filename="say \"hi\".txt"', ("file", 'say "hi".txt')),
        ('form-data; name="file"; filename="../../etc/passwd"', ("file", "../../etc/passwd")),
        ('form-data; name="file"; filename="C:\\\\dir\\\\x.txt"', ("file", r"C:\dir\x.txt")),
        (r'form-data; name="file"; filename="C:\dir\x.txt"', ("file", r"C:\dir\x.txt")),
        (f'form-data; name="file"; filename="{"x" * 300}"', ("file", "x" * 300)),
        ('form-data; name="file"; filename="日本 語.txt"', ("file", "日本 語.txt")),
        ("form-data; name=file; filename=x; filename*=UTF-8''%e2%82%ac.txt", ("file", "€.txt")),
        ('form-data; name="file"; filename=""', ("file", "")),
        ('form-data; name="expires_after[seconds]"', ("expires_after[seconds]", None)),
    ],
)
def test_names_are_read_as_clients_write_them(header: str, expected: tuple[str, str | None]) -> None:
    assert disposition(header) == expected


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("", "no name"),
        ("form-data", "no name"),
        ('form-data; filename="x"', "no name"),
        (f'form-data; name="file"; filename="{"x" * 1025}"', "1024 characters"),
        ('form-data; name="file"; filename="a\x07b"', "cannot be shown"),
        ('form-data; name="file"; filename="\udcff"', "not UTF-8"),
        ("form-data; name=file; filename*=UTF-8''%ff", "not UTF-8"),
    ],
)
def test_names_that_are_none_are_refused(header: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        disposition(header)


async def test_a_file_without_a_name_has_one_and_keeps_its_type() -> None:
    form, data, _ = await read(part("file", b"x", extra="Content-Type: text/plain\r\n"), END)
    assert (form.filename, form.mime_type, data) == ("unnamed", "text/plain", b"x")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (part("purpose", b"batch") + END, "'file'"),
        (part("file", b"x") + part("file", b"y") + END, "two"),
        (part("file", b"x") + part("a", b"x") + part("a", b"y") + END, "twice"),
        (part("a", b"x" * 2000) + END, "1024"),
        (b"".join(part(f"a{number}", b"") for number in range(17)) + END, "16 parts"),
        (part("a", b"\xff") + END, "codec can.t decode"),
        (part("file", b"x", extra="Content-Transfer-Encoding: base64\r\n") + END, "Content-Transfer-Encoding"),
        (part("file", b"x", extra="Content-Type: multipart/mixed; boundary=y\r\n") + END, "a form itself"),
        (part("file", b"x"), "cannot be read: "),
        (part("file", b"x")[:-3], "cannot be read"),
        (b"", "starting boundary"),
    ],
)
async def test_a_form_that_cannot_be_is_refused_and_says_why(body: bytes, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        await read(body)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Type": "application/json"}, "multipart/form-data"),
        ({"Content-Type": "multipart/form-data"}, "boundary missed"),
        ({"Content-Type": f"multipart/form-data; boundary={'x' * 71}"}, "cannot be read"),
        ({"Content-Encoding": "gzip"}, "Content-Encoding"),
    ],
)
async def test_a_body_that_is_no_form_is_refused(headers: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        await read(part("file", b"x") + END, **headers)


async def test_what_is_announced_is_told_before_it_is_read() -> None:
    http = asked([part("file", b"x") + END], **{"Content-Length": str(1 << 30)})
    sink = Sink()
    await read_form(http, sink, 5.0, lambda name, value: None)
    assert (1 << 30) - sink.expected == 256 << 10


async def test_a_file_that_does_not_arrive_in_time_is_given_up() -> None:
    http = asked([part("file", b"x")[:-2]], ended=False)
    with pytest.raises(BadRequestError, match="upload_timeout_s"):
        await read_form(http, Sink(), 0.01, lambda name, value: None)
