"""Log probabilities follow the text: however tokens are cut and whatever stops it, nothing is told too soon."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from engine.protocol import TokenLogprobs
from gateway.prompt.decode import Decoding
from gateway.prompt.reader import Scores
from gateway.types import ScoredToken, Spelled
from tests.fakes import tokenisers

STORY = "Es war 🙂 einmal, äöü 漢字 and the end."


class Model:
    def __init__(self, name: str) -> None:
        self.hf = HfTokenizer.from_str(tokenisers.ALL[name]().tokenizer_json)
        self.decoding = Decoding(self.hf, json.loads(self.hf.to_str()))

    def encode(self, text: str) -> list[int]:
        return self.hf.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=list(tokenisers.ALL))
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def logprobs_of(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-token / 8, ((token, -token / 8), (0, -9.0))) for token in tokens]


def run(model: Model, tokens: list[int], cuts: list[int], stop: tuple[str, ...]) -> tuple[str, list[Any]]:
    """As the pipeline does. Returns the text, and with each release how much of the text had been sent."""
    decoder, scores = model.decoding.decoder(stop), Scores(model.decoding)
    sent, released = "", []
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in pairwise(edges):
        piece = tokens[start:end]
        scores.feed(piece, logprobs_of(piece))
        if text := decoder.feed(piece):
            sent += text
            released += [(one, sent) for one in scores.release(text)]
        if decoder.met:
            return sent, released
    text = decoder.flush()
    sent += text
    released += [(one, sent) for one in scores.release(text)]
    if not decoder.met:
        released += [(one, sent) for one in scores.flush()]
    return sent, released


@settings(deadline=None)
@given(data=st.data())
def test_without_a_stop_string_every_token_is_told_once_and_in_order(model: Model, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, model.hf.get_vocab_size() - 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 20), max_size=6))
    text, released = run(model, tokens, cuts, ())
    scored: list[ScoredToken] = [one for one, _ in released]
    assert [one.logprob for one in scored] == [-token / 8 for token in tokens]
    assert [one.token for one in scored] == [model.decoding.spell(token) for token in tokens]
    assert [one.offset for one in scored] == sorted(one.offset for one in scored)
    assert all(one.offset <= len(text) for one in scored)
    assert [one for one, _ in run(model, tokens, [], ())[1]] == scored


@settings(deadline=None)
@given(start=st.integers(0, 30), length=st.integers(1, 8), cuts=st.lists(st.integers(0, 60), max_size=12))
def test_no_token_is_told_that_reaches_into_a_stop_string(
    model: Model, start: int, length: int, cuts: list[int]
) -> None:
    tokens = model.encode(STORY)
    whole, _ = run(model, tokens, [], ())
    stop = whole[start : start + length]
    text, released = run(model, tokens, cuts, (stop,))
    assert text == whole[: whole.index(stop)]
    assert len(released) == count_complete(model, tokens, len(text))
    assert all(one.offset <= len(sent) for one, sent in released)


def count_complete(model: Model, tokens: list[int], chars: int) -> int:
    """Leading tokens that end in one which completes a character among the first `chars` of the text."""
    characters, end, complete = model.decoding.characters(), 0, 0
    for count, token in enumerate(tokens, 1):
        text = characters.feed([token])
        end += len(text)
        if text and end <= chars:
            complete = count
    return complete


def test_the_bytes_of_a_split_character_come_with_the_character(model: Model) -> None:
    tokens = model.encode("🙂")
    decoder, scores = model.decoding.decoder(()), Scores(model.decoding)
    for token in tokens:
        scores.feed([token], logprobs_of([token]))
        text = decoder.feed([token])
        assert "🙂" not in text  # something could follow that belongs to it
        assert -tokens[-1] / 8 not in [one.logprob for one in scores.release(text)]
    released = scores.release(text := decoder.flush())
    assert "🙂" in text
    assert released[-1].logprob == -tokens[-1] / 8


def test_special_tokens_have_a_name_and_no_bytes(model: Model) -> None:
    specials = [token for token in json.loads(model.hf.to_str())["added_tokens"] if token["special"]]
    for token in specials:
        assert model.decoding.spell(token["id"]) == Spelled(token["content"], None)
