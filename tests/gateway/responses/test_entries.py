from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.responses.entries import Entry

ENTRY = Entry(b"k" * 32, "a" * 32, "north", "demo", 1.5, 2.5, b'{"an":"answer"}')


def test_an_entry_is_read_as_it_was_written() -> None:
    assert Entry.from_bytes(ENTRY.id, ENTRY.to_bytes()) == ENTRY


@given(st.integers(0, len(ENTRY.to_bytes()) - 1), st.integers(1, 255))
def test_an_entry_with_another_byte_anywhere_is_none(place: int, change: int) -> None:
    changed = bytearray(ENTRY.to_bytes())
    changed[place] ^= change
    with pytest.raises(ValueError, match="cut short, or changed"):
        Entry.from_bytes(ENTRY.id, bytes(changed))


@given(st.integers(0, len(ENTRY.to_bytes()) - 1))
def test_an_entry_that_is_cut_anywhere_is_none(length: int) -> None:
    with pytest.raises(ValueError, match="cut short, or changed"):
        Entry.from_bytes(ENTRY.id, ENTRY.to_bytes()[:length])
