"""Items of the Responses API as JSON Schemas, for the published document. items.py is what checks them."""

from __future__ import annotations

from typing import Final

from gateway.api.fields import MAX_ITEMS, JsonSchema, choice, object_schema
from gateway.api.openai.caching import check_breakpoint

check_status: Final = choice("in_progress", "completed", "incomplete")
check_phase: Final = choice("commentary", "final_answer")


def _parts(*schemas: JsonSchema) -> JsonSchema:
    """A string, or parts of these kinds."""
    parts = {"type": "array", "items": {"anyOf": list(schemas)}, "minItems": 1, "maxItems": MAX_ITEMS}
    return {"anyOf": [{"type": "string"}, parts]}


_text: Final[JsonSchema] = {"type": "string"}
_input_text: Final = object_schema(
    {"type": {"const": "input_text"}, "text": _text, "prompt_cache_breakpoint": check_breakpoint.schema}, "type", "text"
)
_said: Final = (
    object_schema(
        {
            "type": {"const": "output_text"},
            "text": _text,
            "annotations": {"type": "array"},
            "logprobs": {"type": "array"},
            "parsed": {},
        },
        "type",
        "text",
    ),
    object_schema({"type": {"const": "refusal"}, "refusal": _text}, "type", "refusal"),
)
_every: Final[JsonSchema] = {"id": {"type": "string", "maxLength": 128}, "status": check_status.schema}


def _item_schema(kind: str, fields: JsonSchema, *required: str) -> JsonSchema:
    return object_schema({**_every, "type": {"const": kind}, **fields}, *required)


def _with_texts(name: str) -> JsonSchema:
    return object_schema({name: {"type": "array", "items": _text}}, name)


ITEM: Final[JsonSchema] = {
    "anyOf": [
        _item_schema(
            "message",
            {
                "role": {"enum": ["user", "system", "developer"]},
                "content": _parts(_input_text),
                "phase": check_phase.schema,
            },
            "role",
            "content",
        ),
        _item_schema(
            "message",
            {"role": {"const": "assistant"}, "content": _parts(*_said), "phase": check_phase.schema},
            "role",
            "content",
        ),
        _item_schema(
            "function_call",
            {"call_id": _text, "name": _text, "arguments": _text, "namespace": _text},
            "type",
            "call_id",
            "name",
            "arguments",
        ),
        _item_schema(
            "custom_tool_call",
            {"call_id": _text, "name": _text, "input": _text, "namespace": _text},
            "type",
            "call_id",
            "name",
            "input",
        ),
        _item_schema(
            "custom_tool_call_output", {"call_id": _text, "output": _parts(_input_text)}, "type", "call_id", "output"
        ),
        _item_schema(
            "local_shell_call", {"call_id": _text, "action": _with_texts("command")}, "type", "call_id", "action"
        ),
        _item_schema("shell_call", {"call_id": _text, "action": _with_texts("commands")}, "type", "call_id", "action"),
        _item_schema(
            "apply_patch_call",
            {"call_id": _text, "operation": object_schema({"type": _text, "path": _text}, "type", "path")},
            "type",
            "call_id",
            "operation",
        ),
        _item_schema("local_shell_call_output", {"call_id": _text, "output": _text}, "type", "call_id", "output"),
        _item_schema(
            "shell_call_output",
            {"call_id": _text, "output": {"type": "array", "items": {"type": "object"}}},
            "type",
            "call_id",
            "output",
        ),
        _item_schema("apply_patch_call_output", {"call_id": _text, "output": _text}, "type", "call_id"),
        _item_schema(
            "function_call_output",
            {"call_id": _text, "name": _text, "output": _parts(_input_text)},
            "type",
            "call_id",
            "output",
        ),
        _item_schema(
            "reasoning",
            {
                "summary": {"type": "array", "items": {"type": "object"}},
                "content": {"type": "array", "items": {"type": "object"}},
                "encrypted_content": _text,
            },
            "type",
        ),
        object_schema({"type": {"const": "item_reference"}, "id": _text}, "id"),
    ]
}
