"""Token parity: whether a server makes the same tokens of a conversation as we do, by the shape of the request.

The same small conversations are tokenised by both sides, one for each shape. Requests of a shape that differs must not
be sent in our tokens (rendering.py). Knows nothing of how either side renders; `encode` is the prompt stage's.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import aiohttp
import orjson

from engine.protocol import Hello, Sampling
from engine.protocol.frozen import dataclass
from gateway.config import ReplicaSettings
from gateway.errors import KvasirError
from gateway.replicas.base import ServerFacts
from gateway.replicas.calls import Caller, ServerError, mapping, whole
from gateway.replicas.servers import ask_tokens
from gateway.types import ANONYMOUS, ChatPrompt, EncodedPrompt, Prompt, Request, Tenant, TextPrompt, TokenPrompt, Tool

CHECK_TIMEOUT_S: Final = 30.0
"""For all shapes; what is not compared by then stays unchecked."""

ANSWER_TIMEOUT_S: Final = 60.0
"""For an answer of one token; the server may be busy."""

Shape = Literal[
    "text",
    "plain",
    "system",
    "turns",
    "tools",
    "bare_tools",
    "calls",
    "parallel_calls",
    "reasoning",
    "unicode",
    "continuation",
]
"""text: of the completions API. The others are of conversations: plain is every one of them, bare tools lack a
description or parameters, calls have their results with them, and continuation goes on with a message of the
assistant."""

Encode = Callable[[Prompt], Awaitable[Sequence[int]]]
"""Our token ids. Raises KvasirError for a prompt that we refuse."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Of each shape, in words: the first token that differs, or why nothing was compared. Shapes that are in neither
    are equal. `rendering` is a fingerprint of the server's tokens: two servers with the same one render alike."""

    different: Mapping[Shape, str]
    unchecked: Mapping[Shape, str]
    rendering: str = ""

    def reason(self, prompt: Prompt) -> str | None:
        """Why this prompt must not be sent as token ids; None if it may."""
        for shape in sorted(shapes_of(prompt) & self.different.keys()):
            return f"{shape}: {self.different[shape]}"
        return None


def shapes_of(prompt: Prompt) -> frozenset[Shape]:
    """What the prompt has in it of what was compared; nothing for token ids. Takes no longer for longer texts."""
    if isinstance(prompt, TokenPrompt):
        return frozenset()
    if isinstance(prompt, TextPrompt):
        return frozenset(("text",) if prompt.text.isascii() else ("text", "unicode"))
    found: set[Shape] = {"plain"}
    if prompt.tools:
        found.add("tools")
    if any(tool.description is None or tool.parameters is None for tool in prompt.tools):
        found.add("bare_tools")
    if prompt.continues:
        found.add("continuation")
    for number, message in enumerate(prompt.messages):
        found |= _shapes_of_message(message, last=number == len(prompt.messages) - 1)
    return frozenset(found)


def _shapes_of_message(message: Mapping[str, Any], *, last: bool) -> set[Shape]:
    found: set[Shape] = set()
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    if role == "system":
        found.add("system")
    if role == "tool" or calls:
        found.add("calls")
    if len(calls) > 1:
        found.add("parallel_calls")
    if role == "assistant" and not last:
        found.add("turns")
    if message.get("reasoning_content"):
        found.add("reasoning")
    if isinstance(content, str) and not content.isascii():
        found.add("unicode")
    return found


# -- the conversations -------------------------------------------------------------------------------------------------

