"""Speculation: drafts are found and counted as they should be, and change no token and no probability."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.compute.draft_model import DraftModel
from engine.compute.model import ModelError, check_draft
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.demo import MODEL_DIR
from engine.protocol import Sampling
from engine.sequence import NOT_FINITE, ROW_FAILED, Sequence, Step, Work
from engine.serving import load
from engine.speculation import (
    CANDIDATES,
    CATCH_UP,
    GRAM,
    LONGEST,
    MODEL_DRAFTS,
    Candidate,
    Drafter,
    ModelDrafts,
    PromptLookup,
    RowCost,
    accept,
    choose_count,
    choose_drafts,
)
from tests.engine.test_seeds import CONTROLS, PROMPT, record_rows
from tests.fakes.model_bench import make_model_bench
from tests.fakes.scheduler_bench import Bench, make
from tests.fakes.tiny_models import VOCABULARY, make_loaded, make_module, random_ids

TEXTS = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 300), max_size=20).map(lambda one: one * 3)

# -- drafts ------------------------------------------------------------------------------------------------------------


def find_slowly(tokens: list[int]) -> tuple[int, int]:
    """Among the last places where the last GRAM tokens stood: the longest match, the latest of equals."""
    end, found = len(tokens), list[tuple[int, int]]()
    for at in range(end - 1, GRAM - 1, -1):
        length = next((n for n in range(at) if tokens[at - 1 - n] != tokens[end - 1 - n]), at)
        if length >= GRAM:
            found.append((min(length, LONGEST), at))
    return max(found[:CANDIDATES], default=(0, 0))


@given(TEXTS, st.lists(st.integers(1, 7), min_size=40, max_size=40))
def test_the_longest_and_then_the_latest_match_is_found_as_the_text_grows(text: list[int], steps: list[int]) -> None:
    lookup, tokens = PromptLookup(), array("I")
    for step in steps:
        tokens.extend(text[len(tokens) : len(tokens) + step])
        assert lookup.find(tokens) == find_slowly(tokens.tolist())


def test_a_long_prompt_is_indexed_in_steps_of_which_none_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.speculation.INDEXED_AT_ONCE", 50)
    lookup, tokens = PromptLookup(), array("I", [*range(3000), 7, 8, 9])
    taken = 0
    while lookup.find(tokens) != (3, 10):
        assert len(lookup._before) - taken <= 50
        taken = len(lookup._before)
        assert taken < len(tokens)


def drafting(tokens: list[int], ends: tuple[int, ...] = ()) -> Sequence:
    return cast("Sequence", SimpleNamespace(tokens=array("I", tokens), end_ids=frozenset(ends)))


def test_a_guess_goes_on_as_the_text_did_and_a_repetition_with_itself() -> None:
    assert Drafter().guess(drafting([1, 2, 3, 4, 5, 9, 1, 2, 3]))[:6] == [4, 5, 9, 1, 2, 3]
    assert Drafter().guess(drafting([5, 1, 2, 1, 2, 1]))[:5] == [2, 1, 2, 1, 2]
    assert Drafter().guess(drafting([1, 2, 3, 4, 5, 9, 1, 2, 3], ends=(9,))) == [4, 5]
    assert Drafter().guess(drafting([1, 2, 3, 4])) == Drafter().guess(drafting([])) == []


def count_drafts(copies: Callable[[Random], bool], cost: float = 0.2) -> tuple[int, int]:
    """Drafts and steps of a text that goes on as it did before, or not, and of which each row costs so much."""
    rng, drafter, drafts, steps = Random(0), Drafter(), 0, 0
    sequence = drafting([rng.randrange(40) for _ in range(4000)])
    for _ in range(300):
        guess = drafter.guess(sequence)
        (count,) = choose_drafts([drafter.chances(len(guess))], 1.0, cost, 1)
        for token in guess[: count + 1] or [0]:
            sequence.tokens.append(token if copies(rng) else rng.randrange(40, 80))
        drafts, steps = drafts + count, steps + 1
        if not copies(rng):  # what stood here has been met before, and went on in another way
            at = rng.randrange(3990)
            sequence.tokens.extend(sequence.tokens[at : at + 3])
    return drafts, steps


def test_a_text_that_goes_on_in_other_ways_costs_next_to_nothing() -> None:
    drafts, steps = count_drafts(lambda rng: False)
    assert drafts < steps / 30
    drafts, steps = count_drafts(lambda rng: True)
    assert drafts > 10 * steps


CHANCES = st.lists(
    st.lists(st.floats(0.3, 1), max_size=3).map(lambda row: np.cumprod(row).tolist()), min_size=1, max_size=3
)


@given(CHANCES, st.floats(0.001, 1.5))
def test_as_many_drafts_are_chosen_as_give_the_most_tokens_for_their_time(
    chances: list[list[float]], row_seconds: float
) -> None:
    def rate(counts: tuple[int, ...]) -> float:
        tokens = len(chances) + sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        return tokens / (1.0 + row_seconds * sum(counts))

    chosen = choose_drafts(chances, 1.0, row_seconds, len(chances))
    best = max(map(rate, product(*(range(len(row) + 1) for row in chances))))
    assert rate(tuple(chosen)) == pytest.approx(best)


@pytest.mark.parametrize(("base", "each"), [(10.0, 0.1), (1.0, 1.0)])
def test_what_a_row_costs_is_learned_from_steps(base: float, each: float) -> None:
    cost, rng = RowCost(), Random(1)
    assert cost.line(4) == (1.0, 0.0625)
    for _ in range(200):
        rows = rng.choice([1, 4, 9])
        cost.add(rows, (base + each * rows) * rng.uniform(0.95, 1.05))
    seconds, slope = cost.line(8)
    assert slope == pytest.approx(each, abs=0.05 * base)
    assert seconds == pytest.approx(base + 8 * each, rel=0.1)


@pytest.mark.parametrize(
    ("drawn", "result"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 9, 3], [1, 9]),
        ([9, 2, 3], [9]),
        ([NOT_FINITE, 2, 3], [NOT_FINITE]),
        ([1, ROW_FAILED, 3], [1]),
        ([1, 2, NOT_FINITE], [1, 2]),
        ([9, NOT_FINITE, NOT_FINITE], [9]),
    ],
)
def test_drafts_are_accepted_while_they_are_what_was_drawn(drawn: list[int], result: list[int]) -> None:
    assert accept((1, 2), drawn) == result


# -- in the engine -----------------------------------------------------------------------------------------------------


def test_a_text_that_repeats_takes_few_steps_and_all_blocks_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.oracle_runner.choose_token", lambda salt, tokens, vocab: (tokens[-1] + 1) % 20)
    steps = {}
    for way in ("prompt-lookup", "none"):
        bench = make(speculation=way)
        bench.submit(1, list(range(20)) * 3, max_tokens=100)
        bench.submit(2, list(range(20)) * 2, max_tokens=61, stop_ids=(17,))
        bench.finish()
        assert bench.answer(1) == [i % 20 for i in range(100)]
        assert bench.answer(2) == list(range(17))
        assert bench.of(2)[-1].stop_id == 17
        counters = bench.scheduler.counters
        assert counters.decoded_tokens + 2 == 100 + 17 + 1
        assert (counters.accepted_tokens > 80) == (way == "prompt-lookup") == bool(counters.drafted_tokens)
        steps[way] = counters.steps
    assert steps["prompt-lookup"] < steps["none"] / 4


def foresee(bench: Bench, answers: dict[int, list[int]], seed: int = 0) -> None:
    """Drafts are the answers, of which one in eight is wrong, or of chance where there is none."""
    rng = Random(seed)

    def guess(sequence: Sequence) -> tuple[list[int], list[float]]:
        left = sequence.sampling.max_tokens - sequence.num_generated - 1
        known = answers.get(sequence.seq, [])[sequence.num_generated :]
        known = known or [rng.randrange(VOCABULARY) for _ in range(5)]
        found = [one if rng.random() < 0.88 else rng.randrange(VOCABULARY) for one in known[: min(left, 9)]]
        found = [one for one in found if one not in sequence.end_ids]
        return found, [1.0] * len(found)

    bench.scheduler._planner._guess = guess  # type: ignore[method-assign]


@pytest.mark.parametrize("controls", CONTROLS.values(), ids=CONTROLS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_and_the_bits_of_their_logits_are_those_without_speculation(
    controls: dict[str, Any], temperature: float
) -> None:
    prompts = {seq: random_ids(9 + 13 * seq, seq) for seq in range(5)}
    stop = [0]

    def ask(bench: Bench) -> dict[int, list[int]]:
        for seq, prompt in prompts.items():
            sampling = {"seed": 50 + seq, "max_tokens": 40, "logprobs": 3, **controls}
            bench.submit(seq, prompt, temperature=temperature, stop_ids=tuple(stop), **sampling)
            bench.step()
        bench.submit(7, prompts[2], group=(1, 2), max_tokens=20, temperature=temperature, seed=1)
        bench.submit(8, prompts[2], group=(1, 2), max_tokens=20, temperature=temperature, seed=2)
        bench.finish()
        return {seq: bench.answer(seq) for seq in (*prompts, 7, 8)}

    plain = make_model_bench(speculation="none")
    stop[0] = ask(plain)[3][30]  # ends one of them, perhaps behind a draft
    plain = make_model_bench(speculation="none")
    wanted_rows = record_rows(plain)
    wanted = ask(plain)
    bench = make_model_bench(60)
    foresee(bench, wanted)
    rows = record_rows(bench)
    assert ask(bench) == wanted
    # A row behind a wrong draft is of another text: only what led to the answer is compared, and comes last.
    assert {key: rows[key] for key in wanted_rows} == wanted_rows
    for seq in prompts:
        told, alone = ([one for u in b.of(seq) for one in u.logprobs or ()] for b in (bench, plain))
        assert told == alone
        assert len(told) == len(wanted[seq])
        assert bench.of(seq)[-1].stop_id == plain.of(seq)[-1].stop_id
    assert bench.scheduler.counters.accepted_tokens > 80
    assert bench.scheduler.counters.drafted_tokens > bench.scheduler.counters.accepted_tokens
    assert bench.scheduler.counters.preemptions > 0


def test_blocks_written_by_speculation_are_found_and_continue_to_the_same_bits() -> None:
    plain = make_model_bench(speculation="none")
    plain.submit(1, PROMPT, max_tokens=40, temperature=0.0)
    plain.finish()
    answer = plain.answer(1)
    bench = make_model_bench()
    foresee(bench, {1: answer})
    bench.submit(1, PROMPT, max_tokens=40, temperature=0.0)
    bench.finish()
    rows = [record_rows(one) for one in (plain, bench)]
    for one in (plain, bench):
        one.submit(2, PROMPT + answer, max_tokens=3, temperature=0.0)
        one.finish()
        assert one.of(2)[0].cached_tokens == 80
    assert rows[0] == {key: rows[1][key] for key in rows[0]}


def test_a_draft_whose_numbers_are_not_finite_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row behind the first is spoilt: what is right before it is taken, and the rest is computed again."""
    plain = make_model_bench(speculation="none")
    plain.submit(1, PROMPT, max_tokens=30, temperature=0.0)
    plain.finish()
    bench = make_model_bench()
    foresee(bench, {1: plain.answer(1)})
    runner = cast("ModelRunner", bench.runner)
    forward, spoilt = runner._forward, []

    def spoil(batch: Any, unwanted: Any = None) -> torch.Tensor:
        logits = forward(batch, unwanted)
        if batch.num_tokens == len(batch.asked) > 3 and len(spoilt) < 3:
            runner.cache.data[:, batch.slots[2:]] = float("nan")
            logits = logits.clone()
            logits[2:] = float("nan")
            spoilt.append(batch)
        return logits

    monkeypatch.setattr(runner, "_forward", spoil)
    bench.submit(1, PROMPT, max_tokens=30, temperature=0.0)
    bench.finish()
    assert len(spoilt) == 3
    assert bench.answer(1) == plain.answer(1)
    assert runner.find_not_finite(list(range(runner.num_blocks))) == []


