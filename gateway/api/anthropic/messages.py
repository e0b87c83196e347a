"""System prompt and messages of the Anthropic API into what a chat template takes, and where each block of them ends.

    system           one message of that role; so is a message of role `system` further down
    user             tool results, which come first, become messages of role `tool`; the texts behind them are one
    assistant        one message: texts, tool calls, and what was thought as `reasoning_content`

Turns of one role that follow each other are one turn, with an empty line between them; blocks of one message are joined
as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from gateway.api.anthropic.blocks import Kind, Part, blocks
from gateway.api.fields import (
    Check,
    a_list,
    array_of,
    empty_array,
    invalid,
    record,
    tagged,
    takes,
    text,
)
from gateway.types import Media

BETWEEN_TURNS: Final = "\n\n"
MAX_WORD_CHARS: Final = 64


def _content(role: str, *kinds: str) -> Check[list[Part]]:
    """A string, or blocks of these kinds."""
    several = blocks(0, *kinds)

    @takes({"anyOf": [{"type": "string", "minLength": 1}, several.schema]})
    def check(value: Any, path: str) -> list[Part]:
        if value in ("", []):
            raise invalid(path, f"{role} messages must have non-empty content")
        if type(value) is not str:
            return several.function(value, path)
        if value.isspace():
            raise invalid(path, "text content blocks must contain non-whitespace text")
        return [Part("text", path, value)]

    return check


_CONTENTS: Final = {
    "user": _content("user", "text", "document", "image", "tool_result"),
    "assistant": _content("assistant", "text", "tool_use", "thinking", "redacted_thinking"),
    "system": _content("system", "text"),
}
_message: Final = tagged(
    "role", {role: record("content", role=text(), content=content) for role, content in _CONTENTS.items()}
)


class Block(NamedTuple):
    """A place where a prefix may end.

    message  number among the template's messages; 0 for a tool
    place    characters of its content up to the end of the block; of a call or a tool its number
    settled  the same; of a text with more text behind it, up to its last word: how that becomes tokens depends on what
             follows, which may be another text next time
    media    of those in the message, how many come before the place
    """

    kind: Kind
    path: str
    control: Mapping[str, str] | None
    message: int
    place: int
    settled: int
    media: int = 0


@dataclass(slots=True)
class Conversation:
    """Messages for the template, and all blocks and media in the order of the prompt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    continues: bool = False  # the last message is the beginning of the answer


class _Turn(NamedTuple):
    """Messages of one role that follow each other."""

    role: str
    path: str
    parts: list[Part]


@takes({"anyOf": [{"const": ""}, _CONTENTS["system"].schema]})
def read_system(value: Any, path: str) -> list[Part]:
    """A string, or blocks of text. An empty string is no system prompt."""
    return [] if value == "" else _CONTENTS["system"].function(value, path)


@takes(array_of(_message, 1).schema)
def read_turns(value: Any, path: str) -> list[_Turn]:
    """Checks every message by itself. Raises BadRequestError with the path of what is wrong."""
    turns: list[_Turn] = []
    for index, item in enumerate(a_list(value, path)):
        where = f"{path}[{index}]"
        if (parts := _plain(item, where)) is None:
            parts = _message.function(item, where)["content"]
        if turns and turns[-1].role == item["role"]:
            turns[-1].parts.extend([parts[0]._replace(begins=True), *parts[1:]])
        else:
            turns.append(_Turn(item["role"], where, parts))
    if not turns:
        raise empty_array(path)
    return turns


def _plain(item: Any, path: str) -> list[Part] | None:
    """The text of a message that is nothing else, as nearly all of a long conversation are."""
    if type(item) is dict and len(item) == 2 and item.get("role") in ("user", "assistant"):
        content = item.get("content")
        if type(content) is str and content and not content.isspace():
            return [Part("text", f"{path}.content", content)]
    return None


def converse(system: Sequence[Part], turns: Sequence[_Turn]) -> Conversation:
    """Puts it all together. Raises BadRequestError for turns that do not belong behind each other."""
    conversation = Conversation()
    if system:
        _add("system", system, conversation)
    called: dict[str, str] = {}  # id -> name of the tools that the turn before has called
    for number, turn in enumerate(turns):
        if turn.role == "system":
            _check_place(turns, number)
            _add("system", turn.parts, conversation)
        elif turn.role == "user":
            _user(turn, called, conversation)
            called = {}
        else:
            called = _assistant(turn, conversation)
    if turns[-1].role == "assistant":
        _check_open(turns[-1])
        conversation.continues = True
    return conversation


