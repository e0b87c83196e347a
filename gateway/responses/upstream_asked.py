"""Requests to upstreams, as the response cache sees them (Asked in base.py). Pure.

Their bodies are JSON that others define. A text of which is not known for certain that it is the user's last one, or a
request that may be for more than a text, has the exact cache alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from gateway.responses.asked import owner_of
from gateway.responses.base import Situation
from gateway.responses.upstream_key import (
    CALLED,
    include_usage,
    is_large,
    route_of,
    sampling_of,
    situation_digest,
    streams,
    upstream_key,
)
from gateway.responses.upstream_recording import Form
from gateway.types import Replay, Reuse, UpstreamRequest

MAX_MODEL_CHARS: Final = 256
"""Of a model's name that questions are kept under: where a pattern matches, clients choose it."""

TIERS: Final = ("service_tier", "priority")
"""Names in a body that say how long an answer may take, and nothing of what it says."""

MAX_SECTION_NAMES: Final = 256
"""Of a body or a section of it. One with more is for no API, and not looked through."""

DEFAULT_TEMPERATURE: Final = 1.0
"""What the APIs take for a request that says none."""


class _Chat(NamedTuple):
    """How a route writes chats.

    turns  name of the list of them
    parts  name of what a turn says: a text, where `texts` has types, or parts
    texts  types of the parts that are texts; where parts have no types, a text is all that such a part has
    alone  whether a text may stand in the place of the turns
    """

    turns: str
    parts: str
    texts: frozenset[str]
    alone: bool = False


_CHATS: Final[Mapping[str, _Chat]] = {
    "/v1/chat/completions": _Chat("messages", "content", frozenset(("text",))),
    "/v1/messages": _Chat("messages", "content", frozenset(("text",))),
    "/v1/responses": _Chat("input", "content", frozenset(("input_text", "output_text")), alone=True),
    ":generateContent": _Chat("contents", "parts", frozenset()),
}
"""By route, as upstream_key.route_of calls it."""

_SPEAKERS: Final = frozenset(("user", "assistant", "model", "system", "developer"))
"""Who says texts. What tools say is something else."""

_MORE_THAN_TEXT: Final = ("tool_calls", "function_call", "audio")
"""Of a turn."""

_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "bestof": (1,),
    "candidatecount": (1,),
    "format": ({"type": "text"},),
    "grammar": (),
    "guidedchoice": (),
    "guidedgrammar": (),
    "guidedjson": (),
    "guidedregex": (),
    "include": ([],),
    "jsonschema": (),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "outputformat": (),
    "promptlogprobs": (),
    "responseformat": ({"type": "text"},),
    "responsejsonschema": (),
    "responselogprobs": (False,),
    "responsemimetype": ("text/plain",),
    "responsemodalities": (["TEXT"],),
    "responseschema": (),
    "speechconfig": (),
    "structuredoutputs": (),
    "toplogprobs": (0,),
}
"""Names that ask for more than one text or another form of it, in small letters and without underscores -> what they
may say nevertheless, besides null."""

_SECTIONS: Final = ("generationConfig", "generation_config", "output_config", "text")
"""Of a body, that have such names, too."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class UpstreamAsked:
    """See Asked.

    replay  converts answers of its route
    form    in which it wants its answer
    whose   which upstreams and models answer it
    tiers   digest of how long its answer may take
    """

    request: UpstreamRequest
    replay: Replay
    form: Form
    whose: str
    key: bytes
    owner: str
    tiers: bytes

    @classmethod
    def of(cls, request: UpstreamRequest, replay: Replay, whose: str) -> UpstreamAsked:
        form = Form(streams(request), streams(request) and include_usage(request))
        tiers = hashlib.sha256(orjson.dumps([request.values.get(name) for name in TIERS])).digest()
        return cls(request, replay, form, whose, upstream_key(request, whose), owner_of(request.owner), tiers)

    @property
    def tenant(self) -> str:
        return self.request.tenant.name

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def reuse(self) -> Reuse:
        return self.request.reuse

    @property
    def work(self) -> int:
        return self.request.work

    def find_unfit(self, max_temperature: float) -> str | None:
        """See Asked."""
        values = self.request.values
        if any(values.get(name) not in (None, []) for name in CALLED):
            return "tools"
        sections = [values, *(values[name] for name in _SECTIONS if isinstance(values.get(name), dict))]
        if len(self.request.model) > MAX_MODEL_CHARS or not all(map(_is_plain, sections)):
            return "form"
        temperature = sampling_of(values).get("temperature")
        if temperature is None:
            temperature = DEFAULT_TEMPERATURE
        return None if type(temperature) in (int, float) and temperature <= max_temperature else "sampling"

    def find_situation(self) -> Situation | None:
        """See Asked. None as well for a chat in which there is anything but text, and for a large one."""
        chat = None if is_large(self.request) else _CHATS.get(route_of(self.request))
        cut = None if chat is None else _cut(self.request.values, chat)
        if cut is None:
            return None
        text, without = cut
        return Situation(situation_digest(self.request, without, self.whose), text)


def _is_plain(section: Mapping[str, Any]) -> bool:
    """Whether nothing in it asks for more than one text."""
    return len(section) <= MAX_SECTION_NAMES and all(
        value is None or value in _PLAIN.get(name.replace("_", "").lower(), (value,)) for name, value in section.items()
    )


def _cut(values: Mapping[str, Any], chat: _Chat) -> tuple[str, dict[str, Any]] | None:
    """What the user said last, and everything else."""
    turns = values.get(chat.turns)
    if chat.alone and isinstance(turns, str):
        return turns, {**values, chat.turns: None}
    if not isinstance(turns, list) or not turns or not all(_says_texts(turn, chat) for turn in turns):
        return None
    *before, last = turns
    if last.get("role", "user") != "user":
        return None
    said = last[chat.parts]
    if isinstance(said, str):
        text, emptied = said, None
    else:
        *parts, part = said
        text, emptied = part["text"], [*parts, {**part, "text": None}]
    return text, {**values, chat.turns: [*before, {**last, chat.parts: emptied}]}


def _says_texts(turn: Any, chat: _Chat) -> bool:
    """Whether a turn is somebody's who says texts, and nothing else."""
    if not isinstance(turn, dict) or str(turn.get("role", "user")) not in _SPEAKERS:
        return False
    if turn.get("type", "message") != "message" or any(turn.get(name) for name in _MORE_THAN_TEXT):
        return False
    said = turn.get(chat.parts)
    if isinstance(said, str):
        return bool(chat.texts)
    return isinstance(said, list) and bool(said) and all(_is_text(part, chat) for part in said)


def _is_text(part: Any, chat: _Chat) -> bool:
    if not isinstance(part, dict) or type(part.get("text")) is not str:
        return False
    return str(part.get("type")) in chat.texts if chat.texts else not set(part) - {"text", "thoughtSignature"}
