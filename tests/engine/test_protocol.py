"""The contract between gateways and engines: identity of blocks, and messages as bytes."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    DIGEST_BYTES,
    HASHES,
    Abort,
    BlockEvents,
    Breakpoint,
    Grammar,
    GrammarKind,
    Group,
    Hello,
    Load,
    Namespace,
    ProtocolError,
    Sampling,
    SequenceUpdate,
    StepFrame,
    Submit,
    TokenizerFiles,
    TokenLogprobs,
    blocks_key,
    chain_digests,
    decode,
    encode,
    split_digests,
)

SOME = Namespace(
    weights="w", dtype="bfloat16", kv_dtype="float16", block_size=16, adapter="a", quantization="q", salt="tenant:x"
)

texts = st.text(max_size=20)
counts = st.integers(0, 2**31)
token_ids = st.integers(0, 2**32 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
packed_digests = st.integers(0, 5).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n))
namespaces = st.builds(
    Namespace, weights=texts, dtype=texts, kv_dtype=texts, block_size=st.integers(4, 1024), adapter=texts, salt=texts
)
samplings = st.builds(
    Sampling,
    max_tokens=counts,
    temperature=finite,
    top_p=finite,
    top_k=counts,
    seed=st.none() | st.integers(),
    presence_penalty=finite,
    frequency_penalty=finite,
    logit_bias=st.lists(st.tuples(token_ids, finite), max_size=4).map(tuple),
    stop_ids=st.lists(token_ids, max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    min_p=finite,
    repetition_penalty=finite,
    min_tokens=counts,
    logprobs=st.none() | st.integers(0, 20),
)
submits = st.builds(
    Submit,
    seq=counts,
    tokens=st.lists(token_ids, max_size=40).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids)),
    digests=packed_digests,
    sampling=samplings,
    salt=texts,
    lane=st.sampled_from(["online", "batch"]),
    request_id=texts,
    tenant=texts,
    breakpoints=st.lists(st.builds(Breakpoint, tokens=counts, ttl_s=finite), max_size=3).map(tuple),
    use_cache=st.booleans(),
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(get_args(GrammarKind)), text=texts),
    group=st.none() | st.builds(Group, number=counts, size=counts),
)
hellos = st.builds(
    Hello,
    incarnation=texts,
    model=texts,
    namespace=namespaces,
    context_tokens=counts,
    vocab_size=counts,
    num_blocks=counts,
    max_sequences=counts,
    eos_ids=st.lists(token_ids, max_size=3).map(tuple),
    tokenizer=texts,
    created=counts,
)
loads = st.builds(
    Load,
    waiting=counts,
    running=counts,
    prefill_backlog=counts,
    leased_blocks=counts,
    prefill_tokens_per_s=finite,
    draining=st.booleans(),
)
found_logprobs = st.none() | st.lists(
    st.builds(TokenLogprobs, finite, st.lists(st.tuples(token_ids, finite), max_size=3).map(tuple)), max_size=3
)
updates = st.builds(
    SequenceUpdate,
    seq=counts,
    tokens=st.lists(token_ids, max_size=5),
    cached_tokens=st.none() | counts,
    queue_ms=st.none() | finite,
    prefill_ms=st.none() | finite,
    finish=st.none() | st.sampled_from(["stop", "length", "abort", "error"]),
    stop_id=st.none() | token_ids,
    error=st.none() | texts,
    grammar_path=st.none() | texts,
    lease_read_tokens=st.none() | counts,
    lease_reads=st.none() | st.lists(counts, max_size=3),
    lease_write_tokens=st.none() | counts,
    leases_degraded=st.none() | counts,
    logprobs=found_logprobs,
    prompt_logprobs=found_logprobs,
)
frames = st.builds(StepFrame, updates=st.lists(updates, max_size=6), load=loads)
events = st.builds(
    BlockEvents,
    stored=packed_digests,
    removed=packed_digests,
    reset=st.booleans(),
    tier=st.sampled_from(["gpu", "host", "disk"]),
)


@given(st.one_of(submits, st.builds(Abort, seq=counts), frames, events, hellos))
def test_decode_is_the_inverse_of_encode(message: Any) -> None:
    assert decode(encode(message)) == message


@given(submits, st.integers(0, 400))
def test_a_submit_cut_short_is_refused_or_loses_whole_digests_only(submit: Submit, cut: int) -> None:
    data = encode(submit)
    try:
        message = decode(data[: max(0, len(data) - cut)])
    except ProtocolError:
        return
    assert isinstance(message, Submit)
    assert message.tokens == submit.tokens
    assert submit.digests.startswith(message.digests)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_a_protocol_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@pytest.mark.parametrize("header", ["[]", "null", "{}", '{"op":"dance"}', '{"op":"abort"}', '{"op":"step"}', "{"])
def test_a_header_that_is_not_ours_is_a_protocol_error(header: str) -> None:
    with pytest.raises(ProtocolError):
        decode(struct.pack("<I", len(header)) + header.encode())


def test_a_header_nested_deeper_than_anybody_reads_is_a_protocol_error() -> None:
    header = b'{"op":"abort","seq":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(ProtocolError):
        decode(struct.pack("<I", len(header)) + header)


def test_an_engine_of_another_version_is_refused_with_both_numbers() -> None:
    hello = Hello("i", "m", SOME, 1, 1, 1, 1, (), "t", 0, version=7)
    with pytest.raises(ProtocolError, match="version 7, not 5"):
        decode(encode(hello))


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
