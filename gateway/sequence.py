"""One answer while engines generate it: their updates become events, metered in the request's trace.

Keeps what it takes to go on at another engine when one is lost in the middle of the answer: the next one is given the
prompt with all tokens so far behind it, and the reader, which holds back what may become a stop string or a call, stays
the same. So the client sees one answer. Knows no queue and no index; the pipeline gives it engines, one after another.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.protocol import Hello, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import BadRequestError, EngineFailedError, KvasirError
from gateway.metering import KeyMisses, meter_cached, meter_start
from gateway.receipts import Receipts
from gateway.stages import Engine, Prompts, Reader
from gateway.types import Candidate, EncodedPrompt, Event, Finished, FinishReason, Lost, Request, Started


class RunningSequence:
    """`prompt` and `sampling` are what the next engine is given. `ended` when the last event is there."""

    def __init__(
        self,
        prompts: Prompts,
        key_misses: KeyMisses,
        receipts: Receipts,
        find_lost: Callable[[str, bytes, int], Lost | None],
        request: Request,
        prompt: EncodedPrompt,
        sampling: Sampling,
    ) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.ended = False
        self._prompts, self._key_misses, self._receipts = prompts, key_misses, receipts
        self._find_lost = find_lost
        self._request = request
        self._own_prompt, self._own_sampling = prompt, sampling  # the request's
        self._engine: Engine | None = None
        self._hello: Hello | None = None  # of the engine that has it, or had it last
        self._reader: Reader | None = None
        self._answer = array("I")
        self._sent_s = 0.0
        self._is_metered = False  # what was reused of the prompt is known, or never will be

    # -- from engine to engine ----------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the client was told that its answer begins."""
        return self._request.trace.first_token_ms is not None

    @property
    def may_go_on(self) -> bool:
        """Whether another engine may take it as it is now. In the middle of an answer that is so where the tokens so
        far may as well be the prompt's: not with a grammar, whose text would begin anew, nor with penalties, which
        count tokens of the answer alone, nor for one of several answers to a prompt."""
        request, sampling = self._request, self.sampling
        return not self.has_begun or (
            request.constraint is None
            and request.group is None
            and sampling.prompt_logprobs is None
            and sampling.presence_penalty == sampling.frequency_penalty == 0
        )

    @property
    def is_complete(self) -> bool:
        """Whether it has all tokens that it may have. Its end may be missing."""
        return self.has_begun and len(self._answer) >= self._own_sampling.max_tokens

    @property
    def num_tokens(self) -> int:
        """Of the answer, so far."""
        return len(self._answer)

    def fits(self, engine: Engine) -> bool:
        """Whether its tokens mean the same at this engine as at the one that had it."""
        return (
            self._hello is None
            or not self.has_begun
            or _identity(engine.hello.named(self._request.model)) == _identity(self._hello)
        )

    def give(self, engine: Engine, predicted: int | None, waited_s: float, *, alone: bool) -> None:
        """An engine gets it now, after waiting for a slot, which the index says will reuse so many tokens. `alone`:
        there is no other, and nothing was scored."""
        now, request, trace = time.monotonic(), self._request, self._request.trace
        self._engine, self._hello, self._sent_s = engine, engine.hello.named(request.model), now
        trace.engine = engine.name
        if not self.has_begun:
            self._reader = self._prompts.reader(request, self._hello)
            trace.predicted_tokens = predicted
            if alone:
                trace.route[:] = (Candidate(engine.name, predicted or 0, waited_s, None, chosen=True),)
            trace.queue_ms += waited_s * 1e3
            trace.overhead_ms = (now - request.received_s) * 1e3 - trace.queue_ms

    def replace_prompt(self, prompt: EncodedPrompt, sampling: Sampling) -> None:
        """The engine that has it renders it in its own way; the index was asked for other tokens."""
        self.prompt = self._own_prompt = prompt
        self.sampling = self._own_sampling = sampling
        self._request.trace.prompt_tokens = prompt.num_tokens
        self._request.trace.predicted_tokens = None

    def take_back(self) -> None:
        """Its engine was lost: the next one goes on behind the last token that came."""
        own, count = self._own_sampling, len(self._answer)
        self._is_metered = self.has_begun  # what the next one reuses is of another prompt
        if not count or self._hello is None:
            return
        self.prompt = self._prompts.extend(self._own_prompt, self._answer.tobytes(), self._request, self._hello)
        self.sampling = replace(own, max_tokens=own.max_tokens - count, min_tokens=max(0, own.min_tokens - count))

    # -- updates ------------------------------------------------------------------------------------------------------

    def feed(self, update: SequenceUpdate) -> list[Event]:
        """What became certain with this update. Raises what the engine failed with."""
        if update.finish == "error":
            raise _failure(self._request, update)
        assert self._reader is not None
        trace, reader = self._request.trace, self._reader
        events: list[Event] = []
        if not self.has_begun:
            events.append(self._start(update))
        elif update.cached_tokens is not None and not self._is_metered:
            self._meter(update)
        for tokens, logprobs in _slices(self._request, update):
            self._answer.extend(tokens)
            trace.completion_tokens += len(tokens)
            events += reader.feed(tokens, logprobs)
            if reader.ended:
                break
        if reader.ended or update.finish in ("stop", "length"):
            if not reader.ended:
                trace.completion_tokens += update.stop_id is not None
                events += reader.flush()
            self.ended = True
            trace.finish = reason = _reason(reader, update)
            events.append(Finished(reason, trace.usage, reader.met))
        return events

    def _start(self, update: SequenceUpdate) -> Started:
        assert self._engine is not None
        assert self._hello is not None
        meter_start(self._request, update)
        self._meter(update)
        logprobs = update.prompt_logprobs
        scored = () if logprobs is None else self._prompts.score(self._own_prompt, logprobs, self._hello)
        return Started(self._engine.name, self._request.trace.usage, scored)

    def _meter(self, update: SequenceUpdate) -> None:
        """What was reused of the prompt, as the engine reports it with its first tokens or its last."""
        assert self._engine is not None
        assert self._hello is not None
        request, trace = self._request, self._request.trace
        meter_cached(request, self._own_prompt, self._hello.namespace.block_size, update)
        trace.cached_late = update.cached_tokens is None
        if update.cached_tokens is None:
            return
        self._is_metered = True
        self._key_misses.look(request, self._own_prompt)
        prompt, held = self._own_prompt, update.cached_tokens
        if self._engine.reused(prompt.num_tokens, prompt.num_tokens) > held:
            blocks = held // self._hello.namespace.block_size
            trace.lost = self._find_lost(self._hello.incarnation, prompt.digests, blocks)
        if trace.predicted_tokens is not None:
            incarnation = self._hello.incarnation
            self._receipts.note(
                self._engine.name, incarnation, trace.predicted_tokens, update.cached_tokens, self._sent_s
            )


