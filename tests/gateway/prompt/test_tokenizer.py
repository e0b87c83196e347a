"""Cuts give the ids of the whole, for every kind of tokeniser; special strings that users typed stay text."""

from __future__ import annotations

import json
from array import array
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from gateway.prompt.samples import SAMPLES
from gateway.prompt.tokenizer import Link, Tokenizer
from tests.fakes import tokenisers

UNHURRIED = settings(deadline=None)  # other work on the machine is no failure

UNCUT = {"llama2"}


class Twins:
    """A tokeniser of ours, and the library's for the same file."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.files = tokenisers.ALL[name]()
        self.ours = Tokenizer(self.files.tokenizer_json)
        self.theirs = HfTokenizer.from_str(self.files.tokenizer_json)
        self.deaf = HfTokenizer.from_str(self.files.tokenizer_json)
        self.deaf.encode_special_tokens = True

    def ids(self, masked: str) -> list[int]:
        return array("I", b"".join(self.ours.encode(list(self.ours.cut(masked))))).tolist()


@lru_cache
def twins_of(name: str) -> Twins:
    return Twins(name)


@pytest.fixture(scope="module", params=list(tokenisers.ALL))
def twins(request: pytest.FixtureRequest) -> Twins:
    return twins_of(request.param)


@lru_cache  # a strategy that is new is examined anew
def texts(tokenizer: Tokenizer) -> st.SearchStrategy[str]:
    added = [*tokenizer.specials, "<tool_call>", "</think>", "<0x41>", "▁", "⸻"]
    words = st.sampled_from([*SAMPLES[:60], *tokenisers.sentences(40, seed=5)[0].split(" "), " ", "  ", "\n"])
    pieces = words | st.text(max_size=5) | st.sampled_from(added) | st.sampled_from(added).map(lambda text: text[:-1])
    return st.lists(pieces, max_size=8).map("".join)


@UNHURRIED
@given(data=st.data())
def test_no_text_has_fewer_tokens_than_it_is_refused_for(twins: Twins, data: st.DataObject) -> None:
    ours = twins.ours
    parts = st.lists(texts(ours).map(ours.masking.mask) | st.sampled_from(sorted(ours.specials) or [""]), max_size=4)
    marks = st.text("\u03b1\u0313\u0300\u0345\u1100\u1161\u11a8e\u0301", max_size=30)  # compose to few characters
    masked = "".join(data.draw(parts)) + data.draw(marks)
    assert ours.least_tokens(masked) <= len(twins.ids(masked))


def test_a_text_that_is_longer_than_any_context_is_known_to_be_so_by_its_characters() -> None:
    ours = twins_of("qwen").ours
    assert ours.least_tokens("a" * 10_000_000) > 10_000


@UNHURRIED
@given(data=st.data())
def test_without_typed_special_strings_ids_are_those_of_the_whole_text(twins: Twins, data: st.DataObject) -> None:
    ours = twins.ours
    parts: list[str] = []
    for text in data.draw(st.lists(texts(ours), max_size=4)):
        if ours.masking.mask(text) == text:
            parts += [text, data.draw(st.sampled_from(sorted(ours.specials)))]
    whole = "".join(parts)
    assert twins.ids(whole) == twins.theirs.encode(whole, add_special_tokens=False).ids


@UNHURRIED
@given(data=st.data())
def test_typed_special_strings_are_text(twins: Twins, data: st.DataObject) -> None:
    """Reference: the library, told to take special strings for text, on each piece between the template's own."""
    ours = twins.ours
    parts = data.draw(st.lists(texts(ours), max_size=4))
    special = data.draw(st.sampled_from(sorted(ours.specials)))
    masked = "".join(ours.masking.mask(text) + special for text in parts)
    ids = twins.ids(masked)
    if special not in ("<unk>", "[UNK]"):  # which also stands for characters that are not in the vocabulary
        assert ids.count(ours.specials[special]) == len(parts)
    if twins.name not in UNCUT and twins.name != "unigram":  # whose pieces include the special strings themselves
        expected: list[int] = []
        for text in parts:
            expected += [*twins.deaf.encode(text, add_special_tokens=False).ids, ours.specials[special]]
        assert ids == expected


