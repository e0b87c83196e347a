"""The key of an answer: everything that can change it does change the key, and nothing else does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from engine.protocol import Grammar, Hello, Namespace, Sampling
from gateway.responses.engine_answers import find_situation, request_key
from gateway.responses.entries import entry_id
from gateway.types import (
    ChatPrompt,
    Constraint,
    Group,
    Marker,
    Media,
    Prompt,
    Request,
    Reuse,
    Scope,
    Tenant,
    TextPrompt,
    Thinking,
    Thought,
    TokenPrompt,
    Tool,
    ToolUse,
    Trace,
)
from tests.fakes.pipeline import hello

TOOL = Tool("look", "Looks.", {"type": "object", "properties": {"a": {}, "b": {}}})
CHAT = ChatPrompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}], tools=(TOOL,))
IMAGE = Media("image", "messages", "No images.", "image/png", data="AAAA", message=1)
USE = ToolUse((TOOL,))
CONSTRAINT = Constraint(Grammar("regex", "a+"), "response_format")
REQUEST = Request(
    request_id="r",
    tenant=Tenant("a"),
    model="demo",
    prompt=CHAT,
    sampling=Sampling(max_tokens=8, temperature=0.0),
    received_s=0.0,
    deadline_s=9.0,
    constraint=CONSTRAINT,
    tool_use=USE,
)
MODEL = hello()

IGNORED: dict[type, frozenset[str]] = {
    Request: frozenset(
        (
            "request_id",
            "tenant",  # as far as it has its own cache, it is in `salt`
            "received_s",
            "deadline_s",
            "prompt_param",  # for error messages
            "lane",
            "tier",
            "priority",
            "affinity",
            "use_cache",  # a request without reuse gets none here, either
            "only_leased",
            "fit",  # more tokens than fit get the answer that needed fewer
            "group",
            "stream",
            "trace",
            "work",
            "check",  # is done with before the cache is asked
        )
    ),
    ChatPrompt: frozenset(("markers", "min_breakpoint_tokens")),  # what is kept of it, not what is answered
    Tool: frozenset(("path",)),
    Media: frozenset(("path", "refusal")),
    Constraint: frozenset(("param", "places")),
    Hello: frozenset(
        (
            *("incarnation", "num_blocks", "max_sequences", "created", "version"),
            *("adapters", "parent"),  # the namespace has the fingerprint of the one that answers
        )
    ),
}
"""Fields that change no answer. Every other one changes the key."""

OTHER: dict[type, dict[str, Any]] = {
    Request: {
        "request_id": "s",
        "tenant": Tenant("b"),
        "model": "other",
        "prompt": TextPrompt("Hi."),
        "sampling": Sampling(max_tokens=9, temperature=0.0),
        "received_s": 1.0,
        "deadline_s": 10.0,
        "stop": ("x",),
        "prompt_param": "input",
        "lane": "batch",
        "tier": "flex",
        "priority": -5,
        "scope": Scope(tenant="b"),
        "affinity": "k",
        "use_cache": False,
        "only_leased": True,
        "prewarm": True,
        "fit": True,
        "constraint": None,
        "tool_use": None,
        "thinking": Thinking("low"),
        "group": Group(2),
        "number": 1,
        "stream": True,
        "work": 9,
        "reuse": Reuse(partition="p"),
        "trace": Trace(engine="e"),
        "check": object(),
    },
    Sampling: {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 1,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.1,
        "logit_bias": ((1, 2.0),),
        "stop_ids": (3,),
        "ignore_eos": True,
        "min_tokens": 1,
        "prompt_logprobs": 0,
        "logprobs": 0,
    },
    ChatPrompt: {
        "messages": [{"role": "user", "content": "Hi."}],
        "add_generation_prompt": False,
        "markers": (Marker(0, 1, 60.0),),
        "tools": (),
        "min_breakpoint_tokens": 5,
        "continues": True,
        "thoughts": (Thought(0, -1, "s"),),
        "media": (IMAGE,),
    },
    Media: {
        "kind": "file",
        "path": "input",
        "refusal": "No.",
        "mime_type": "image/gif",
        "data": "AAAB",
        "url": "https://example.org/a.png",
        "name": "a.png",
        "detail": "low",
        "message": 0,
        "chars": 1,
    },
    Tool: {
        "name": "see",
        "description": None,
        "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
        "strict": True,
        "path": "functions",
    },
    ToolUse: {"callable": (), "mode": "required", "parallel": False},
    Constraint: {"grammar": Grammar("regex", "b+"), "param": "x", "places": (("a", "b"),)},
    Grammar: {"kind": "lark", "text": "b"},
    Hello: {
        "incarnation": "2",
        "model": "other",
        "namespace": Namespace("v", "float32", "float32", 16),
        "context_tokens": 1,
        "vocab_size": 1,
        "num_blocks": 1,
        "max_sequences": 1,
        "eos_ids": (1,),
        "tokenizer": "u",
        "created": 1,
        "version": 1,
        "adapters": (("small", "f"),),
        "parent": "base",
    },
    Namespace: {
        "weights": "v",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 8,
        "adapter": "x",
        "quantization": "int8",
        "hash_name": "sha256",
        "salt": "x",
    },
}
"""Another value for every field. A new field has to be added here, and then changes the key or is among the ignored."""


def changed(kind: type, name: str, value: Any) -> bytes:
    """The key of the request, or of the same under another model, with this one field changed."""
    change = {name: value}
    request, model = REQUEST, MODEL
    tool = replace(TOOL, **change) if kind is Tool else TOOL
    if kind is Request:
        request = replace(request, **change)
    elif kind is Sampling:
        request = replace(request, sampling=replace(request.sampling, **change))
    elif kind is ChatPrompt:
        request = replace(request, prompt=replace(CHAT, **change))
    elif kind is Media:
        prompts = [replace(CHAT, media=(one,)) for one in (IMAGE, replace(IMAGE, **change))]
        one, other = (request_key(replace(REQUEST, prompt=prompt), MODEL) for prompt in prompts)
        return KEY if one == other else other
    elif kind is Tool:
        request = replace(request, prompt=replace(CHAT, tools=(tool,)))
        assert (request_key(replace(REQUEST, tool_use=ToolUse((tool,))), MODEL) != KEY) == (name not in IGNORED[Tool])
    elif kind is ToolUse:
        request = replace(request, tool_use=replace(USE, **change))
    elif kind is Constraint:
        request = replace(request, constraint=replace(CONSTRAINT, **change))
    elif kind is Grammar:
        request = replace(request, constraint=replace(CONSTRAINT, grammar=replace(CONSTRAINT.grammar, **change)))
    elif kind is Hello:
        model = replace(model, **change)
    else:
        model = replace(model, namespace=replace(model.namespace, **change))
    return request_key(request, model)


KEY = request_key(REQUEST, MODEL)


def test_the_key_of_a_large_request_says_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.responses.engine_answers.LARGE", -1)
    own = request_key(REQUEST, MODEL)
    assert own != KEY
    monkeypatch.setitem(globals(), "KEY", own)  # which `changed` compares with
    for kind, values in OTHER.items():
        for name, value in values.items():
            ignored = name in IGNORED.get(kind, frozenset()) and (kind, name) != (Request, "tenant")
            assert (changed(kind, name, value) == own) == ignored, f"{kind.__name__}.{name}"


@pytest.mark.parametrize("kind", OTHER, ids=lambda kind: kind.__name__)
def test_every_field_changes_the_key_or_is_known_to_change_no_answer(kind: type) -> None:
    names = {field.name for field in fields(kind)}
    assert set(OTHER[kind]) == names
    assert IGNORED.get(kind, frozenset()) <= names
    for name, value in OTHER[kind].items():
        ignored = name in IGNORED.get(kind, frozenset()) and (kind, name) != (Request, "tenant")
        assert (changed(kind, name, value) == KEY) == ignored, f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("name", "value"),
    [("asked", True), ("read", False), ("write", False), ("only_cached", True), ("max_age_s", 1.0), ("ttl_s", 1.0)],
)
def test_how_an_answer_may_be_reused_does_not_change_which_it_is(name: str, value: object) -> None:
    assert request_key(replace(REQUEST, reuse=replace(Reuse(), **{name: value})), MODEL) == KEY  # type: ignore[arg-type]


def test_a_namespace_that_tenants_share_makes_their_answers_one() -> None:
    def shared(tenant: str) -> bytes:
        return request_key(replace(REQUEST, tenant=Tenant(tenant), scope=Scope(namespace="n")), MODEL)

    assert shared("a") == shared("b") != KEY


@pytest.mark.parametrize("scope", [Scope(tenant="a", key="k"), Scope(tenant="a", cache_salt="k"), Scope(namespace="a")])
def test_what_separates_blocks_separates_answers(scope: Scope) -> None:
    assert request_key(replace(REQUEST, scope=scope), MODEL) != KEY


PROMPTS: list[Prompt] = [
    TextPrompt("ab"),
    TextPrompt('["ab"]'),
    TokenPrompt(b"ab\0\0"),
    TextPrompt("61620000"),
    ChatPrompt([{"role": "user", "content": "ab"}]),
    ChatPrompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]),
    ChatPrompt([{"role": "user", "content": 'a"},{"role":"user","content":"b'}]),
    ChatPrompt([{"role": "system", "content": "ab"}]),
    ChatPrompt([{"role": "user", "content": "ab", "name": "c"}]),
    ChatPrompt([{"role": "user", "content": "ab "}]),
    ChatPrompt([{"role": "user", "content": "AB"}]),
    ChatPrompt([{"role": "user", "content": "a\u0308b"}]),
    ChatPrompt([{"role": "user", "content": "\u00e4b"}]),
]


def test_no_prompt_passes_for_another() -> None:
    keys = {request_key(replace(REQUEST, prompt=prompt), MODEL) for prompt in PROMPTS}
    assert len(keys) == len(PROMPTS)


def test_the_names_of_a_message_may_come_in_any_order_but_arguments_of_a_call_may_not() -> None:
    def key(*messages: dict[str, Any]) -> bytes:
        return request_key(replace(REQUEST, prompt=ChatPrompt(list(messages))), MODEL)

    assert key({"role": "user", "content": "x"}) == key({"content": "x", "role": "user"})
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    assert key(calls[0]) != key(calls[1])


def test_a_situation_is_all_but_what_the_user_said_last() -> None:
    one = find_situation(REQUEST, MODEL)
    assert one is not None
    assert one.text == "Hi."
    other = replace(CHAT, messages=[CHAT.messages[0], {"role": "user", "content": "Good day."}])
    assert find_situation(replace(REQUEST, prompt=other), MODEL) == (one.digest, "Good day.")
    for name in ("sampling", "stop", "model", "reuse"):
        differs = find_situation(replace(REQUEST, **{name: OTHER[Request][name]}), MODEL)
        assert differs is not None
        assert differs.digest != one.digest
    history = replace(CHAT, messages=[{"role": "system", "content": "Be long."}, CHAT.messages[1]])
    differs = find_situation(replace(REQUEST, prompt=history), MODEL)
    assert differs is not None
    assert differs.digest != one.digest


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("Hi."),
        ChatPrompt([{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "H"}], continues=True),
        ChatPrompt([{"role": "tool", "content": "Hi."}]),
        ChatPrompt([{"role": "user", "content": "Hi."}], media=(replace(IMAGE, message=0),)),
    ],
)
def test_what_does_not_end_with_a_text_of_the_user_has_no_situation(prompt: Prompt) -> None:
    assert find_situation(replace(REQUEST, prompt=prompt), MODEL) is None


def test_an_id_is_not_the_key() -> None:
    assert entry_id(KEY) not in KEY.hex()
    assert len(entry_id(KEY)) == 32