def _identity(hello: Hello) -> object:
    return hello.model, hello.namespace, hello.tokenizer, hello.context_tokens, hello.eos_ids


def _slices(request: Request, update: SequenceUpdate) -> Sequence[tuple[Sequence[int], Sequence[TokenLogprobs]]]:
    """Its tokens one by one where the text may end an answer, so that nothing behind that end is counted: how many
    tokens come with an update is chance."""
    tokens, logprobs = update.tokens, update.logprobs or ()
    if len(tokens) < 2 or not (request.stop or (request.tool_use and not request.tool_use.parallel)):
        return ((tokens, logprobs),)
    return [(tokens[index : index + 1], logprobs[index : index + 1]) for index in range(len(tokens))]


def _reason(reader: Reader, update: SequenceUpdate) -> FinishReason:
    if update.finish == "length" and not reader.ended:
        return "length"
    return "tool_calls" if reader.called else "stop"


def _failure(request: Request, update: SequenceUpdate) -> KvasirError:
    """A grammar that cannot be carried out is the client's; everything else is the engine's."""
    if update.grammar_path is None or request.constraint is None:
        return EngineFailedError(update.error or "The engine failed on this request.")
    param = request.constraint.param
    path = f"{param}.{update.grammar_path}" if update.grammar_path else param
    for inside, place in request.constraint.places:
        if update.grammar_path == inside or update.grammar_path.startswith(f"{inside}."):
            path = place + update.grammar_path[len(inside) :]
    message = f"Invalid '{path}': {update.error}."
    return BadRequestError(message, param=path, code="invalid_grammar", reason=update.error)
