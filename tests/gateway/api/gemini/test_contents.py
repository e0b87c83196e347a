from __future__ import annotations

from typing import Any

import pytest

from gateway.api.gemini.contents import content, contents, instruction, to_messages
from gateway.errors import BadRequestError, UnsupportedError


def messages(*turns: Any, system: str | None = None) -> list[dict[str, Any]]:
    return to_messages(system, contents(list(turns), "contents")).messages


def text(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"text": one} for one in texts]}


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": {"of": name}, **more}}


def returned(name: str, **more: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"result": 1}, **more}}


def test_turns_become_messages_and_the_texts_of_one_are_joined() -> None:
    assert messages(text("user", "a", "b"), text("model", "c"), {"parts": [{"text": "d"}]}, system="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]


def test_pieces_of_one_answer_are_one_message() -> None:
    pieces = [text("model", "a"), {"role": "model", "parts": [called("f")]}, text("model", "b", "")]
    (told,) = messages(*pieces)
    assert (told["role"], told["content"], len(told["tool_calls"])) == ("assistant", "ab", 1)


@pytest.mark.parametrize("role", ["user", "model"])
def test_the_fast_path_of_plain_turns_reads_as_the_slow_one_does(role: str) -> None:
    plain = text(role, "a")
    assert contents([plain], "contents") == [content(plain, "contents[0]")]
    assert contents(plain, "contents") == [content(plain, "contents[0]")]


def test_calls_and_responses_get_ids_in_their_order() -> None:
    told = messages(
        {"role": "model", "parts": [{"text": "Let me see."}, called("f"), called("f"), called("g", id="mine")]},
        {"role": "user", "parts": [returned("f"), returned("g", id="mine"), {"text": "Well?"}]},
        {"role": "function", "parts": [returned("f")]},
    )
    assert told[0]["content"] == "Let me see."
    assert [call["id"] for call in told[0]["tool_calls"]] == ["call00001", "call00002", "mine"]
    assert told[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"of": "f"}}
    assert [(one["role"], one.get("tool_call_id"), one["content"]) for one in told[1:]] == [
        ("tool", "call00001", '{"result":1}'),
        ("tool", "mine", '{"result":1}'),
        ("user", None, "Well?"),
        ("tool", "call00002", '{"result":1}'),
    ]


def test_thoughts_are_left_out_and_their_signatures_kept_apart() -> None:
    thought = {"text": "hm", "thought": True, "thoughtSignature": "eA=="}
    (message,) = messages({"role": "model", "parts": [thought, {"text": "a"}]})
    assert message == {"role": "assistant", "content": "a", "thoughts": [(-1, "eA==")]}
    assert messages({"role": "model", "parts": [thought]}) == []


def test_a_system_instruction_is_text() -> None:
    assert instruction({"role": "user", "parts": [{"text": "a"}, {"text": "b"}]}, "systemInstruction") == "ab"
    assert instruction({"parts": {"text": "a"}}, "systemInstruction") == "a"
    with pytest.raises(BadRequestError) as refused:
        instruction({"parts": [called("f")]}, "systemInstruction")
    assert refused.value.param == "systemInstruction.parts[0]"


@pytest.mark.parametrize(
    ("turn", "path"),
    [
        ({"role": "system", "parts": [{"text": "a"}]}, "contents[0].role"),
        ({"role": "user"}, "contents[0].parts"),
        ({"role": "user", "parts": []}, "contents[0].parts"),
        ({"role": "user", "parts": [{}]}, "contents[0].parts[0]"),
        (
            {"role": "user", "parts": [{"text": "a"}, {"text": "a", "functionCall": {"name": "f"}}]},
            "contents[0].parts[1]",
        ),
        ({"role": "user", "parts": [called("f")]}, "contents[0].parts[0]"),
        ({"role": "model", "parts": [{"text": "a"}, returned("f")]}, "contents[0].parts[1]"),
        ({"role": "model", "parts": [{"functionCall": {"args": {}}}]}, "contents[0].parts[0].functionCall.name"),
        ({"role": "model", "parts": [called("f", args=[])]}, "contents[0].parts[0].functionCall.args"),
        ({"parts": [{"text": 3}]}, "contents[0].parts[0].text"),
        ({"parts": [{"txt": ""}]}, "contents[0].parts[0].txt"),
    ],
)
def test_what_is_no_turn_is_refused_with_its_path(turn: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        messages(turn)
    assert refused.value.param == path


@pytest.mark.parametrize("kind", ["executableCode", "codeExecutionResult", "videoMetadata"])
def test_code_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        messages(text("user", "a"), {"role": "user", "parts": [{kind: {"mimeType": "image/png"}}]})
    assert str(refused.value.param).startswith("contents[1].parts[0].")
