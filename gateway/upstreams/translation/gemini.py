"""Gemini generateContent as an upstream: POST /v1beta/models/{model}:generateContent, or :streamGenerateContent. Pure.

systemInstruction    the system messages that come before all others; later ones are text of the user's turn
contents             messages of one side that follow each other are one turn, a user's with its function responses
                     first; empty texts are left out
functionResponse     the object that a result is, else its text as `output`; its name is that of its call
toolConfig           AUTO, ANY or NONE; VALIDATED where tools are strict, or the model may call some of them only
thinkingConfig       a budget for 2.5 and for a number of tokens, else a level; left out where no model thinks
thoughtSignature     where it was: at a call, which newer models refuse without one, or else at the text. Calls that
                     another model made have the one that the API documents for them
candidates           one. The API has no field for one call at most: others are left out
media                as bytes, and in a user's turn by public URL as well. Names of files are left out, and how
                     closely to look at an image
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

import orjson

from gateway.errors import BadRequestError
from gateway.types import (
    CachePrefix,
    CallDelta,
    ChatPrompt,
    Constraint,
    Delta,
    FinishReason,
    Media,
    Request,
    TextDelta,
    Thinking,
    ThinkingDelta,
    Tool,
    ToolUse,
)
from gateway.upstreams.stored import is_public
from gateway.upstreams.translation.base import (
    LEFT_OUT,
    AnswerReader,
    Field,
    Form,
    Table,
    Written,
    arguments_of,
    calls_of,
    chat_of,
    kind_of,
    lacks,
    lacks_media,
    media_of,
    num_instructions,
    object_of,
    pieces,
    refusal,
    string_of,
    text_of,
)
from gateway.upstreams.translation.thoughts import Thoughts, budget_of, effort_of, seal, thoughts_of

MAX_STOPS: Final = 5

MIN_BUDGET: Final = 512
MAX_BUDGET: Final = 24_576
PRO_BUDGET: Final = 128
"""Tokens of thoughts that every model with a budget takes, besides 0; `pro` takes no 0, but PRO_BUDGET."""

_API: Final = "Gemini generateContent"
_NEVER_THINKS: Final = re.compile(r"(.*/)?(gemini-(1|2\.0)|gemma|learnlm)")
_HAS_BUDGET: Final = re.compile(r"(.*/)?gemini-2")
_NO_SIGNATURE: Final = "skip_thought_signature_validator"
_IMAGES: Final = ("image/png", "image/jpeg", "image/webp", "image/heic", "image/heif")
_SOUNDS: Final = re.compile(r"audio/(wav|x-wav|mp3|mpeg|aiff|aac|ogg|flac|mp4|webm)")
_FILES: Final = re.compile(r"application/(pdf|json|x-javascript|x-python)|text/.+")
_REFUSED: Final = frozenset(
    (
        *("SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "MODEL_ARMOR"),
        *("IMAGE_SAFETY", "IMAGE_PROHIBITED_CONTENT", "IMAGE_RECITATION"),
    )
)
"""Reasons of an end by a filter."""
_FAILED: Final = frozenset(
    (
        *("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "TOO_MANY_TOOL_CALLS"),
        *("MALFORMED_RESPONSE", "MISSING_THOUGHT_SIGNATURE"),
    )
)
"""Reasons of an end that leaves no answer: the model wrote what cannot be read."""

Fields = dict[str, Any]


class GeminiGenerate(Form):
    dialect = "gemini"
    name = "gemini"
    title = _API
    table: ClassVar[Table] = {
        "system": Field("systemInstruction"),
        "messages": Field("contents"),
        "calls": Field("functionCall"),
        "results": Field("functionResponse"),
        "names": LEFT_OUT,
        "image": Field("inlineData"),
        "image URL": Field("fileData"),
        "file": Field("inlineData"),
        "file URL": Field("fileData"),
        "audio": Field("inlineData"),
        "result image": Field("inlineData"),
        "tools": Field("functionDeclarations"),
        "tool_choice": Field("functionCallingConfig"),
        "one call": LEFT_OUT,
        "strict": Field("VALIDATED"),
        "json_object": Field("responseMimeType"),
        "json_schema": Field("responseJsonSchema"),
        "thinking": Field("thinkingConfig"),
        "max_tokens": Field("maxOutputTokens"),
        "stop": Field("stopSequences", most=MAX_STOPS),
        "temperature": Field("temperature"),
        "top_p": Field("topP"),
        "top_k": Field("topK"),
        "seed": Field("seed"),
        "presence_penalty": Field("presencePenalty"),
        "frequency_penalty": Field("frequencyPenalty"),
        "breakpoints": Field("cachedContents"),
    }

    def write(self, request: Request, model: str) -> Written:
        chat, marked = _cut(chat_of(request, _API))
        config = self.fields(request, chat)
        if "seed" in config:
            config["seed"] %= 1 << 31  # a 32-bit integer there
        instruction, contents, _ = _conversation(chat, marked, thoughts_of(chat, self.name, request.model))
        if not contents:
            raise BadRequestError(f"{_API} takes no conversation without any text.", param=request.prompt_param)
        optional = {
            "systemInstruction": {"parts": instruction} if instruction else None,
            "tools": [{"functionDeclarations": [_declaration(tool) for tool in chat.tools]}] if chat.tools else None,
            "toolConfig": _tool_config(chat, request.tool_use) if chat.tools else None,
            "generationConfig": config | _format(request.constraint) | _thinking(request.thinking, model),
        }
        body = {"contents": contents} | {name: value for name, value in optional.items() if value}
        if request.stream:
            return Written("/v1beta/models/{model}:streamGenerateContent", body, "alt=sse")
        return Written("/v1beta/models/{model}:generateContent", body)

    def prefix(self, request: Request) -> CachePrefix | None:
        """Up to the last marker at which a content ends, or to the content before it; never all of the contents."""
        if not chat_of(request, _API).markers:
            return CachePrefix()
        chat, marked = _cut(chat_of(request, _API))
        _, contents, ends = _conversation(chat, marked, {})
        instructions = num_instructions(chat.messages)
        found: list[tuple[int, float]] = []
        for at, ttl_s in marked.items():
            whole = sum(end <= at for end in ends)
            if whole or at == instructions - 1:
                found.append((min(whole, len(contents) - 1), ttl_s))
        return CachePrefix(*max(found)) if found else None

    def reader(self, request: Request) -> AnswerReader:
        return _Reader(request.model, one_call=request.tool_use is not None and not request.tool_use.parallel)


def _cut(chat: ChatPrompt) -> tuple[ChatPrompt, dict[int, float]]:
    """Turns of a user as several messages, which end where they are marked; and messages that end at a marker, with
    its seconds. The last tool stands for the message before the first."""
    if not chat.markers:
        return chat, {}
    messages: list[dict[str, Any]] = []
    media: list[Media] = []
    places: list[int] = []  # of the messages among these
    marked: dict[int, float] = {}
    own = [marker for marker in chat.markers if marker.tool is None]
    by_message = media_of(chat)
    if any(marker.tool == len(chat.tools) - 1 for marker in chat.markers):
        marked[-1] = max(marker.ttl_s for marker in chat.markers if marker.tool is not None)
    for number, message in enumerate(chat.messages):
        text, calls, start = text_of(message), message.get("tool_calls") or (), 0
        left = by_message.get(number, [])
        num_media, done = len(left), 0
        for one in sorted((one for one in own if one.message == number), key=lambda one: (one.chars, one.media)):
            at_end = not text[one.chars :].strip() and one.media >= num_media
            if one.call == len(calls) - 1 if calls else at_end:
                marked[len(messages)] = max(one.ttl_s, marked.get(len(messages), 0.0))
            elif message["role"] == "user" and (text[start : one.chars].strip() or one.media > done):
                marked[len(messages)] = one.ttl_s
                media += _moved(left[: one.media - done], len(messages), start)
                left, done = left[one.media - done :], one.media
                messages.append({**message, "content": text[start : one.chars]})
                start = one.chars
        media += _moved(left, len(messages), start)
        messages.append({**message, "content": text[start:]} if start else message)
    thoughts = tuple(replace(thought, message=places[thought.message]) for thought in chat.thoughts)
    return replace(chat, messages=messages, media=tuple(media), thoughts=thoughts), marked


def _moved(media: Sequence[Media], message: int, start: int) -> list[Media]:
    """Into a message that begins so many characters later."""
    return [replace(one, message=message, chars=one.chars - start) for one in media]


def _conversation(
    chat: ChatPrompt, marked: Collection[int], thoughts: Thoughts
) -> tuple[list[Fields], list[Fields], list[int]]:
    """The parts of the instruction, the contents, and the last message of each of these. A content ends with a text of
    the user that is `marked`, unless results follow, which belong to one."""
    instructions, calls, media = num_instructions(chat.messages), calls_of(chat.messages), media_of(chat)
    results = calls.results
    instruction: list[Fields] = []
    contents: list[Fields] = []
    ends: list[int] = []
    for at, message in enumerate(chat.messages):
        text = text_of(message)
        parts = [_part(piece) for piece, _ in pieces(text, media.get(at, ()))]
        if at in results:
            one, name = results[at]
            response: Fields = {"name": name, "response": _response(text)}
            if at in media:
                response["parts"] = [_part(part, in_result=True) for part in media[at]]
            parts = [{"functionResponse": {"id": one, **response} if one else response}]
        signatures = _signatures(thoughts, at, message) if thoughts else {}
        if parts and -1 in signatures:
            parts[0]["thoughtSignature"] = signatures[-1]
        for number, call in enumerate(message.get("tool_calls") or ()):
            named = {"id": calls.ids[at, number], "name": call["function"]["name"], "args": arguments_of(call)}
            # Of several calls at once, the first has the signature.
            signature = signatures.get(number, "" if number else _NO_SIGNATURE)
            parts.append({"functionCall": named, **({"thoughtSignature": signature} if signature else {})})
        if at < instructions:
            instruction += parts
        elif parts:
            role = "model" if message["role"] == "assistant" else "user"
            is_cut = bool(ends) and ends[-1] in marked and role == "user" and at not in results
            if not contents or contents[-1]["role"] != role or is_cut:
                contents.append({"role": role, "parts": []})
                ends.append(at)
            contents[-1]["parts"] += parts
            ends[-1] = at
    for content in contents if results else ():
        content["parts"].sort(key=lambda part: "functionResponse" not in part)
    return instruction, contents, ends


def _part(part: str | Media, *, in_result: bool = False) -> Fields:
    """A function response has its media as bytes, and apart from its text."""
    if isinstance(part, str):
        return {"text": part}
    mime_type = part.mime_type
    known = mime_type in _IMAGES or _FILES.fullmatch(mime_type) or _SOUNDS.fullmatch(mime_type)
    if known and part.data:
        return {"inlineData": {"mimeType": mime_type, "data": part.data}}
    # Addresses of its own are files of whoever has uploaded them.
    if known and not in_result and is_public(part.url):
        return {"fileData": {"mimeType": mime_type, "fileUri": part.url}}
    raise lacks_media(_API, part, in_result=in_result)


def _signatures(thoughts: Thoughts, at: int, message: Mapping[str, Any]) -> dict[int, str]:
    """By call; -1 is the text's, which also has one behind all calls."""
    num_calls, has_text = len(message.get("tool_calls") or ()), bool(text_of(message))
    found = dict[int, str]()
    for call in range(-1, num_calls + 1):
        place = -1 if call == num_calls or (call < 0 and has_text) else max(call, 0)
        for content in thoughts.get((at, call), ()):
            if isinstance(signature := content.get("thoughtSignature"), str):
                found[place] = signature
    return found


