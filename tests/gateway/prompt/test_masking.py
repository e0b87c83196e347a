"""Masked text holds no special string, side by side with other masked text neither, and can be unmasked."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt import masking as masking_module
from gateway.prompt.masking import Masking, alternatives, find_all

SETS = {
    "chatml": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "<unk>"],
    "overlapping": ["aba", "ba", "b<", "<<"],
    "single": ["\u2581", "<s>", "0", "1", "⸻"],
    "none": [],
}


def texts(specials: list[str]) -> st.SearchStrategy[str]:
    cut = [special[:i] for special in specials for i in range(1, len(special) + 1)]
    cut += [special[i:] for special in specials for i in range(1, len(special))]
    pieces = st.sampled_from([*cut, "a", "b", "<", " ", "⸻", "⸺", "⸹", "é"]) | st.text(max_size=3)
    return st.lists(pieces, max_size=12).map("".join)


@pytest.mark.parametrize("name", SETS)
@given(data=st.data())
def test_masked_texts_hold_no_special_string_even_side_by_side(name: str, data: st.DataObject) -> None:
    specials = SETS[name]
    masking = Masking(specials)
    parts = data.draw(st.lists(texts(specials), max_size=4))
    masked = "".join(map(masking.mask, parts))
    assert not any(special in masked for special in specials)
    assert masking.unmask(masked) == "".join(parts)


@given(text=texts(SETS["chatml"]), stop=st.integers(0, 40))
def test_masking_can_be_undone_piece_by_piece(text: str, stop: int) -> None:
    masking = Masking(SETS["chatml"])
    assert masking.unmask(masking.mask(text[:stop])) + masking.unmask(masking.mask(text[stop:])) == text


@pytest.mark.parametrize("name", SETS)
@given(data=st.data())
def test_a_marker_parts_a_text_where_it_was_meant_to_and_changes_nothing(name: str, data: st.DataObject) -> None:
    masking = Masking(SETS[name])
    text = data.draw(texts(SETS[name]) | st.sampled_from(["".join(masking.markers), masking.mark * 3]))
    chars = data.draw(st.integers(0, len(text)))
    masked = masking.mask(text)
    assert not any(marker in masked for marker in masking.markers)
    marked = masking.insert(masked, chars, masking.markers[1])
    before, marker, after = marked.partition(masking.markers[1])
    assert marker
    assert before + after == masked
    assert (masking.unmask(before), masking.unmask(after)) == (text[:chars], text[chars:])


def test_text_without_special_strings_is_left_as_it_is() -> None:
    masking = Masking(SETS["chatml"])
    for text in ("plain", "a < b and c | d", "<|nothing|>"):
        assert masking.mask(text) is text


def test_the_mark_is_none_of_the_characters_to_avoid() -> None:
    first = Masking(["<s>"])
    second = Masking(["<s>"], avoid="".join(first.sequences))
    assert not set("".join(first.sequences)) & set("".join(second.sequences))


def test_every_string_in_a_message_is_masked() -> None:
    masking = Masking(["<s>"])
    data = {"<s>": ["<s>", {"name": "<s>", "n": 1, "x": None, "y": True, "z": 1.5}], "plain": "a"}
    masked = masking.mask_data(data)
    assert "<s>" not in repr(masked)
    assert masked["plain"] == "a"
    assert masked[masking.mask("<s>")][1]["n"] == 1


@given(text=st.text("ab<|x>", max_size=40), start=st.integers(0, 5), size=st.integers(1, 7))
def test_what_is_found_slice_by_slice_is_what_is_found_at_once(text: str, start: int, size: int) -> None:
    strings = ["<|x|>", "<|x", "ab", "ba", "<<", "b"]
    pattern, longest = re.compile(alternatives(strings)), max(map(len, strings))
    overlapping = [found for at in range(start, len(text)) if (found := pattern.match(text, at))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masking_module, "SLICE", size)
        found = find_all(pattern, text, start, longest)
        assert [one.span() for one in found] == [one.span() for one in pattern.finditer(text, start)]
        every = find_all(pattern, text, start, longest, overlapping=True)
        assert [one.span() for one in every] == [one.span() for one in overlapping]


@given(text=texts(SETS["single"]), size=st.integers(1, 7))
def test_long_texts_are_masked_slice_by_slice(text: str, size: int) -> None:
    masking = Masking(SETS["single"])
    whole = masking.mask(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masking_module, "SLICE", size)
        assert masking.mask(text) == whole