@pytest.mark.slow
def test_answers_without_a_seed_pass_a_chi_square_test() -> None:
    """Of three tokens: the last two are drafted, right and wrong."""
    draws, prompt, module = 3000, random_ids(21, 7), make_module("llama")

    def likeliest(ids: list[int]) -> dict[int, float]:
        with torch.inference_mode():
            top = module(torch.tensor([ids])).logits[0, -1].double().topk(3)
        return dict(zip(top.indices.tolist(), (top.values / 0.8).softmax(-1).tolist(), strict=True))

    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*answer, token): chance * one
            for answer, chance in expected.items()
            for token, one in likeliest([*prompt, *answer]).items()
        }
    bench = make_model_bench(max_sequences=64, max_waiting=draws)
    cast("ModelRunner", bench.runner)._sampler._unseeded = np.random.default_rng(5)
    answers = {seq: list(max(expected, key=lambda one: (one[0] == seq % 3, expected[one]))) for seq in range(draws)}
    foresee(bench, answers)
    for seq in range(draws):
        bench.submit(seq, prompt, max_tokens=3, temperature=0.8, top_k=3)
    bench.finish(limit=draws)
    seen = Counter(tuple(bench.answer(seq)) for seq in range(draws))
    assert set(seen) <= set(expected)
    assert bench.scheduler.counters.accepted_tokens > draws / 10
    assert bench.scheduler.counters.drafted_tokens > 1.2 * bench.scheduler.counters.accepted_tokens
    chi_square = sum((seen[answer] - draws * p) ** 2 / (draws * p) for answer, p in expected.items())
    assert chi_square < 26 + 4 * np.sqrt(2 * 26)  # four standard deviations; the generator is fixed