def _check_place(turns: Sequence[_Turn], number: int) -> None:
    """Raises BadRequestError where a system message may not stand."""
    path = turns[number].path
    if not number:
        raise invalid(path, "the first message cannot be a system message; use the top-level `system` parameter")
    if turns[number - 1].role != "user":
        raise invalid(path, "a system message must follow a user turn")
    if number + 1 < len(turns) and turns[number + 1].role != "assistant":
        raise invalid(path, "a system message must precede an assistant turn or end the list")


def _check_open(turn: _Turn) -> None:
    """Raises BadRequestError where an answer cannot continue this turn."""
    last = turn.parts[-1]
    if any(part.kind == "tool_use" for part in turn.parts) or last.kind != "text":
        raise invalid(last.path, "an answer goes on with text; the last turn of the assistant ends with something else")
    if last.text != last.text.rstrip():
        raise invalid(last.path, "final assistant content cannot end with trailing whitespace")


def _user(turn: _Turn, called: Mapping[str, str], conversation: Conversation) -> None:
    unanswered = dict(called)
    num_results = 0
    for part in turn.parts:
        if part.kind == "text":
            break
        num_results += 1
        if (name := unanswered.pop(part.call_id, None)) is None:
            raise invalid(
                part.path,
                f"unexpected `tool_use_id` found in `tool_result` blocks: {part.call_id[:64]}. Each `tool_result` "
                "block must have a corresponding `tool_use` block in the previous message",
            )
        chars, number = len(part.text), len(conversation.messages)
        block = Block(part.kind, part.path, part.control, number, chars, chars, len(part.media))
        conversation.blocks.append(block)
        conversation.media += [replace(one, message=number) for one in part.media]
        message = {"role": "tool", "content": part.text, "tool_call_id": part.call_id, "name": name}
        conversation.messages.append(message)
    texts = turn.parts[num_results:]
    for part in texts:
        if part.kind != "text":
            raise invalid(part.path, "tool_result blocks must come before all other content of the turn")
    if unanswered:
        raise invalid(
            turn.path,
            f"`tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(unanswered)[:200]}. "
            "Each `tool_use` block must have a corresponding `tool_result` block in the next message",
        )
    if texts:
        _add("user", texts, conversation)


def _assistant(turn: _Turn, conversation: Conversation) -> dict[str, str]:
    """Returns the tools that it calls."""
    message = _add("assistant", turn.parts, conversation)
    called: dict[str, str] = {}
    for part in turn.parts:
        if part.call is not None:
            if part.call_id in called:
                raise invalid(f"{part.path}.id", "`tool_use` ids must be unique")
            called[part.call_id] = part.call["function"]["name"]
            message.setdefault("tool_calls", []).append(part.call)
    if thoughts := [part.text for part in turn.parts if part.kind == "thinking" and part.text]:
        message["reasoning_content"] = "\n".join(thoughts)
    if any(part.seal for part in turn.parts):
        message["thoughts"] = list(_seals(turn.parts))
    return called


def _seals(parts: Sequence[Part]) -> Iterator[tuple[int, str]]:
    """Those of thoughts, with the number of the call that they come before; -1: before the text."""
    call = -1
    for part in parts:
        if part.seal:
            yield call, part.seal
        elif part.kind != "thinking":
            call = max(call, 0) + (part.kind == "tool_use")


def _add(role: str, parts: Sequence[Part], conversation: Conversation) -> dict[str, Any]:
    """Adds one message with the texts of these parts, and a block for each of them."""
    number = len(conversation.messages)
    texts: list[str] = []
    chars = num_calls = num_media = 0
    last = max((index for index, part in enumerate(parts) if part.kind == "text"), default=-1)
    for index, part in enumerate(parts):
        place = settled = chars
        if part.kind == "text":
            if texts and part.begins:
                texts.append(BETWEEN_TURNS)
                chars += len(BETWEEN_TURNS)
            texts.append(part.text)
            conversation.media += [replace(one, message=number, chars=chars + one.chars) for one in part.media]
            num_media += len(part.media)
            whole = index == last or part.media
            settled = chars + (len(part.text) if whole else _settled_chars(part.text))
            place = chars = chars + len(part.text)
        if part.kind == "tool_use":
            place, num_calls = num_calls, num_calls + 1
        settled = settled if index < last else place
        conversation.blocks.append(Block(part.kind, part.path, part.control, number, place, settled, num_media))
    message: dict[str, Any] = {"role": role, "content": "".join(texts)}
    conversation.messages.append(message)
    return message


def _settled_chars(text: str) -> int:
    """Characters before the last word, and the blanks before that; all of them where the last word is very long, as in
    writing without blanks. There is something besides blanks in it."""
    before, *last = text.rsplit(maxsplit=1)
    return len(before) if last and len(last[0]) <= MAX_WORD_CHARS else len(text)
