"""Digests of large values: as telling as those of the whole JSON text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import digests
from gateway.digests import dump, feed

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text("ab1[{s:;\u00e9", max_size=6)
    | st.sampled_from((0.5, 1.0)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)


class Heard:
    """What a hash is given."""

    def __init__(self) -> None:
        self.data = b""

    def update(self, data: bytes, /) -> None:
        self.data += data


def heard(value: Any) -> bytes:
    hashed = Heard()
    feed(hashed, value)
    return hashed.data


@given(VALUES, VALUES, st.integers(1, 4))
def test_two_values_are_one_exactly_where_their_json_is(one: Any, other: Any, size: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "_SLICE", size)
        assert (heard(one) == heard(other)) == (orjson.dumps(one) == orjson.dumps(other))
        assert heard([one, other]) != heard([[one], other])


@given(VALUES, st.integers(1, 4))
def test_a_text_in_slices_is_the_text_at_once(value: Any, size: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(digests, "_SLICE", size)
        assert dump(value) == orjson.dumps(value)


def test_the_order_of_names_counts_and_lists_are_one_with_tuples() -> None:
    assert heard({"a": 1, "b": 2}) != heard({"b": 2, "a": 1})
    assert heard(("a", 1)) == heard(["a", 1])


def test_a_text_is_never_added_in_one_piece() -> None:
    sizes: list[int] = []

    class Sizes:
        def update(self, data: bytes, /) -> None:
            sizes.append(len(data))

    feed(Sizes(), {"text": "\n" * 1_000_000})
    assert max(sizes) <= 64 << 10
    assert sum(sizes) > 1_000_000