_WEATHER: Final = Tool(
    name="get_weather",
    description="The weather of a place, now.",
    parameters={
        "type": "object",
        "properties": {
            "place": {"type": "string", "description": "City, as in `Paris, France`"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        },
        "required": ["place"],
    },
)
_AWKWARD: Final = (
    "na\u00efve caf\u00e9, Zu\u0308rich \u212b \u00bd; \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \ud55c\uad6d\uc5b4 "
    "\U0001f642\U0001f468\u200d\U0001f469\u200d\U0001f467 x\u00a0y\u3000z  \t\r\n\n tail \u200b\ufeff"
)
"""Composed and combining characters, several scripts, an emoji of several, and blanks of all kinds."""


def _call(number: int, place: str) -> dict[str, Any]:
    """With an id of nine characters, because templates of Mistral refuse any other."""
    arguments = {"place": place, "unit": "celsius"}
    return {"id": f"call0000{number}", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def _result(number: int, degrees: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": f'{{"celsius": {degrees}}}'}


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_ASK: Final = _said("user", "What is the weather in Paris?")
_TURNS: Final = [_said("user", "Name a color."), _said("assistant", "Blue."), _said("user", " And another one? ")]

CANARIES: Final[Mapping[Shape, Prompt]] = {
    "text": TextPrompt("Once upon a time, there were 12 bears (and 1 wolf).\n\n"),
    "plain": ChatPrompt([_said("user", "Hello! How are you?")]),
    "system": ChatPrompt([_said("system", "Answer in one word.\n"), _said("user", "Ready?")]),
    "turns": ChatPrompt(_TURNS),
    "tools": ChatPrompt([_ASK], tools=(_WEATHER, replace(_WEATHER, name="get_forecast", description="Tomorrow's."))),
    "bare_tools": ChatPrompt([_ASK], tools=(Tool("now"), Tool("wait", "Waits."), replace(_WEATHER, description=None))),
    "calls": ChatPrompt(
        [_ASK, _said("assistant", "", tool_calls=[_call(1, "Paris")]), _result(1, 21)], tools=(_WEATHER,)
    ),
    "parallel_calls": ChatPrompt(
        [
            _said("user", "Paris and Rome?"),
            _said("assistant", "Both.", tool_calls=[_call(1, "Paris"), _call(2, "Rome")]),
            _result(1, 21),
            _result(2, 27),
            _said("assistant", "Rome is warmer."),
            _said("user", "Thanks."),
        ],
        tools=(_WEATHER,),
    ),
    "reasoning": ChatPrompt(
        [
            _said("user", "2 + 2?"),
            _said("assistant", "4", reasoning_content="Two and two make four."),
            _said("user", "And 3 + 3?"),
        ]
    ),
    "unicode": ChatPrompt([_said("system", _AWKWARD), _said("user", _AWKWARD[::-1]), _said("assistant", "\u2026")] * 2),
    "continuation": ChatPrompt(
        [_said("user", "Count to five."), _said("assistant", "One, two,")],
        add_generation_prompt=False,
        continues=True,
    ),
}


# -- the comparison ----------------------------------------------------------------------------------------------------


def first_difference(ours: Sequence[int], theirs: Sequence[int], spell: Callable[[int], str]) -> str | None:
    """The first token that differs, in words; None for equal ones. `spell` is the text of an id."""
    same = next((at for at, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if same is None and len(ours) == len(theirs):
        return None
    at = min(len(ours), len(theirs)) if same is None else same

    def token(ids: Sequence[int]) -> str:
        return f"{ids[at]} {spell(ids[at])[:40]!r}" if at < len(ids) else "the end"

    return f"token {at}: {token(ours)} here, {token(theirs)} at the server ({len(ours)} and {len(theirs)} tokens)"


class TokenSource:
    """A server's own tokens of prompts: what its tokenisation says, else the prompt of an answer of one token, which it
    has to compute for that. Some servers render a chat in another way than they tokenise it (`by_answer`)."""

    def __init__(self, session: aiohttp.ClientSession, settings: ReplicaSettings, facts: ServerFacts) -> None:
        self._session, self._settings, self._facts = session, settings, facts
        self._calls_tools = True
        self.by_answer = "tokenize" not in facts.features

    def tokenizes(self, prompt: Prompt) -> bool:
        chat = isinstance(prompt, ChatPrompt)
        return not self.by_answer and ("tokenize_chat" if chat else "tokenize") in self._facts.features

    async def ask(self, prompt: Prompt, salt: str = "") -> list[int] | int:
        """Token ids; their number where that is all that the server says, 0 where it does not. Raises ServerError."""
        if self.tokenizes(prompt):
            try:
                return await ask_tokens(self._session, self._settings, wire_body(self._facts, prompt))
            except ServerError as error:
                if error.status is not None or "return_token_ids" not in self._facts.features:
                    raise
            found = await self.ask_answer(prompt, salt)
            self.by_answer = isinstance(found, list)
            return found
        return await self.ask_answer(prompt, salt)

    async def ask_answer(self, prompt: Prompt, salt: str = "") -> list[int] | int:
        """By an answer of one token, which is computed under a salt where there is one."""
        chat = isinstance(prompt, ChatPrompt)
        body = {**wire_body(self._facts, prompt), "model": self._facts.models[0], "max_tokens": 1, "temperature": 0}
        if "return_token_ids" in self._facts.features:
            body["return_token_ids"] = True
        if salt and ("chat_cache_salt" if chat else "cache_salt") in self._facts.features:
            body["cache_salt"] = salt
        path, caller = "v1/chat/completions" if chat else "v1/completions", Caller(self._session, self._settings)
        tools = bool(body.get("tools"))
        if tools and not self._calls_tools:
            body["tool_choice"] = "none"
        try:
            answer = mapping(await caller.ask(path, ANSWER_TIMEOUT_S, body))
        except ServerError as error:
            if not (tools and self._calls_tools and error.status == 400):
                raise
            self._calls_tools = False  # a vLLM without --enable-auto-tool-choice
            answer = mapping(await caller.ask(path, ANSWER_TIMEOUT_S, {**body, "tool_choice": "none"}))
        ids = answer.get("prompt_token_ids") or mapping(answer.get("choices")).get("prompt_token_ids")
        if isinstance(ids, list) and all(type(one) is int for one in ids):
            return ids
        return whole(mapping(answer.get("usage")).get("prompt_tokens"))


async def check_parity(
    source: TokenSource, encode: Encode, spell: Callable[[int], str], *, proven: bool = False
) -> Parity:
    """Compares all shapes, within CHECK_TIMEOUT_S. Never raises for what either side answers: a side that refuses what
    the other one takes is different, and a server that says nothing of its tokens leaves a shape unchecked.

    proven  that the server tokenises a conversation as it renders one for a chat, which is looked at otherwise
    """
    different: dict[Shape, str] = {}
    unchecked: dict[Shape, str] = dict.fromkeys(CANARIES, f"no time within {CHECK_TIMEOUT_S:g} s")
    seen = hashlib.blake2b(digest_size=8)
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            if not proven and source.tokenizes(_PROOF):
                source.by_answer = await _answers_otherwise(source)
            for shape, prompt in CANARIES.items():
                ours, theirs = await _ours(encode, prompt), await _theirs(source, prompt)
                seen.update(f"{shape} {'refused' if isinstance(theirs, ServerError) else theirs};".encode())
                if (why := _uncompared(ours, theirs)) is not None:
                    unchecked[shape] = why
                    continue
                del unchecked[shape]
                if (words := _compared(ours, theirs, spell)) is not None:
                    different[shape] = words
    except TimeoutError:
        pass
    return Parity(different, unchecked, seen.hexdigest())


_PROOF: Final = CANARIES["turns"]  # without tools, for which a server may want to be set up


async def _answers_otherwise(source: TokenSource) -> bool:
    """Whether its chat has other tokens than its tokenisation says."""
    told = await _theirs(source, _PROOF)
    try:
        used = await source.ask_answer(_PROOF)
    except ServerError:
        return source.by_answer
    return source.by_answer or (isinstance(told, list) and isinstance(used, list) and told != used)


async def _theirs(source: TokenSource, prompt: Prompt) -> list[int] | int | ServerError:
    try:
        return await source.ask(prompt)
    except ServerError as error:
        return error


def _uncompared(ours: Sequence[int] | KvasirError, theirs: list[int] | int | ServerError) -> str | None:
    """Why the two cannot be compared."""
    if isinstance(theirs, ServerError):
        return str(theirs) if theirs.status is None or theirs.status >= 500 else None
    if theirs == 0:
        return "the server does not say its tokens"
    if isinstance(theirs, int) and not isinstance(ours, KvasirError) and len(ours) == theirs:
        return "the server says the number of its tokens alone, which is the same"
    return None


async def _ours(encode: Encode, prompt: Prompt) -> Sequence[int] | KvasirError:
    try:
        return await encode(prompt)
    except KvasirError as error:
        return error


def _compared(
    ours: Sequence[int] | KvasirError, theirs: list[int] | int | ServerError, spell: Callable[[int], str]
) -> str | None:
    if isinstance(ours, KvasirError):
        return None if isinstance(theirs, ServerError) else f"refused here: {ours.message}"
    if isinstance(theirs, ServerError):
        return f"refused by the server: {theirs}"
    if isinstance(theirs, int):
        return f"{len(ours)} tokens here, {theirs} at the server"
    return first_difference(ours, theirs, spell)


def wire_body(facts: ServerFacts, prompt: Prompt) -> dict[str, Any]:
    """The prompt as the server's tokenisation takes it, with what the OpenAI API has instead of our normal form."""
    body: dict[str, Any] = {} if facts.kind == "tensorrt-llm" else {"model": facts.models[0]}
    if isinstance(prompt, TextPrompt):
        return body | {"prompt": prompt.text}
    assert isinstance(prompt, ChatPrompt)
    body["messages"] = [_wire_message(message) for message in prompt.messages]
    if prompt.tools:
        body["tools"] = [_wire_tool(tool) for tool in prompt.tools]
    if prompt.continues:
        body["continue_final_message"] = True
    if facts.kind == "vllm":  # a SGLang renders as for a chat completion when it is not said
        body["add_generation_prompt"] = prompt.add_generation_prompt
    return body


def _wire_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls are text there, and a message with nothing but calls has no content."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [
        {**call, "function": {**call["function"], "arguments": orjson.dumps(call["function"]["arguments"]).decode()}}
        for call in calls
    ]
    return {**message, "content": message["content"] or None, "tool_calls": written}


def _wire_tool(tool: Tool) -> dict[str, Any]:
    said = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in said.items() if value is not None}}


def encoder(encode: Callable[[Request, Hello], Awaitable[EncodedPrompt]], model: Hello) -> Encode:
    """The prompt stage's `encode` for canaries of this model."""

    async def ids(prompt: Prompt) -> Sequence[int]:
        request = Request(
            request_id="parity",
            tenant=Tenant(ANONYMOUS),
            model=model.model,
            prompt=prompt,
            sampling=Sampling(max_tokens=1),
            received_s=0.0,
            deadline_s=float("inf"),
        )
        return array("I", (await encode(request, model)).tokens)

    return ids
