"""Tools of the Anthropic API whose arguments Anthropic has published and which the client runs: bash, the text editor,
memory. A request names only their type, so the model is offered functions with those arguments; calls of them are
`tool_use` blocks like any other. Pure.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_string: Final = {"type": "string"}
_integer: Final = {"type": "integer"}
_range: Final = {"type": "array", "items": _integer, "minItems": 2, "maxItems": 2}


class ClientTool(NamedTuple):
    description: str
    schema: dict[str, Any]


def _commands(*names: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": list(names)}, **properties},
        "required": ["command"],
    }


_EDITS: Final = {
    "path": _string,
    "file_text": _string,
    "old_str": _string,
    "new_str": _string,
    "insert_line": _integer,
    "insert_text": _string,
    "view_range": _range,
}

BY_PREFIX: Final = {
    "bash_": ClientTool(
        "Runs a command in a bash session on the user's machine, or restarts the session.",
        {"type": "object", "properties": {"command": _string, "restart": {"type": "boolean"}}},
    ),
    "text_editor_": ClientTool(
        "Views, creates and edits text files on the user's machine.",
        _commands("view", "create", "str_replace", "insert", "undo_edit", **_EDITS),
    ),
    "memory_": ClientTool(
        "Views and edits the files below /memories, which are kept between conversations.",
        _commands(
            "view", "create", "str_replace", "insert", "delete", "rename", **_EDITS, old_path=_string, new_path=_string
        ),
    ),
}
"""By what their types begin with; a date follows."""

SERVER_TOOLS: Final = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "computer_",
    "tool_search_tool_",
    "mcp_toolset",
)
"""What types of tools begin with that Anthropic runs, or that need more than text."""


def find(kind: str) -> ClientTool | None:
    """The tool of this type, if it is one that the client runs."""
    return next((tool for prefix, tool in BY_PREFIX.items() if kind.startswith(prefix)), None)
