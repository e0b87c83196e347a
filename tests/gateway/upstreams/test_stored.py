"""Which ids a request names, and which an answer says were made."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.errors import BadRequestError
from gateway.upstreams.stored import MAX_CREATED, MAX_IDS, created_ids, named_ids

NAMED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"previous_response_id": "resp_1"}, {"resp_1": "previous_response_id"}),
    ({"previous_response_id": None, "conversation": None, "container": None}, {}),
    ({"conversation": "conv_1"}, {"conv_1": "conversation"}),
    ({"conversation": {"id": "conv_1"}}, {"conv_1": "conversation.id"}),
    (
        {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
        {"resp_1": "prompt_cache_options.comparison_response_id"},
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]},
        {"file-1": "input[0].content[0].file_id"},
    ),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}, {"id": "rs_1"}]},
        {"msg_1": "input[0].id", "rs_1": "input[1].id"},
    ),
    (
        {
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "image_generation_call", "id": "ig_1"},
            ]
        },
        {"rs_1": "input[0].id", "ig_1": "input[1].id"},
    ),
    (
        {
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                {"type": "message", "id": "msg_1", "role": "assistant", "content": []},
                {"id": "msg_2", "role": "assistant", "content": "x"},
                {
                    "type": "function_call",
                    "id": "fc_1",
                    "call_id": "c",
                    "name": "f",
                    "arguments": '{"file_id": "file-1"}',
                },
            ]
        },
        {},
    ),
    (
        {
            "tools": [
                {"type": "code_interpreter", "container": "cntr_1"},
                {"type": "file_search", "vector_store_ids": ["vs_1", "vs_2"]},
            ]
        },
        {
            "cntr_1": "tools[0].container",
            "vs_1": "tools[1].vector_store_ids[0]",
            "vs_2": "tools[1].vector_store_ids[1]",
        },
    ),
    (
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}]},
        {"file-1": "tools[0].container.file_ids[0]"},
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
        {"file-1": "messages[0].content[0].file.file_id"},
    ),
    ({"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, {"audio_1": "messages[0].audio.id"}),
    ({"audio": {"voice": "alloy", "format": "wav"}}, {}),
    (
        {"messages": [{"content": [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}]}]},
        {"file_1": "messages[0].content[0].source.file_id"},
    ),
    ({"container": {"id": "container_1", "skills": [{"skill_id": "pptx"}]}}, {"container_1": "container.id"}),
    (
        {
            "messages": [
                {"content": [{"type": "tool_use", "id": "t", "input": {"file_id": "file_1", "container": "x"}}]}
            ]
        },
        {},
    ),
    ({"cachedContent": "cachedContents/1"}, {"cachedContents/1": "cachedContent"}),
    (
        {
            "contents": [
                {"parts": [{"fileData": {"fileUri": "https://generativelanguage.googleapis.com/v1beta/files/a"}}]}
            ]
        },
        {"https://generativelanguage.googleapis.com/v1beta/files/a": "contents[0].parts[0].fileData.fileUri"},
    ),
    (
        {"contents": [{"parts": [{"file_data": {"file_uri": "files/a"}}]}]},
        {"files/a": "contents[0].parts[0].file_data.file_uri"},
    ),
    ({"contents": [{"parts": [{"fileData": {"fileUri": "https://www.youtube.com/watch?v=1"}}]}]}, {}),
    ({"contents": [{"parts": [{"functionCall": {"name": "f", "args": {"file_id": "x"}}}]}]}, {}),
    ({"metadata": {"conversation": "mine"}, "tools": [{"parameters": {"properties": {"container": {"id": "x"}}}}]}, {}),
]


@pytest.mark.parametrize(("body", "ids"), NAMED, ids=lambda value: str(value)[:60])
def test_ids_are_found_where_the_apis_have_them(body: dict[str, Any], ids: dict[str, str]) -> None:
    assert {one.id: one.path for one in named_ids(body)} == ids


def test_a_request_may_name_only_so_many() -> None:
    items = [{"type": "item_reference", "id": f"msg_{number}"} for number in range(MAX_IDS + 1)]
    assert len(named_ids({"input": items[:-1]})) == MAX_IDS
    with pytest.raises(BadRequestError):
        named_ids({"input": items})
    with pytest.raises(BadRequestError):
        named_ids({"file_ids": [f"file-{number}" for number in range(MAX_IDS + 1)]})


@pytest.mark.parametrize(
    ("told", "ids"),
    [
        ({"type": "response.created", "response": {"id": "resp_1", "output": []}}, ["resp_1"]),
        ({"type": "response.output_item.added", "item": {"id": "rs_1", "type": "reasoning"}}, ["rs_1"]),
        ({"id": "resp_1", "output": [{"id": "ci_1", "container_id": "cntr_1"}]}, ["ci_1", "cntr_1", "resp_1"]),
        ({"object": "list", "data": [{"id": "msg_1"}, {"id": "fc_1"}]}, ["fc_1", "msg_1"]),
        ({"id": "msg_1", "container": {"id": "container_1"}}, ["container_1", "msg_1"]),
        ({"type": "message_delta", "delta": {"container": {"id": "container_1"}}}, ["container_1"]),
        ({"choices": [{"delta": {"audio": {"id": "audio_1"}}}]}, ["audio_1"]),
        ({"id": 1, "output": {}, "response": "x"}, []),
        ([], []),
    ],
    ids=str,
)
def test_what_was_made_is_found_in_answers_and_events(told: Any, ids: list[str]) -> None:
    assert sorted(created_ids(told)) == ids


def test_of_one_answer_only_so_many_are_remembered_and_no_nesting_is_too_deep() -> None:
    assert len(created_ids({"output": [{"id": f"rs_{number}"} for number in range(MAX_CREATED + 1)]})) == MAX_CREATED
    nested: Any = {"id": "deep"}
    for _ in range(900):
        nested = {"response": nested}
    assert created_ids(nested) == []
