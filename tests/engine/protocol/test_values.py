"""Identity of blocks: namespaces and chains."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import DIGEST_BYTES, HASHES, Namespace, TokenizerFiles, blocks_key, chain_digests, split_digests
from tests.fakes.messages import SOME, namespaces, token_ids


@pytest.mark.parametrize("field", [spec.name for spec in fields(Namespace)])
def test_another_value_in_any_field_is_another_namespace(field: str) -> None:
    other: dict[str, Any] = {"block_size": 32, "hash_name": "sha256"}
    assert replace(SOME, **{field: other.get(field, "other")}).root() != SOME.root()


@given(namespaces, namespaces)
def test_different_namespaces_have_different_roots(one: Namespace, other: Namespace) -> None:
    assert (one.root() == other.root()) == (one == other)


def test_one_field_cannot_pass_for_another() -> None:
    text = ["weights", "dtype", "kv_dtype", "adapter", "quantization", "salt"]
    empty = Namespace(weights="", dtype="", kv_dtype="", block_size=16)
    roots = {replace(empty, **{field: "x"}).root() for field in text}
    assert len(roots) == len(text)


@given(st.text(max_size=8), st.text(max_size=8))
def test_text_cannot_move_over_a_field_border(left: str, right: str) -> None:
    empty = Namespace(weights="", dtype="", kv_dtype="", block_size=16)
    both = replace(empty, weights=left, dtype=right)
    moved = replace(empty, weights=left + right, dtype="")
    assert (both.root() == moved.root()) == (right == "")


@given(st.lists(token_ids, max_size=100), st.lists(token_ids, max_size=40), st.sampled_from(sorted(HASHES)))
def test_appending_tokens_keeps_every_earlier_digest(first: list[int], more: list[int], hash_name: Any) -> None:
    root = SOME.root()
    short = chain_digests(root, struct.pack(f"<{len(first)}I", *first), 16, hash_name)
    both = first + more
    long = chain_digests(root, struct.pack(f"<{len(both)}I", *both), 16, hash_name)
    assert len(short) == len(first) // 16 * DIGEST_BYTES
    assert long.startswith(short)


@given(st.lists(token_ids, min_size=32, max_size=64), st.integers(0, 15), st.sampled_from(sorted(HASHES)))
def test_another_token_changes_its_block_and_every_later_one(tokens: list[int], at: int, hash_name: Any) -> None:
    changed = [*tokens]
    changed[at] ^= 1
    old, new = (chain_digests(SOME.root(), struct.pack(f"<{len(t)}I", *t), 16, hash_name) for t in (tokens, changed))
    assert not set(split_digests(old)) & set(split_digests(new))


@given(st.lists(token_ids, min_size=64, max_size=100))
def test_a_chain_may_be_computed_in_parts(tokens: list[int]) -> None:
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    whole = chain_digests(SOME.root(), data, 16)
    head = chain_digests(SOME.root(), data[: 2 * 16 * 4], 16)
    assert whole == head + chain_digests(head[-16:], data[2 * 16 * 4 :], 16)


def test_all_keys_of_a_model_lie_in_one_cluster_slot() -> None:
    one, other = blocks_key("some/model", "a"), blocks_key("some/model", "b")
    assert one != other
    assert one[one.index("{") : one.index("}")] == other[other.index("{") : other.index("}")]


def test_the_fingerprint_of_a_tokeniser_covers_all_of_it() -> None:
    files = TokenizerFiles("{}", "template", {"bos_token": "<s>"}, add_bos=False)
    others = [
        replace(files, tokenizer_json="{ }"),
        replace(files, chat_template=None),
        replace(files, special_tokens={}),
        replace(files, add_bos=True),
    ]
    assert len({files.fingerprint(), *(other.fingerprint() for other in others)}) == 5
    assert TokenizerFiles.from_json(files.to_json()).fingerprint() == files.fingerprint()
