"""How much a model is to think, in the words of each API; and thoughts of earlier answers, on their way back to the API
that made them. Pure.

    effort  none  minimal    low  medium    high   xhigh     max
    tokens     0      512  1,024   8,192  24,576  32,768  65,536

A client keeps a thought as one opaque text, its signature, and sends it back with the conversation: "a3Yx" and base64
of a JSON object, with what the upstream wants to see again, word for word, and `by`: its API and its model. That text
has a place in every API (a signature, a data field, an encrypted content), and also in those that take nothing but
base64. Signatures of another API or model, which would be refused, are passed over.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.types import ChatPrompt, Effort, Thinking
from gateway.upstreams.translation.base import object_of

BUDGETS: Final[Mapping[Effort, int]] = {
    "none": 0,
    "minimal": 512,
    "low": 1024,
    "medium": 8192,
    "high": 24_576,
    "xhigh": 32_768,
    "max": 65_536,
}
_MARK: Final = "a3Yx"
"""Base64 of "kv1"."""

Json = dict[str, Any]
Thoughts = Mapping[tuple[int, int], list[Json]]
"""What the API that is written for wants to see again, by message and call, as in Thought."""


def effort_of(thinking: Thinking | None) -> Effort | None:
    """Said, or as its budget is: at most "high", because few models know more. None: as the model likes."""
    if thinking is None or thinking.effort is not None or thinking.budget is None:
        return None if thinking is None else thinking.effort
    budget = thinking.budget
    fitting: tuple[Effort, ...] = ("minimal", "low", "medium")
    return next((effort for effort in fitting if budget <= BUDGETS[effort]), "high")


def budget_of(thinking: Thinking) -> int | None:
    """Said, or as its effort is. None: as the model likes."""
    if thinking.budget is not None or thinking.effort is None:
        return thinking.budget
    return BUDGETS[thinking.effort]


def seal(api: str, model: str, content: Json) -> str:
    """The signature of a thought."""
    return _MARK + base64.urlsafe_b64encode(orjson.dumps({"by": [api, model], **content})).decode()


def unseal(signature: str, api: str, model: str) -> Json | None:
    """What the API wants to see again. None for what is none of this API and model."""
    if not signature.startswith(_MARK):
        return None
    try:
        plain = base64.b64decode(signature[len(_MARK) :].translate(_STANDARD), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    content = object_of(plain)
    return content if content is not None and content.pop("by", None) == [api, model] else None


_STANDARD: Final = str.maketrans("-_", "+/")
"""SDKs that read it as bytes may write it in either alphabet."""


def thoughts_of(chat: ChatPrompt, api: str, model: str) -> Thoughts:
    """Those of this API and model."""
    found: dict[tuple[int, int], list[Json]] = {}
    for thought in chat.thoughts:
        if (content := unseal(thought.signature, api, model)) is not None:
            found.setdefault((thought.message, thought.call), []).append(content)
    return found