def _response(text: str) -> Fields:
    found = object_of(text)
    return {"output": text} if found is None else found


def _declaration(tool: Tool) -> Fields:
    optional = {"description": tool.description, "parametersJsonSchema": tool.parameters}
    return {"name": tool.name} | {name: value for name, value in optional.items() if value}


def _tool_config(chat: ChatPrompt, use: ToolUse | None) -> Fields | None:
    """None is the mode AUTO. All tools are declared, so that a prefix with them is the same for each choice."""
    if use is None:
        return {"functionCallingConfig": {"mode": "NONE"}}
    some = len(use.callable) < len(chat.tools)
    if use.mode == "auto" and not some and not any(tool.strict for tool in use.callable):
        return None
    calling: Fields = {"mode": "ANY" if use.mode == "required" else "VALIDATED"}
    if some:
        calling["allowedFunctionNames"] = [tool.name for tool in use.callable]
    return {"functionCallingConfig": calling}


def _thinking(thinking: Thinking | None, model: str) -> Fields:
    if thinking is None or _NEVER_THINKS.match(model):
        return {}
    config: Fields = {"includeThoughts": True} if thinking.shown and thinking.is_on else {}
    budget, effort, is_pro = budget_of(thinking), effort_of(thinking), "pro" in model
    if _HAS_BUDGET.match(model):
        off = PRO_BUDGET if is_pro else 0
        config["thinkingBudget"] = -1 if budget is None else min(max(budget, MIN_BUDGET), MAX_BUDGET) if budget else off
    elif thinking.budget:
        config["thinkingBudget"] = thinking.budget
    elif effort is not None:  # there is no way not to think; `pro` has no MINIMAL
        least = "LOW" if is_pro else "MINIMAL"
        levels = {"none": least, "minimal": least, "low": "LOW", "medium": "MEDIUM"}
        config["thinkingLevel"] = levels.get(effort, "HIGH")
    return {"thinkingConfig": config} if config else {}


