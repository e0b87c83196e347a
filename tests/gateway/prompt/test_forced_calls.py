"""Calls that have to be made: how the prompt ends, and that whatever the grammar allows is read as valid calls.

The grammar is compiled as the engine compiles it, and walked at random, token by token, over each tokeniser.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar, Sampling
from engine.sampling.grammar import GrammarError, Grammars
from gateway.config import PromptSettings
from gateway.errors import BadRequestError
from gateway.prompt.stage import PromptStage
from gateway.prompt.tool_styles import MAX_CALLS
from gateway.types import CallDelta, ChatPrompt, Constraint, Event, Request, Tenant, TextDelta, Tool, ToolUse
from tests.fakes import tokenisers, tool_templates
from tests.fakes.grammars import fill_mask

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/few"}, "next": {"$ref": "#"}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, "é\n", None]}},
}
TOOLS = (
    Tool("tree-of_1", "A tree.", TREE, path="tools[0].function.parameters"),
    Tool("now", path="tools[1].function.parameters"),
    Tool("ping", None, {"properties": {"to": {"type": "boolean"}}, "additionalProperties": False}),
)
ENDS = {
    "qwen": "<|im_start|>assistant\n<tool_call>",
    "thinking": "<|im_start|>assistant\n<think>\n</think>\n\n<tool_call>",
    "hermes": "<|im_start|>assistant\n<tool_call>",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[/INST] [TOOL_CALLS]",
    "tekken": "[/INST][TOOL_CALLS]",
    "demo": "<|im_start|>assistant\n",
}


class Loaded:
    """A stage with one model, and the model's grammars."""

    def __init__(self, name: str) -> None:
        self.name = name
        files = tool_templates.ALL[name]()
        self.hf = Tokenizer.from_str(files.tokenizer_json)
        self.eos = self.hf.token_to_id({"mistral": "</s>"}.get(name, "<|im_end|>")) or self.hf.token_to_id("<|eot_id|>")
        self.hello = tokenisers.hello(files, eos_ids=(self.eos,))
        self.stage = PromptStage(PromptSettings())
        asyncio.run(self.stage.load(self.hello, files))
        size = self.hello.vocab_size
        self.grammars = Grammars(files.tokenizer_json, size, (self.eos,))

    def request(self, use: ToolUse | None, **changes: Any) -> Request:
        prompt = ChatPrompt([{"role": "user", "content": "Hello."}], tools=TOOLS)
        values = {"received_s": 0.0, "deadline_s": 0.0, "tool_use": use} | changes
        return Request("r", Tenant("t"), "model", prompt, Sampling(max_tokens=5), **values)

    def walk(self, grammar: Grammar, seed: int) -> list[int]:
        rng, tokens, mask = random.Random(seed), list[int](), np.empty(self.hello.vocab_size, np.bool_)
        matcher = self.grammars.compile(grammar)
        while True:
            assert fill_mask(matcher, mask), self.hf.decode(tokens, skip_special_tokens=False)
            if mask[self.eos] and rng.random() < 0.6:
                return tokens
            mask[self.eos] = False
            if not mask.any():
                return tokens
            tokens.append(int(rng.choice(np.flatnonzero(mask))))
            matcher.consume(tokens[-1:])

    def read(self, request: Request, tokens: list[int]) -> list[Event]:
        reader = self.stage.reader(request, self.hello)
        events: list[Event] = []
        for token in tokens:
            events += reader.feed([token], ())
        return events + list(reader.flush())


@pytest.fixture(scope="module", params=tool_templates.ALL)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return Loaded(request.param)


