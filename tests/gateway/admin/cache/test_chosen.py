from __future__ import annotations

from typing import Any

import pytest

from gateway.admin.cache.chosen import chosen_by
from gateway.errors import BadRequestError
from gateway.responses.entries import About
from gateway.responses.listing import Chosen

KEPT = About("tenant:north", "ab" * 16, "demo", created_s=1000.0, expires_s=2000.0, num_bytes=5)


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({}, True),
        ({"tenant": "north"}, True),
        ({"tenant": "nort"}, False),
        ({"namespace": "north"}, False),
        ({"model": "demo"}, True),
        ({"model": "dem"}, False),
        ({"id": "ab" * 16}, True),
        ({"id": "aba"}, True),
        ({"id": "b"}, False),
        ({"older_than_s": 100.0}, True),
        ({"older_than_s": 100.1}, False),
        ({"younger_than_s": 100.0}, True),
        ({"younger_than_s": 99.9}, False),
        ({"tenant": "north", "model": "demo", "id": "a", "older_than_s": 1.0, "younger_than_s": 101.0}, True),
    ],
)
def test_all_that_is_asked_for_has_to_be_so(values: dict[str, Any], taken: bool) -> None:
    assert chosen_by(values).takes(KEPT, 1100.0) is taken


def test_what_was_made_later_or_is_over_its_time_is_not_chosen() -> None:
    assert not Chosen().takes(KEPT, 999.0)
    assert not Chosen().takes(KEPT, 2000.0)


def test_an_answer_is_a_tenants_or_a_namespaces() -> None:
    shared = About("namespace:north", "ab" * 16, "demo", 1000.0, 2000.0, 5)
    assert chosen_by({"namespace": "north"}).takes(shared, 1100.0)
    assert not chosen_by({"tenant": "north"}).takes(shared, 1100.0)
    with pytest.raises(BadRequestError, match="not both"):
        chosen_by({"namespace": "north", "tenant": "north"})


def test_only_what_nothing_restricts_is_everything() -> None:
    assert chosen_by({}).everything
    for values in ({"tenant": ""}, {"model": ""}, {"id": "a"}, {"older_than_s": 1.0}, {"younger_than_s": 1e9}):
        assert not chosen_by(values).everything
