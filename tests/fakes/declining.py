"""Refusals as hosted APIs answer them."""

from __future__ import annotations

from typing import Any

from tests.fakes.upstream import SSE, Told, events, named, said

NO = "I cannot help with that."
CHAT = {"id": "c", "created": 1, "model": "up-1"}
RESPONSE: dict[str, Any] = {"id": "r", "object": "response", "created_at": 1, "model": "up-1", "status": "completed"}
MESSAGE: dict[str, Any] = {"id": "m", "type": "message", "role": "assistant", "model": "up-1", "stop_sequence": None}
EXPLAINED = {"type": "refusal", "category": "bio", "explanation": NO}
USED = {"input_tokens": 1, "output_tokens": 1}


def declines(dialect: str, *, stream: bool) -> Told:
    if dialect == "openai":
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        message = {"role": "assistant", "content": None, "refusal": NO}
        if not stream:
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return said({**CHAT, "object": "chat.completion", "choices": [choice], "usage": usage})
        deltas = [{"role": "assistant"}, {"refusal": NO[:9]}, {"refusal": NO[9:]}]
        ends = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        ends += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        return Told([*events(*({**CHAT, **end} for end in ends)), b"data: [DONE]\n\n"], media=SSE)
    if dialect == "responses":
        part = {"type": "refusal", "refusal": NO}
        item = {"type": "message", "id": "i", "role": "assistant", "status": "completed", "content": [part]}
        whole = {**RESPONSE, "output": [item], "usage": {**USED, "total_tokens": 2}}
        if not stream:
            return said(whole)
        delta = {"type": "response.refusal.delta", "item_id": "i", "output_index": 0, "content_index": 0, "delta": NO}
        return Told(named(delta, {"type": "response.completed", "response": whole}), media=SSE)
    if dialect == "anthropic":
        end = {"stop_reason": "refusal", "stop_sequence": None, "stop_details": EXPLAINED}
        if not stream:
            return said({**MESSAGE, "content": [], **end, "usage": USED})
        begun = {**MESSAGE, "content": [], "stop_reason": None, "usage": USED}
        start = {"type": "message_start", "message": begun}
        return Told(
            named(start, {"type": "message_delta", "delta": end, "usage": USED}, {"type": "message_stop"}), media=SSE
        )
    blocked = {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT", "blockReasonMessage": NO}}
    blocked["usageMetadata"] = {"promptTokenCount": 1, "totalTokenCount": 1}  # type: ignore[dict-item]
    return Told(events(blocked), media=SSE) if stream else said(blocked)
