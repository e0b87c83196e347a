from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Breakpoint
from gateway.api.anthropic.fingerprint import MAX_MARKS, Change, Fingerprint, PromptPart, compare, same_scope, take
from gateway.config import TenantSettings
from gateway.types import Lease
from tests.fakes.down_store import DownStore
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakeModels, FakePipeline, hello

TOOL: Any = {"name": "weather", "description": "Tells the weather.", "input_schema": {"type": "object"}}
PARTS = [
    PromptPart("tools", "tools[0]", "", "a tool of ours"),
    PromptPart("system", "system[0]", "", "You are the clerk of a small station."),
    PromptPart("messages", "messages[0].content", "user text ", "How many bags may I take?"),
]


def changed(*parts: PromptPart, model: str = "m") -> Change | None:
    before = take("msg_1", "m", "scope", PARTS, 9)
    return compare(Fingerprint.from_json(before.to_json()), "msg_1", model, parts)


def with_text(number: int, text: str) -> list[PromptPart]:
    return [piece._replace(text=text) if at == number else piece for at, piece in enumerate(PARTS)]


def test_nothing_but_messages_at_the_end_is_no_change() -> None:
    assert changed(*PARTS) is None
    assert changed(*PARTS, PromptPart("messages", "messages[1].content", "assistant text ", "Two.")) is None


@pytest.mark.parametrize(
    ("parts", "change"),
    [
        (with_text(1, "You are the clerk of a large station."), Change("system", "system[0]", 6, "large")),
        (with_text(2, "How many bags may you take?"), Change("messages", "messages[0].content", 4, "you")),
        (with_text(2, "How many bags"), Change("messages", "messages[0].content", 3, "")),
        (with_text(2, "How many bags may I take? Please."), Change("messages", "messages[0].content", 6, "Please.")),
        (with_text(2, "How many bags  may I take?"), Change("messages", "messages[0].content")),
        (with_text(0, "a tool of yours"), Change("tools", "tools[0]", 3, "yours")),
        (PARTS[1:], Change("tools", "tools")),
        ([PARTS[0], PARTS[0], *PARTS[1:]], Change("tools", "tools[0]")),
        ([*PARTS[:2], PARTS[2]._replace(kind="assistant text ")], Change("messages", "messages[0].content")),
        (PARTS[:2], Change("messages", "messages")),
        ([*with_text(0, "x")[:1], *with_text(1, "y")[1:]], Change("tools", "tools[0]", 0, "x")),
    ],
)
def test_the_first_change_is_told_with_its_word(parts: list[PromptPart], change: Change) -> None:
    assert changed(*parts) == change


def test_another_model_is_the_first_change_of_all() -> None:
    assert changed(*with_text(1, "x"), model="other") == Change(None)


@given(words=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=40), data=st.data())
def test_the_word_that_was_changed_is_found(words: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(words) - 1))
    other = [*words[:at], words[at] + "X", *words[at + 1 :]]
    piece = PromptPart("system", "system", "", " ".join(words))
    found = compare(take("id", "m", "", [piece], 0), "id", "m", [piece._replace(text=" ".join(other))])
    assert found == Change("system", "system", at, other[at])


def test_in_a_long_prompt_the_place_is_told_to_a_few_words() -> None:
    words = [f"word{number}" for number in range(3 * MAX_MARKS)]
    piece = PromptPart("system", "system", "", " ".join(words))
    before = take("id", "m", "", [piece], 0)
    assert sum(len(marks) for _, _, marks in before.parts) <= 4 * MAX_MARKS
    words[9001] = "other"
    found = compare(before, "id", "m", [piece._replace(text=" ".join(words))])
    assert found == Change("system", "system", 9000, "word9000 other word9002 word9003")


def test_nothing_of_the_text_is_in_a_fingerprint_and_every_message_has_hashes_of_its_own() -> None:
    one, other = (take(message, "model-name", "scope-name", PARTS, 9) for message in ("msg_1", "msg_2"))
    for piece in PARTS:
        for word in (*piece.text.split(), "model-name", "scope-name"):
            assert len(word) < 5 or word.encode() not in one.to_json()
    assert not {digest for _, digest, _ in one.parts} & {digest for _, digest, _ in other.parts}
    assert same_scope(one, "msg_1", "scope-name")
    assert not same_scope(one, "msg_1", "other")


# -- over HTTP --------------------------------------------------------------------------------------------------------

BOOK = "Rule one: two bags. Rule two: no dogs."


