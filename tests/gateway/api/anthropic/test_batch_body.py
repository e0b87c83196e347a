"""Bodies of new message batches, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.anthropic import batch_body
from gateway.api.anthropic.batch_body import RequestSplitter
from gateway.errors import BadRequestError, BodyTooLargeError, KvasirError

PARAMS = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "\u2028 😀 \\ud83d"}]}


def request(custom_id: object, /, **changed: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "params": PARAMS} | changed


def read(data: bytes, size: int | None = None, max_request_bytes: int = 100_000) -> list[Any]:
    splitter = RequestSplitter(5, max_request_bytes)
    size = size or len(data) or 1
    rows = b"".join(splitter.rows(splitter.feed(data[start : start + size])) for start in range(0, len(data), size))
    splitter.close()
    found = [json.loads(row) for row in rows.decode().split("\n")[:-1]]
    assert splitter.num_requests == len(found)
    return found


TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=9
)


@given(
    values=st.lists(VALUES, min_size=1, max_size=4),
    size=st.integers(1, 40),
    escaped=st.booleans(),
    indent=st.none() | st.just(2),
)
def test_requests_are_the_same_wherever_their_body_is_cut(
    values: list[Any], size: int, escaped: bool, indent: int | None
) -> None:
    sent = [request(f"r-{number}", params={"x": value}) for number, value in enumerate(values)]
    data = json.dumps({"requests": sent}, ensure_ascii=escaped, indent=indent).encode()
    assert read(data, size) == read(data) == sent


ESCAPES = (
    r"\ud83d",
    r"\uD83D",
    r"\ude00",
    r"\uDE00",
    r"\u0041",
    r"\ud7ff",
    r"\ue000",
    r"\\",
    r"\n",
    r"\"",
    "ud83d",
    "x",
    "é",
)


@given(parts=st.lists(st.sampled_from(ESCAPES), max_size=12), size=st.integers(1, 40))
def test_half_of_a_character_is_refused_wherever_it_stands_and_is_cut(parts: list[str], size: int) -> None:
    told = json.loads(f'"{"".join(parts)}"')
    data = f'{{"requests":[{{"custom_id":"a","params":{{"x":"{"".join(parts)}"}}}}]}}'.encode()
    if any("\ud800" <= character <= "\udfff" for character in told):
        with pytest.raises(BadRequestError, match="surrogate"):
            read(data, size)
    else:
        assert read(data, size) == [request("a", params={"x": told})]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"requests": []}, "requests"),
        ({"requests": {}}, "requests"),
        ({"requests": {"item": [request("a")]}}, "requests"),
        ({"requests": "x"}, "requests"),
        ({"requests": None}, "requests"),
        ({"requests": 0.5}, "requests"),
        ({}, "requests"),
        ({"requests": [request("a")], "model": "demo"}, "model"),
        ({"requests.item": [request("a")]}, "requests.item"),
        ([request("a")], None),
        ("x", None),
        ({"requests": ["x"]}, "requests[0]"),
        ({"requests": [request("a"), {"params": {}}]}, "requests[1].custom_id"),
        ({"requests": [request(7)]}, "requests[0].custom_id"),
        ({"requests": [request("")]}, "requests[0].custom_id"),
        ({"requests": [request("a b")]}, "requests[0].custom_id"),
        ({"requests": [request("x" * 65)]}, "requests[0].custom_id"),
        ({"requests": [request("a"), request("b"), request("a")]}, "requests[2].custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "requests[0].params"),
        ({"requests": [request("a", params=[])]}, "requests[0].params"),
        ({"requests": [request("a", method="POST")]}, "requests[0].method"),
        ({"requests": [request("a"), request("b", params={"x": json.loads("[" * 128 + "]" * 128)})]}, "requests[1]"),
        ({"requests": [request(str(number)) for number in range(6)]}, "requests"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(body: Any, param: str | None, size: int) -> None:
    with pytest.raises(BadRequestError) as told:
        read(json.dumps(body).encode(), size)
    assert told.value.param == param
    assert told.value.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"requests":[{"custom_id":"a","params":{}}]',
        b'{"requests":[{"custom_id":"a","params":{}}]}}',
        b'{"requests":[{"custom_id":"a","params":{"x":NaN}}]}',
        b'{"requests":[{"custom_id":"a","params":{"x":1e999}}]}',
        b'{"requests":[{"custom_id":"a","params":{}} {"custom_id":"b","params":{}}]}',
        b'{"requests":[{"custom_id":"a","params":{}},]}',
        b'{"requests":[,{"custom_id":"a","params":{}}]}',
        b'{"requests":[{"custom_id":"a","params":{]}}]}',
        b'{"requests":[{"custom_id":"a","params":{"x":"\\ud83d"}}]}',
        b'{"requests":[{"custom_id":"a","params":{"x":"\\ude00 and more text behind it"}}]}',
        b'{"requests":[{"custom_id":"a","params":{"x":"\\ud83d\\u0041 and more text"}}]}',
        b'{"requests":[{"custom_id":"a","params":{"x":"\xff"}}]}',
        b'\xef\xbb\xbf{"requests":[{"custom_id":"a","params":{}}]}',
        b'{"requests":[{"custom_id":"a","params":{}}],"requests":[{"custom_id":"b","params":{}}]}',
        b'{"requests":' + b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("size", [1, 1000, None])
def test_what_is_no_json_is_refused(data: bytes, size: int | None) -> None:
    with pytest.raises(KvasirError) as told:
        read(data, size if len(data) < 1000 else 1000)
    assert told.value.status in (400, 413)


def test_a_request_is_in_memory_alone_and_so_large_at_most() -> None:
    data = json.dumps({"requests": [request("a", params={"x": "y" * 3000})]}).encode()
    assert len(read(data, 100, 4000)) == 1
    with pytest.raises(BodyTooLargeError):
        read(data, 100, 2000)


def test_a_request_of_too_many_values_is_not_split_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_body, "MAX_MARKS", 1000)
    with pytest.raises(BadRequestError) as refused:
        RequestSplitter(5, 100_000).feed(b'{"requests":[' + b'{"a":' * 400)
    assert refused.value.code == "too_many_json_values"
