"""Wherever a text is cut, no emoji is: a family, a flag or a skin tone comes in one piece."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.decode import MAX_HELD, Signs

FAMILY, RAINBOW, SCOTLAND = "👩‍👩‍👧‍👦", "🏳️‍🌈", "🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"
EMOJI = (FAMILY, RAINBOW, SCOTLAND, "🇮🇸", "🇩🇪", "👍🏽", "🧑🏿‍🚀", "❤️", "©️", "🙂")
PARTS = "\u200d\ufe0f\U0001f3fd🇮🇸👩👧🏴\U000e0067\U000e007f\u0301\u20e3"
TEXTS = st.lists(
    st.sampled_from((*EMOJI, *PARTS, "a", " ", "1", "é", "क्षि", "각", "\r\n", "\u0600")) | st.characters(), max_size=24
).map("".join)
CUTS = st.lists(st.integers(0, 80), max_size=24)


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(min(i, len(text)) for i in at), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def pass_through(pieces: list[str]) -> list[str]:
    signs = Signs()
    return [*(signs.feed(piece) for piece in pieces), signs.release()]


def inside_emoji(text: str) -> set[int]:
    """Places within a sign that begins with an emoji, however the text behind it goes on."""
    found = (match for match in regex.finditer(r"\X", text) if match.end() - match.start() <= MAX_HELD)
    emoji = (match for match in found if regex.match(r"[\p{Extended_Pictographic}\p{Regional_Indicator}]", match[0]))
    return {place for match in emoji for place in range(match.start() + 1, match.end())}


@given(text=TEXTS, at=CUTS)
def test_pieces_joined_are_the_text_however_it_is_cut(text: str, at: list[int]) -> None:
    assert "".join(pass_through(cut(text, at))) == text


@given(text=TEXTS, at=CUTS)
def test_no_piece_ends_within_an_emoji(text: str, at: list[int]) -> None:
    ends = accumulate(len(piece) for piece in pass_through(cut(text, at)))
    assert not inside_emoji(text) & set(ends)


@pytest.mark.parametrize("sign", [*EMOJI, "e\u0301\u0323", "\u1112\u1161\u11ab"])
def test_a_sign_whose_kind_is_known_comes_whole_one_character_at_a_time(sign: str) -> None:
    begun = 2 if sign[0].isascii() else 1  # a plain letter is known to have marks when it comes with one
    pieces = pass_through(["x", sign[:begun], *sign[begun:], "y"])
    assert [piece for piece in pieces if piece] == ["x", sign + "y"]


def test_flags_are_counted_in_pairs() -> None:
    assert pass_through([*"🇮🇸🇩🇪🇫"]) == ["", "", "🇮🇸", "", "🇩🇪", "🇫"]


def test_a_flag_behind_a_flag_is_another_sign() -> None:
    assert pass_through(["🇮🇸🇩", "🇪!"]) == ["🇮🇸", "🇩🇪!", ""]


@given(pieces=st.lists(st.text(st.characters(max_codepoint=127))))
def test_ascii_is_never_held_back(pieces: list[str]) -> None:
    assert pass_through(pieces) == [*pieces, ""]


@pytest.mark.parametrize("text", ["漢字", "Привет", "Ünïcödé", "한국어", "नमन"])
def test_plain_letters_of_no_alphabet_are_held_back(text: str) -> None:
    assert pass_through([*text]) == [*text, ""]


def test_a_mark_in_a_piece_of_its_own_follows_a_plain_letter() -> None:
    assert pass_through(["e", "\u0301", "a"]) == ["e", "", "\u0301a", ""]


def test_a_sign_without_end_is_let_go() -> None:
    signs = Signs()
    assert signs.feed("👩" + "\u0301" * (MAX_HELD - 1)) == ""
    assert len(signs.feed("\u0301")) == MAX_HELD + 1
    assert signs.release() == ""
