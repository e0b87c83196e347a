from __future__ import annotations

from typing import Any

import pytest

from gateway.api.fields import boolean, refused, table, text, used
from gateway.api.gemini.proto import enum, given, message, read, repeated, whole
from gateway.errors import BadRequestError, UnsupportedError

INNER = table(used("topK", whole(0, 10), "", ""), used("isOn", boolean, "", ""))
OUTER = table(
    used("someInner", message(INNER), "", ""),
    used("names", repeated(text(), 2), "", ""),
    used("inners", repeated(message(INNER)), "", ""),
    refused("only", "Only text.", enum("TEXT", "AUDIO"), "", "TEXT"),
)


@pytest.mark.parametrize("key", ["someInner", "some_inner"])
@pytest.mark.parametrize("inner", ["topK", "top_k"])
def test_every_field_has_two_spellings(key: str, inner: str) -> None:
    assert read({key: {inner: 3}}, OUTER) == {"someInner": {"topK": 3}}


def test_null_is_not_given_whatever_the_field() -> None:
    assert read({"someInner": None, "names": None, "only": None}, OUTER) == {}


def test_both_spellings_at_once_are_refused() -> None:
    with pytest.raises(BadRequestError, match="it is there in two spellings") as refused_:
        given({"someInner": {}, "some_inner": {}}, OUTER)
    assert refused_.value.param == "someInner"


@pytest.mark.parametrize(
    ("body", "message_", "path"),
    [
        ({"x": 1}, 'Unknown name "x": Cannot find field.', "x"),
        ({"someInner": {"x": 1}}, "Unknown name \"x\" at 'someInner': Cannot find field.", "someInner.x"),
        ({"inners": [{}, {"x": None}]}, "Unknown name \"x\" at 'inners[1]': Cannot find field.", "inners[1].x"),
    ],
)
def test_an_unknown_field_is_named_with_its_place(body: Any, message_: str, path: str) -> None:
    with pytest.raises(BadRequestError) as refused_:
        read(body, OUTER)
    assert refused_.value.message == f"Invalid JSON payload received. {message_}"
    assert refused_.value.param == path


@pytest.mark.parametrize("value", [3, 3.0, "3", "3.0"])
def test_a_whole_number_may_be_written_in_four_ways(value: Any) -> None:
    assert whole(0, 10)(value, "a") == 3


@pytest.mark.parametrize("value", [3.5, "3.5", "x", True, None, [], 11, "11", -1, 1e30, "9" * 400])
def test_what_is_no_whole_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(BadRequestError) as refused_:
        whole(0, 10)(value, "a.b")
    assert refused_.value.param == "a.b"


def test_an_enum_is_taken_in_any_case() -> None:
    assert enum("AUTO", "ANY")("any", "a") == "ANY"
    with pytest.raises(BadRequestError, match="'AUTO', 'ANY'"):
        enum("AUTO", "ANY")("most", "a")


def test_one_object_stands_for_an_array_of_it() -> None:
    assert read({"inners": {"topK": 1}}, OUTER) == read({"inners": [{"topK": 1}]}, OUTER)


@pytest.mark.parametrize(("names", "path"), [("a", "names"), (["a", 1], "names[1]"), (["a", "b", "c"], "names")])
def test_an_array_says_which_of_its_values_is_wrong(names: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as refused_:
        read({"names": names}, OUTER)
    assert refused_.value.param == path


def test_a_refused_field_takes_what_asks_for_nothing() -> None:
    assert read({"only": "TEXT"}, OUTER) == {}
    with pytest.raises(UnsupportedError, match=r"Unsupported field 'only'\. Only text\."):
        read({"only": "AUDIO"}, OUTER)