# -- the draft model ---------------------------------------------------------------------------------------------------


def make_drafted_bench(seed: int, num_blocks: int = 1000) -> Bench:
    """The draft model is the model itself where the seed is its own, and makes noise else."""
    bench = make_model_bench(num_blocks, draft_model="small")
    runner = cast("ModelRunner", bench.runner)
    draft = make_loaded(make_module("llama", seed=seed))
    runner._draft = DraftModel(draft, runner.num_blocks, runner._block_size)
    bench.takes_s = lambda step: 1.0 + 0.01 * step.num_rows  # drafts cost a little, and the draft model nothing
    return bench


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_changes_no_answer_and_saves_steps_where_it_is_right(temperature: float) -> None:
    def ask(bench: Bench) -> dict[int, list[int]]:
        for seq in range(4):
            bench.submit(
                seq, random_ids(9 + 30 * seq, seq), max_tokens=40, temperature=temperature, seed=seq, logprobs=1
            )
            bench.step()
        for seq in (7, 8):
            bench.submit(seq, PROMPT, group=(1, 2), max_tokens=30, temperature=temperature, seed=seq)
        bench.finish()
        return {seq: bench.answer(seq) for seq in (0, 1, 2, 3, 7, 8)}

    plain = make_model_bench(speculation="none")
    wanted = ask(plain)
    for seed, num_blocks in ((3, 1000), (3, 44), (4, 1000)):
        bench = make_drafted_bench(seed, num_blocks)
        assert ask(bench) == wanted
        counters = bench.scheduler.counters
        if (seed, temperature) == (3, 0.0):
            assert counters.accepted_tokens > 0.9 * counters.drafted_tokens
            assert num_blocks == 44 or counters.steps < plain.scheduler.counters.steps / 3
        assert bench.scheduler.counters.preemptions > 0 or num_blocks > 44


