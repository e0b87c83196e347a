"""A body with long texts is read as orjson reads it, without one long call."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import long_texts
from gateway.api.long_texts import find_long_texts, loads
from gateway.errors import BadRequestError, TextTooLargeError
from tests.fakes.gateway import running

UNITS = (
    *("a", "\\\\", '\\"', "\\n", "é", "漢", "😀", "{,"),
    *("\\u00e9", "\\u6f22", "\\ud83d\\ude00", "\\\\u00", "\\\\ud83d"),
)
TEXT = st.lists(st.tuples(st.sampled_from(UNITS), st.integers(1, 60)), max_size=6).map(
    lambda runs: "".join(unit * times for unit, times in runs)
)
VALUES = st.recursive(
    TEXT.map(lambda text: f'"{text}"') | st.just("1"),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(st.sampled_from(UNITS), inner, max_size=3).map(
            lambda named: "{" + ",".join(f'"{name}":{item}' for name, item in named.items()) + "}"
        )
    ),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "LEAST", 0)
    monkeypatch.setattr(long_texts, "SLICE", 16)


@given(written=VALUES, blanks=st.integers(0, 20))
def test_it_is_what_the_parser_reads_however_the_slices_fall(written: str, blanks: int) -> None:
    body = (" " * blanks + written).encode()
    assert loads(body, find_long_texts(body), 1 << 20) == orjson.loads(body)


@given(written=VALUES, at=st.integers(0, 400), junk=st.sampled_from((b'"', b"\\", b"\n", b"\xff", b"\\ud83d", b"")))
def test_what_the_parser_refuses_is_refused(written: str, at: int, junk: bytes) -> None:
    body = written.encode()
    body = body[:at] + junk + body[at + 1 :]
    try:
        expected: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            loads(body, find_long_texts(body), 1 << 20)
    else:
        assert loads(body, find_long_texts(body), 1 << 20) == expected


@pytest.mark.parametrize(
    ("text", "width"),
    [("a", 1), ("é", 1), ("漢", 2), ("😀", 4), ("\\u00e9", 1), ("\\u6f22", 2), ("\\ud83d\\ude00", 4)],
)
def test_the_memory_of_a_text_is_not_underrated(text: str, width: int) -> None:
    body = b'"' + b"a" * 160 + (text * 160).encode() + b'"'
    assert find_long_texts(body).num_bytes >= width * len(orjson.loads(body)) * 0.9


@pytest.mark.parametrize("at", [0, 500, 1_000])
def test_a_text_that_one_emoji_makes_too_large_is_refused(at: int) -> None:
    body = json.dumps(at * "a" + "😀" + (1_000 - at) * "a", ensure_ascii=False).encode()
    assert loads(body, find_long_texts(body), 4_100)
    with pytest.raises(TextTooLargeError):
        loads(body, find_long_texts(body), 3_900)


def test_a_long_name_of_a_field_is_refused() -> None:
    body = b'{"' + b"a" * 100 + b'": 1}'
    with pytest.raises(BadRequestError, match="name of a field"):
        loads(body, find_long_texts(body), 1 << 20)


async def test_a_long_text_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "SLICE", 1 << 10)
    said = "one line\n" * 3_000
    body = {"model": "demo", "messages": [{"role": "user", "content": said}]}
    async with running() as gateway:
        status, _, _ = await gateway.post("/v1/chat/completions", body)
        assert status == 200
        assert gateway.pipeline.requests[-1].prompt.messages[-1]["content"] == said
