from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.gemini.wire import page
from gateway.errors import BadRequestError


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.integers(), max_size=30), st.integers(1, 10))
def test_all_pages_together_are_all_items_once(items: dict[str, int], size: int) -> None:
    found: list[tuple[str, int]] = []
    query = {"pageSize": str(size)}
    while True:
        shown, token = page(items, query)
        found += shown
        if not token:
            break
        assert len(shown) == size
        query["pageToken"] = token
    assert found == sorted(items.items())


def test_an_item_that_went_away_ends_no_walk() -> None:
    items = dict.fromkeys("abcd", 0)
    _, token = page(items, {"pageSize": "2"})
    del items["b"]
    assert [key for key, _ in page(items, {"pageToken": token})[0]] == ["c", "d"]


@pytest.mark.parametrize("query", [{"pageSize": "-1"}, {"pageSize": "x"}, {"pageToken": "?"}, {"pageToken": "_w=="}])
def test_a_size_or_token_that_is_none_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(BadRequestError) as refused:
        page({}, query)
    assert refused.value.param in query


def test_a_page_has_at_most_a_thousand_items_and_fifty_without_a_size() -> None:
    items = {f"{number:05d}": 0 for number in range(2000)}
    sizes = [len(page(items, query)[0]) for query in ({"pageSize": "5000"}, {"pageSize": "0"}, {})]
    assert sizes == [1000, 50, 50]
