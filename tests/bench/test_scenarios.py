"""What the scenarios' table is computed from; the run itself needs a server and minutes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.bench.scenarios import PRICES, Asked, Prices, Row, histories, make_texts, read_prices

TURNS = [(f"question {number}?", f"answer {number}") for number in range(10)]


def test_each_kind_of_token_has_its_price() -> None:
    asked = Asked(first_ms=1.0, prompt=100, cached=60, written=30, completion=7)
    assert asked.cost(Prices(input=1, cached_read=0, cache_write=0, output=0)) == 10
    assert asked.cost(Prices(input=0, cached_read=1, cache_write=0, output=0)) == 60
    assert asked.cost(Prices(input=0, cached_read=0, cache_write=1, output=0)) == 30
    assert asked.cost(Prices(input=0, cached_read=0, cache_write=0, output=1)) == 7
    assert asked.cost_uncached(Prices(input=1, cached_read=0, cache_write=0, output=1)) == 107


def test_differences_are_percent_of_what_it_is_without_a_cache() -> None:
    row = Row("x", theirs=(-79, -90), wanted=-97, cold_ms=[900.0, 1000.0, 1100.0], warm_ms=[10.0, 20.0, 500.0])
    row.warm = [Asked(1.0, prompt=100, cached=100, written=0, completion=0)]
    assert row.difference() == pytest.approx(-98)
    assert row.cost_difference(PRICES["claude-5m"]) == pytest.approx(-90)
    row.warm = [Asked(1.0, prompt=100, cached=0, written=100, completion=0)]
    assert row.cost_difference(PRICES["claude-5m"]) == pytest.approx(25)


def test_prices_come_from_a_file_as_well(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"input": 1, "cached_read": 0.5, "cache_write": 1, "output": 4}))
    assert read_prices(str(file)) == Prices(input=1, cached_read=0.5, cache_write=1, output=4)
    with pytest.raises(TypeError):
        file.write_text("{}")
        read_prices(str(file))


def test_each_turn_goes_on_from_the_one_before_and_conversations_differ_from_their_first_word() -> None:
    turns = list(histories(TURNS, 0))
    assert [len(messages) for messages in turns] == [2 * number + 1 for number in range(10)]
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(turns))
    assert {messages[-1]["role"] for messages in turns} == {"user"}
    assert turns[0] != next(histories(TURNS, 1))


def test_generated_texts_are_the_same_every_time_and_long_enough() -> None:
    book, shots = make_texts(1200)
    assert (book, shots) == make_texts(1200)
    assert len(book.split()) == 1200
    assert shots.count("Question: ") == shots.count("Answer: ") == 100
