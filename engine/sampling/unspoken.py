"""A tokeniser for grammars, in which no text is a special token.

llguidance writes text that has to come as the tokeniser would, and the tokeniser takes "<|im_end|>" in a constant for
the end of the answer. So the added tokens that are not ordinary text get names that nobody can write; text is then
spelled with all other tokens. Grammars say such a token by its id, and those that say it by its name are rewritten.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LARK_PARTS: Final = r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*'
"""Strings, regular expressions and comments of a Lark grammar."""


def rename_specials(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """The tokeniser with its special tokens renamed, and their ids by the names that they had."""
    spec: dict[str, Any] = json.loads(tokenizer_json)
    added = spec.get("added_tokens") or []
    ids = {token["content"]: token["id"] for token in added if _is_special(token)}
    nonce = secrets.token_hex(8)
    names = {content: f"<\ue0f0{nonce}x{index}\ue0f1>" for content, index in ids.items()}
    for token in added:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True, "normalized": False}
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["post_processor"] = None  # speaks of them by name, and is for whole prompts
    return json.dumps(spec, ensure_ascii=False), ids


def by_id(lark: str, ids: Mapping[str, int]) -> str:
    """A Lark grammar with the special tokens in it named by their ids."""
    if not ids:
        return lark
    names = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    return re.sub(f"{_LARK_PARTS}|({names})", lambda found: f"<[{ids[found[1]]}]>" if found[1] else found[0], lark)


def _is_special(token: Mapping[str, Any]) -> bool:
    """As llguidance sees it, for which what looks like a tag is special, too."""
    content = token["content"]
    tag = content.startswith("<") and content.endswith(">") and not _BYTE.fullmatch(content)
    return bool(token["special"] or tag)
