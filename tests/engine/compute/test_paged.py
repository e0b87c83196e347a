"""The plan of the compiled attention: common prefixes, threads, and numbers that are not finite."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from torch import Tensor

from engine.compute.batch import Span
from engine.compute.kv_cache import CacheShape, KVCache
from engine.compute.paged import PagedAttention, can_attend, find_common

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, SIZE = 8, 2, 64, 16


def make_cache(dtype: torch.dtype = torch.float32, num_blocks: int = 256) -> KVCache:
    cache = KVCache(CacheShape(1, KV_HEADS, DIM, dtype), num_blocks, SIZE, CPU)
    cache.data.normal_(generator=torch.Generator().manual_seed(3))
    return cache


needs_library = pytest.mark.skipif(not can_attend(make_cache()), reason="no C compiler")


def make_spans(*shapes: tuple[int, int, list[int]]) -> list[Span]:
    """(start, count, table) of each, one after the other."""
    spans: list[Span] = []
    for start, count, table in shapes:
        spans.append(Span(spans[-1].row + spans[-1].count if spans else 0, count, start, array("i", table)))
    return spans


def query_of(spans: list[Span]) -> Tensor:
    rows = spans[-1].row + spans[-1].count
    return torch.randn(rows, HEADS, DIM, generator=torch.Generator().manual_seed(4))


def attend(cache: KVCache, spans: list[Span], query: Tensor, window: int | None = None) -> Tensor:
    out = torch.full_like(query, float("nan"))
    PagedAttention(cache, spans, HEADS).attend(0, query, DIM**-0.5, window, None, out)
    return out


def textbook(cache: KVCache, spans: list[Span], query: Tensor, window: int | None = None) -> Tensor:
    """In float64, one row at a time."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for span in spans:
        slots = torch.tensor(span.table)[:, None] * SIZE + torch.arange(SIZE)
        seen = cache.layers[0][slots.view(-1)].double()  # (keys, 2, kv_heads, dim)
        for row in range(span.count):
            end = span.start + row + 1
            begin = max(0, end - window) if window else 0
            key, value = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in seen[begin:end].unbind(1))
            scores = torch.einsum("hd,khd->hk", query[span.row + row].double(), key) * DIM**-0.5
            out[span.row + row] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    return out


HEAD = [*range(5, 13)]  # blocks of 128 tokens
SHARING = make_spans(
    (214, 1, [*HEAD, 13, 20, 21, 22, 23, 24]),
    (223, 1, [*HEAD, 13, 30, 31, 32, 33, 34]),
    (100, 1, [90, 91, 92, 93, 94, 95, 96]),
    (160, 40, [*HEAD, 13, 40, 41, 42, 43]),
    (128, 10, [*HEAD, 50]),
    (128, 200, [*HEAD, *range(51, 64)]),
)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3, 70, 120])
def test_rows_that_share_a_prefix_get_what_the_textbook_says(window: int | None, dtype: torch.dtype) -> None:
    cache, query = make_cache(dtype), query_of(SHARING).to(dtype)
    assert [(sorted(members), keys) for members, keys in find_common(SHARING, SIZE)] == [([0, 1, 3, 4, 5], 128)]
    got, near = attend(cache, SHARING, query, window), 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.double(), textbook(cache, SHARING, query, window), atol=near, rtol=near)


@needs_library
@pytest.mark.parametrize("window", [None, 3, 70, 120, 300])
def test_who_else_is_in_the_step_changes_no_bit(window: int | None) -> None:
    cache, query = make_cache(), query_of(SHARING)
    together = attend(cache, SHARING, query, window)
    for span in SHARING:
        rows = slice(span.row, span.row + span.count)
        alone = [Span(0, span.count, span.start, span.table)]
        assert torch.equal(attend(cache, alone, query[rows], window), together[rows])
        for row in range(0, span.count, 7):  # and one row at a time, as decoding computes it
            single = [Span(0, 1, span.start + row, span.table)]
            got = attend(cache, single, query[rows][row : row + 1], window)
            assert torch.equal(got, together[rows][row : row + 1])


