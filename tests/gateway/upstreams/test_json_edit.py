"""Values of a JSON text in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams import json_edit
from gateway.upstreams.json_edit import children, find, named_once, replaced, root, with_member

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(autouse=True, params=[1, 7, 64 << 10], scope="module")
def slices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Texts are looked through slice by slice, of any size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(json_edit, "_SLICE", request.param)
        yield


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"x":1,"model" :\t"a\\\\","y":"model"}', b'"a\\\\"'),
        (b'{"model":{"model":1}}', b'{"model":1}'),
        (b'{"x":"\\u00e9","model":"a"}', b'"a"'),
        (b'{"x":"\\u006d","model":"a\\""}', b'"a\\""'),
        (b'{"\\u006dodel":"a"}', b'"a"'),
        (b'{"model":1,"model":2}', None),
        (b'{"model":1,"mod\\u0065l":2}', None),
        (b'{"model":1,"mod\\u006Cl":2,"\\u006Dodel":3}', None),
    ],
)
def test_a_member_that_there_is_once_is_found_however_it_is_written(text: bytes, value: bytes | None) -> None:
    found = named_once(text, "model")
    assert (None if found is None else text[found.start : found.end]) == value
