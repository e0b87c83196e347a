"""Structured output of the whole engine: the demo model, its loop, its scheduler, and the grammars in between."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from tokenizers import Tokenizer

from engine.compute.model import LoadedModel, load_model
from engine.compute.runner import ModelRunner
from engine.config import EngineSettings
from engine.loop import EngineLoop
from engine.protocol import BlockEvents, Breakpoint, Grammar, Group, Sampling, SequenceUpdate, StepFrame, Submit
from engine.sampling.grammar_pool import GrammarPool
from engine.sampling.grammar_worker import GrammarWorker, Matcher, StepMasks
from engine.sequence import MASK_LATE, NO_TOKEN, Step
from engine.serving import make_hello, make_loop
from tests.fakes.schemas import HARD, REFUSED, closed, schemas, validate
from tests.fakes.tuned import tuned

LIMIT_S = 30.0
PROMPT = "<|im_start|>user\nTell me.<|im_end|>\n<|im_start|>assistant\n"
BOOLEAN = Grammar("json_schema", '{"type": "boolean"}')


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(EngineSettings(threads=1))


class Desk:
    """An engine without a server, and everything that it said."""

    def __init__(self, model: LoadedModel, **changes: Any) -> None:
        options = tuned(EngineSettings, **{"threads": 1, "kv_cache_bytes": 64 << 20, "disk_bytes": 0, **changes})
        self.runner = ModelRunner(model, options, threads=1)
        self.hello = make_hello(options, model, self.runner.num_blocks)
        self.tokenizer = Tokenizer.from_str(model.tokenizer.tokenizer_json)
        self.prompt = self.tokenizer.encode(PROMPT, add_special_tokens=False).ids
        self.said = threading.Condition()
        self.updates: dict[int, list[SequenceUpdate]] = {}
        self.loop: EngineLoop = make_loop(
            options, self.hello, model.tokenizer, self.runner, self.on_frames, self.on_blocks
        )

    def on_frames(self, frames: Any) -> None:
        with self.said:
            for frame in frames.values():
                assert isinstance(frame, StepFrame)
                for update in frame.updates:
                    self.updates.setdefault(update.seq, []).append(update)
            self.said.notify_all()

    def on_blocks(self, events: BlockEvents) -> None:
        pass

    def __enter__(self) -> Desk:
        self.loop.start()
        return self

    def __exit__(self, *error: object) -> None:
        assert self.loop.stop(LIMIT_S)
        stats = self.loop.stats()
        assert (stats["errors"], stats["invariant_violations"], stats["failed_steps"]) == (0, 0, 0)

    def submit(
        self,
        seq: int,
        grammar: Grammar | None,
        prompt: list[int] | None = None,
        group: Group | None = None,
        **sampling: Any,
    ) -> None:
        tokens = array("I", prompt or self.prompt).tobytes()
        sampling = {"max_tokens": 500, "seed": seq, **sampling}
        self.loop.submit("g", Submit(seq, tokens, b"", Sampling(**sampling), grammar=grammar, group=group))

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.said:
            assert self.said.wait_for(holds, 20 * LIMIT_S)

    def end_of(self, seq: int) -> SequenceUpdate:
        self.wait_for(lambda: any(update.finish for update in self.updates.get(seq, [])))
        return self.updates[seq][-1]

    def text_of(self, seq: int) -> str:
        self.end_of(seq)
        tokens = [token for update in self.updates[seq] for token in update.tokens]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text


@pytest.fixture
def desk(model: LoadedModel) -> Iterator[Desk]:
    with Desk(model) as desk:
        yield desk


def generated(count: int) -> list[Any]:
    """So many different schemas, the same in every run."""
    found: dict[str, Any] = {}

    @settings(
        max_examples=4 * count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def collect(schema: Any) -> None:
        found.setdefault(json.dumps(schema), schema)

    collect()
    assert len(found) >= count
    return list(found.values())[:count]


@pytest.mark.slow
def test_every_output_under_two_hundred_schemas_and_any_seed_parses_and_validates(desk: Desk) -> None:
    """Each schema at two of four temperatures; most outputs end, and those do validate."""
    wanted = [*HARD.values(), *generated(200 - len(HARD))]
    runs = [(schema, seed) for seed in range(2) for schema in wanted]
    for seq, (schema, seed) in enumerate(runs):
        temperature = (0.0, 0.7, 1.0, 1.6)[(seq + seed) % 4]
        sampling = {"seed": 1000 * seed + seq, "temperature": temperature, "max_tokens": 1000}
        desk.submit(seq, Grammar("json_schema", json.dumps(schema)), **sampling)
    ended = 0
    for seq, (schema, _) in enumerate(runs):
        end = desk.end_of(seq)
        assert end.finish in ("stop", "length"), (schema, end.error)
        if end.finish == "stop":
            validate(desk.text_of(seq), schema)
            ended += 1
    assert ended >= 0.9 * len(runs)


@pytest.mark.parametrize("name", ["not", "look-ahead", "a definition that is only itself", "nothing"])
def test_a_schema_that_cannot_be_carried_out_is_refused_with_its_path(desk: Desk, name: str) -> None:
    schema, path = REFUSED[name]
    desk.submit(1, Grammar("json_schema", json.dumps(schema)))
    end = desk.end_of(1)
    assert (end.finish, end.grammar_path, end.tokens) == ("error", path, [])
    assert end.error
    assert desk.loop.stats()["refused"] == 1


@pytest.mark.slow
def test_constrained_and_free_sequences_share_steps_and_get_what_they_get_alone() -> None:
    model = load_model(EngineSettings(threads=1, dtype="float32"))  # in bfloat16 some processors round by batch size
    grammar = Grammar("json_schema", json.dumps(HARD["recursion through the root"]))
    wanted = [grammar if seq % 2 else None for seq in range(12)]
    alone = []
    for seq, one in enumerate(wanted):
        with Desk(model) as desk:
            desk.submit(seq, one, max_tokens=60)
            alone.append(desk.text_of(seq))
    with Desk(model, kv_cache_bytes=1 << 20, max_sequences=12) as desk:  # 400 tokens: some are preempted
        for seq, one in enumerate(wanted):
            desk.submit(seq, one, max_tokens=60)
        assert [desk.text_of(seq) for seq in range(12)] == alone
        assert desk.loop.stats()["preemptions"] > 0


def test_each_fork_goes_through_the_grammar_by_itself(model: LoadedModel) -> None:
    grammar, alone = Grammar("json_schema", json.dumps(HARD["recursion through the root"])), []
    for seq in range(6):
        with Desk(model) as desk:
            desk.submit(seq, grammar, max_tokens=60, temperature=10.0)
            alone.append(desk.text_of(seq))
    with Desk(model) as desk:
        for seq in range(6):
            desk.submit(seq, grammar, group=Group(1, 6), max_tokens=60, temperature=10.0)
        assert [desk.text_of(seq) for seq in range(6)] == alone
        stats = desk.loop.stats()
        assert (stats["forks"], stats["prefilled_tokens"]) == (5, len(desk.prompt))
    assert len(set(alone)) > 1


def test_max_tokens_cuts_a_text_before_it_is_complete(desk: Desk) -> None:
    desk.submit(1, Grammar("json_schema", json.dumps(HARD["wide"])), max_tokens=9)
    assert desk.end_of(1).finish == "length"
    assert len(desk.text_of(1)) > 9
    with pytest.raises(ValueError):
        json.loads(desk.text_of(1))


def test_the_text_ends_where_nothing_can_follow_whatever_min_tokens_wants(desk: Desk) -> None:
    desk.submit(1, BOOLEAN, min_tokens=50)
    assert desk.end_of(1).finish == "stop"
    assert desk.text_of(1) in ("true", "false")


def test_bias_and_penalties_choose_among_what_is_allowed(desk: Desk) -> None:
    true = desk.tokenizer.encode("true", add_special_tokens=False).ids[0]
    desk.submit(1, BOOLEAN, logit_bias=((true, -100.0),), presence_penalty=2.0, temperature=0.0)
    desk.submit(2, BOOLEAN, logit_bias=((true, 100.0),), temperature=0.0)
    assert (desk.text_of(1), desk.text_of(2)) == ("false", "true")


def test_log_probabilities_under_a_grammar_are_the_models_own(desk: Desk) -> None:
    desk.submit(1, Grammar("regex", "(yes|no|perhaps), sir"), temperature=1.0, logprobs=3)
    assert desk.end_of(1).finish == "stop"
    told = [one for update in desk.updates[1] for one in update.logprobs or ()]
    said = [token for update in desk.updates[1] for token in update.tokens]
    assert len(told) == len(said)
    # The same text scored as a prompt, which no grammar touches.
    scoring = Sampling(max_tokens=1, prompt_logprobs=3)
    tokens = array("I", [*desk.prompt, *said]).tobytes()
    desk.loop.submit("g", Submit(2, tokens, b"", scoring, use_cache=False))
    desk.end_of(2)
    (scored,) = [update.prompt_logprobs for update in desk.updates[2] if update.prompt_logprobs]
    for ours, theirs in zip(told, scored[-len(said) :], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert any(token not in {one for one, _ in found.top} for token, found in zip(said, told, strict=True))


@pytest.mark.parametrize("grammar", [BOOLEAN, Grammar("json_schema", '{"not": {}}')])
def test_a_prompt_that_is_only_computed_has_a_grammar_checked_and_generates_nothing(
    desk: Desk, grammar: Grammar
) -> None:
    desk.submit(1, grammar, max_tokens=0)
    end = desk.end_of(1)
    assert not any(update.tokens for update in desk.updates[1])
    assert (end.finish, end.grammar_path) == (("length", None) if grammar is BOOLEAN else ("error", "not"))
    desk.submit(2, None, max_tokens=2)
    assert desk.end_of(2).finish in ("stop", "length")


def test_a_regular_expression_and_a_json_object_constrain_too(desk: Desk) -> None:
    desk.submit(1, Grammar("regex", "(left|right) [0-9]{2}"))
    desk.submit(2, Grammar("json_object"), temperature=0.0)
    assert desk.text_of(1).split()[0] in ("left", "right")
    assert desk.end_of(1).finish == "stop"
    assert desk.text_of(2).startswith("{")


def test_ignore_eos_and_a_grammar_are_refused_together(desk: Desk) -> None:
    desk.submit(1, BOOLEAN, ignore_eos=True)
    assert desk.end_of(1).finish == "error"
    assert "ignore_eos" in (desk.end_of(1).error or "")


def test_a_sequence_whose_grammar_allows_nothing_fails_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = desk.runner.run

    def fail_first(step: Step) -> list[int | None]:
        results = run(step)
        return [
            NO_TOKEN if work.sequence.seq == 1 and work.samples else one
            for work, one in zip(step.work, results, strict=True)
        ]

    monkeypatch.setattr(desk.runner, "run", fail_first)
    desk.submit(1, BOOLEAN)
    desk.submit(2, BOOLEAN)
    assert desk.end_of(1).finish == "error"
    assert "too complex" in (desk.end_of(1).error or "")
    assert desk.end_of(1).grammar_path == ""  # the client's grammar is to blame: trying again is pointless
    assert desk.end_of(2).finish == "stop"


class HeldGrammars:
    """Compiles nothing before it is let go."""

    def __init__(self, desk: Desk, max_waiting: int) -> None:
        pool = desk.loop._scheduler.grammars
        assert pool is not None
        self._pool, self._mailbox = pool, desk.loop._intake
        self._compile_next = pool._compile_next
        pool._jobs._max_waiting = max_waiting
        pool._compile_next = lambda: None  # type: ignore[method-assign]

    def go(self) -> None:
        self._pool._compile_next = self._compile_next  # type: ignore[method-assign]
        self._mailbox.post(self._compile_next)


def held(desk: Desk, max_waiting: int = 8) -> HeldGrammars:
    return HeldGrammars(desk, max_waiting)


def test_nobody_waits_for_a_grammar_but_those_who_asked_for_it(model: LoadedModel) -> None:
    desk = Desk(model)
    hold = held(desk)
    with desk:
        desk.submit(1, BOOLEAN)
        desk.submit(2, None, max_tokens=5)
        assert desk.end_of(2).finish in ("stop", "length")
        assert 1 not in desk.updates
        assert not desk.loop.wait_idle(0)
        hold.go()
        assert desk.end_of(1).finish == "stop"


def test_a_sequence_that_is_aborted_while_its_grammar_is_compiled_never_runs(model: LoadedModel) -> None:
    desk = Desk(model)
    hold = held(desk)
    with desk:
        desk.submit(1, BOOLEAN)
        desk.loop.abort("g", 1)
        desk.submit(2, BOOLEAN)
        desk.loop.abort_owner("g")
        desk.submit(3, BOOLEAN)
        hold.go()
        assert desk.end_of(3).finish == "stop"
        assert set(desk.updates) == {3}
        assert desk.loop.stats()["finished"]["abort"] == 2


def test_no_more_than_max_waiting_wait_for_their_grammars(model: LoadedModel) -> None:
    desk = Desk(model)
    hold = held(desk, max_waiting=1)
    with desk:
        desk.submit(1, BOOLEAN)
        desk.submit(1, BOOLEAN)
        assert desk.end_of(1).error == "sequence number 1 is in use"
        desk.submit(2, BOOLEAN)
        assert desk.end_of(2).finish == "abort"
        hold.go()
        desk.wait_for(lambda: len(desk.updates[1]) > 1)


def test_who_waits_for_a_grammar_is_told_when_the_engine_stops(model: LoadedModel) -> None:
    desk = Desk(model)
    hold = held(desk)
    with desk:
        desk.submit(1, BOOLEAN)
        desk.submit(2, None, max_tokens=1)
        desk.end_of(2)
        assert desk.loop.stop(LIMIT_S)
        assert desk.end_of(1).finish == "error"
        hold.go()


def test_a_tokeniser_that_cannot_be_constrained_refuses_grammars_and_nothing_else(model: LoadedModel) -> None:
    desk = Desk(replace(model, eos_ids=()))
    with desk:
        desk.submit(1, BOOLEAN)
        assert (desk.end_of(1).finish, desk.end_of(1).grammar_path) == ("error", "")
        assert "ends a text" in (desk.end_of(1).error or "")
        desk.submit(2, None, max_tokens=3)
        assert desk.end_of(2).finish == "length"


def test_the_same_schema_is_compiled_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    real = GrammarPool._begin
    monkeypatch.setattr(GrammarPool, "_begin", lambda self, job: begun.append(job) or real(self, job))
    for seq in range(5):
        desk.submit(seq, Grammar("json_schema", json.dumps(closed(a={"type": "boolean"}))))
    for seq in range(5):
        assert set(json.loads(desk.text_of(seq))) == {"a"}
    assert len(begun) == 1


def test_texts_are_the_same_when_every_mask_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(EngineSettings(threads=1, dtype="float32"))  # in bfloat16 some processors round by batch size
    real, seen, texts = StepMasks._mask, set[tuple[Matcher, int]](), []

    def late_once(self: StepMasks, matcher: Matcher, count: int) -> Any:
        if count and (matcher, count) not in seen:
            seen.add((matcher, count))
            return MASK_LATE
        return real(self, matcher, count)

    for late in (False, True):
        if late:
            monkeypatch.setattr(StepMasks, "_mask", late_once)
            monkeypatch.setattr(GrammarWorker, "slow", property(lambda _: True, lambda *_: None), raising=False)
        with Desk(model) as desk:
            for seq in range(4):
                desk.submit(seq, Grammar("json_object") if seq % 2 else None, max_tokens=40)
            texts.append([desk.text_of(seq) for seq in range(4)])
            assert desk.loop.stats()["masks_late"] or not late  # a busy machine may be late by itself
            assert desk.loop.stats()["decoded_tokens"] <= 4 * 40
    assert texts[0] == texts[1]


def test_a_lease_that_a_prompt_uses_is_renewed_while_its_grammar_is_compiled(model: LoadedModel) -> None:
    desk = Desk(model)
    hold = held(desk)
    with desk:
        desk.submit(1, None, max_tokens=1)
        desk.end_of(1)
        leases = desk.loop._scheduler.leases
        renewed = []
        renew = leases.renew
        leases.renew = lambda found, *rest, **more: (renewed.append(len(found)), renew(found, *rest, **more))  # type: ignore[assignment, misc]
        tokens = array("I", desk.prompt).tobytes()
        breakpoints = (Breakpoint(len(desk.prompt), 60.0),)
        desk.loop.submit("g", Submit(2, tokens, b"", Sampling(2), breakpoints=breakpoints))
        desk.end_of(2)
        renewed.clear()
        desk.loop.submit("g", Submit(3, tokens, b"", Sampling(9), grammar=BOOLEAN))
        desk.submit(4, None, max_tokens=1, prompt=desk.prompt[:4])
        desk.end_of(4)
        assert 3 not in desk.updates
        assert renewed[0] == 1
        hold.go()
        assert desk.end_of(3).finish == "stop"
