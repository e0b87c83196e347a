"""The response object of the Responses API. Pure values for JSON; shape.py fills them in, piece by piece."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

from gateway.api.dialect import printable
from gateway.api.openai.response import chat_logprobs
from gateway.api.openai.responses.request import ResponsesRequest
from gateway.api.openai.responses.tools import Tools
from gateway.config import LeaseSettings, duration_s
from gateway.errors import KvasirError
from gateway.types import ScoredToken, Tier, Usage

REPORTED_TTLS: Final = ("30m", "12h")
"""Whose tokens are always told; those of others only where there are any."""

_RATE_LIMITED: Final = 429


def new_token() -> str:
    """What the ids of a response and of its items have in common."""
    return secrets.token_hex(16)


def new_response(query: ResponsesRequest, token: str, tier: Tier, leases: LeaseSettings) -> dict[str, Any]:
    """All its fields. Parameters are told as they were asked for, or with what holds without them."""
    values, body = query.values, query.body
    return {
        "id": f"resp_{token}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": values.get("background", False),
        "error": None,
        "incomplete_details": None,
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": values.get("metadata", {}),
        "model": values["model"],
        "output": [],
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": values.get("previous_response_id"),
        "prompt_cache_diagnostics": None,
        "prompt_cache_options": _options(query, leases),
        "prompt_cache_key": values.get("prompt_cache_key"),
        "prompt_cache_retention": body.get("prompt_cache_retention"),
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": tier,
        "store": False,
        "temperature": values.get("temperature", 1.0),
        "text": {"format": {"type": "text"}, "verbosity": "medium"}
        | {key: value for key, value in (body.get("text") or {}).items() if value is not None},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": list(values.get("tools", Tools()).published),
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": values.get("top_p", 1.0),
        "truncation": values.get("truncation", "disabled"),
        "usage": None,
        "user": user if type(user := body.get("user")) is str else None,
    }


def _options(query: ResponsesRequest, leases: LeaseSettings) -> dict[str, Any] | None:
    """Those that were applied. Without any, nothing is kept on purpose."""
    options = query.values.get("prompt_cache_options")
    if options is None:
        return None
    return {
        "mode": options.get("mode", "implicit"),
        "ttl": options.get("ttl", leases.default_ttl),
        "comparison_response_id": options.get("comparison_response_id"),
    }


def failed_response(response: dict[str, Any], error: KvasirError) -> dict[str, Any]:
    """The same, failed."""
    error_json = {"code": error_code(error), "message": printable(error.message)}
    return {**response, "status": "failed", "error": error_json}


def usage_json(usage: Usage, leases: LeaseSettings) -> dict[str, Any]:
    """input_tokens is the whole prompt, cached and written tokens included."""
    details: dict[str, Any] = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    if usage.lease_writes:
        details["cache_write_tokens_details"] = _writes_json(usage, leases)
    if usage.lease:
        details["cache_lease"] = usage.lease
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _writes_json(usage: Usage, leases: LeaseSettings) -> dict[str, int]:
    by_ttl = {}
    for ttl in dict.fromkeys((*REPORTED_TTLS, *leases.ttls, leases.default_ttl)):
        tokens = sum(tokens for ttl_s, tokens in usage.lease_writes if ttl_s == duration_s(ttl))
        if tokens or ttl in REPORTED_TTLS:
            by_ttl[f"ttl_{ttl}_tokens"] = tokens
    return by_ttl


def logprobs_json(scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """As chats have them, but for special tokens, which have no bytes: no list is an empty one here."""
    if not scored:
        return []
    content: list[dict[str, Any]] = chat_logprobs(scored)["content"]
    for entry in content:
        for one in (entry, *entry["top_logprobs"]):
            one["bytes"] = one["bytes"] or []
    return content


def error_code(error: KvasirError) -> str:
    """Of the few that the SDK's type knows."""
    if error.status == _RATE_LIMITED:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
