"""Tool calls in a text that comes in pieces: what is told, what is held back, and what is text after all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import json_scan, tool_calls
from gateway.prompt.tool_calls import CallParser, Chunk
from gateway.prompt.tool_styles import HERMES, JSON, LLAMA3, MISTRAL, STYLES, ToolStyle
from gateway.types import CallDelta, TextDelta, Tool, ToolUse

NAMES = ("f", "get_weather")
TOOLS = tuple(Tool(name) for name in NAMES)
FREE = ToolUse(TOOLS)

Read = tuple[str, list[tuple[str, str]]]
"""The text, and name and arguments of each call."""


def parser(style: ToolStyle = HERMES, use: ToolUse = FREE, *stop: str) -> CallParser:
    return CallParser(style, use, stop)


def pieces_of(parser: CallParser, *texts: str) -> list[Chunk]:
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return pieces + list(parser.flush())


def joined(pieces: Sequence[Chunk]) -> Read:
    text, calls = "", list[tuple[str, str]]()
    for _, event in pieces:
        if type(event) is TextDelta:
            text += event.text
        elif type(event) is CallDelta:
            assert (event.call == len(calls)) == bool(event.name)
            if event.name:
                calls.append((event.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return text, calls


def read(style: ToolStyle, text: str, use: ToolUse = FREE, *stop: str) -> Read:
    return joined(pieces_of(parser(style, use, *stop), text))


WRITTEN: dict[str, tuple[ToolStyle, str, Read | None]] = {
    "hermes": (
        HERMES,
        'I look.\n\n<tool_call>\n{"name": "f", "arguments": {"a": "}{\\""}}\n</tool_call>',
        ("I look.", [("f", '{"a": "}{\\""}')]),
    ),
    "hermes, two": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"b": [{}, 1]}}\n</tool_call>\n',
        ("", [("f", "{}"), ("get_weather", '{"b": [{}, 1]}')]),
    ),
    "hermes, arguments first": (
        HERMES,
        '<tool_call>{"arguments": {"x": {"y": 1}}, "name": "f"}</tool_call>',
        ("", [("f", '{"x": {"y": 1}}')]),
    ),
    "hermes without closers": (
        HERMES,
        '<tool_call>{"name":"f","arguments":{}}\n<tool_call>{"name":"f","arguments":{"a":1}}',
        ("", [("f", "{}"), ("f", '{"a":1}')]),
    ),
    "hermes without arguments": (HERMES, '<tool_call>\n{"name": "f"}\n</tool_call>', ("", [("f", "{}")])),
    "hermes, text behind": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone. <b>',
        ("\n\nDone. <b>", [("f", "{}")]),
    ),
    "hermes, text in place of the closer": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}} </tool and so on',
        (" </tool and so on", [("f", "{}")]),
    ),
    "hermes, more keys": (
        HERMES,
        '<tool_call>{"id": "1", "type": "function", "name": "f", "arguments": {}, "x": "}"}</tool_call>',
        ("", [("f", "{}")]),
    ),
    "an opener twice": (
        HERMES,
        '<tool_call><tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ("<tool_call>", [("f", "{}")]),
    ),
    "an escaped name": (HERMES, '<tool_call>{"name": "\\u0066", "arguments": {}}', ("", [("f", "{}")])),
    "a missing brace": (HERMES, '<tool_call>{"name": "f", "arguments": {}\nSo.', ("\nSo.", [("f", "{}")])),
    "mistral": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "f", "arguments": {}}]',
        ("", [("f", '{"a": 1}'), ("f", "{}")]),
    ),
    "mistral, text before": (MISTRAL, 'Well. [TOOL_CALLS][{"name":"f","arguments":{}}]', ("Well.", [("f", "{}")])),
    "mistral, the second may not be called": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        (', {"name": "g", "arguments": {}}]', [("f", "{}")]),
    ),
    "llama": (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
    "llama, marked": (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', ("", [("f", "{}")])),
    "llama, several": (
        LLAMA3,
        '{"type": "function", "name": "f", "parameters": {}}; {"name": "f", "parameters": {"a": 2}}',
        ("", [("f", "{}"), ("f", '{"a": 2}')]),
    ),
    "llama, code": (LLAMA3, '<|python_tag|>search.call(query="x")', ('<|python_tag|>search.call(query="x")', [])),
    "llama, semicolon": (LLAMA3, '{"name": "f", "parameters": {}}; so', ("; so", [("f", "{}")])),
    "json behind text": (
        JSON,
        'Let me see.\n{"name": "f", "arguments": {"a": 1}}\n{"name": "get_weather", "arguments": {}}',
        ("Let me see.", [("f", '{"a": 1}'), ("get_weather", "{}")]),
    ),
    "json in a line": (JSON, 'So {"name": "f", "arguments": {}}', ('So {"name": "f", "arguments": {}}', [])),
    "json that is an answer": (JSON, '{\n  "name": "Ann",\n  "age": 3}', ('{\n  "name": "Ann",\n  "age": 3}', [])),
    "json with only a name": (JSON, '{"name": "f"}', ('{"name": "f"}', [])),
    "json behind another brace": (JSON, '{\n{"name": "f", "arguments": {}}', ("{", [("f", "{}")])),
    "arguments that are no object": (HERMES, '<tool_call>{"name": "f", "arguments": "x"}', None),
    "a name that may not be called": (HERMES, '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None),
    "half an opener": (HERMES, "a <tool_ca", None),
    "half a call": (HERMES, 'a <tool_call>\n{"name": "f", "argu', None),
    "blanks": (HERMES, " \n a \n\n b" + "\n" * 200 + " ", None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_model_wrote_is_read_as_text_and_calls(name: str) -> None:
    style, text, expected = WRITTEN[name]
    assert read(style, text) == (expected or (text, []))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_cut_anywhere_is_read_the_same(name: str) -> None:
    style, text, expected = WRITTEN[name]
    expected = expected or (text, [])
    assert joined(pieces_of(parser(style), *text)) == expected
    for at in range(len(text)):
        assert joined(pieces_of(parser(style), text[:at], text[at:])) == expected


def call_of(style: ToolStyle, name: str, arguments: Any) -> str:
    return json.dumps({"name": name, style.key: arguments})


def written(style: ToolStyle, calls: list[tuple[str, Any]]) -> str:
    inner = style.between.join(call_of(style, *call) for call in calls)
    inner = f"[{inner}]" if style.listed else inner
    return style.opener + style.before + inner + (style.before + style.closer if style.closer else "")


VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\{}[]é\n<;', max_size=6), lambda inner: st.lists(inner, max_size=3)
)
ARGUMENTS = st.dictionaries(st.text(alphabet='ab"{}', max_size=3), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


@given(style=st.sampled_from(STYLES), calls=CALLS, text=st.text(alphabet="ab \n<{[", max_size=8), data=st.data())
def test_calls_behind_any_text_come_out_whole(
    style: ToolStyle, calls: list[tuple[str, Any]], text: str, data: st.DataObject
) -> None:
    whole = text + "\n\n" + written(style, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    texts = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    told, made = joined(pieces_of(parser(style), *texts))
    assert [(name, json.loads(arguments)) for name, arguments in made] == calls
    assert text.startswith(told)
    assert not text[len(told) :].strip(" \n")


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]
HEADS = ['{"name": "f", "arguments": {', '"parameters": {"', '{"name": ', '"f"', '"g"', '"name"']
PARTS = st.sampled_from([*MARKS, *HEADS, *'{}[]a"\\:<;,\n é', ", ", "; "])
WILD = st.lists(PARTS, max_size=14).map("".join)


@given(style=st.sampled_from(STYLES), text=WILD, parallel=st.booleans(), data=st.data())
def test_whatever_is_written_is_read_the_same_however_it_is_cut(
    style: ToolStyle, text: str, parallel: bool, data: st.DataObject
) -> None:
    use, stop = ToolUse(TOOLS, parallel=parallel), data.draw(st.sampled_from([(), ("a}",), ("\n",), ('{"', "; f")]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    texts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    one, other = parser(style, use, *stop), parser(style, use, *stop)
    assert joined(pieces_of(one, text)) == joined(pieces_of(other, *texts))
    assert (one.met, one.made, one.done) == (other.met, other.made, other.done)


@given(style=st.sampled_from(STYLES), text=WILD)
def test_the_sources_of_all_pieces_are_the_text_and_what_is_no_call_is_told_unchanged(
    style: ToolStyle, text: str
) -> None:
    pieces = pieces_of(parser(style), text)
    assert "".join(source for source, _ in pieces) == text
    for source, event in pieces:
        if type(event) is TextDelta:
            assert event.text == source
    told, made = joined(pieces)
    if not made:
        assert told == text


@given(text=WILD)
def test_what_is_told_of_a_stream_so_far_is_never_taken_back(text: str) -> None:
    whole, _ = read(HERMES, text)
    reading, so_far = parser(), list[Chunk]()
    for char in text:
        so_far += reading.feed(char)
        assert whole.startswith(joined(so_far)[0])


def test_arguments_are_told_as_they_come_and_the_name_once() -> None:
    reading = parser()
    assert reading.feed('<tool_call>\n{"name": "get_weather", "argum') == []
    assert [event for _, event in reading.feed('ents": {"ci')] == [
        CallDelta(0, "get_weather"),
        CallDelta(0, "", '{"ci'),
    ]
    assert [event for _, event in reading.feed('ty": "Par')] == [CallDelta(0, "", 'ty": "Par')]
    assert [event for _, event in reading.feed('is"}}\n</tool')] == [CallDelta(0, "", 'is"}'), None]
    assert [event for _, event in reading.feed("_call>")] == [None]


def test_one_call_ends_the_answer_when_no_more_are_wanted() -> None:
    two = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for style, use in ((HERMES, ToolUse(TOOLS, parallel=False)), (replace(HERMES, single=True), FREE)):
        reading = parser(style, use)
        assert joined(pieces_of(reading, two)) == ("", [("f", "{}")])
        assert reading.done
        assert reading.ended


def test_stop_strings_are_looked_for_in_text_and_not_in_calls() -> None:
    text = 'Well.\n<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call> and STOP and more'
    reading = parser(HERMES, FREE, "STOP", "")
    assert joined(pieces_of(reading, *text)) == ("Well. and ", [("f", '{"a": "STOP"}')])
    assert reading.met == "STOP"
    assert read(HERMES, "STO" + text, FREE, "STOP")[0].startswith("STOWell.")


def test_a_call_that_is_cut_short_stays_one() -> None:
    assert read(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b') == ("", [("f", '{"a": "b')])


def test_a_forced_answer_begins_behind_the_opener_and_has_no_text() -> None:
    use = ToolUse(TOOLS, mode="required")
    assert read(HERMES, '\n{"name": "f", "arguments": {}}\n</tool_call>', use) == ("", [("f", "{}")])
    assert read(MISTRAL, ' [{"name": "f", "arguments": {}}, {"name": "f", "argu', use) == ("", [("f", "{}")])
    assert read(JSON, '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {}}', use)[1] == [("f", "{}")] * 2
    assert read(LLAMA3, '{"name": "f", "para', use) == ("", [])


def test_what_is_held_back_has_a_limit() -> None:
    long = '<tool_call>{"arguments": {"a": "' + "x" * (tool_calls.MAX_HELD + 10)
    reading = parser()
    assert "".join(source for source, event in reading.feed(long) if type(event) is TextDelta).startswith("<tool_call>")
    name = '<tool_call>{"name": "' + "y" * (json_scan.MAX_STRING + 10)
    assert parser().feed(name)
    blanks = "<tool_call>" + " " * (json_scan.MAX_BLANKS + 1)
    assert parser().feed(blanks)
