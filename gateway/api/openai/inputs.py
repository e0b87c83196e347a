"""Texts or token ids, one or an array of them, as completions and embeddings take them. Pure."""

from __future__ import annotations

from typing import Any, Final

from gateway.api.fields import Check, JsonSchema, at_most, empty_array, integer, invalid, takes, text, wrong_type

TOKEN_ID_MAX: Final = 2**32 - 1
token_id: Final = integer(0, TOKEN_ID_MAX)

Inputs = dict[str, str | list[int]]
"""Path in the request -> text, or token ids; all of one kind."""


def texts_or_ids(most: int, min_chars: int = 0) -> Check[Inputs]:
    """A string, an array of strings, of token ids, or of arrays of token ids; up to `most` texts. `min_chars` is 0 or
    1."""
    one_text = text(min_chars=min_chars)
    ids: JsonSchema = {"type": "array", "items": token_id.schema, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}

    @takes({"anyOf": [one_text.schema, ids, {**several, "items": one_text.schema}, {**several, "items": ids}]})
    def check(value: Any, path: str) -> Inputs:
        if type(value) is str:
            return {path: one_text(value, path)}
        if type(value) is not list:
            raise wrong_type(path, "a string or an array", value)
        if not value:
            raise empty_array(path)
        if type(value[0]) in (int, float):
            return {path: _token_ids(value, path)}
        check_one = one_text if type(value[0]) is str else _token_ids
        paths = [f"{path}[{index}]" for index in range(len(at_most(most, value, path)))]
        return {where: check_one(item, where) for where, item in zip(paths, value, strict=True)}

    return check


def _token_ids(value: Any, path: str) -> list[int]:
    if type(value) is not list:
        raise wrong_type(path, "a string or an array of token ids", value)
    if not value:
        raise empty_array(path)
    if set(map(type, value)) != {int}:
        index = next(index for index, item in enumerate(value) if type(item) is not int)
        raise wrong_type(f"{path}[{index}]", "an integer", value[index])
    if min(value) < 0 or max(value) > TOKEN_ID_MAX:
        index = next(index for index, item in enumerate(value) if not 0 <= item <= TOKEN_ID_MAX)
        raise invalid(f"{path}[{index}]", "token ids are integers from 0 to the size of the model's vocabulary")
    return value
