"""The runner against transformers' generate, and against itself: alone and batched, cold and warm, cut and whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compute import kv_cache
from engine.compute import runner as runners
from engine.compute.kv_cache import STEP_BYTES, CacheShape, choose_budget, free_bytes
from engine.compute.paged import can_attend
from engine.compute.runner import ModelRunner
from engine.config import ConfigError, EngineSettings
from engine.planner import MIN_TAIL_TOKENS
from engine.sequence import NOT_FINITE, Copy, Step, StepGivenUp, Work
from tests.fakes.tiny_models import (
    KINDS,
    Driver,
    make_family,
    make_loaded,
    make_module,
    make_runner,
    random_ids,
    transformers_generate,
)

FUSED = ("llama", "qwen2", "qwen3", "mistral", "mistral with a window")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers_generate(kind: str) -> None:
    prompts = [random_ids(count, seed) for seed, count in enumerate((5, 150, 300))]
    module = make_module(kind)
    expected = [transformers_generate(module, ids, 24) for ids in prompts]
    driver = Driver(make_runner(kind))
    assert [driver.generate(ids, 24) for ids in prompts] == expected


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_sixteen_sequences_at_once_get_the_tokens_they_get_alone(kind: str) -> None:
    driver = Driver(make_runner(kind))
    prompts = [random_ids(20 + 17 * seed, seed) for seed in range(16)]
    alone = [driver.generate(ids, 12) for ids in prompts]
    driver = Driver(make_runner(kind))
    sequences = [driver.sequence(ids, 12) for ids in prompts]
    # Each joins one step after the one before, so that prefills run next to decodes of every age.
    running = []
    for sequence in sequences:
        decodes = [Work(s, s.num_tokens - 1, 1, samples=True) for s in running if s.num_generated < 12]
        driver.run(*decodes, Work(sequence, 0, sequence.num_tokens, samples=True))
        running.append(sequence)
    while waiting := [s for s in running if s.num_generated < 12]:
        driver.decode(waiting, 1)
    assert [list(s.tokens[s.num_prompt :]) for s in sequences] == alone


@pytest.fixture(scope="module", params=[*FUSED, "qwen3 with int8 keys and values"])
def fused_driver(request: pytest.FixtureRequest) -> Driver:
    kind, _, kept = request.param.partition(" with int8")
    return Driver(make_runner(kind, kv_dtype=torch.int8 if kept else None))


@pytest.mark.parametrize("tail", [1, 4, 16, 17, 100, 271])
def test_warm_logits_equal_cold_ones_bit_for_bit(fused_driver: Driver, tail: int) -> None:
    driver = fused_driver
    driver._next_block = 0
    shared = random_ids(560, 1)
    first = driver.sequence(shared + random_ids(90, 2))
    driver.prefill(first, cuts=[256, 512])
    length = 560 + 1
    ids = (shared + random_ids(1, 3))[:length]
    cold = driver.prefill(driver.sequence(ids), cuts=[256, 512])
    start = (length - tail) // 16 * 16
    warm = driver.sequence(ids, shared=first.block_table[: start // 16])
    assert torch.equal(driver.prefill(warm, start, cuts=[256, 512]), cold)


def test_logits_do_not_depend_on_how_a_prefill_is_cut(fused_driver: Driver) -> None:
    driver = fused_driver
    driver._next_block = 0
    ids = random_ids(700, 4)
    whole = driver.prefill(driver.sequence(ids))
    for cuts in ([256, 512], [512], [16, 32, 500], [64, 128, 391], [699], list(range(1, 60))):
        assert torch.equal(driver.prefill(driver.sequence(ids), cuts=cuts), whole), cuts
        driver._next_block = 0


def test_blocks_written_while_decoding_equal_prefilled_ones_bit_for_bit(fused_driver: Driver) -> None:
    driver = fused_driver
    driver._next_block = 0
    one = driver.sequence(random_ids(120, 5), 80)
    driver.prefill(one)
    driver.decode([one], 60)
    ids = list(one.tokens)
    cold = driver.prefill(driver.sequence(ids))
    start = (len(ids) - 1) // 16 * 16
    warm = driver.sequence(ids, shared=one.block_table[: start // 16])
    assert torch.equal(driver.prefill(warm, start), cold)


def test_a_row_does_not_depend_on_its_neighbours_in_the_batch(fused_driver: Driver) -> None:
    driver = fused_driver
    driver._next_block = 0
    ids = [random_ids(30 + 11 * seed, 50 + seed) for seed in range(8)]
    alone = [driver.prefill(driver.sequence(one)) for one in ids]
    mixed = [driver.sequence(one, scattered=True) for one in ids]
    driver.run(*(Work(s, 0, s.num_tokens - 1, samples=False) for s in mixed))
    driver.run(*(Work(s, s.num_tokens - 1, 1, samples=True) for s in mixed))
    for row, logits in enumerate(alone):
        assert torch.equal(driver.logits[row], logits)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_warm_starts_at_any_block_in_any_table_equal_cold_ones(data: st.DataObject) -> None:
    driver = data.draw(st.sampled_from(_drivers()))
    driver._next_block = 0
    size = driver.runner._block_size
    length = data.draw(st.integers(2, 330), label="length")
    ids = random_ids(length, data.draw(st.integers(0, 5), label="seed"))
    last = max(0, length - MIN_TAIL_TOKENS)  # the scheduler leaves no smaller piece
    cuts = st.lists(st.integers(1, last), unique=True, max_size=6).map(sorted) if last else st.just([])
    cold = driver.prefill(driver.sequence(ids))
    start = data.draw(st.integers(0, last // size), label="start") * size
    holder = driver.sequence(ids + random_ids(7, 9), scattered=data.draw(st.booleans()))
    driver.prefill(holder, cuts=data.draw(cuts))
    warm = driver.sequence(ids, shared=holder.block_table[: start // size], scattered=data.draw(st.booleans()))
    assert torch.equal(driver.prefill(warm, start, cuts=data.draw(cuts)), cold)


_made: list[Driver] = []


def _drivers() -> list[Driver]:
    if not _made:
        _made.extend(
            Driver(make_runner(kind, block_size=size, kv_dtype=kv_dtype))
            for kind, size, kv_dtype in (
                ("qwen3", 4, None),
                ("llama", 16, None),
                ("qwen2", 32, None),
                ("llama", 16, torch.int8),
            )
        )
    return _made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_nothing_is_read_from_blocks_of_others(kind: str, dtype: torch.dtype) -> None:
    ids = random_ids(100, 6)
    clean = Driver(make_runner(kind, dtype))
    expected = clean.generate(ids, 30)
    driver = Driver(make_runner(kind, dtype))
    driver.runner.cache.data[:, : driver.runner.num_blocks * 16].fill_(float("nan"))
    for scattered in (False, True):
        many = [driver.sequence(ids, 30, scattered=scattered) for _ in range(4)]
        for sequence in many:
            driver.prefill(sequence)
        driver.decode(many, 29)
        assert [list(s.tokens[100:]) for s in many] == [expected] * 4


def test_a_fresh_block_is_zeroed_before_the_step_writes() -> None:
    driver = Driver(make_runner("llama"))
    driver.runner.cache.data[:, : driver.runner.num_blocks * 16].fill_(float("nan"))
    sequence = driver.sequence(random_ids(40, 7), 1)
    driver.runner.cache.data[:, : driver.runner.num_blocks * 16].fill_(float("nan"))
    driver.run(Work(sequence, 0, 40, samples=True), fresh=list(sequence.block_table))
    assert torch.isfinite(driver.logits).all()
    assert torch.isnan(driver.runner.cache.data[:, 3 * 16 : 4 * 16]).all()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_numbers_that_are_not_finite_fail_their_own_work_only(kind: str) -> None:
    driver = Driver(make_runner(kind))
    good, bad, prefill, poisoned = (driver.sequence(random_ids(40, seed), 4) for seed in range(4))
    for sequence in (good, bad):
        driver.prefill(sequence)
    driver.run(Work(poisoned, 0, 16, samples=False))
    for sequence in (bad, poisoned):
        slot = sequence.block_table[0] * 16
        driver.runner.cache.data[1, slot + 3, 1] = float("inf")
    tokens = driver.run(
        Work(good, 40, 1, samples=True),
        Work(bad, 40, 1, samples=True),
        Work(prefill, 0, 16, samples=False),
        Work(poisoned, 16, 16, samples=False),
    )
    assert tokens[0] is not None
    assert tokens[0] >= 0
    assert tokens[1:] == [NOT_FINITE, None, NOT_FINITE]
    blocks = [*good.block_table, *bad.block_table, *poisoned.block_table[:1], *prefill.block_table[:1]]
    found = driver.runner.find_not_finite(blocks)
    assert (bad.block_table[0] in found, poisoned.block_table[0] in found) == (True, True)
    assert not {*good.block_table, prefill.block_table[0]} & set(found)


def test_the_budget_decides_how_many_blocks_there_are() -> None:
    model = make_loaded(make_module("llama"))
    block_bytes = model.cache_shape.token_bytes * 16
    budget = EngineSettings(kv_cache_bytes=1 << 20, threads=1)
    runner = ModelRunner(model, budget)
    assert (runner.num_blocks + 1) * block_bytes <= 1 << 20 < (runner.num_blocks + 2) * block_bytes
    assert runner.cache.data.nbytes == (runner.num_blocks + 1) * block_bytes


def test_without_a_budget_it_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CacheShape(2, 2, 8, torch.float32)
    gib = 1 << 30
    assert choose_budget(shape, STEP_BYTES + gib, 1) == gib // 2
    assert choose_budget(shape, STEP_BYTES + gib, 1, 0.9) == int(gib * 0.9)
    assert choose_budget(shape, STEP_BYTES - 1, 1) == 0
    assert choose_budget(shape, 100 * gib, 1) == 2 * gib  # more blocks than sequences can use have a price, too
    assert choose_budget(shape, 100 * gib, 10 * gib // shape.token_bytes) == 10 * gib
    monkeypatch.setattr(kv_cache, "available_bytes", lambda: 900)
    monkeypatch.setattr(kv_cache, "own_bytes", lambda: 100)
    cpu = torch.device("cpu")
    assert [free_bytes(cpu, limit) for limit in (0, 500, 5000, 50)] == [900, 400, 900, 0]
    assert [EngineSettings(kv_cache_bytes=value).kv_cache_bytes for value in ("auto", 0, "77")] == [0, 0, 77]
    monkeypatch.setattr(runners, "free_bytes", lambda device, limit: STEP_BYTES + limit)
    settings = EngineSettings(threads=1, memory_bytes=8 << 20)
    assert ModelRunner(make_loaded(make_module("llama")), settings).cache.data.nbytes in range(3 << 20, (4 << 20) + 1)


def test_a_budget_below_two_blocks_is_refused() -> None:
    model = make_loaded(make_module("llama"))
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        ModelRunner(model, EngineSettings(kv_cache_bytes=1 << 20, block_size=1024, threads=1))


def test_the_warm_up_leaves_the_cache_empty() -> None:
    runner = make_runner("llama")
    assert not runner.cache.data.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_close_to_float32(dtype: torch.dtype) -> None:
    ids = random_ids(600, 8)
    for kind in ("llama", "gpt2", "mistral with a window"):
        exact = Driver(make_runner(kind)).generate(ids, 1)
        driver = Driver(make_runner(kind, dtype))
        whole = driver.prefill(driver.sequence(ids)).float()
        halves = driver.prefill(driver.sequence(ids), cuts=[256]).float()
        assert ((whole - halves).norm() / whole.norm()).item() < 0.05
        assert whole.topk(10).indices.tolist().count(exact[0]) == 1


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_in_bfloat16_compiled_attention_gives_a_row_the_same_bits_alone_in_a_batch_and_warm(family: str) -> None:
    module = make_family(family, {**KINDS["llama"][1], "hidden_size": 256, "head_dim": 32}, torch.bfloat16)
    driver = Driver(ModelRunner(make_loaded(module), EngineSettings(kv_cache_bytes=32 << 20, threads=1)))
    if not can_attend(driver.runner.cache):
        pytest.skip("no C compiler")
    shared = random_ids(272, 1)
    holder = driver.sequence(shared)
    driver.prefill(holder, cuts=[256])
    prefix = holder.block_table[:16]
    ids = [shared[:256] + random_ids(5 + 3 * seed, seed) for seed in range(16)]
    cold = [driver.prefill(driver.sequence(one), cuts=[256]) for one in ids]
    warm = [driver.prefill(driver.sequence(one, shared=prefix), 256) for one in ids]
    batch = [driver.sequence(one, shared=prefix) for one in ids]
    driver.run(*(Work(s, 256, s.num_tokens - 257, samples=False) for s in batch))
    driver.run(*(Work(s, s.num_tokens - 1, 1, samples=True) for s in batch))
    for row, (one, other) in enumerate(zip(cold, warm, strict=True)):
        assert torch.equal(one, other)
        assert torch.equal(one, driver.logits[row])


def test_a_step_that_is_given_up_has_zeroed_and_copied_and_computes_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr("engine.compute.runner._wait_for", waited.append)
    driver = Driver(make_runner("qwen3"))
    sequence, cache = driver.sequence(random_ids(20, 1), 1), driver.runner.cache
    driver.prefill(sequence)
    assert waited == []
    sequence.tokens.append(1)
    dirty, copied = (cache.num_blocks - count for count in (2, 1))
    cache.data[:, dirty * cache.block_size : (copied + 1) * cache.block_size] = 1.0
    source = sequence.block_table[0]
    step = Step(
        [Work(sequence, 20, 1, samples=True)], [dirty, copied], [Copy(source, copied, 5)], unwanted=lambda: True
    )
    with pytest.raises(StepGivenUp):
        driver.runner.run(step)
    rows = cache.data.view(cache.shape.num_layers, cache.num_blocks + 1, cache.block_size, -1)
    assert not rows[:, dirty].any()
    assert torch.equal(rows[:, copied, :5], rows[:, source, :5])
    assert not rows[:, copied, 5:].any()
    assert waited == [driver.runner.model.device]


@pytest.mark.parametrize(("kind", "places"), [("qwen3", 5), ("gpt2", 2)])
def test_a_step_that_was_given_up_anywhere_is_computed_anew_with_the_same_bits(kind: str, places: int) -> None:
    ids, driver = random_ids(150, 1), Driver(make_runner(kind))
    expected = driver.prefill(driver.sequence(ids)).clone()
    for place in range(places):
        sequence = driver.sequence(ids)
        asked = iter([False] * place + [True])
        step = Step([Work(sequence, 0, 150, samples=True)], unwanted=lambda asked=asked: next(asked))
        with pytest.raises(StepGivenUp):
            driver.runner.run(step)
        assert next(asked, None) is None  # it went no further
        assert torch.equal(driver.prefill(sequence, cuts=[48]), expected)