def _format(constraint: Constraint | None) -> Fields:
    if constraint is None:
        return {}
    schema = True if kind_of(constraint) == "json_object" else orjson.loads(constraint.grammar.text)
    if schema is False:
        raise lacks(_API, "schema that nothing validates against", constraint.param)
    return {"responseMimeType": "application/json"} | ({"responseJsonSchema": schema} if schema is not True else {})


class _Reader(AnswerReader):
    """Parts other than texts, calls and thoughts are passed over. Which stop string ended an answer is not told."""

    def __init__(self, model: str, *, one_call: bool) -> None:
        self._model = model
        self._one_call = one_call
        self._num_calls = 0
        self._has_text = False

    def whole(self, answer: Mapping[str, Any]) -> Iterator[Delta]:
        return self.event(answer)

    def event(self, event: Mapping[str, Any]) -> Iterator[Delta]:
        if error := event.get("error"):
            raise refusal(error["message"], _status(error.get("code")))
        feedback = event.get("promptFeedback") or {}
        if blocked := feedback.get("blockReason"):
            yield TextDelta(_why("The prompt was blocked", blocked, feedback.get("blockReasonMessage")), refusal=True)
            self.reason = "refusal"
        candidates = event.get("candidates")
        if not candidates:
            return
        candidate = candidates[0]
        for part in (candidate.get("content") or {}).get("parts") or ():
            yield from self._part(part)
        if why := candidate.get("finishReason"):
            yield from self._end(why, candidate.get("finishMessage"))

    def _part(self, part: Mapping[str, Any]) -> Iterator[Delta]:
        call = part.get("functionCall")
        if call is not None and self._one_call and self._num_calls:
            return
        if part.get("thought") and (text := part.get("text")):
            yield ThinkingDelta(string_of(text))
        if signature := part.get("thoughtSignature"):
            content = {"thoughtSignature": string_of(signature)}
            yield ThinkingDelta(signature=seal(GeminiGenerate.name, self._model, content))
        if part.get("thought"):
            return
        if text := part.get("text"):
            self._has_text = True
            yield TextDelta(string_of(text))
        if call is not None:
            arguments = call.get("args") or {}
            if not call["name"] or not isinstance(arguments, dict):
                raise TypeError("a call without a name, or with arguments that are no object")
            yield CallDelta(self._num_calls, string_of(call["name"]), orjson.dumps(arguments).decode())
            self._num_calls += 1

    def _end(self, why: str, message: Any) -> Iterator[Delta]:
        """What was stopped before any text says why. A stream may end more than once."""
        if why in _FAILED:
            raise refusal(_why("The model wrote no answer that can be read", why, message), 502)
        if why not in ("STOP", "MAX_TOKENS") and message and not self._has_text:
            self._has_text = True
            yield TextDelta(string_of(message), refusal=why in _REFUSED)
        ended: FinishReason = "tool_calls" if self._num_calls and why == "STOP" else "stop"
        self.reason = "refusal" if why in _REFUSED else "length" if why == "MAX_TOKENS" else ended


def _status(code: Any) -> int:
    return code if type(code) is int and 400 <= code < 600 else 500


def _why(what: str, reason: Any, message: Any) -> str:
    more = f": {message}" if isinstance(message, str) else ""
    return f"{what} ({reason}){more}"
