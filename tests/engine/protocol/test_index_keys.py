"""Keys of the index in Redis."""

from __future__ import annotations

from engine.protocol import blocks_key


def test_all_keys_of_a_model_lie_in_one_cluster_slot() -> None:
    one, other = blocks_key("some/model", "a"), blocks_key("some/model", "b")
    assert one != other
    assert one[one.index("{") : one.index("}")] == other[other.index("{") : other.index("}")]