def test_links_joined_are_the_text_and_cutting_may_start_at_any_of_them(twins: Twins) -> None:
    special = next(iter(twins.ours.specials))
    text = f"{special}a{special}{special}b"
    links = list(twins.ours.cut(text))
    assert "".join(link.text for link in links) == text
    at = 0
    for i, link in enumerate(links):
        assert list(twins.ours.cut(text, at)) == links[i:]
        at += len(link.text)
    if twins.name in UNCUT:
        assert links == [Link(text, len(text))]
    else:
        assert links[-1] == Link("b", 1)
        assert len(links) == 4


def test_a_lone_surrogate_is_refused(twins: Twins) -> None:
    for text in ("\ud83d", "漢\udc00"):
        with pytest.raises(UnicodeEncodeError):
            twins.ours.encode([Link(text, len(text))])


def test_which_library_is_used_and_why_is_known() -> None:
    found = {name: twins_of(name).ours for name in tokenisers.ALL}
    assert {name for name, tokenizer in found.items() if tokenizer.library == "tiktoken"} == {*tokenisers.BYTE_LEVEL}
    assert {name for name, tokenizer in found.items() if tokenizer.fallback} == UNCUT
    assert found["llama2"].fallback == "segments are tokenised otherwise than the whole prompt"
    assert all(tokenizer.slow for name, tokenizer in found.items() if name in tokenisers.OTHERS)


def test_the_prefix_of_plain_text_is_the_tokenisers_own() -> None:
    llama3 = twins_of("llama3")
    assert array("I", llama3.ours.prefix).tolist() == [llama3.ours.specials["<|begin_of_text|>"]]
    assert twins_of("qwen").ours.prefix == b""


def changed(name: str, **changes: Any) -> Tokenizer:
    """The tokeniser with fields of its first special token changed."""
    spec = json.loads(tokenisers.ALL[name]().tokenizer_json)
    first = next(token for token in spec["added_tokens"] if token["special"])
    first.update(changes)
    return Tokenizer(json.dumps(spec))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_special_tokens_that_strip_forbid_cuts_and_ids_stay_right(flag: str) -> None:
    tokenizer = changed("qwen", **{flag: True})
    assert tokenizer.fallback == "special tokens strip the text around them"
    special = next(iter(tokenizer.specials))
    text = f"a  {special}  b"
    reference = json.loads(tokenisers.qwen().tokenizer_json)
    reference["added_tokens"][0][flag] = True
    theirs = HfTokenizer.from_str(json.dumps(reference)).encode(text, add_special_tokens=False).ids
    assert array("I", b"".join(tokenizer.encode(list(tokenizer.cut(text))))).tolist() == theirs
    masked = tokenizer.masking.mask(text)
    typed = array("I", b"".join(tokenizer.encode(list(tokenizer.cut(masked))))).tolist()
    assert tokenizer.specials[special] not in typed


def test_special_tokens_that_overlap_or_are_normalised_forbid_cuts() -> None:
    spec = json.loads(tokenisers.qwen().tokenizer_json)
    spec["added_tokens"][-1]["content"] = "<|im_end|>x"
    assert Tokenizer(json.dumps(spec)).fallback == "special tokens overlap"
    assert changed("qwen", normalized=True).fallback == "special tokens are normalised"
    assert changed("qwen", single_word=True).fallback == "added tokens look at the text around them"


def test_added_tokens_that_look_around_are_left_to_the_library() -> None:
    spec = json.loads(tokenisers.qwen().tokenizer_json)
    spec["added_tokens"][-1]["rstrip"] = True
    tokenizer = Tokenizer(json.dumps(spec))
    assert (tokenizer.library, tokenizer.fallback) == ("tokenizers", None)


def test_a_pattern_that_the_two_libraries_read_differently_is_noticed() -> None:
    # [:alpha:] is all of Unicode's letters to Oniguruma, and those of ASCII to the other.
    spec = json.loads(tokenisers.qwen().tokenizer_json)
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"[[:alpha:]]+|[\s\S]"}
    tokenizer = Tokenizer(json.dumps(spec))
    assert (tokenizer.library, tokenizer.fallback) == ("tokenizers", None)
    assert tokenizer.slow is not None
    assert tokenizer.slow.startswith("tiktoken and tokenizers differ on ")


def test_what_is_no_tokeniser_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer("{}")
