"""The tables of docs/translation.md say what happens to each field of a client form at each form of an upstream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import isfinite
from typing import Any

import pytest

from gateway.errors import UnsupportedError
from gateway.types import CachePrefix, Request
from gateway.upstreams.translation.base import DROPPED, FIELDS
from gateway.upstreams.translation.forms import FORMS
from gateway.upstreams.translation.stage import _written
from tests.fakes.client_fields import CLIENTS, TABLES, field_of, request_of, sample, without, written_by
from tests.fakes.translated import chat

MODEL = "gpt-5.6"
CASES = [
    (client, upstream, name) for client, upstream in itertools.permutations(CLIENTS, 2) for name in written_by(client)
]


def body_of(upstream: str, client: str, fields: Any, *, lossy: bool = False) -> tuple[Any, tuple[str, ...]]:
    """The body that the upstream gets, and what was dropped."""
    request = request_of(client, fields)
    object.__setattr__(request, "model", MODEL)
    return _written(CLIENTS[upstream], request, MODEL, lossy=lossy).values, request.trace.dropped


def words(value: Any) -> Iterator[str]:
    """Keys, and values that are strings."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from words(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from words(one)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize(("client", "upstream", "name"), CASES, ids=map("-".join, CASES))
def test_a_field_becomes_what_its_row_says(client: str, upstream: str, name: str) -> None:
    fields, field = sample(client, name), CLIENTS[upstream].table.get(name)
    assert field_of(client, name) in words(fields)
    plain, _ = body_of(upstream, client, without(client, name))
    if field is None:
        with pytest.raises(UnsupportedError) as caught:
            body_of(upstream, client, fields)
        assert caught.value.param
        if name in DROPPED:
            assert body_of(upstream, client, fields, lossy=True) == (plain, (name,))
        else:
            with pytest.raises(UnsupportedError):
                body_of(upstream, client, fields, lossy=True)
        return
    body, dropped = body_of(upstream, client, fields)
    assert not dropped
    if field.name == "cachedContents":  # which is made of the body, before it is sent
        assert CLIENTS[upstream].prefix(request_of(client, fields)) not in (None, CachePrefix())
    elif field.name:
        assert body != plain
        assert field.name in words(body)
    else:
        assert body == plain


BOUNDS = [
    (upstream, name, bound, step)
    for upstream, form in CLIENTS.items()
    for name, field in form.table.items()
    for bound, step in ((field.least, -1), (field.most, 1))
    if isfinite(bound)
]


@pytest.mark.parametrize(("upstream", "name", "bound", "step"), BOUNDS)
def test_a_value_out_of_bounds_is_refused_or_dropped(upstream: str, name: str, bound: int, step: int) -> None:
    def asking(number: int) -> Request:
        return chat(stop=tuple("abcdefgh"[:number])) if name == "stop" else chat(sampling={name: number})

    _written(CLIENTS[upstream], asking(bound), MODEL, lossy=False)
    out = asking(bound + step)
    with pytest.raises(UnsupportedError) as caught:
        _written(CLIENTS[upstream], out, MODEL, lossy=False)
    assert (caught.value.param, f"{bound:g}" in caught.value.message) == (name, True)
    if name in DROPPED:
        assert _written(CLIENTS[upstream], out, MODEL, lossy=True).values == _plain(upstream)


def _plain(upstream: str) -> Any:
    return _written(CLIENTS[upstream], chat(), MODEL, lossy=False).values


OURS = {
    "openai": "model stream stream_options n cache cache_salt priority service_tier prompt_cache_key "
    "prompt_cache_options max_tokens logprobs functions function_call guided_json guided_regex guided_choice "
    "guided_grammar",
    "responses": "model stream stream_options cache cache_salt service_tier prompt_cache_key prompt_cache_options "
    "previous_response_id truncation include metadata store background",
    "anthropic": "model stream cache service_tier output_format diagnostics",
    "gemini": "tools toolConfig generationConfig candidateCount responseSchema responseLogprobs",
}
"""What no row needs: the gateway carries it out itself, or it is another word for a field that has a row."""


@pytest.mark.parametrize("client", CLIENTS)
def test_every_field_that_a_client_may_write_has_a_row(client: str) -> None:
    rows = {field_of(client, name) for name in FIELDS}
    used = {name for name, parameter in TABLES[client].items() if parameter.effect == "used"}
    assert used - rows == set(OURS[client].split())


def test_every_field_that_a_form_takes_is_known() -> None:
    assert {name for form in FORMS for name in form.table} <= set(FIELDS)
