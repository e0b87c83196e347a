"""Log probabilities as the OpenAI dialect writes them: a list of objects for chats, parallel lists for completions.

Values in, values for JSON out. response.py puts them into bodies and chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.types import ScoredToken, Spelled


def chat_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: `token` is for reading, `bytes` is exact."""
    content = [
        {
            **_entry(one.token, one.logprob),
            "top_logprobs": [_entry(token, logprob) for token, logprob in one.top],
        }
        for one in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    scored: Sequence[ScoredToken], before: int, prompt: Sequence[ScoredToken] = ()
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `before` is how many characters of the choice's text are not the answer's.

    The chosen token is among `top_logprobs`, also where it was not among the likeliest. Tokens of the prompt come
    first, and the first of them has null for both: nothing comes before it.
    """
    if prompt:
        scores = completion_logprobs(prompt, 0)
        scores["token_logprobs"][0] = scores["top_logprobs"][0] = None
        answer = completion_logprobs(scored, before)
        return {key: values + answer[key] for key, values in scores.items()}
    return {
        "tokens": [_name(one.token) for one in scored],
        "token_logprobs": [one.logprob for one in scored],
        "top_logprobs": [
            {_name(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))} for one in scored
        ],
        "text_offset": [before + one.offset for one in scored],
    }


def _entry(token: Spelled, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": logprob, "bytes": None if token.bytes is None else list(token.bytes)}


def _name(token: Spelled) -> str:
    """Its text; a token that is no text by itself is told by its bytes, as this route always did."""
    if token.bytes is None or token.bytes == token.text.encode():
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)
