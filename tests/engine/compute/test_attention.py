"""Paged attention against its slow twin: one row at a time, over keys that a dictionary remembers."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.compute.attention import StepAttention, UnsupportedAttentionError, paged_attention
from engine.compute.batch import make_batch
from engine.compute.kv_cache import CacheShape, KVCache, count_blocks
from engine.protocol import Sampling
from engine.sequence import Sequence, Step, Work

CPU = torch.device("cpu")
LAYERS = 2


class Twin:
    """Attention as the textbook has it, in float64, without blocks."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], torch.Tensor] = {}

    def layer(
        self, work: list[Work], layer: int, query: Any, key_value: Any, window: int | None, cap: float | None
    ) -> torch.Tensor:
        out, row = torch.zeros(query.shape, dtype=torch.float64), 0
        for item in work:
            rows, owner = slice(row, row + item.num_rows), (id(item.sequence), layer)
            before = self.memory.get(owner, torch.empty(0, *key_value.shape[1:], dtype=torch.float64))
            seen = self.memory[owner] = torch.cat((before, key_value[rows].double()))  # (keys, 2, kv_heads, head_dim)
            key, value = (part.repeat_interleave(query.shape[1] // seen.shape[2], 1) for part in seen.unbind(1))
            scores = torch.einsum("rhd,khd->hrk", query[rows].double(), key) * query.shape[2] ** -0.5
            scores = cap * torch.tanh(scores / cap) if cap else scores
            distance = torch.arange(item.start, item.start + item.num_rows)[:, None] - torch.arange(len(seen))
            hidden = (distance < 0) | (distance >= (window or 10**9))
            out[rows] = torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)
            row += item.num_rows
        return out


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_steps_of_any_mixture_equal_the_slow_twin(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    size = data.draw(st.sampled_from([4, 16, 32]))
    shapes = [(1, 1, 8), (2, 4, 16), (3, 2, 24), (2, 4, 32), (1, 7, 64), (1, 9, 96), (1, 2, 256)]
    kv_heads, group, head_dim = data.draw(st.sampled_from(shapes))
    window = data.draw(st.sampled_from([None, 1, 5, 40, 300]))
    cap = data.draw(st.sampled_from([None, None, 0.5, 2.0, 60.0]))
    cache = KVCache(CacheShape(LAYERS, kv_heads, head_dim, dtype), 4096 // size, size, CPU)
    cache.data[:, : cache.zero_slot] = float("nan")
    free = data.draw(st.sampled_from([list, _shuffled]))(range(cache.num_blocks))
    twin = Twin()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    sequences = [Sequence("", i, array("I"), 0, [], Sampling(max_tokens=1)) for i in range(5)]
    for _ in range(data.draw(st.integers(1, 4))):
        work, fresh = [], []
        for sequence in sequences:
            count = data.draw(st.sampled_from([0, 1, 1, 1, 3, 17, 100, 290]))
            drafts = (0,) * data.draw(st.integers(0, count - 1 if 0 < count < 9 else 0))  # a decode has some
            start = len(sequence.tokens)
            if count:
                sequence.tokens.extend([0] * count)
                while len(sequence.block_table) * size < len(sequence.tokens):
                    fresh.append(free.pop(0))
                    sequence.block_table.append(fresh[-1])
                work.append(Work(sequence, start, count - len(drafts), samples=True, drafts=drafts))
        if not work:
            continue
        if fresh:
            cache.zero(fresh)
        batch = make_batch(Step(work), size)
        compiled = data.draw(st.booleans(), label="compiled, where it can be")
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr("engine.compute.attention.can_attend", lambda cache: False)
            attention = StepAttention(cache, batch)
            for layer in range(LAYERS):
                query = torch.randn(batch.num_tokens, kv_heads * group, head_dim, generator=generator).to(dtype)
                key_value = torch.randn(batch.num_tokens, 2, kv_heads, head_dim, generator=generator).to(dtype)
                got = attention.layer(layer, query, key_value, window=window, cap=cap)
                want = twin.layer(work, layer, query, key_value, window, cap)
                tolerance = 1e-5 if dtype == torch.float32 else 0.03
                torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
                asked = attention.asked_rows().attend(layer, query[batch.asked], window=window, cap=cap)
                assert torch.equal(asked, got[batch.asked])


def _shuffled(blocks: range) -> list[int]:
    return torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("blocks", [[3], [2, 3, 4], [5, 1, 3]])
def test_zeroing_touches_the_named_blocks_only(blocks: list[int]) -> None:
    cache = KVCache(CacheShape(2, 1, 4, torch.float32), 8, 4, CPU)
    cache.data.fill_(1.0)
    cache.zero(blocks)
    by_block = cache.data.view(2, 9, -1)
    for block in range(9):
        assert bool(by_block[:, block].any()) == (block not in blocks)


def test_padding_rows_are_not_written_and_come_back_as_zero() -> None:
    cache = KVCache(CacheShape(1, 2, 8, torch.float32), 4, 16, CPU)
    sequence = Sequence("", 0, array("I", [5]), 1, [], Sampling(max_tokens=1), block_table=array("i", [2]))
    attention = StepAttention(cache, make_batch(Step([Work(sequence, 0, 1, samples=True)]), 16))
    out = attention.layer(0, torch.ones(2, 4, 8), torch.ones(2, 2, 2, 8))
    assert out[0].eq(1).all()
    assert out[1].eq(0).all()
    assert cache.data.sum() == 2 * 2 * 8


def test_the_budget_counts_the_block_that_belongs_to_nobody() -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert shape.token_bytes == 2 * 2 * 2 * 8 * 2
    assert count_blocks(shape, 16, 10 * 16 * shape.token_bytes) == 9
    assert count_blocks(shape, 16, 16 * shape.token_bytes - 1) == -1


class Recorder:
    """In place of a step: what the attention function handed over."""

    def layer(self, layer: int, query: Any, key_value: Any, scale: Any, window: Any, cap: Any) -> torch.Tensor:
        self.seen = (layer, tuple(query.shape), tuple(key_value.shape), scale, window, cap)
        self.value = key_value[:, 1]
        return torch.ones_like(query)


def call(**others: Any) -> tuple[Any, Recorder]:
    module, recorder = nn.Module(), Recorder()
    module.layer_idx = 3
    arguments: dict[str, Any] = {"scaling": 0.5, "kvasir": recorder, "attention_mask": None, **others}
    query, key = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    value = arguments.pop("value", key)
    return paged_attention(module, query, key, value, **arguments)[0], recorder


def test_transformers_calls_arrive_with_rows_first() -> None:
    out, recorder = call(sliding_window=9, dropout=0.0, position_ids=torch.zeros(1, 6), softcap=30.0)
    assert recorder.seen == (3, (6, 4, 8), (6, 2, 2, 8), 0.5, 9, 30.0)
    assert out.shape == (1, 6, 4, 8)


def test_values_narrower_than_keys_are_stored_with_zeros_behind_them() -> None:
    out, recorder = call(value=torch.ones(1, 2, 6, 5))
    assert recorder.seen[2] == (6, 2, 2, 8)
    assert recorder.value.sum() == recorder.value[..., :5].sum() == 2 * 6 * 5
    assert out.shape == (1, 6, 4, 5)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"softcap": -1.0}, "capped at -1"),
        ({"value": torch.zeros(1, 2, 6, 9)}, "values"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, "mask"),
        ({"kvasir": None}, "keyword"),
        ({"a_thing_of_next_year": 1}, "a_thing_of_next_year"),
    ],
)
def test_what_is_not_implemented_is_refused_and_never_ignored(others: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=reason):
        call(**others)
