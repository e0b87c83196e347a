"""Strategies for everything that the protocol between gateways and engines can say."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from engine.protocol import (
    DIGEST_BYTES,
    BlockEvents,
    Breakpoint,
    Grammar,
    GrammarKind,
    Group,
    Hello,
    Load,
    Namespace,
    Sampling,
    SequenceUpdate,
    StepFrame,
    Submit,
    Taker,
    TokenLogprobs,
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
_events = st.builds(
    BlockEvents,
    stored=packed_digests,
    removed=packed_digests,
    reset=st.booleans(),
    tier=st.sampled_from(["device", "host", "disk"]),
)


def _with_takers(plain: BlockEvents, tenants: list[str]) -> BlockEvents:
    """Of one block each."""
    count = len(plain.removed) // DIGEST_BYTES
    return replace(plain, takers=tuple(Taker(1, tenants[n % len(tenants)], f"req_{n}") for n in range(count)))


events = st.one_of(_events, st.builds(_with_takers, _events, st.lists(texts, min_size=1, max_size=3)))