def ask(previous: str | None = None, **fields: Any) -> Any:
    return {
        "model": "demo",
        "max_tokens": 4,
        "system": [{"type": "text", "text": BOOK, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Why?"}],
        "diagnostics": {"previous_message_id": previous},
        **fields,
    }


def pipeline(*reads: int, **more: Any) -> FakePipeline:
    """One whose prompts have a breakpoint at 30 of 40 tokens."""
    point = Breakpoint(30, 300.0)
    traced = {"breakpoints": (point,), "kept_tokens": 30, "lease": Lease(0, point), "lease_reads": reads, **more}
    return FakePipeline(traced=traced)


def reason(answer: Any) -> Any:
    return None if answer.diagnostics is None else answer.diagnostics.cache_miss_reason.to_dict()


async def test_a_first_turn_has_no_diagnosis_and_neither_has_one_that_read_everything() -> None:
    async with running(pipeline()) as gateway, gateway.anthropic() as client:
        first = await client.messages.create(**ask())
        assert first.to_dict()["diagnostics"] is None
        gateway.pipeline.traced = pipeline(30).traced
        second = await client.messages.create(**ask(first.id))
        assert second.diagnostics is None
        unasked = ask()
        del unasked["diagnostics"]
        assert "diagnostics" not in (await client.messages.create(**unasked)).to_dict()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"system": BOOK.replace("dogs", "cats")},
            {"type": "system_changed", "path": "system", "word": 7, "text": "cats."},
        ),
        (
            {"messages": [{"role": "user", "content": "How?"}]},
            {"type": "messages_changed", "path": "messages.0.content", "word": 0, "text": "How?"},
        ),
        ({"tools": [TOOL]}, {"type": "tools_changed", "path": "tools.0"}),
        ({"model": "other"}, {"type": "model_changed"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_miss_has_the_reason_and_the_tokens_that_it_cost(fields: Any, told: Any, stream: bool) -> None:
    models = FakeModels([hello(), hello("other")])
    async with running(pipeline(), models) as gateway, gateway.anthropic() as client:
        first = await client.messages.create(**ask())
        if stream:
            async with client.messages.stream(**ask(first.id, **fields)) as events:
                started = await anext(aiter(events))
                assert started.type == "message_start"
                answer: Any = started.message
        else:
            answer = await client.messages.create(**ask(first.id, **fields))
    assert reason(answer) == {**told, "cache_missed_input_tokens": 30}


async def test_moving_a_marker_and_going_on_is_no_change() -> None:
    async with running(pipeline()) as gateway, gateway.anthropic() as client:
        first = await client.messages.create(**ask())
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Why?", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "And?"},
        ]
        gateway.pipeline.traced = pipeline(30).traced
        assert (await client.messages.create(**ask(first.id, system=BOOK, messages=messages))).diagnostics is None


@pytest.mark.parametrize(
    ("traced", "detail"),
    [
        ({}, "the entry has expired, or there was no room to keep it"),
        ({"lease": Lease(1, None), "kept_tokens": 0}, "the entry has expired, or there was no room to keep it"),
        ({"lease_reads": (35,)}, "the entry is further before the breakpoints than the look back goes"),
    ],
)
async def test_an_entry_that_is_gone_is_unavailable_with_the_reason(traced: Any, detail: str) -> None:
    async with running(pipeline()) as gateway, gateway.anthropic() as client:
        first = await client.messages.create(**ask())
        gateway.pipeline.traced = {**pipeline().traced, **traced}
        assert reason(await client.messages.create(**ask(first.id))) == {"type": "unavailable", "detail": detail}


async def test_a_message_that_is_not_remembered_is_not_found_and_another_tenants_neither() -> None:
    tenants = [TenantSettings(name=name, keys=(f"{name}-key",)) for name in ("north", "south")]
    not_found = {"type": "previous_message_not_found"}
    async with (
        running(pipeline(), tenants=tenants) as gateway,
        gateway.anthropic("north-key") as north,
        gateway.anthropic("south-key") as south,
    ):
        assert reason(await north.messages.create(**ask("msg_unknown"))) == not_found
        first = await north.messages.create(**ask())
        assert reason(await south.messages.create(**ask(first.id))) == not_found


async def test_a_store_that_is_down_costs_no_answer() -> None:
    async with running(pipeline(), fingerprints=DownStore()) as gateway, gateway.anthropic() as client:
        first = await client.messages.create(**ask())
        second = await client.messages.create(**ask(first.id))
    assert reason(second) == {"type": "unavailable", "detail": "the store of fingerprints is unreachable"}
