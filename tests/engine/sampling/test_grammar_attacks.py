"""Grammars of one tenant that would crash, stop or starve an engine, beside another tenant's chat."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest

from engine.compute.model import load_model
from engine.config import EngineSettings
from engine.protocol import Grammar, Sampling, Submit
from engine.sampling import grammar_pool
from tests.engine.sampling.test_structured import BOOLEAN, Desk
from tests.fakes.grammars import many_properties, many_terminals, reference_chain, unit_rules


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def object_chain(links: int) -> Grammar:
    definitions: dict[str, Any] = {
        f"a{link}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{link + 1}"}}, "required": ["x"]}
        for link in range(links)
    }
    definitions[f"a{links}"] = {"type": "boolean"}
    return schema({"$defs": definitions, "$ref": "#/$defs/a0"})


def terminal_chain(links: int) -> Grammar:
    terminals = [f'T{number}: "a" T{number + 1}' for number in range(links)]
    return Grammar("lark", "\n".join(["start: T0", *terminals, f'T{links}: "x"\n']))


KINDS: dict[str, Any] = {
    "references": reference_chain,
    "references through objects": object_chain,
    "unit rules": unit_rules,
    "terminals": many_terminals,
    "terminals in a chain": terminal_chain,
    "properties": many_properties,
    "alternatives": lambda size: schema({"anyOf": [{"const": f"a{n}"} for n in range(size)]}),
    "patterns": lambda size: schema({"allOf": [{"type": "string", "pattern": f"a.*{n}.*b"} for n in range(size)]}),
    "nested arrays": lambda size: Grammar("json_schema", '{"items":' * size + "true" + "}" * size),
    "nested groups": lambda size: Grammar("regex", "(" * size + "x" + ")" * size),
    "repeated repeats": lambda size: Grammar("regex", f"((.{{1,{size}}}a){{1,{size}}}b){{1,{size}}}"),
    "many ways": lambda size: Grammar("regex", "(a|b|ab)*" * size),
    "brackets": lambda size: Grammar("lark", "start: " + "(" * size + '"x"' + ")" * size),
    "long string": lambda size: schema({"type": "string", "minLength": 100 * size, "maxLength": 200 * size}),
}
FEW, MANY = (3_500,), (30, 300, 990, 1_500, 5_000)


def attack(sizes: tuple[int, ...]) -> None:
    """Every grammar is answered or still within its limits when the chat ends; the chat gets all of its tokens, and its
    tenant's own grammar is compiled meanwhile."""
    with Desk(load_model(EngineSettings(threads=1))) as desk:
        prompt = array("I", desk.prompt).tobytes()
        grammars = [make(size) for size in sizes for make in KINDS.values()]
        for seq, grammar in enumerate(grammars):
            sampling = Sampling(8, seed=seq)
            desk.loop.submit("g", Submit(100 + seq, prompt, b"", sampling, "a", tenant="a", grammar=grammar))
        desk.loop.submit("g", Submit(1, prompt, b"", Sampling(300, ignore_eos=True, seed=1), "b", tenant="b"))
        desk.loop.submit("g", Submit(2, prompt, b"", Sampling(9, seed=2), "b", tenant="b", grammar=BOOLEAN))
        assert desk.end_of(1).finish == "length"
        assert sum(len(update.tokens) for update in desk.updates[1]) == 300
        assert desk.end_of(2).finish == "stop"
        for seq, grammar in enumerate(grammars):
            end = desk.end_of(100 + seq)
            assert end.finish in ("stop", "length", "error"), (grammar.text[:80], end.error)
            assert end.finish != "error" or end.error, grammar.text[:80]


@pytest.mark.slow
def test_no_grammar_of_one_tenant_ends_the_engine_or_stops_anothers_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "COMPILE_S", 0.3)
    attack(FEW)


@pytest.mark.slow
def test_no_grammar_of_any_size_ends_the_engine_or_stops_anothers_chat() -> None:
    attack(MANY)
