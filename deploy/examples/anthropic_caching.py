"""Prompt caching with the anthropic SDK, as its documentation has it, against a server of your own:

    python deploy/examples/anthropic_caching.py [URL] [MODEL] [KEY]

A long system prompt is marked with cache_control. The first question writes it to the cache, the next ones read it, and
a question whose system prompt has one other word is told which one.
"""

from __future__ import annotations

import sys
from typing import Any

import anthropic

HANDBOOK = " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(1, 61)
)


def main(url: str = "http://127.0.0.1:8080", model: str = "demo", key: str = "none") -> None:
    """Asks four questions and prints what the cache did for each."""
    client = anthropic.Anthropic(base_url=url, api_key=key)
    previous: str | None = None

    def ask(question: str, handbook: str = HANDBOOK) -> Any:
        nonlocal previous
        answer: Any = client.messages.create(
            model=model,
            max_tokens=16,
            system=[{"type": "text", "text": handbook, "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": question}],
            diagnostics={"previous_message_id": previous},
        )
        previous = answer.id
        usage, total = answer.usage, answer.usage.input_tokens
        total += usage.cache_creation_input_tokens + usage.cache_read_input_tokens
        print(
            f"{question:26} {total:5} tokens: {usage.cache_creation_input_tokens:5} created, "
            f"{usage.cache_read_input_tokens:5} read, {usage.input_tokens:3} others"
        )
        return answer

    ask("How many bags may I take?")
    ask("And my dog?")
    ask("Who made these rules?")
    answer = ask("Is that so?", HANDBOOK.replace("Rule 7: a passenger", "Rule 7: a traveller"))
    print("why:", answer.diagnostics.cache_miss_reason.to_dict())


if __name__ == "__main__":
    main(*sys.argv[1:4])
