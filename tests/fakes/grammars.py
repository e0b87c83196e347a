"""Grammars in their own processes, without an engine: a pool, and the loop that it would have."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.demo import MODEL_DIR
from engine.protocol import Grammar, Lane
from engine.sampling.grammar import GrammarState
from engine.sampling.grammar_pool import GrammarPool
from engine.sampling.grammar_worker import Matcher, Refusal

LIMIT_S = 60.0
VOCABULARY, EOS = 4096, (2, 0)


class GrammarDesk:
    """A pool for the demo's tokeniser, which hears of its processes while something is waited for."""

    def __init__(self, *, max_kept: int = 64, max_waiting: int = 64, **options: Any) -> None:
        tokenizer_json = (MODEL_DIR / "tokenizer.json").read_text()
        self.pool = GrammarPool(tokenizer_json, VOCABULARY, EOS, max_kept=max_kept, max_waiting=max_waiting, **options)

    def __enter__(self) -> GrammarDesk:
        self.pool.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close()

    def run_until(self, holds: Callable[[], object]) -> None:
        limit_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < limit_s, "it did not come to be"
            self.pool._find_ready(0.05)
            self.pool.pump()

    def begin(self, grammar: Grammar, tenant: str = "a", salt: str | None = None, lane: Lane = "online") -> Asked:
        return Asked(self, grammar, tenant, tenant if salt is None else salt, lane)

    def compile(self, grammar: Grammar, tenant: str = "a", salt: str | None = None) -> Matcher:
        asked = self.begin(grammar, tenant, salt)
        self.run_until(lambda: asked.answered)
        assert asked.refusal is None, asked.refusal
        return asked.matcher


class Asked:
    """One sequence that waits for its grammar, or has it."""

    def __init__(self, desk: GrammarDesk, grammar: Grammar, tenant: str, salt: str, lane: Lane) -> None:
        self.answered = False
        self.refusal: Refusal | None = None
        self.matcher = desk.pool.open(grammar, tenant=tenant, salt=salt, lane=lane)
        self.matcher.compile(self._answer)

    def _answer(self, refusal: Refusal | None) -> None:
        self.answered, self.refusal = True, refusal


def fill_mask(matcher: GrammarState, out: npt.NDArray[np.bool_]) -> bool:
    """Which tokens may come next, (vocab_size,) bool. False, and nothing is allowed, when the matcher has failed."""
    bits = matcher.bits()
    if bits is None:
        out[:] = False
        return False
    out[:] = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(out), bitorder="little").view(np.bool_)
    return True


def reference_chain(links: int) -> Grammar:
    """A schema whose references lead from one definition to the next."""
    definitions: dict[str, Any] = {f"a{link}": {"$ref": f"#/$defs/a{link + 1}"} for link in range(links)}
    definitions[f"a{links}"] = {"type": "boolean"}
    return Grammar("json_schema", json.dumps({"$defs": definitions, "$ref": "#/$defs/a0"}))


def unit_rules(count: int) -> Grammar:
    """A Lark grammar whose rules lead from one to the next."""
    rules = [f"r{number}: r{number + 1}" for number in range(count)]
    return Grammar("lark", "\n".join(["start: r0", *rules, f'r{count}: "x"\n']))


def many_terminals(count: int) -> Grammar:
    terminals = [f'T{number}: "x{number}y"' for number in range(count)]
    return Grammar("lark", "\n".join(["start: " + " | ".join(f"T{n}" for n in range(count)), *terminals]))


def many_properties(count: int, **named: Any) -> Grammar:
    """An object with so many properties, strings where nothing else is said, all of which may be left out."""
    properties = {f"p{number}": named or {"type": "string"} for number in range(count)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return Grammar("json_schema", json.dumps(schema))
