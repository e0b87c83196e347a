from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from google.genai import types as google
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from engine.protocol import Hello
from gateway.api.anthropic.request import parse_message
from gateway.api.gemini.request import parse_generate
from gateway.api.gemini.request import to_call as gemini_call
from gateway.api.openai.request import parse_chat
from gateway.api.openai.responses.request import parse as parse_response
from gateway.api.openai.responses.request import to_call as response_call
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import UnsupportedError
from gateway.pipeline import Pipeline
from gateway.responses.engine_answers import request_key
from gateway.types import ChatPrompt, Request, Thinking, ThinkingDelta, Thought, ToolUse
from gateway.upstreams.translation.forms import FORMS
from gateway.upstreams.translation.thoughts import BUDGETS, effort_of, seal
from tests.fakes.stages import ScriptedEngine, Stages, hello
from tests.fakes.translated import CLOCK, call, chat, check_types, result, said, user

ON_CLAUDE_4 = {"type": "enabled", "budget_tokens": 8192}
FORM = {form.name: form for form in FORMS}


# -- what a client asks for -------------------------------------------------------------------------------------------

HI: Any = [{"role": "user", "content": "Hi"}]


def of_chat(**fields: Any) -> Thinking | None:
    return parse_chat({"model": "m", "messages": HI, **fields}, LeaseSettings()).thinking


def of_response(**reasoning: Any) -> Thinking | None:
    query = parse_response({"model": "m", "input": "Hi", "reasoning": reasoning})
    return response_call(query, query.items, LeaseSettings()).thinking


def of_message(**fields: Any) -> Thinking | None:
    body = {"model": "m", "max_tokens": 4096, "messages": HI, **fields}
    return parse_message(body, "2023-06-01", AnthropicSettings(), LeaseSettings()).call.thinking


def of_gemini(**config: Any) -> Thinking | None:
    values = {"contents": [{"parts": [{"text": "Hi"}]}], "generationConfig": {"thinkingConfig": config}}
    return gemini_call("m", parse_generate(values)).thinking


def test_every_client_says_in_its_own_words_how_much_is_to_be_thought() -> None:
    assert of_chat() is None
    assert of_chat(reasoning_effort="xhigh") == Thinking("xhigh")
    assert of_chat(reasoning_effort="none") == Thinking("none", shown=False)
    assert of_response() is None
    assert of_response(effort="low") == Thinking("low", shown=False)
    assert of_response(summary="auto") == Thinking()
    assert of_message() is None
    assert of_message(thinking={"type": "enabled", "budget_tokens": 2000}) == Thinking(budget=2000)
    assert of_message(thinking={"type": "adaptive", "display": "omitted"}) == Thinking(shown=False)
    assert of_message(thinking={"type": "adaptive"}, output_config={"effort": "max"}) == Thinking("max")
    assert of_message(thinking={"type": "disabled"}, output_config={"effort": "max"}) == Thinking("none", shown=False)
    assert of_message(output_config={"effort": "low"}) == Thinking("low", shown=False)
    assert of_gemini(thinkingBudget=-1) == Thinking(shown=False)
    assert of_gemini(thinking_budget=0, includeThoughts=True) == Thinking("none", shown=False)
    assert of_gemini(thinkingBudget=300, includeThoughts=True) == Thinking(budget=300)
    assert of_gemini(thinkingLevel="high") == Thinking("high", shown=False)
    assert of_gemini(thinkingLevel="THINKING_LEVEL_UNSPECIFIED") == Thinking(shown=False)


