"""Special tokens and the text that looks like them, under a grammar."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.protocol import Grammar, TokenizerFiles
from engine.sampling.grammar import GrammarError, Grammars, by_id, rename_specials
from tests.fakes import tokenisers, tool_templates
from tests.fakes.grammars import fill_mask

MAKERS = tool_templates.ALL | tokenisers.BYTE_LEVEL | {name: tokenisers.OTHERS[name] for name in ("llama2", "gemma")}


class Loaded:
    def __init__(self, files: TokenizerFiles) -> None:
        self.hf = Tokenizer.from_str(files.tokenizer_json)
        added = json.loads(files.tokenizer_json)["added_tokens"]
        self.specials = {token["content"]: token["id"] for token in added}
        self.eos = max(token["id"] for token in added if token["special"])
        self.size = self.hf.get_vocab_size(with_added_tokens=True)
        self.grammars = Grammars(files.tokenizer_json, self.size, (self.eos,))

    def walk(self, grammar: Grammar, seed: int) -> list[int]:
        """A text of random tokens, up to where nothing but its end may come."""
        rng, tokens, mask = random.Random(seed), list[int](), np.empty(self.size, np.bool_)
        matcher = self.grammars.compile(grammar)
        while True:
            assert fill_mask(matcher, mask), tokens
            mask[self.eos] = False
            if not mask.any():
                assert matcher.is_complete
                return tokens
            tokens.append(int(rng.choice(np.flatnonzero(mask))))
            matcher.consume(tokens[-1:])

    def text(self, tokens: list[int]) -> str:
        return str(self.hf.decode(tokens, skip_special_tokens=False))


@cache
def loaded(name: str) -> Loaded:
    return Loaded(MAKERS[name]())


@pytest.mark.parametrize("name", MAKERS)
def test_a_constant_that_spells_a_special_token_is_spelled_out(name: str) -> None:
    model = loaded(name)
    for special in list(model.specials)[:12]:
        constant = f"x{special} y{special}"
        for seed in range(2):
            tokens = model.walk(Grammar("json_schema", json.dumps({"enum": [constant]})), seed)
            assert json.loads(model.text(tokens)) == constant
            assert not set(tokens) & set(model.specials.values())


def test_a_special_token_is_said_by_its_name_and_by_its_id() -> None:
    model = loaded("hermes")
    opener = model.specials["<tool_call>"]
    for said in ("<tool_call>", f"<[{opener}]>"):
        tokens = model.walk(Grammar("lark", f'start: "<tool_call>" {said} "b" // <tool_call>'), 0)
        assert tokens.count(opener) == 1
        assert model.text(tokens).replace(" ", "") == "<tool_call><tool_call>b"


def test_names_in_strings_expressions_and_comments_stay() -> None:
    lark = 'start: "a\\"<s>" <s> /<s>\\/x/ b // <s>\nb: <s>'
    assert by_id(lark, {"<s>": 7}) == 'start: "a\\"<s>" <[7]> /<s>\\/x/ b // <s>\nb: <[7]>'
    assert by_id(lark, {}) == lark


def test_ids_stay_what_they_were_and_only_specials_and_tags_get_names() -> None:
    files = tokenisers.gpt2_digits()  # special tokens inside of the vocabulary
    renamed, ids = rename_specials(files.tokenizer_json)
    before, after = Tokenizer.from_str(files.tokenizer_json), Tokenizer.from_str(renamed)
    assert ids == {
        "<|endoftext|>": before.token_to_id("<|endoftext|>"),
        "<fim_prefix>": before.token_to_id("<fim_prefix>"),
    }
    assert after.get_vocab_size() == before.get_vocab_size()
    for name, index in ids.items():
        assert after.token_to_id(name) is None
        assert after.id_to_token(index) is not None
        assert index not in after.encode(f"a{name}b", add_special_tokens=False).ids


@pytest.mark.parametrize("broken", ["{}", '{"added_tokens": [{}], "model": {"vocab": {}}}', "{"])
def test_what_is_no_tokeniser_is_refused_with_a_reason(broken: str) -> None:
    with pytest.raises(GrammarError):
        Grammars(broken, 10, (1,))