def calls_in(events: list[Event]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        assert isinstance(event, CallDelta)
        if event.name:
            calls.append((event.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("parallel", [True, False])
def test_what_the_grammar_allows_is_read_as_calls_whose_arguments_validate(loaded: Loaded, parallel: bool) -> None:
    request = loaded.request(ToolUse(TOOLS, mode="required", parallel=parallel))
    forced = loaded.stage.constraint(request, loaded.hello)
    assert forced is not None
    counts = set()
    for seed in range(12):
        calls = calls_in(loaded.read(request, loaded.walk(forced.grammar, seed)))
        counts.add(len(calls))
        for name, arguments in calls:
            schema = {"tree-of_1": TREE, "ping": TOOLS[2].parameters, "now": {"maxProperties": 0}}[name]
            jsonschema.validate(arguments, schema)
    assert 0 not in counts
    assert max(counts) <= MAX_CALLS
    assert (max(counts) > 1) is (parallel and loaded.name != "llama3")


async def test_a_servers_rendering_goes_on_with_the_same_opener(loaded: Loaded) -> None:
    use = ToolUse(TOOLS, mode="required")
    request = loaded.request(use)
    forced = await loaded.stage.encode(request, loaded.hello)
    free = await loaded.stage.encode(loaded.request(replace(use, mode="auto")), loaded.hello)
    adopted = await loaded.stage.adopt(free, free.tokens, "f", request, loaded.hello)
    ends = [loaded.hf.decode(array("I", one.tokens), skip_special_tokens=False) for one in (forced, adopted)]
    assert ends[0] == ends[1]
    assert adopted.rendering == "f"
    if loaded.name != "thinking":  # blanks behind <think> are cut in another place
        assert (adopted.tokens, adopted.digests) == (forced.tokens, forced.digests)


async def test_the_prompt_ends_with_the_opener_as_its_token(loaded: Loaded) -> None:
    use = ToolUse(TOOLS, mode="required")
    forced = await loaded.stage.encode(loaded.request(use), loaded.hello)
    free = await loaded.stage.encode(loaded.request(replace(use, mode="auto")), loaded.hello)
    ids = array("I", forced.tokens).tolist()
    end = ENDS[loaded.name]
    assert loaded.hf.decode(ids, skip_special_tokens=False).replace(" ", "").endswith(end.replace(" ", ""))
    for opener in ("<tool_call>", "[TOOL_CALLS]"):
        if end.endswith(opener):
            assert ids[-1] == loaded.hf.token_to_id(opener)
    assert (len(forced.tokens) > len(free.tokens)) is end.endswith(("<tool_call>", "[TOOL_CALLS]"))
    again = await loaded.stage.encode(loaded.request(use), loaded.hello)
    assert (again.tokens, again.new_tokens) == (forced.tokens, 0)


def test_openers_of_calls_that_nobody_forced_are_read_although_they_are_special_tokens(loaded: Loaded) -> None:
    style = {"mistral": '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'}
    style |= {"llama3": '<|python_tag|>{"name": "now", "parameters": {}}', "demo": '{"name": "now", "arguments": {}}'}
    name = {"tekken": "mistral"}.get(loaded.name, loaded.name)
    written = style.get(name, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    tokens = loaded.hf.encode(written, add_special_tokens=False).ids
    assert calls_in(loaded.read(loaded.request(ToolUse(TOOLS)), tokens)) == [("now", {})]
    # Without tools to use it is text, and special tokens are not.
    text = "".join(event.text for event in loaded.read(loaded.request(None), tokens) if isinstance(event, TextDelta))
    assert '{"name": "now"' in text
    assert "[TOOL_CALLS]" not in text
    assert "<|python_tag|>" not in text


@pytest.fixture(scope="module")
def qwen() -> Loaded:
    return Loaded("qwen")


def test_only_the_tools_that_may_be_called_can_be(qwen: Loaded) -> None:
    request = qwen.request(ToolUse(TOOLS[1:2], mode="required"))
    forced = qwen.stage.constraint(request, qwen.hello)
    assert forced is not None
    for seed in range(8):
        for name, arguments in calls_in(qwen.read(request, qwen.walk(forced.grammar, seed))):
            assert (name, arguments) == ("now", {})


def test_nothing_is_forced_where_the_model_may_choose(qwen: Loaded) -> None:
    assert qwen.stage.constraint(qwen.request(ToolUse(TOOLS)), qwen.hello) is None


def test_the_places_of_a_refusal_lead_to_the_tool(qwen: Loaded) -> None:
    bad = replace(TOOLS[1], parameters={"type": "object", "properties": {"a": {"not": {}}}})
    forced = qwen.stage.constraint(qwen.request(ToolUse((TOOLS[0], bad), mode="required")), qwen.hello)
    assert forced is not None
    with pytest.raises(GrammarError) as caught:
        qwen.grammars.compile(forced.grammar)
    places = dict(forced.places)
    assert caught.value.path == "schemas.arguments_1.properties.a.not"
    assert places["schemas.arguments_1"] == "tools[1].function.parameters"


ANSWER = Constraint(Grammar("json_schema", json.dumps(TREE)), "response_format.json_schema.schema")


def test_an_answer_that_has_to_be_json_may_be_a_call_instead(loaded: Loaded) -> None:
    request = loaded.request(ToolUse(TOOLS), constraint=ANSWER)
    if loaded.name in ("llama3", "demo"):  # a call begins as any other object does
        with pytest.raises(BadRequestError, match="cannot be combined"):
            loaded.stage.constraint(request, loaded.hello)
        return
    both = loaded.stage.constraint(request, loaded.hello)
    assert both is not None
    assert dict(both.places)["schemas.text"] == ANSWER.param
    seen = set()
    for seed in range(30):
        events = loaded.read(request, loaded.walk(both.grammar, seed))
        if all(isinstance(event, TextDelta) for event in events):
            jsonschema.validate(json.loads("".join(getattr(event, "text", "") for event in events)), TREE)
            seen.add("text")
        else:
            assert calls_in(events)
            seen.add("calls")
    assert seen == {"text", "calls"}


def test_an_answer_under_a_grammar_of_the_client_has_no_place_for_a_call(qwen: Loaded) -> None:
    own = Constraint(Grammar("regex", "a+"), "structured_outputs.regex")
    with pytest.raises(BadRequestError, match="cannot be combined") as caught:
        qwen.stage.constraint(qwen.request(ToolUse(TOOLS), constraint=own), qwen.hello)
    assert caught.value.param == own.param
    forced = qwen.stage.constraint(qwen.request(ToolUse(TOOLS, mode="required"), constraint=own), qwen.hello)
    assert forced is not None
    assert forced.grammar.kind == "lark_schemas"  # there is no text that it could be about


STRICT = (replace(TOOLS[0], strict=True), *TOOLS[1:])


def follow(loaded: Loaded, grammar: Grammar, tokens: list[int]) -> int:
    """How many of the tokens the grammar allows."""
    matcher, mask = loaded.grammars.compile(grammar), np.empty(loaded.hello.vocab_size, np.bool_)
    for count, token in enumerate(tokens):
        if not (fill_mask(matcher, mask) and mask[token]):
            return count
        matcher.consume([token])
    return len(tokens)


@pytest.mark.parametrize("name", ["qwen", "hermes", "mistral", "tekken"])
def test_calls_of_strict_tools_are_held_to_their_schemas_also_where_the_model_may_choose(name: str) -> None:
    loaded = Loaded(name)
    request = loaded.request(ToolUse(STRICT))
    grammar = loaded.stage.constraint(request, loaded.hello)
    assert grammar is not None
    opener = "<tool_call>" if name in ("qwen", "hermes") else "[TOOL_CALLS]"
    text = loaded.hf.encode(f"Well, a < b [TOOL {opener[:-1]}.\n\n", add_special_tokens=False).ids
    assert follow(loaded, grammar.grammar, text) == len(text)
    found = set()
    for seed in range(12):
        # What the grammar allows behind the opener, up to where it may end.
        rng, tokens = random.Random(seed), [*text, loaded.hf.token_to_id(opener)]
        matcher, mask = loaded.grammars.compile(grammar.grammar), np.empty(loaded.hello.vocab_size, np.bool_)
        matcher.consume(tokens)
        while not matcher.is_complete:
            assert fill_mask(matcher, mask)
            tokens.append(int(rng.choice(np.flatnonzero(mask))))
            matcher.consume(tokens[-1:])
        events = loaded.read(request, tokens)
        for called, arguments in calls_in([event for event in events if isinstance(event, CallDelta)]):
            found.add(called)
            assert isinstance(arguments, dict)
            if called == "tree-of_1":
                jsonschema.validate(arguments, TREE)
    assert "tree-of_1" in found
    # What would be read as an opener, and not be held to anything behind it, cannot be written.
    ids = loaded.hf.token_to_id
    spelled = [ids(char) or ids(f"<0x{ord(char):02X}>") for char in f"x{opener}y"]
    assert follow(loaded, grammar.grammar, spelled) == len(f"x{opener}") - 1
    loaded.stage.close()


def test_tools_that_are_not_strict_or_calls_without_an_opener_leave_text_alone(loaded: Loaded) -> None:
    assert loaded.stage.constraint(loaded.request(ToolUse(TOOLS)), loaded.hello) is None
    held = loaded.stage.constraint(loaded.request(ToolUse(STRICT)), loaded.hello)
    assert (held is None) is (loaded.name in ("llama3", "demo"))
    endless = replace(loaded.request(ToolUse(STRICT)), sampling=Sampling(max_tokens=5, ignore_eos=True))
    assert loaded.stage.constraint(endless, loaded.hello) is None


def test_a_thinking_model_thinks_before_it_calls_a_strict_tool() -> None:
    loaded = Loaded("thinking")
    held = loaded.stage.constraint(loaded.request(ToolUse(STRICT)), loaded.hello)
    assert held is not None
    call = '<tool_call>\n{"name": "tree-of_1", "arguments": {"n": 1}}\n</tool_call>'
    tokens = loaded.hf.encode(f"<think>\nWell.\n</think>\n\n{call}\n{call} So.", add_special_tokens=False).ids
    assert follow(loaded, held.grammar, tokens) == len(tokens)
    wrong = loaded.hf.encode(call.replace("1}", "2}"), add_special_tokens=False).ids
    assert follow(loaded, held.grammar, wrong) < len(wrong)
    loaded.stage.close()


def test_schemas_beyond_the_limit_of_a_grammar_are_refused(qwen: Loaded) -> None:
    long = Tool("f", None, {"enum": ["x" * MAX_GRAMMAR_BYTES]})
    with pytest.raises(BadRequestError, match="too long") as caught:
        qwen.stage.constraint(qwen.request(ToolUse((long,), mode="required")), qwen.hello)
    assert caught.value.param == "tools"