class Noting:
    """A response cache that notes the requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def answer(self, request: Request, model: Hello, generate: Any) -> Any:
        self.requests.append(request)
        return generate(request)


def test_an_engine_and_its_response_cache_know_nothing_of_it() -> None:
    stages, cache = Stages([ScriptedEngine("e", [])]), Noting()
    pipeline = Pipeline(prompts=stages, index=stages, registry=stages, queue=stages, responses=cache)
    plain = chat()
    asked = replace(plain, thinking=Thinking("high"))
    thought = replace(asked, prompt=ChatPrompt([user("Hi")], thoughts=(Thought(0, -1, "x"),)))
    for request in (asked, thought):
        pipeline.answer(request)
    assert cache.requests == [plain, plain]


def test_another_way_to_think_is_another_question_to_an_upstream() -> None:
    asked = [chat(thinking=one) for one in (None, Thinking(), Thinking("low"), Thinking(budget=9))]
    asked.append(replace(asked[0], prompt=ChatPrompt([user("Hi")], thoughts=(Thought(0, -1, "x"),))))
    for work in (0, 1 << 40):
        assert len({request_key(replace(one, work=work), hello()) for one in asked}) == 5


# -- what an upstream is asked for ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("effort", "budget"), BUDGETS.items())
def test_a_budget_is_the_least_effort_that_has_it(effort: Any, budget: int) -> None:
    expected = {"none": "minimal", "xhigh": "high", "max": "high"}.get(effort, effort)
    assert effort_of(Thinking(budget=budget)) == expected
    assert effort_of(Thinking(effort, budget)) == effort


def written(api: str, model: str, request: Request) -> dict[str, Any]:
    body = FORM[api].write(request, model).body
    match api:
        case "openai":
            check_types(TypeAdapter(CompletionCreateParamsNonStreaming), body)
        case "openai-responses":
            check_types(TypeAdapter(ResponseCreateParamsNonStreaming), body)
        case "anthropic":
            check_types(TypeAdapter(MessageCreateParamsNonStreaming), body)
        case _:
            google.GenerationConfig.model_validate(body.get("generationConfig", {}))
    return body


@pytest.mark.parametrize(
    ("thinking", "model", "effort"),
    [
        (None, "gpt-5.2", None),
        (Thinking("xhigh"), "gpt-5.2", "xhigh"),
        (Thinking("none"), "gpt-5.2", "none"),
        (Thinking(), "o3", None),
        (Thinking(budget=31_999), "openai/gpt-5.2", "high"),
        (Thinking("low"), "gpt-4o", None),
        (Thinking("low"), "gpt-5-chat-latest", None),
        (Thinking("low"), "deepseek-v4", "low"),
    ],
)
def test_openai_is_told_an_effort_where_a_model_thinks(thinking: Any, model: str, effort: str | None) -> None:
    assert written("openai", model, chat(thinking=thinking)).get("reasoning_effort") == effort
    body = written("openai-responses", model, chat(thinking=thinking))
    assert body.get("reasoning", {}).get("effort") == effort
    assert ("summary" in body.get("reasoning", {})) == (
        thinking is not None and thinking.is_on and "4o" not in model and "chat" not in model
    )
    thinks = model in ("gpt-5.2", "o3", "openai/gpt-5.2", "deepseek-v4") and (thinking is None or thinking.is_on)
    assert body.get("include") == (["reasoning.encrypted_content"] if thinks else None)


@pytest.mark.parametrize(
    ("thinking", "model", "limit", "expected"),
    [
        (Thinking("medium"), "claude-sonnet-4-5-20250929", 0, (ON_CLAUDE_4, None, 4096 + 8192)),
        (Thinking("medium"), "claude-sonnet-4-20250514", 20_000, (ON_CLAUDE_4, None, 20_000)),
        (Thinking(), "glm-5", 20_000, (ON_CLAUDE_4, None, 20_000)),
        (Thinking("high"), "claude-haiku-4-5", 4000, ({"type": "enabled", "budget_tokens": 3000}, None, 4000)),
        (Thinking(budget=128), "claude-opus-4-1", 2000, ({"type": "enabled", "budget_tokens": 1024}, None, 2000)),
        (Thinking("high"), "claude-haiku-4-5", 1000, (None, None, 1000)),
        (Thinking("none"), "claude-haiku-4-5", 1000, (None, None, 1000)),
        (Thinking("none"), "claude-opus-4-6", 1000, ({"type": "disabled"}, None, 1000)),
        (Thinking("max"), "claude-opus-4-6", 1000, ({"type": "adaptive", "display": "summarized"}, "max", 1000)),
        (
            Thinking(budget=1000, shown=False),
            "anthropic/claude-sonnet-5",
            900,
            ({"type": "adaptive", "display": "omitted"}, "low", 900),
        ),
        (Thinking(), "claude-opus-4-7", 0, ({"type": "adaptive", "display": "summarized"}, None, 4096 + 1024)),
    ],
)
def test_anthropic_is_told_a_budget_or_to_adapt(thinking: Any, model: str, limit: int, expected: Any) -> None:
    body = written("anthropic", model, chat(thinking=thinking, sampling={"max_tokens": limit}))
    effort = body.get("output_config", {}).get("effort")
    assert (body.get("thinking"), effort, body["max_tokens"]) == expected


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.5), ("top_p", 0.5), ("top_k", 3)])
def test_anthropic_takes_no_sampling_together_with_thoughts(name: str, value: float) -> None:
    with pytest.raises(UnsupportedError) as refused:
        written("anthropic", "claude-opus-4-6", chat(thinking=Thinking("low"), sampling={name: value}))
    assert refused.value.param == name


def test_anthropic_is_not_asked_to_think_where_it_would_refuse_to() -> None:
    forced = chat(thinking=Thinking("low"), tools=(CLOCK,), tool_use=ToolUse((CLOCK,), "required"))
    behind = chat(user("Hi"), said("", call("clock", {})), result("noon"), thinking=Thinking("low"))
    later = chat(user("Hi"), said("", call("clock", {})), result("noon"), user("And?"), thinking=Thinking("low"))
    prewarm = chat(thinking=Thinking("low"), prewarm=True, sampling={"max_tokens": 0})
    assert [
        "thinking" in written("anthropic", "claude-haiku-4-5", one) for one in (forced, behind, later, prewarm)
    ] == [
        False,
        False,
        True,
        False,
    ]
    assert "thinking" in written("anthropic", "claude-opus-4-6", behind)  # this one does not mind


@pytest.mark.parametrize(
    ("thinking", "model", "config"),
    [
        (None, "gemini-2.5-flash", None),
        (Thinking("low"), "gemini-2.0-flash", None),
        (Thinking("low"), "models/gemini-2.5-flash", {"includeThoughts": True, "thinkingBudget": 1024}),
        (Thinking("max", shown=False), "gemini-2.5-pro", {"thinkingBudget": 24_576}),
        (Thinking(budget=3, shown=False), "gemini-2.5-pro", {"thinkingBudget": 512}),
        (Thinking("none"), "gemini-2.5-flash", {"thinkingBudget": 0}),
        (Thinking("none"), "gemini-2.5-pro", {"thinkingBudget": 128}),
        (Thinking(), "gemini-2.5-flash-lite", {"includeThoughts": True, "thinkingBudget": -1}),
        (Thinking(), "gemini-3-pro-preview", {"includeThoughts": True}),
        (Thinking(shown=False), "gemini-3-pro-preview", None),
        (Thinking("minimal", shown=False), "gemini-3-pro-preview", {"thinkingLevel": "LOW"}),
        (Thinking("none"), "gemini-3.5-flash", {"thinkingLevel": "MINIMAL"}),
        (Thinking("medium", shown=False), "gemini-3.5-flash", {"thinkingLevel": "MEDIUM"}),
        (Thinking("max", shown=False), "gemini-3.5-flash", {"thinkingLevel": "HIGH"}),
        (Thinking(budget=99, shown=False), "gemini-3.5-flash", {"thinkingBudget": 99}),
    ],
)
def test_gemini_is_told_a_budget_or_a_level(thinking: Any, model: str, config: Any) -> None:
    body = written("gemini", model, chat(thinking=thinking))
    assert body.get("generationConfig", {}).get("thinkingConfig") == config


def test_the_docs_have_the_table_of_efforts() -> None:
    docs = Path("docs/translation.md").read_text()
    assert ", ".join(f"`{effort}` {budget:,}" for effort, budget in BUDGETS.items()) in docs


# -- signatures -------------------------------------------------------------------------------------------------------

OWN = {"anthropic": {"thinking": "Hm.", "signature": "s"}, "gemini": {"thoughtSignature": "s"}}
FORGED = [
    "",
    "s",
    "a3Yx",
    "a3Yx====",
    "a3Yxé",
    "a3Yx" + "W10=",
    "a3Yx" + base64.b64encode(b"[" * 5000).decode(),
    "a3Yx" + base64.b64encode(b'{"by":["anthropic","m"],"thinking":' + b'{"a":' * 200 + b"1" + b"}" * 201).decode(),
    seal("anthropic", "other", OWN["anthropic"]),
    seal("gemini", "m", OWN["gemini"]),
    seal("anthropic", "m", {"thinking": 1, "signature": ["s"]}),
    seal("anthropic", "m", {"type": "tool_result", "data": None}),
]


def turns(*signatures: str) -> Request:
    """A conversation in which the call of an answer had these."""
    thoughts = tuple(Thought(1, -1, one) for one in signatures)
    messages = [user("Hi"), said("", call("clock", {})), result("noon"), user("And?")]
    return replace(chat(thinking=Thinking("low")), prompt=ChatPrompt(messages, thoughts=thoughts))


def test_a_signature_goes_back_to_its_own_api_and_model_and_no_forged_one_to_any() -> None:
    own = seal("anthropic", "m", OWN["anthropic"])
    body = written("anthropic", "claude-haiku-4-5", turns(*FORGED, own, own.replace("-", "+").replace("_", "/")))
    kinds = [block["type"] for block in body["messages"][1]["content"]]
    assert kinds == ["thinking", "thinking", "tool_use"]
    plain = {api: written(api, "up", turns()) for api in FORM}
    forged = [one for one in FORGED if one != seal("gemini", "m", OWN["gemini"])]
    assert {api: written(api, "up", turns(*forged)) for api in FORM} == plain
    signed = written("gemini", "up", turns(seal("gemini", "m", OWN["gemini"])))
    assert signed["contents"][1]["parts"][0]["thoughtSignature"] == "s"


def test_details_of_a_chat_are_joined_and_go_back_as_they_are_until_the_user_speaks() -> None:
    details: list[Any] = [
        {"type": "reasoning.text", "index": 0, "text": "Let me", "format": "x"},
        {"type": "reasoning.text", "index": 0, "text": " see."},
        {"type": "reasoning.text", "index": 0, "signature": "s"},
        {"type": "reasoning.encrypted", "index": 1, "data": "d"},
    ]
    called = {"index": 0, "id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    deltas: list[Any] = [{"reasoning": "Let me see.", "reasoning_details": [one]} for one in details]
    deltas.append({"tool_calls": [called]})
    reader = FORM["openai"].reader(chat())
    read = [one for delta in deltas for one in reader.event({"choices": [{"index": 0, "delta": delta}]})]
    (signature,) = (one.signature for one in read if isinstance(one, ThinkingDelta) and one.signature)
    later = turns(signature)
    assert "reasoning" not in written("openai", "up", later)["messages"][1]
    assert isinstance(later.prompt, ChatPrompt)
    now = replace(later, prompt=replace(later.prompt, messages=later.prompt.messages[:-1]))
    message = FORM["openai"].write(now, "up").body["messages"][1]
    assert message["reasoning"] == "Let me see." * 4
    assert message["reasoning_details"] == [
        {"type": "reasoning.text", "index": 0, "text": "Let me see.", "format": "x", "signature": "s"},
        {"type": "reasoning.encrypted", "index": 1, "data": "d"},
    ]
