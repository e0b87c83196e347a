"""Cached contents of the Gemini API: what a client asks to keep, until when, and what a prompt becomes that uses it.

What is kept becomes a lease: the prompt is computed up to its end, with a breakpoint there whose time to live is that
of the cached content. Every use sets the breakpoint again, with the time that is left, so that a lease that was lost
is made anew. Pure; cached_contents.py has the handlers.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import orjson

from engine.protocol import Sampling
from gateway.api.call import Call
from gateway.api.fields import anything, invalid, missing, no_effect, refused, shown, table, takes, text, used
from gateway.api.gemini.contents import Message, to_messages
from gateway.api.gemini.parameters import GENERATE
from gateway.api.gemini.proto import given, read
from gateway.api.gemini.tools import strict, tool_use
from gateway.api.gemini.wire import duration, duration_s, timestamp, timestamp_s
from gateway.config import GeminiSettings
from gateway.config import duration_s as setting_s
from gateway.types import CachedContent, ChatPrompt, Lease, Marker

LEAST_S: Final = 1e-3  # of a breakpoint, where a cached content ends while it is used
_KEPT: Final = ("systemInstruction", "contents", "tools", "toolConfig")
_string = text()
_OURS: Final = "The server writes it."
_FIXED: Final = "Only the end of a cached content can be changed."
_TTL: Final = ("string like `3.5s`", "For how long it is kept from now; default `gemini.default_ttl`.")
_EXPIRES: Final = ("RFC 3339 timestamp", "Until when it is kept; not together with `ttl`.")

CREATE: Final = table(
    used("model", _string, "string, required", "Name of a served model, with or without `models/`."),
    *(GENERATE[name] for name in _KEPT),
    used("ttl", duration_s, *_TTL),
    used("expireTime", timestamp_s, *_EXPIRES),
    used("displayName", text(128), "string of up to 128 characters", "For people."),
    *(no_effect(name, anything, "-", _OURS) for name in ("name", "createTime", "updateTime", "usageMetadata")),
    refused("kmsKeyName", "Nothing is encrypted with keys of others."),
)
CHANGE: Final = table(
    used("ttl", duration_s, *_TTL),
    used("expireTime", timestamp_s, *_EXPIRES),
    *(no_effect(name, anything, "-", _OURS) for name in ("name", "createTime", "updateTime", "usageMetadata")),
    *(refused(name, _FIXED) for name in ("model", "displayName", *_KEPT)),
)


@takes({"type": "string"})
def check_mask(value: Any, path: str) -> str:
    """An updateMask: the fields that a change is about."""
    for name in _string(value, path).split(","):
        if name not in ("ttl", "expireTime", "expire_time", "*", ""):
            raise invalid(path, f"'{shown(name)}' cannot be changed")
    return str(value)


MASK: Final = table(
    used("updateMask", check_mask, "`ttl` or `expireTime`", "What is changed; the body says it as well."),
)


def new_name() -> str:
    """Unguessable."""
    return secrets.token_hex(16)


def kept_part(body: dict[str, Any], limits: GeminiSettings) -> bytes:
    """What of a checked body is kept, as it came. Raises BadRequestError when it is too large."""
    found = given(body, CREATE)
    kept = orjson.dumps({name: found[name] for name in _KEPT if name in found})
    if len(kept) > limits.max_content_bytes:
        raise invalid("contents", f"{len(kept)} bytes of JSON, and {limits.max_content_bytes} are possible")
    return kept


def kept_values(content: CachedContent) -> dict[str, Any]:
    """The checked values of what was kept."""
    return read(orjson.loads(content.body), GENERATE)


def expires_s(values: dict[str, Any], now_s: float, limits: GeminiSettings, *, default: bool) -> float:
    """When it ends, in seconds since 1970. Raises BadRequestError for a time that is too near or too far, and for
    none where there is no default."""
    if "ttl" in values and "expireTime" in values:
        raise invalid("expireTime", "it is there besides 'ttl'")
    if "ttl" in values:
        path, ttl_s = "ttl", values["ttl"]
    elif "expireTime" in values:
        path, ttl_s = "expireTime", values["expireTime"] - now_s
    elif default:
        path, ttl_s = "ttl", setting_s(limits.default_ttl)
    else:
        raise missing("ttl")
    least_s = setting_s(limits.min_ttl)
    if not least_s <= ttl_s <= limits.longest_s:
        possible = f"{duration(least_s)} to {duration(limits.longest_s)} (gemini.max_ttl)"
        raise invalid(path, f"it is {duration(ttl_s)} from now, and may be {possible}")
    return in_ms(now_s + ttl_s)


def in_ms(seconds: float) -> float:
    """To the millisecond, which is what every store keeps: a time is told the same whenever it is asked for."""
    return round(seconds, 3)


def marker(values: dict[str, Any], ttl_s: float) -> Marker:
    """The breakpoint at the end of what is kept: it begins every prompt that uses it."""
    messages = _messages(values)
    return Marker(len(messages) - 1, len(messages[-1]["content"]), max(ttl_s, LEAST_S))


def _messages(values: dict[str, Any]) -> list[Message]:
    messages = to_messages(values.get("systemInstruction"), values.get("contents", ()))
    if not messages:
        raise missing("contents")
    return messages


def prefix_call(model: str, values: dict[str, Any], ttl_s: float) -> Call:
    """Computes what is kept, and generates nothing. Raises BadRequestError for what no request could use."""
    declared = strict(values.get("tools", ()), values.get("toolConfig", {}))
    tool_use(declared, values.get("toolConfig", {}), "toolConfig")
    prompt = ChatPrompt(
        _messages(values),
        add_generation_prompt=False,
        markers=(marker(values, ttl_s),),
        tools=declared,
    )
    return Call(model=model, prompts=(prompt,), prompt_param="contents", sampling=Sampling(max_tokens=0), prewarm=True)


def resource_json(content: CachedContent, lease: Lease | None = None) -> dict[str, Any]:
    """The resource; its contents are never told. `cacheLease` is ours, and there when an engine was just asked."""
    return {
        "name": f"cachedContents/{content.name}",
        "model": f"models/{content.model}",
        **({"displayName": content.display_name} if content.display_name else {}),
        "createTime": timestamp(content.created_s),
        "updateTime": timestamp(content.updated_s),
        "expireTime": timestamp(content.expires_s),
        "usageMetadata": {"totalTokenCount": content.tokens},
        **({"cacheLease": lease.state} if lease is not None else {}),
    }
