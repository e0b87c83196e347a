"""Grammars without a model: whatever token a sampler takes among the allowed ones, what ends is what was asked for."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.demo import MODEL_DIR
from engine.protocol import Grammar
from engine.sampling.grammar import GrammarError, Grammars, GrammarState
from tests.fakes.grammars import fill_mask, many_properties, many_terminals, reference_chain, unit_rules
from tests.fakes.schemas import HARD, REFUSED, schemas, validate, wild_schemas

EOS = (2, 0)
VOCABULARY = 4096
LIMIT = 3_000  # tokens of one text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@cache
def grammars() -> Grammars:
    return Grammars((MODEL_DIR / "tokenizer.json").read_text(), VOCABULARY, EOS)


@cache
def closers() -> np.ndarray[Any, Any]:
    """Tokens that close something."""
    texts = [tokenizer().decode([token], skip_special_tokens=False) for token in range(VOCABULARY)]
    return np.array([bool(re.search(r'["\]}]', text)) for text in texts])


def compile_schema(schema: Any) -> GrammarState:
    return grammars().compile(Grammar("json_schema", json.dumps(schema)))


def walk(matcher: GrammarState, seed: int, limit: int = LIMIT) -> str | None:
    """A text of random tokens; those that end or close something are often preferred. None when it did not end."""
    rng, tokens, mask = random.Random(seed), [], np.empty(VOCABULARY, np.bool_)
    for _ in range(limit):
        assert fill_mask(matcher, mask), tokenizer().decode(tokens)
        assert mask[EOS[0]] == mask[EOS[1]] == matcher.is_complete
        if matcher.is_complete and rng.random() < 0.5:
            return tokenizer().decode(tokens)
        mask[list(EOS)] = False
        if not mask.any():
            return tokenizer().decode(tokens)
        closing = mask & closers()
        choice = np.flatnonzero(closing if closing.any() and rng.random() < 0.3 else mask)
        tokens.append(int(rng.choice(choice)))
        matcher.consume(tokens[-1:])
    return None


@pytest.mark.parametrize("name", HARD)
def test_every_text_under_a_hard_schema_parses_and_validates(name: str) -> None:
    ended = 0
    for seed in range(12):
        text = walk(compile_schema(HARD[name]), seed)
        if text is not None:
            validate(text, HARD[name])
            ended += 1
    assert ended > 6


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=schemas(), seed=st.integers(0, 2**32))
def test_every_text_under_a_generated_schema_parses_and_validates(schema: Any, seed: int) -> None:
    text = walk(compile_schema(schema), seed)
    assert text is not None
    validate(text, schema)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=wild_schemas(), seed=st.integers(0, 2**32))
def test_a_wild_schema_is_refused_or_kept(schema: Any, seed: int) -> None:
    try:
        matcher = compile_schema(schema)
    except GrammarError:
        assume(False)
    text = walk(matcher, seed, 500)
    if text is not None:
        validate(text, schema)


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_carried_out_is_refused_with_the_path_of_the_reason(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        compile_schema(schema)
    assert caught.value.reason
    if name == "too deep":
        assert caught.value.path.count("level_") > 20
    else:
        assert caught.value.path == path, caught.value


def accepts(matcher: GrammarState, text: str) -> bool:
    """Whether the text may be said, token by token, and be the whole of it."""
    mask = np.empty(VOCABULARY, np.bool_)
    for token in tokenizer().encode(text, add_special_tokens=False).ids:
        if not (fill_mask(matcher, mask) and mask[token]):
            return False
        matcher.consume([token])
    return matcher.is_complete


@pytest.mark.parametrize(
    ("low", "high", "outside", "inside"),
    [
        ({"exclusiveMinimum": 5}, {"exclusiveMaximum": 5.5}, ["5", "5.0", "5.5"], ["5.00000001", "5.4"]),
        ({"exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}, ["0", "0.0", "-0"], ["0.25"]),
        ({"exclusiveMinimum": 10}, {"maximum": 10.5}, ["10", "10.0"], ["10.5", "10.25"]),
        ({"minimum": -5.5}, {"exclusiveMaximum": -5}, ["-5", "-5.0"], ["-5.5", "-5.1"]),
        ({"exclusiveMinimum": -0.5}, {"exclusiveMaximum": 0}, ["-0", "0", "-0.0", "-0.5"], ["-0.25"]),
        ({"minimum": 0.1}, {"maximum": 0.29999999999999999}, ["0.30000001", "0.09999999"], ["0.1", "0.3"]),
        ({"minimum": -0.34}, {"maximum": -0.24000000000000002}, ["-0.24"], ["-0.25"]),
    ],
)
def test_a_number_is_within_its_bounds_however_they_come_together(
    low: dict[str, Any], high: dict[str, Any], outside: list[str], inside: list[str]
) -> None:
    number = {"type": "number"}
    for schema in (
        number | low | high,
        {"allOf": [number | low, high]},
        {"anyOf": [number | low | high, {"type": "null"}]},
        {"type": ["number", "null"]} | low | high,
        {"$defs": {"low": number | low}, "$ref": "#/$defs/low"} | high,
    ):
        for text in outside:
            assert not accepts(compile_schema(schema), text), (schema, text)
        for text in inside:
            assert accepts(compile_schema(schema), text), (schema, text)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^[[a]]$", ["a]", "[]"], ["a", "[", "]"]),
        ("^[[:alpha:]]$", ["[]", ":]", "a]"], ["a", "b", "z]"]),
        ("^[a&&b]$", ["a", "&", "b"], ["&&", "\\\\"]),
        ("^[a~~b]$", ["a", "~", "b"], ["~~"]),
        ("^[^[&]$", ["a", "]"], ["[", "&"]),
        ("^[a[]b&&$", ["ab&&", "[b&&"], ["a", "[]b&&"]),
        (r"^\[[\]\[a]\]$", ["[a]", "[[]", "[]]"], ["a", "[b]"]),
    ],
)
def test_a_class_of_a_pattern_has_characters_and_no_operators(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    for schema in ({"type": "string", "pattern": pattern}, {"type": "object", "patternProperties": {pattern: True}}):
        before, behind = ('"', '"') if "pattern" in schema else ('{"', '": null}')
        for text in matching:
            assert accepts(compile_schema(schema | {"additionalProperties": False}), before + text + behind), text
        for text in others:
            assert not accepts(compile_schema(schema | {"additionalProperties": False}), before + text + behind), text


@pytest.mark.parametrize("bound", [0.7, 2.3, 4.1, 5.1, 1.25, 100])
def test_an_inclusive_bound_may_be_said(bound: float) -> None:
    for name in ("minimum", "maximum"):
        assert accepts(compile_schema({"type": "number", name: bound}), str(bound))
    assert accepts(compile_schema({"type": "number", "minimum": bound, "maximum": bound}), str(bound))


@pytest.mark.parametrize("value", [0, 2, 17, -1.5, 0.25])
def test_a_constant_may_be_demanded_of_a_number(value: float) -> None:
    assert accepts(compile_schema({"allOf": [{"type": "number"}, {"const": value}]}), str(value))


@pytest.mark.parametrize("bounds", [{}, {"minimum": 0}, {"maximum": 1}, {"minimum": 0, "exclusiveMaximum": 1}])
def test_a_number_comes_to_an_end_and_is_a_finite_double(bounds: dict[str, Any]) -> None:
    schema = {"type": "number"} | bounds
    for text in ("0." + "9" * 20, "0." + "0" * 20, "9" * 30, "-" + "9" * 30, "1e5", "1e99999", "0.5e1"):
        assert not accepts(compile_schema(schema), text), text
    for text in ("0.99999999", "0.5", "0"):
        assert accepts(compile_schema(schema), text), text


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":[1,2],"b":{}}', True),
        ('{"a": [1, 2], "b": {}}', True),
        ('{"a":  1}', False),
        ('{ "a": 1}', False),
        ('{"a": 1\n}', False),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
        ('{"a": 1}{"a": 1}', False),
        ("[1]", False),
        ('{"\\u0061": 1}', False),
        ('{"a\tb": 1}', False),
        ('{"a": <|im_end|>}', False),
    ],
)
def test_a_json_object_has_at_most_one_blank_between_tokens(text: str, allowed: bool) -> None:
    assert accepts(grammars().compile(Grammar("json_object")), text) is allowed


@pytest.mark.parametrize("seed", range(10))
def test_any_json_object_parses(seed: int) -> None:
    text = walk(grammars().compile(Grammar("json_object")), seed)
    assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", ["[a-c]{2,5}", r"\d{3}-\d{4}", "(yes|no)", "^[^x]{1,4}$", "é+!"])
def test_a_text_under_a_regular_expression_matches_it_as_a_whole(pattern: str) -> None:
    for seed in range(10):
        text = walk(grammars().compile(Grammar("regex", pattern)), seed)
        assert text is not None
        assert re.fullmatch(pattern, text)


def test_a_text_under_a_lark_grammar_is_one_of_its_sentences() -> None:
    lark = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,3}/'
    for seed in range(10):
        text = walk(grammars().compile(Grammar("lark", lark)), seed)
        assert text is not None
        assert all(number.isdecimal() and len(number) <= 3 for number in text.split("+"))


def nested(lark: str, **schemas: Any) -> Grammar:
    return Grammar("lark_schemas", json.dumps({"lark": lark, "schemas": schemas}))


def test_each_schema_in_a_lark_grammar_is_a_root_of_its_own_and_keeps_the_rules_of_all_schemas() -> None:
    tree = {"type": "object", "properties": {"n": {"$ref": "#/$defs/few"}, "next": {"$ref": "#"}}, "required": ["n"]}
    few = {"$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}}, "additionalProperties": False}
    day = {"type": "string", "format": "date"}
    grammar = nested('start: call ("; " call){0,2}\ncall: "<" @tree ">" | "[" @day "]"', tree=tree | few, day=day)
    for seed in range(20):
        text = walk(grammars().compile(grammar), seed)
        assert text is not None
        for call in text.split("; "):
            validate(call[1:-1], day if call[0] == "[" else tree | few)
    assert not accepts(grammars().compile(grammar), '<{"n":  1}>')


def test_a_special_token_in_a_lark_grammar_is_that_token_and_not_its_characters() -> None:
    matcher = grammars().compile(nested("start: @yes <[1]> @yes", yes={"const": True}))
    assert accepts(matcher, "true<|im_start|>true")
    assert not accepts(
        grammars().compile(nested('start: @yes "<|im_start|>"', yes={"const": True})), "true<|im_start|>"
    )


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "too deep"])
def test_a_schema_that_is_refused_is_refused_in_a_lark_grammar_with_the_path_through_its_name(name: str) -> None:
    schema, path = REFUSED[name]
    with pytest.raises(GrammarError) as caught:
        grammars().compile(nested("start: @fine | @bad", fine=True, bad=schema))
    assert caught.value.path == (f"schemas.bad.{path}" if path else "schemas.bad")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark_schemas", "{"),
        Grammar("lark_schemas", "[]"),
        Grammar("lark_schemas", '{"lark": "start: /a/"}'),
        nested("start: @missing"),
        Grammar("regex", "(a"),
        Grammar("regex", "(?=a)b"),
        Grammar("regex", r"[^\s\S]"),
        Grammar("lark", "start: nothing"),
        Grammar("lark", ""),
        Grammar("json_schema", "{"),
        Grammar("json_schema", "[" * 100_000),
        Grammar("yaml"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"\w+"):
        grammars().compile(grammar)


def test_a_token_that_the_mask_forbade_leaves_a_matcher_that_allows_nothing() -> None:
    matcher = compile_schema({"type": "boolean"})
    mask = np.empty(VOCABULARY, np.bool_)
    assert fill_mask(matcher, mask)
    matcher.consume([int(np.flatnonzero(~mask)[0])])
    assert not fill_mask(matcher, mask)
    assert not mask.any()


def test_a_matcher_made_again_from_the_tokens_allows_the_same() -> None:
    matcher, again = compile_schema(HARD["recursion"]), compile_schema(HARD["recursion"])
    tokens = tokenizer().encode('{"value": true, "next": {"value": ', add_special_tokens=False).ids
    for token in tokens:
        matcher.consume([token])
    again.consume(tokens)
    first, second = np.empty((2, VOCABULARY), np.bool_)
    assert fill_mask(matcher, first)
    assert fill_mask(again, second)
    assert (first == second).all()


def test_sequences_of_one_grammar_do_not_disturb_each_other() -> None:
    one, two = compile_schema({"enum": ["ab", "cd"]}), compile_schema({"enum": ["ab", "cd"]})
    one.consume(tokenizer().encode('"ab"', add_special_tokens=False).ids)
    assert one.is_complete
    assert accepts(two, '"cd"')


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (reference_chain(1_500), "256"),
        (unit_rules(3_500), "1000"),
        (many_terminals(5_000), "1000"),
        (many_properties(5_001), "5000"),
        (many_properties(2_001, type=["integer", "null"]), "2000"),
        (Grammar("lark", f"start: %json {reference_chain(1_500).text}"), "256"),
        (Grammar("lark_schemas", json.dumps({"lark": unit_rules(3_500).text, "schemas": {}})), "1000"),
        (nested("start: @chain", chain=json.loads(reference_chain(1_500).text)), "256"),
        (Grammar("lark", "start: " + "(" * 5_000 + '"x"' + ")" * 5_000), "200"),
        (Grammar("regex", "(" * 5_000 + "x" + ")" * 5_000), "200"),
        (Grammar("json_schema", '{"items":' * 900 + "true" + "}" * 900), "160"),
        (Grammar("json_schema", json.dumps({"allOf": [{"pattern": "a"}] * 501})), "500"),
        (Grammar("json_schema", json.dumps({"pattern": "a" * 2_001})), "2000"),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused_with_the_limit_before_the_compiler_sees_it(
    grammar: Grammar, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = grammars()
    monkeypatch.setattr(Grammars, "_try", lambda *_: pytest.fail("the compiler was asked"))
    with pytest.raises(GrammarError, match=limit) as refused:
        made.compile(grammar)
    assert ("a schema in it" in str(refused.value)) == ("%json" in grammar.text)


@pytest.mark.parametrize("grammar", [reference_chain(250), unit_rules(990), many_terminals(990), many_properties(300)])
def test_a_grammar_within_the_limits_is_compiled(grammar: Grammar) -> None:
    grammars().compile(grammar)


@pytest.mark.parametrize("named", [{"type": "string"}, {"type": "number"}, {"enum": ["a", "b"]}, {"type": "boolean"}])
def test_a_thousand_properties_that_may_be_left_out_are_written(named: dict[str, Any]) -> None:
    matcher = grammars().compile(many_properties(1_000, **named))
    value = {"string": '"x"', "number": "7", "boolean": "true"}.get(named.get("type", ""), '"a"')
    text = f'{{"p0": {value}, "p500": {value}, "p999": {value}}}'
    for token in tokenizer().encode(text, add_special_tokens=False).ids:
        bits = matcher.bits()
        assert bits is not None
        assert bits[token >> 3] >> (token & 7) & 1
        matcher.consume([token])
    assert matcher.is_complete


@pytest.mark.parametrize("eos", [(), (2,)])
def test_a_tokeniser_that_cannot_be_used_is_refused(eos: tuple[int, ...]) -> None:
    with pytest.raises(GrammarError):
        Grammars((MODEL_DIR / "tokenizer.json").read_text() if not eos else "{}", VOCABULARY, eos)