@needs_library
def test_queries_may_be_part_of_a_wider_row() -> None:
    cache, spans = make_cache(), make_spans((70, 3, [1, 2, 3, 4, 5]))
    wide = torch.randn(3, HEADS + 2 * KV_HEADS, DIM).bfloat16()
    assert torch.equal(attend(cache, spans, wide[:, :HEADS]), attend(cache, spans, wide[:, :HEADS].contiguous()))


@needs_library
@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("window", [None, 200])
def test_the_number_of_threads_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, threads: int, window: int | None
) -> None:
    long = make_spans((2000, 1, [*range(60, 190)]), (1000, 9, [*range(60, 124)]), (0, 150, [*range(190, 200)]))
    for spans in (SHARING, long, long[:1]):
        cache, query = make_cache(), query_of(spans)
        monkeypatch.setattr("engine.compute.paged.THREAD_LEAST", 0)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = attend(cache, spans, query, window)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        for _ in range(3):
            assert torch.equal(attend(cache, spans, query, window), alone)


@needs_library
def test_what_is_kept_between_items_is_bounded_and_the_bound_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, query = make_cache(), query_of(SHARING)
    together = attend(cache, SHARING, query)
    for limit in (0, 30_000, 100_000):
        monkeypatch.setattr("engine.compute.paged.RESULTS_BYTES", limit)
        plan = PagedAttention(cache, SHARING, HEADS)
        assert plan._held[-1] is None or plan._held[-1].nbytes <= limit
        assert torch.equal(attend(cache, SHARING, query), together)


@needs_library
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_with_the_rows_that_read_them(poison: float) -> None:
    cache, query = make_cache(), query_of(SHARING)
    clean = attend(cache, SHARING, query)
    cache.layers[0][24 * SIZE + 3] = poison  # position 211 of the first sequence
    cache.layers[0][24 * SIZE + 8] = poison  # and one that is beyond its end
    cache.layers[0][34 * SIZE + 15 + SIZE :][: SIZE // 2] = poison  # a block of nobody
    got = attend(cache, SHARING, query)
    assert not torch.isfinite(got[0]).any()
    assert torch.equal(got[1:], clean[1:])


@needs_library
def test_what_lies_beyond_a_sequence_is_not_read() -> None:
    cache, spans = make_cache(), make_spans((20, 1, [3, 4]), (0, 5, [9]))
    query = query_of(spans)
    clean = attend(cache, spans, query)
    cache.layers[0][4 * SIZE + 5 : 5 * SIZE] = float("nan")
    cache.layers[0][9 * SIZE + 5 : 10 * SIZE] = float("nan")
    assert torch.equal(attend(cache, spans, query), clean)


def test_common_prefixes_are_found_whatever_the_order() -> None:
    system = list(range(100, 140))  # 640 tokens
    chats = [system + [200 + 100 * chat + i for i in range(60)] for chat in range(2)]
    tables = [(chats[chat] + [900 + 10 * turn + chat], 1600 + 5) for turn in range(3) for chat in range(2)]
    tables.append(([1, 2, 3, 4, 5, 6], 90))
    tables.append(([*system[:3], 77], 50))
    spans = make_spans(*((start, 1, table) for table, start in tables))
    for order in range(5):
        mixed = random.Random(order).sample(spans, len(spans))
        found = [({id(mixed[i]) for i in members}, keys) for members, keys in find_common(mixed, SIZE)]
        assert sorted(keys for _, keys in found) == [1536, 1536]  # of 1600
        assert [len(members) for members, _ in found] == [3, 3]


def test_a_prefix_ends_before_the_first_row_of_every_member() -> None:
    table = list(range(30))
    spans = make_spans((459, 1, table), (383, 10, table), (400, 1, table))
    assert list(find_common(spans, SIZE)) == [([0, 1, 2], 256)]
    assert list(find_common(make_spans((127, 1, table), (459, 1, table)), SIZE)) == []
