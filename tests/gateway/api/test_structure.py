"""What a body may be made of, in every dialect."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import structure
from gateway.api.anthropic.batch_body import RequestSplitter
from gateway.api.anthropic.messages import read_turns
from gateway.api.anthropic.parameters import stop_sequences
from gateway.api.body import parse_object
from gateway.api.fields import MAX_ITEMS, MAX_STOP_CHARS
from gateway.api.gemini.contents import contents, to_messages
from gateway.api.gemini.parameters import GENERATION
from gateway.api.openai.batches.rows import RowLimits, check
from gateway.api.openai.embeddings import check_input
from gateway.api.openai.messages import MAX_ARGUMENT_VALUES, parse_messages
from gateway.api.openai.parameters import MAX_BIASES, logit_bias, stop
from gateway.api.openai.responses.items import parse_input
from gateway.api.structure import Structure, check_structure, count_structure
from gateway.errors import BadRequestError

VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text('\\"{[,:]}é\n '),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('\\",:{'), inner, max_size=4),
    max_leaves=30,
)
TOO_MANY = {
    "empty objects": b'{"messages":[' + b",".join([b"{}"] * structure.MAX_CONTAINERS) + b"]}",
    "empty arrays": b'{"messages":[' + b",".join([b"[]"] * structure.MAX_CONTAINERS) + b"]}",
    "nested arrays": b'{"a":' + b"[[[[[]]]]]," * (structure.MAX_CONTAINERS // 5) + b"0}",
    "numbers": b'{"input":[' + b",".join([b"1"] * (structure.MAX_VALUES + 1)) + b"]}",
    "names": b"{" + b",".join(b'"%d":1' % number for number in range(structure.MAX_NAMES + 1)) + b"}",
    "objects behind a text full of them": b'{"a":"' + b"{}," * 9 + b'\\\\","b":[' + b"{}," * structure.MAX_CONTAINERS,
}


def weigh(value: Any) -> Structure:
    """As the parser would, one after the other; an empty container counts for a value more."""
    if not isinstance(value, dict | list):
        return Structure(0, 0, 1)
    inner = list(value.values()) if isinstance(value, dict) else value
    found = [weigh(one) for one in inner]
    return Structure(
        1 + sum(one.containers for one in found),
        sum(one.names for one in found) + (len(value) if isinstance(value, dict) else 0),
        1 + (sum(one.values for one in found) or 1),
    )


@given(value=VALUES, size=st.integers(1, 9))
def test_what_is_counted_is_what_a_parser_finds_however_the_slices_fall(value: Any, size: int) -> None:
    body = orjson.dumps(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(structure, "_SLICE", size)
        assert count_structure(body) == weigh(value)


@pytest.mark.parametrize("every", [2, 200, 255, 256, 257, 300, 1000])
def test_signs_are_counted_whether_there_are_few_or_many(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = (b"," + b"x" * (every - 1)) * 1000 + b'{[":'
    monkeypatch.setattr(structure, "_LONG", 1000)
    assert check_structure(body) == Structure(2, 1, 1003)


@pytest.mark.parametrize("name", TOO_MANY)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.body.loads", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(BadRequestError, match="50000, 100000 and 500000") as refused:
        parse_object(TOO_MANY[name])
    assert refused.value.code == "too_many_json_values"


def test_a_text_may_have_any_number_of_commas_and_braces() -> None:
    text = "[{},:" * 1_000_000
    assert parse_object(json.dumps({"a": text}).encode()) == {"a": text}
    assert check_structure(json.dumps({"a": text}).encode()) == Structure(1, 1, 2)


def test_the_token_ids_of_the_largest_request_for_embeddings_fit() -> None:
    assert check_structure(orjson.dumps({"input": [list(range(300)) for _ in range(1000)]})).fits()


TEXT = {"type": "text", "text": "a"}


def said(value: Any) -> list[Any]:
    return [{"role": "user", "content": value}]


SEVERAL: dict[str, tuple[Callable[[Any, str], Any], Any]] = {
    "messages": (parse_messages, {"role": "user", "content": "a"}),
    "turns": (read_turns, {"role": "user", "content": "a"}),
    "items": (parse_input, {"role": "user", "content": "a"}),
    "contents": (contents, {"parts": [{"text": "a"}]}),
    "texts": (check_input, "a"),
    "parts": (lambda value, path: parse_messages(said(value), path), TEXT),
    "blocks": (lambda value, path: read_turns(said(value), path), TEXT),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_an_array_of_objects_has_a_maximum_in_every_dialect(name: str) -> None:
    read, one = SEVERAL[name]
    read([one] * MAX_ITEMS, "a")
    with pytest.raises(BadRequestError) as refused:
        read([one] * (MAX_ITEMS + 1), "a")
    assert refused.value.code == "array_above_max_length"
    assert str(MAX_ITEMS) in refused.value.message


def test_biases_have_a_maximum() -> None:
    with pytest.raises(BadRequestError) as refused:
        logit_bias({str(token): 1 for token in range(MAX_BIASES + 1)}, "logit_bias")
    assert refused.value.code == "object_above_max_properties"


@pytest.mark.parametrize(
    "read",
    [
        stop,
        lambda one, path: stop([one], path),
        lambda one, path: stop_sequences([one], path),
        lambda one, path: GENERATION["stopSequences"].check([one], path),
    ],
)
def test_stop_strings_have_a_maximum_in_every_dialect(read: Callable[[Any, str], Any]) -> None:
    read("a" * MAX_STOP_CHARS, "stop")
    with pytest.raises(BadRequestError) as refused:
        read("a" * (MAX_STOP_CHARS + 1), "stop")
    assert refused.value.code == "string_above_max_length"


def test_arguments_behind_the_limit_of_values_stay_text_and_those_before_it_do_not() -> None:
    def call(written: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": written}
        calls = [{"id": "1", "type": "function", "function": function}]
        return {"role": "assistant", "tool_calls": calls}

    many = json.dumps({"a": [{}] * (MAX_ARGUMENT_VALUES // 6)})
    read = parse_messages([call('{"a": 1}'), call(many), call(many), call('{"a": 1}')], "messages")
    kinds = [type(one["tool_calls"][0]["function"]["arguments"]) for one in read]
    assert kinds == [dict, dict, str, str]


def test_code_in_arguments_is_one_value() -> None:
    written = json.dumps({"code": "f({[,:" * MAX_ARGUMENT_VALUES})
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": written}}]
    (read,) = parse_messages([{"role": "assistant", "tool_calls": calls}], "messages")
    assert type(read["tool_calls"][0]["function"]["arguments"]) is dict


def test_the_texts_of_many_turns_of_a_model_are_joined_once() -> None:
    turns = contents([{"role": "model", "parts": [{"text": "ab"}]}] * 5000, "contents")
    assert to_messages(None, turns).messages == [{"role": "assistant", "content": "ab" * 5000}]


def test_a_row_of_a_batch_has_the_limits_of_a_body() -> None:
    body = b'{"model":"m","messages":[' + b"{}," * structure.MAX_CONTAINERS + b"{}]}"
    row = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":' + body + b"}\n"
    found = check(io.BytesIO(row), "/v1/chat/completions", RowLimits(9, 9, 1 << 20, 128))
    assert [error.code for error in found.errors] == ["too_many_json_values"]
    splitter = RequestSplitter(9, 1 << 20)
    with pytest.raises(BadRequestError) as refused:
        splitter.rows(splitter.feed(b'{"requests":[{"custom_id":"a","params":' + body + b"}"))
    assert refused.value.code == "too_many_json_values"
