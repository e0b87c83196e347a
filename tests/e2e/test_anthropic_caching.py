"""cache_control with the real anthropic SDK against `kvasir serve` and the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.fakes import vllm_fleet
from tests.fakes.server import Server

BOOK = " ".join(f"Rule {number}: a passenger of class {number % 3} may take {number % 5} bags." for number in range(40))
MARK: Any = {"cache_control": {"type": "ephemeral"}}
HOUR: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory, replicas: vllm_fleet.Replicas | None) -> Iterator[Server]:
    """A server on which a model has a least length."""
    flags = ("--anthropic-min-cache-tokens", "64")
    with vllm_fleet.serving(
        tmp_path_factory.mktemp("caching"), replicas, *flags, engine=(*vllm_fleet.DEMO, str(64 << 20))
    ) as running:
        yield running[0]


def text(said: str, **fields: Any) -> Any:
    return {"type": "text", "text": said, **fields}


def create(server: Server, messages: list[Any], **fields: Any) -> anthropic.types.Message:
    """An answer whose figures of input tokens add up to what counting says."""
    asked: Any = {"model": "demo", "messages": messages, **fields}
    answer = server.anthropic().messages.create(**{"max_tokens": 4, **asked})
    asked.pop("max_tokens", None)
    counted = server.anthropic().messages.count_tokens(**asked).input_tokens
    assert sum(figures(answer)) == counted
    return answer


def figures(answer: anthropic.types.Message) -> tuple[int, int, int]:
    """input, created, read; the two times to live add up."""
    usage = answer.usage
    assert usage.cache_creation is not None
    created = usage.cache_creation.ephemeral_5m_input_tokens + usage.cache_creation.ephemeral_1h_input_tokens
    assert usage.cache_creation_input_tokens == created
    return usage.input_tokens, created, usage.cache_read_input_tokens or 0


def user(*content: Any) -> Any:
    return {"role": "user", "content": list(content)}


def test_what_the_first_creates_is_exactly_what_the_next_reads(caching: Server) -> None:
    system = [text(f"Exactly. {BOOK}", **MARK)]
    first = figures(create(caching, [user(text("How many bags?"))], system=system))
    second = figures(create(caching, [user(text("And which class?"))], system=system))
    assert first[1] > 200
    assert first[2] == 0
    assert second[1:] == (0, first[1])


def test_without_a_marker_nothing_is_told_of_the_cache(caching: Server) -> None:
    messages = [user(text(f"Unmarked. {BOOK}"))]
    assert figures(create(caching, messages))[1:] == (0, 0)
    assert figures(create(caching, messages))[1:] == (0, 0)


@pytest.mark.parametrize("end", ["", " ", "\n", ".\n"])
def test_whatever_follows_a_marked_text_what_was_created_is_read(caching: Server, end: str) -> None:
    book = text(f"Ends {end!r}. {BOOK}{end}", **MARK)
    created = figures(create(caching, [user(book, text("Why?"))]))[1]
    assert created > 200
    for question in ("ly?", "\n\nWhy?", " Why?", "...", "7"):
        assert figures(create(caching, [user(book, text(question))]))[1:] == (0, created)


def test_a_prefix_below_the_least_length_is_ignored(caching: Server) -> None:
    for _ in range(2):
        answer = create(caching, [user(text("Too short to be cached.", **MARK), text("Why?"))])
        assert figures(answer)[1:] == (0, 0)
        assert "cache_lease" not in answer.usage.to_dict()


def test_each_breakpoint_counts_with_its_time_to_live(caching: Server) -> None:
    system = [text(f"Lifetimes. {BOOK}", **HOUR)]
    answer = create(caching, [user(text(BOOK, **MARK), text("Why?"))], system=system)
    created = answer.usage.cache_creation
    assert created is not None
    assert created.ephemeral_1h_input_tokens > 200
    assert created.ephemeral_5m_input_tokens > 200
    again = create(caching, [user(text(f"Other. {BOOK}", **MARK), text("Why?"))], system=system)
    assert again.usage.cache_read_input_tokens == created.ephemeral_1h_input_tokens
    assert again.usage.cache_creation is not None
    assert again.usage.cache_creation.ephemeral_1h_input_tokens == 0


def test_a_conversation_with_an_automatic_marker_reads_what_its_last_turn_created(caching: Server) -> None:
    control: Any = {"type": "ephemeral"}
    messages = [user(text(f"Automatic. {BOOK}"))]
    before = 0
    for question in ("Why?", "How?", "When?"):
        answer = create(caching, messages, cache_control=control)
        _, created, read = figures(answer)
        assert read == before
        assert created > 0
        before = read + created
        messages = [*messages, {"role": "assistant", "content": answer.content or "Yes."}, user(text(question))]


def test_an_entry_counts_up_to_twenty_blocks_before_a_marker(caching: Server) -> None:
    blocks = [text(f"Block {number} of the look back.\n" * 6) for number in range(30)]

    def marked(last: int) -> Any:
        return [user(*blocks[:last], {**blocks[last], **MARK})]

    created = figures(create(caching, marked(4)))[1]
    assert created > 64
    far = figures(create(caching, marked(24)))
    assert far[2] == 0, "block 4 is the twenty-first, counted from the marked one"
    assert figures(create(caching, marked(24)))[2] == far[1]
    near = [text("Near.\n" * 20), *blocks]
    entry = figures(create(caching, [user(*near[:4], {**near[4], **MARK})]))[1]
    assert figures(create(caching, [user(*near[:23], {**near[23], **MARK})]))[2] == entry


def test_tools_and_tool_calls_are_cached(caching: Server) -> None:
    tools = [{**TOOL, "description": f"Tells the weather. {BOOK}", **MARK}]
    first = figures(create(caching, [user(text("Hello."))], tools=tools))
    assert first[1] > 200
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": f"Oslo {BOOK}"}, **MARK}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": f"Rain. {BOOK}", **MARK}
    turns = [user(text("Rain?")), {"role": "assistant", "content": [call]}, user(result)]
    second = figures(create(caching, turns, tools=tools))
    assert second[2] == first[1]
    third = figures(
        create(caching, [*turns, {"role": "assistant", "content": "Yes."}, user(text("Sure?"))], tools=tools)
    )
    assert third[1:] == (0, first[1] + second[1])


def test_prewarming_creates_what_the_question_reads(caching: Server) -> None:
    system = [text(f"Prewarmed. {BOOK}", **MARK)]
    warm = create(caching, [user(text("warmup"))], system=system, max_tokens=0)
    assert (warm.content, warm.stop_reason, warm.usage.output_tokens) == ([], "max_tokens", 0)
    created = figures(warm)[1]
    assert created > 200
    assert figures(create(caching, [user(text("How many?"))], system=system))[1:] == (0, created)


def test_a_stream_tells_the_figures_at_its_beginning(caching: Server) -> None:
    asked: Any = {"model": "demo", "max_tokens": 4, "messages": [user(text(f"Streamed. {BOOK}", **MARK), text("Why?"))]}
    created = figures(caching.anthropic().messages.create(**asked))[1]
    events = list(caching.anthropic().messages.create(**asked, stream=True))
    assert events[0].type == "message_start"
    assert figures(events[0].message)[1:] == (0, created)


def test_both_apis_share_what_they_cache(caching: Server) -> None:
    book = f"Shared. {BOOK}"
    created = figures(create(caching, [user(text(book, **MARK), text("Why?"))]))[1]
    other = caching.client().chat.completions.create(
        model="demo", max_tokens=2, messages=[{"role": "user", "content": f"{book}How?"}]
    )
    assert other.usage is not None
    assert other.usage.prompt_tokens_details is not None
    assert (other.usage.prompt_tokens_details.cached_tokens or 0) >= created


def test_a_miss_is_explained_to_the_word(caching: Server) -> None:
    def ask_about(book: str, previous: str | None) -> Any:
        fields: Any = {"system": [text(f"Explained. {book}", **MARK)], "diagnostics": {"previous_message_id": previous}}
        messages: Any = [user(text("Why?"))]
        return caching.anthropic().messages.create(model="demo", max_tokens=4, messages=messages, **fields)

    first = ask_about(BOOK, None)
    second = ask_about(BOOK, first.id)
    assert (first.to_dict()["diagnostics"], second.diagnostics) == (None, None)
    assert figures(second)[2] == figures(first)[1]
    third = ask_about(BOOK.replace("of class 1", "of rank 1", 1), second.id)
    assert third.diagnostics is not None
    assert third.diagnostics.cache_miss_reason.to_dict() == {
        "type": "system_changed",
        "cache_missed_input_tokens": figures(first)[1],
        "path": "system.0",
        "word": BOOK.split().index("1:") + 5,
        "text": "rank",
    }


def test_where_there_is_no_room_to_keep_a_prefix_nothing_is_claimed(no_room: Server) -> None:
    answer = create(no_room, [user(text(f"Room. {BOOK}", **MARK), text("Why?"))])
    assert figures(answer)[1:] == (0, 0)
    assert answer.usage.to_dict()["cache_lease"] == "degraded"


def test_the_example_shows_creation_reads_and_the_reason_of_a_miss(caching: Server) -> None:
    script = Path(__file__).parents[2] / "deploy/examples/anthropic_caching.py"
    done = subprocess.run(
        [sys.executable, str(script), caching.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    *asked, why = done.stdout.splitlines()
    told = [tuple(map(int, re.findall(r"(\d+) (?:created|read)", line))) for line in asked]
    size = told[0][0]
    assert size > 500
    assert told[:3] == [(size, 0), (0, size), (0, size)]
    assert told[3][0] > 500
    assert told[3][1] == 0
    for part in ("'system_changed'", f"'cache_missed_input_tokens': {size}", "'path': 'system.0'", "'traveller'"):
        assert part in why