def test_a_long_prompt_of_which_the_end_is_caught_up_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("engine.compute.draft_model", "engine.speculation"):
        monkeypatch.setattr(f"{module}.CATCH_UP", 64)
    bench = make_drafted_bench(3)
    bench.submit(1, random_ids(90, 5), max_tokens=40, temperature=0.0)
    bench.finish()
    plain = make_model_bench(speculation="none")
    plain.submit(1, random_ids(90, 5), max_tokens=40, temperature=0.0)
    plain.finish()
    assert bench.answer(1) == plain.answer(1)
    assert 0 < bench.scheduler.counters.accepted_tokens < bench.scheduler.counters.drafted_tokens


def test_of_a_long_text_the_draft_model_reads_the_end_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right drafts are not computed again, wrong ones are overwritten, and what was left out stays left out."""
    monkeypatch.setattr("engine.compute.draft_model.CATCH_UP", 30)
    module = make_module("llama")
    draft = DraftModel(make_loaded(make_module("llama")), 10, 16)
    sequence = Sequence("", 0, array("I", random_ids(90, 5)), 90, [], Sampling(max_tokens=40, temperature=0.0))
    sequence.block_table = array("i", [7, 2, 9, 4, 1, 5, 3, 0])
    for read_from, right in ((48, 4), (48, 1), (48, 0), (48, 4)):
        (work,) = draft.fill(Step([Work(sequence, sequence.num_tokens - 1, 1, samples=True, wanted=4)])).work
        text = torch.tensor([sequence.tokens[read_from:].tolist()])
        with torch.no_grad():
            wanted = module.generate(text, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert list(work.drafts) == wanted[0, text.shape[1] :].tolist()
        sequence.tokens.extend([*work.drafts[:right], 11])
        sequence.follow_end += min(right, 3)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
    st.floats(0.001, 0.5),
    st.floats(0, 0.5),
    st.integers(0, 4),
)
def test_the_draft_model_drafts_nothing_that_costs_more_than_it_saves(
    chances: list[float], row_seconds: float, draft_seconds: float, others: int
) -> None:
    count, saved_s = choose_count(chances, 1.0, row_seconds, draft_seconds, others)
    tokens = others + sum(chance**index for chance in chances for index in range(count + 1))
    token_s = (1 + count * (draft_seconds + len(chances) * row_seconds)) / tokens
    assert saved_s == pytest.approx(1 / (others + len(chances)) - token_s)
    assert saved_s >= 0
    assert choose_count([0.0] * len(chances), 1.0, row_seconds, draft_seconds, others) == (0, 0.0)
    assert choose_count([1.0], 1.0, 0.001, 0.001, 0)[0] == MODEL_DRAFTS


class Sim:
    """Sequences that take turns in a batch of constant size, and a draft model that is right as often as `right` says.
    Seconds are made up; what the engine knows of them it learns."""

    def __init__(self, batch: int, prompt: int, answer: int, right: float, draft_s: float, row_s: float) -> None:
        self.dice, self.prompt, self.answer, self.right = Random(batch), prompt, answer, right
        self.step_s, self.row_s, self.draft_s, self.token_s = 1.0, row_s, draft_s, draft_s / 8
        self.model, self.cost = ModelDrafts(), RowCost()
        self.behind, self.generated = [prompt] * batch, [answer * n // batch for n in range(batch)]
        self.drafters = [Drafter(self.model) for _ in range(batch)]

    def step(self) -> tuple[int, float]:
        """Tokens and seconds."""
        batch = len(self.behind)
        counts, seconds, caught_up, longest, tokens = [0] * batch, self.step_s + self.row_s * batch, 0, 0, 0
        if self.cost.is_known:
            candidates = [
                Candidate(drafter.followed_chance, min(behind, CATCH_UP), self.answer - generated)
                for drafter, behind, generated in zip(self.drafters, self.behind, self.generated, strict=True)
            ]
            counts = self.model.choose(candidates, *self.cost.line(batch), batch)
        for n, count in enumerate(counts):
            right = 0
            if count:
                caught_up, self.behind[n] = caught_up + min(self.behind[n], CATCH_UP), 0
                right = next((i for i in range(count) if self.dice.random() >= self.right), count)
                self.drafters[n].followed(right, count)
                seconds, longest = seconds + count * self.row_s, max(longest, count)
            self.behind[n] += right + 1 - (min(right, count - 1) if right else 0)
            self.generated[n] += right + 1
            tokens += right + 1
            if self.generated[n] >= self.answer:
                self.behind[n], self.generated[n], self.drafters[n] = self.prompt, 0, Drafter(self.model)
        drafting_s = self.token_s * caught_up + self.draft_s * longest
        if any(counts):
            self.model.took(drafting_s)
        else:
            self.model.rested(seconds)
        self.cost.add(batch + sum(counts), seconds)
        return tokens, seconds + drafting_s


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize(("prompt", "answer"), [(50, 200), (1000, 80)])
@pytest.mark.parametrize("row_s", [0.005, 0.3])
@pytest.mark.parametrize(("right", "gain"), [(0.0, 0.97), (0.8, 0.97), (0.95, 1.15)])
def test_a_draft_model_never_costs_much_and_wins_where_it_can(
    batch: int, prompt: int, answer: int, row_s: float, right: float, gain: float
) -> None:
    sim = Sim(batch, prompt, answer, right, draft_s=0.1, row_s=row_s)
    steps = [sim.step() for _ in range(1000)]
    rate = sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)
    can_win = batch == 1 or (prompt < 100 and row_s < 0.01)  # else a row or a prompt costs more than it saves
    assert rate * (sim.step_s + sim.row_s * batch) / batch > (gain if can_win else 0.97)


def test_a_draft_model_that_means_other_tokens_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    for name in ("same", "wider", "other"):
        (tmp_path / name).mkdir()
        for file in MODEL_DIR.iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / name / file.name).write_bytes(file.read_bytes())
    config = json.loads((MODEL_DIR / "config.json").read_text())
    (tmp_path / "wider" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    tokeniser = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    tokeniser["model"]["merges"].pop()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokeniser))

    def check(name: str) -> EngineSettings | None:
        return check_draft(EngineSettings(model="demo", draft_model=str(tmp_path / name)))

    assert check_draft(EngineSettings()) is None
    found = check("same")
    assert found is not None
    assert (found.model, found.draft_model) == (str(tmp_path / "same"), None)
    for name, reason in (("wider", "a vocabulary of"), ("other", "another tokeniser"), ("none", "none")):
        with pytest.raises(ModelError, match=reason) as raised:
            check(name)
        assert "\n" not in str(raised.value)


def test_the_budget_of_the_cache_is_for_both_models() -> None:
    settings = EngineSettings(model="demo", kv_cache_bytes=8 << 20, threads=1)
    alone = load(settings)[1]
    both = load(settings.model_copy(update={"draft_model": str(MODEL_DIR)}))[1]
    assert both.num_blocks == pytest.approx(alone.num_blocks / 2, abs=1)
    sequence = Sequence("", 0, array("I", PROMPT), 40, [], Sampling(max_tokens=20, temperature=0.0), num_computed=44)
    sequence.block_table = array("i", [0, 1, 2, 3])
    both.run(Step([Work(sequence, 0, 44, samples=False)]))
    (drafted,) = both.run(Step([Work(sequence, 44, 1, samples=True, wanted=5)]))
    assert isinstance(drafted, list)
    assert len(drafted) == 6
