"""tiktoken gives the ids of the tokenizers library, or is not used."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from gateway.prompt import byte_level
from gateway.prompt.byte_level import (
    ByteLevelBpe,
    NotConvertibleError,
    TokenizingError,
    has_blank_run,
    num_utf8_bytes,
)
from gateway.prompt.samples import SAMPLES, class_samples
from tests.fakes import tokenisers

UNHURRIED = settings(deadline=None)  # other work on the machine is no failure

Both = tuple[ByteLevelBpe, HfTokenizer]


def spec_of(name: str, **model: Any) -> dict[str, Any]:
    spec = json.loads(tokenisers.BYTE_LEVEL[name]().tokenizer_json)
    return {**spec, "model": {**spec["model"], **model}}


def convert(spec: dict[str, Any]) -> Both:
    plain = HfTokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
    return ByteLevelBpe(spec), plain


@pytest.fixture(scope="module", params=list(tokenisers.BYTE_LEVEL))
def both(request: pytest.FixtureRequest) -> Both:
    return convert(spec_of(request.param))


@UNHURRIED
@given(text=st.text(max_size=60) | st.text(alphabet="aeiou 'stllrved\n\t12<>|é漢", max_size=60))
def test_ids_are_those_of_tokenizers(both: Both, text: str) -> None:
    fast, plain = both
    try:
        ids = fast.encode(text).tolist()
    except TokenizingError:
        return
    assert ids == plain.encode(text, add_special_tokens=False).ids


@UNHURRIED
@given(text=st.text("e\u0301\u0323\u1100\u1161\u11a8 a漢<\u212b", max_size=40), size=st.integers(1, 6))
def test_a_long_text_is_the_same_slice_by_slice(both: Both, text: str, size: int) -> None:
    fast, _ = both
    whole, normal = fast.encode(text), fast.normalize(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(byte_level, "_SLICE", size)
        assert fast.normalize(text) == normal
        assert fast.encode(text) == whole
        assert num_utf8_bytes(text) == len(text.encode())


@given(text=st.text(" \n\u3000a", max_size=40), chars=st.integers(1, 9))
def test_a_run_of_blanks_is_found_wherever_it_lies(text: str, chars: int) -> None:
    assert has_blank_run(text, chars) == (max(map(len, re.findall(r"\s+", text)), default=0) >= chars)


def test_ids_are_those_of_tokenizers_on_trained_text(both: Both) -> None:
    fast, plain = both
    text = "\n".join(tokenisers.sentences(2000, seed=11))
    assert fast.encode(text).tolist() == plain.encode(text, add_special_tokens=False).ids


def test_samples_are_the_same_every_time_and_hold_no_surrogates() -> None:
    for text in SAMPLES + class_samples():
        text.encode()
    assert len(class_samples()) > 10


def test_a_token_that_merges_in_another_order_make_is_not_lost() -> None:
    # "abc" comes first from (a, bc), which loses to (a, b); it is really made by (ab, c), much later in the list.
    spec = spec_of("qwen")
    vocab = {token: index for token, index in spec["model"]["vocab"].items() if len(token) == 1}
    vocab |= {token: 1000 + i for i, token in enumerate(["ab", "bc", "abc", "xy", "cd", "abcd"])}
    merges = [["a", "b"], ["a", "bc"], ["b", "c"], ["x", "y"], ["c", "d"], ["ab", "c"], ["ab", "cd"]]
    spec = {**spec, "added_tokens": [], "model": {**spec["model"], "vocab": vocab, "merges": merges}}
    fast, plain = convert(spec)
    for text in ("abc", "abcd", "aabcc", "xabcdy", "bcabc", "dcba"):
        assert fast.encode(text).tolist() == plain.encode(text, add_special_tokens=False).ids


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Merge lists that no training made: in any order, several for one token, some that never apply."""
    pieces = ["a", "b", "c"]
    merges: list[tuple[str, str]] = []
    for _ in range(draw(st.integers(1, 14))):
        left, right = draw(st.sampled_from(pieces)), draw(st.sampled_from(pieces))
        if len(left + right) <= 8 and (left, right) not in merges:
            merges.append((left, right))
            if left + right not in pieces:
                pieces.append(left + right)
    return draw(st.permutations(merges))


@UNHURRIED
@given(merges=vocabularies(), whole_words=st.booleans(), text=st.text(alphabet="abc", min_size=1, max_size=24))
def test_whatever_the_merges_are_ids_are_equal_or_the_tokeniser_is_refused(
    merges: list[tuple[str, str]], whole_words: bool, text: str
) -> None:
    spec = spec_of("qwen")
    vocab = {token: index for token, index in spec["model"]["vocab"].items() if len(token) == 1}
    for left, right in merges:
        vocab.setdefault(left + right, 1000 + len(vocab))
    model = {**spec["model"], "vocab": vocab, "merges": [list(merge) for merge in merges], "ignore_merges": whole_words}
    spec = {**spec, "added_tokens": [], "model": model, "normalizer": None}
    plain = HfTokenizer.from_str(json.dumps(spec))
    try:
        fast = ByteLevelBpe(spec)
    except NotConvertibleError:
        return
    for part in (text, text[::-1], text + " " + text, text * 3):
        assert fast.encode(part).tolist() == plain.encode(part, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normaliser is Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not byte-level"),
        ({"pre_tokenizer": None}, "not byte-level"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
            "space in front",
        ),
        (
            {
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                }
            },
            "not one regular expression",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_with_a_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotConvertibleError, match=reason):
        convert({**spec_of("qwen"), **change})


def test_a_run_of_blanks_that_would_overflow_the_regex_engine_is_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(byte_level, "_BLANK_RUN", 100)
    fast, _ = convert(spec_of("llama3"))
    for text in (" " * 100, "a" + "\n \t" * 50 + "b"):
        with pytest.raises(TokenizingError):
            fast.encode(text)
    for text in (" " * 99, "a " * 300, ("\n" * 99 + "x") * 3):
        assert len(fast.encode(text)) > 0


def test_a_vocabulary_without_all_bytes_is_refused() -> None:
    spec = spec_of("qwen")
    vocab = {token: index for token, index in spec["model"]["vocab"].items() if token != "~"}
    with pytest.raises(NotConvertibleError, match="1 bytes are not"):
        convert({**spec, "model": {**spec["model"], "vocab": vocab}})
