"""The reference that a model's segments are compared with: its tokeniser, with special tokens that nobody can type.

The tokenizers library cannot tell the special strings that a template wrote from those that a user wrote. In a guarded
copy the special tokens have random names, so that the former can be written by name and the latter are plain text. The
one reader is tokenizer.py.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer as HfTokenizer

from gateway.native import no_panic

Spec = dict[str, Any]
"""A tokenizer.json, as the tokenizers library writes it."""


def build(spec: Spec) -> HfTokenizer:
    plain = {**spec, "truncation": None, "padding": None, "post_processor": None}
    with no_panic("tokenizers"):
        return HfTokenizer.from_str(orjson.dumps(plain).decode())


def deaf_to_specials(spec: Spec) -> HfTokenizer:
    """Good for segments only: it takes every special string for text."""
    tokenizer = build(spec)
    tokenizer.encode_special_tokens = True
    return tokenizer


class Guard(NamedTuple):
    """A tokeniser with special tokens that nobody can type. `names`: special string -> its name there."""

    hf: HfTokenizer
    spec: Spec
    names: dict[str, str]


def guard(spec: Spec) -> Guard | None:
    """None when the vocabulary holds together by the names of its special tokens."""
    nonce = secrets.token_hex(8)
    names = {
        token["content"]: f"\ue0f0{nonce}x{token['id']}\ue0f1" for token in spec["added_tokens"] if token["special"]
    }
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in spec["added_tokens"]]
    model = {**spec["model"]}
    guarded = {**spec, "added_tokens": added, "model": model}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    try:
        built = build(guarded)
    except Exception:  # the library raises plain Exception, for a vocabulary whose merges use a special token
        return None
    kept = all(built.token_to_id(token["content"]) == token["id"] for token in added)
    return Guard(built, guarded, names) if kept else None
