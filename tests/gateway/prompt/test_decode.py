"""However an answer's tokens are cut into pieces, the text is the same, and stop strings end it exactly."""

from __future__ import annotations

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from gateway.prompt.decode import Decoder, Decoding, StopStrings
from tests.fakes import tokenisers

UNHURRIED = settings(deadline=None)  # other work on the machine is no failure


class Model:
    def __init__(self, name: str) -> None:
        self.name = name
        files = tokenisers.ALL[name]()
        self.hf = HfTokenizer.from_str(files.tokenizer_json)
        self.decoding = Decoding(self.hf, json.loads(self.hf.to_str()))
        self.size = self.hf.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self.hf.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module", params=list(tokenisers.ALL))
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def run(decoder: Decoder, pieces: list[list[int]]) -> str:
    text = ""
    for piece in pieces:
        text += decoder.feed(piece)
        if decoder.met:
            assert decoder.feed([1, 2, 3]) == ""
            return text + decoder.flush()
    return text + decoder.flush()


def cut(tokens: list[int], at: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(i, len(tokens)) for i in at), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(edges)]


TEXTS = st.text(max_size=30) | st.sampled_from(
    ["🙂👨‍👩‍👧 é漢字 x", "a  b\n\n c", " leading", "Привет, мир", "\ufffd\ufffd"]
)
CUTS = st.lists(st.integers(0, 80), max_size=8)
STOPS = st.lists(st.text(alphabet="ab \n漢🙂", min_size=1, max_size=4), max_size=4).map(tuple)


@UNHURRIED
@given(data=st.data())
def test_any_tokens_give_the_same_text_however_they_are_cut(model: Model, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, model.size + 5), max_size=40))
    at, stop = data.draw(CUTS), data.draw(STOPS)
    one_by_one = run(model.decoding.decoder(stop), [[token] for token in tokens])
    assert run(model.decoding.decoder(stop), cut(tokens, at)) == one_by_one


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("ab🙂👨\u200d👩 x", "👨\u200d👩"),  # the stop string begins with a character of four bytes, and joins two
        ("ne\u0301e\u0301 e\u0301!", "\u0301 "),  # it begins with an accent that belongs to the letter before it
        ("漢字\n\n漢", "\n漢"),
        ("aaab", "aab"),  # it begins within what looked like it
        ("🙂🙃🙂", "🙃🙃"),  # it never comes
    ],
)
def test_at_every_place_where_a_stream_can_be_cut_it_is_a_beginning_of_the_unstreamed_text(
    model: Model, text: str, stop: str
) -> None:
    tokens = model.encode(text)
    whole = model.decoding.decoder(())
    unstreamed = (whole.feed(tokens) + whole.flush()).partition(stop)[0]
    inner = range(1, min(len(tokens), 11))  # the first eleven tokens in every way, what follows in one piece
    for cuts in (places for count in range(len(inner) + 1) for places in combinations(inner, count)):
        decoder, shown = model.decoding.decoder((stop,)), ""
        for piece in cut(tokens, list(cuts)):
            shown += decoder.feed(piece)
            assert unstreamed.startswith(shown), f"{cuts}: more than comes before the stop string"
        assert shown + decoder.flush() == unstreamed, f"{cuts}"


@UNHURRIED
@given(text=TEXTS)
def test_one_token_at_a_time_gives_the_text_of_the_whole(model: Model, text: str) -> None:
    tokens = model.encode(text)
    ours = run(model.decoding.decoder(()), [[token] for token in tokens])
    before = model.encode("a")
    expected = model.hf.decode(before + tokens)[len(model.hf.decode(before)) :]
    assert ours == expected
    if model.name in ("llama3", "gpt2_digits", "from_ranks"):
        assert ours == text


@UNHURRIED
@given(text=TEXTS.filter(lambda text: "\ufffd" not in text))
def test_no_character_is_ever_cut(model: Model, text: str) -> None:
    decoder = model.decoding.decoder(())
    for token in model.encode(text):
        assert "\ufffd" not in decoder.feed([token])


def test_a_stop_string_that_is_an_emoji_ends_the_answer_at_once_and_nothing_stays_held_back() -> None:
    model = Model("llama3")
    decoder = model.decoding.decoder(("👧",))
    shown = "".join(decoder.feed([token]) for token in model.encode("x 👩\u200d👧"))
    assert (shown, decoder.met, decoder.flush()) == ("x 👩\u200d", "👧", "")


def test_special_tokens_and_unknown_ids_give_no_text(model: Model) -> None:
    special = [model.hf.token_to_id(content) for content in ("<|im_end|>", "<s>", "[SEP]", "<|eot_id|>")]
    ids = [index for index in special if index is not None and index < model.size]
    assert run(model.decoding.decoder(()), [[*ids, model.size + 1000]]) == ""


def test_unfinished_bytes_come_as_replacement_characters_in_the_end() -> None:
    model = Model("llama3")
    decoder = model.decoding.decoder(())
    assert decoder.feed([model.hf.token_to_id("ð"), model.hf.token_to_id("Ł")]) == ""
    assert decoder.flush() == "\ufffd"


def test_the_space_in_front_of_the_first_word_stays() -> None:
    for name in ("llama2", "gemma", "unigram", "wordpiece"):
        model = Model(name)
        tokens = model.encode("a e")[len(model.encode("a")) :]
        assert run(model.decoding.decoder(()), [tokens]) == " e", name


def slowly(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first place where any stop string is complete; of those that end there, the longest is cut off."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], text[end - max(lengths) : end]
    return text, None


@UNHURRIED
@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
)
def test_stop_strings_are_found_wherever_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stops)
    expected, met = slowly(stops, "".join(pieces))
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert expected.startswith(shown)
        if matcher.met:
            break
    else:
        shown += matcher.release()
    assert (shown, matcher.met) == (expected, met)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    matcher = StopStrings(["\n\nUser:", "END"])
    assert matcher.feed("a\n") == "a"
    assert matcher.feed("b") == "\nb"
    assert matcher.feed("E") == ""
    assert matcher.feed("NE") == "EN"
    assert matcher.feed("ND x") == ""
    assert matcher.met


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    matcher = StopStrings(["a" * 20_000 + "b"])
    for _ in range(200):
        matcher.feed("a" * 200)
    assert not matcher.met
    matcher.feed("b")
    assert matcher.met


def test_a_stop_string_may_show_up_in_what_is_flushed() -> None:
    model = Model("llama3")
    decoder = model.decoding.decoder(("\ufffd",))
    assert decoder.feed([model.hf.token_to_id("ð")]) == ""
    assert (decoder.flush(), decoder.met) == ("", "\ufffd")


def test_empty_stop_strings_are_ignored() -> None:
    model = Model("llama3")
    assert run(model.decoding.decoder(("",)), [model.encode("hello")]) == "hello"
