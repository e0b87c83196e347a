"""What makes two requests one: a digest of everything that can change the answer, and nothing else. Pure.

The form is that of a Request, so that one question is one key in every dialect, streamed or not. It is one JSON array
of tagged values, in which no value can pass for another. Where the model reads the order of names (tools, schemas,
arguments of earlier calls) the order counts; a message is the same however its own names are ordered. Of large requests
the same values are added one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

import orjson

from engine.protocol import Grammar, Hello, Sampling
from gateway.digests import feed
from gateway.responses.base import Situation
from gateway.tasks import LARGE
from gateway.types import ChatPrompt, Constraint, Prompt, Request, TextPrompt, Tool, ToolUse

VERSION: Final = 1
"""Of keys and of what is kept under them: a change of either starts with an empty cache."""

IGNORED: Final[Mapping[type, frozenset[str]]] = {
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
            "use_cache",  # a request without reuse gets none here, either: engine_answers.py
            "only_leased",
            "fit",  # more tokens than fit get the answer that needed fewer
            "group",
            "stream",
            "trace",
            "work",
        )
    ),
    ChatPrompt: frozenset(("markers", "min_breakpoint_tokens")),  # what is kept of it, not what is answered
    Tool: frozenset(("path",)),
    Constraint: frozenset(("param", "places")),
    Hello: frozenset(("incarnation", "num_blocks", "max_sequences", "created", "version")),
}
"""Fields that change no answer. A test holds that every other one changes the key."""


def request_key(request: Request, model: Hello) -> bytes:
    """32 bytes."""
    return _digest("answer", request, model, request.prompt)


def find_situation(request: Request, model: Hello) -> Situation | None:
    """None for what is no chat that ends with a text of its user."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt) or prompt.continues or not prompt.messages:
        return None
    last = prompt.messages[-1]
    text = last.get("content")
    if last.get("role") != "user" or type(text) is not str:
        return None
    without = replace(prompt, messages=[*prompt.messages[:-1], {**last, "content": None}])
    return Situation(_digest("situation", request, model, without), text)


def entry_id(key: bytes) -> str:
    """How an answer is called towards clients and operators. It says nothing of the request, nor can it be made from
    one without knowing all of it and whose it is."""
    return hashlib.sha256(b"kvasir-entry" + key).hexdigest()[:32]


def _digest(kind: str, request: Request, model: Hello, prompt: Prompt) -> bytes:
    reuse, constraint, use = request.reuse, request.constraint, request.tool_use
    parts = (
        ("kvasir", kind, VERSION),
        ("scope", request.salt, reuse.partition),
        ("model", request.model, _model(model)),
        ("prompt", *_prompt(prompt)),
        ("sampling", _sampling(request.sampling)),
        ("stop", request.stop),
        ("constraint", None if constraint is None else _grammar(constraint.grammar)),
        ("tool_use", None if use is None else _tool_use(use)),
        ("answer", request.number, request.prewarm),
    )
    if request.work <= LARGE:
        return hashlib.sha256(orjson.dumps(parts)).digest()
    hashed = hashlib.sha256()
    feed(hashed, parts)
    return hashed.digest()


@lru_cache(maxsize=64)
def _model(model: Hello) -> tuple[object, ...]:
    """What it answers with. The tokeniser has the chat template in it."""
    root = model.namespace.root().hex()
    return (model.model, root, model.tokenizer, model.context_tokens, model.vocab_size, model.eos_ids)


@lru_cache(maxsize=256)
def _sampling(sampling: Sampling) -> str:
    """Most requests have one of a few."""
    return orjson.dumps(sampling).decode()


def _prompt(prompt: Prompt) -> tuple[object, ...]:
    if isinstance(prompt, ChatPrompt):
        messages = [sorted(message.items()) for message in prompt.messages]
        tools = [_tool(tool) for tool in prompt.tools]
        return ("chat", messages, tools, prompt.add_generation_prompt, prompt.continues)
    return ("text", prompt.text) if isinstance(prompt, TextPrompt) else ("tokens", prompt.tokens.hex())


def _tool(tool: Tool) -> tuple[object, ...]:
    return (tool.name, tool.description, tool.parameters, tool.strict)


def _tool_use(use: ToolUse) -> tuple[Any, ...]:
    return ([_tool(tool) for tool in use.callable], use.mode, use.parallel)


def _grammar(grammar: Grammar) -> tuple[str, str]:
    return (grammar.kind, grammar.text)
