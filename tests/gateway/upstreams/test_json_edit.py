"""Values of a JSON text in place."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.json_edit import children, find, replaced, root, with_member

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def indented(value: Any) -> bytes:
    return b" \n" + orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\r\n"


@given(st.dictionaries(st.text(max_size=5), values, max_size=5) | st.lists(values, max_size=5))
def test_every_value_is_found_where_it_is(value: Any) -> None:
    for text in (orjson.dumps(value), indented(value)):
        found = {one.name: orjson.loads(text[one.start : one.end]) for one in children(text, root(text))}
        expected = value if isinstance(value, dict) else dict(enumerate(value))
        assert found == expected


@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=5), values)
def test_a_replaced_value_changes_nothing_around_it(value: dict[str, Any], other: Any) -> None:
    text = indented(value)
    name = next(iter(value))
    child = find(text, [name])
    assert child is not None
    edited = replaced(text, child, other)
    assert orjson.loads(edited) == {**value, name: other}
    assert edited.startswith(text[: child.start])
    assert edited.endswith(text[child.end :])


@given(st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=5))
def test_a_member_is_added_in_front_of_all_others(value: dict[str, Any]) -> None:
    text = orjson.dumps(value)
    assert orjson.loads(with_member(text, root(text), "", 1)) == {"": 1, **value}


def test_of_a_name_that_is_there_twice_the_last_is_found_as_a_parser_does() -> None:
    text = b'{"mod\\u0065l": 1, "model" : [ "x", {"a": "}\\"]"} ] }'
    assert [one.name for one in children(text, root(text))] == ["model", "model"]
    child = find(text, ["model", 1, "a"])
    assert child is not None
    assert text[child.start : child.end] == b'"}\\"]"'
    assert find(text, ["model", 2]) is None
