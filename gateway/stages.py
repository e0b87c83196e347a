"""What the pipeline needs of each stage: a small Protocol for each. app.py brings the real ones, tests bring fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from engine.protocol import Hello, Load, Sampling, SequenceUpdate, TokenLogprobs
from gateway.types import (
    Ask,
    CallDelta,
    Constraint,
    EncodedPrompt,
    Event,
    Lost,
    Request,
    ScoredToken,
    TextDelta,
    TokenPrompt,
)


class Responses(Protocol):
    """Steps 1 and 7, around all others."""

    def answer(
        self, request: Request, model: Hello, generate: Callable[[Request], AsyncGenerator[Event, None]]
    ) -> AsyncGenerator[Event, None]:
        """The events of an answer that was there, of one that is being generated, or of `generate`, which is then
        remembered. Raises NotCachedError where nothing may be generated, and what `generate` raises; it has no errors
        of its own: a cache that is down is a cache that is cold."""
        ...


class Reader(Protocol):
    """Tokens of one answer into its events. Holds back unfinished characters, and what may become a stop string or a
    tool call."""

    @property
    def met(self) -> str | None:
        """The stop string that was met; what follows is not part of the answer."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the answer ends here: by a stop string, or with the only call that it may have."""
        ...

    @property
    def called(self) -> bool:
        """Whether there is a tool call in it, so far."""
        ...

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Sequence[TextDelta | CallDelta]:
        """What became certain with these tokens. `logprobs` has one for each, where requested."""
        ...

    def flush(self) -> Sequence[TextDelta | CallDelta]:
        """What was held back, at the end of an answer that did not end before. It may end here."""
        ...


class Prompts(Protocol):
    """Step 2. One tokeniser and template per model, loaded when its first engine joined."""

    async def encode(self, request: Request, model: Hello) -> EncodedPrompt:
        """Raises BadRequestError for what the template refuses, and for tools that this model cannot call."""
        ...

    def constraint(self, request: Request, model: Hello) -> Constraint | None:
        """What the answer has to be, behind the prompt that `encode` returned: the request's own, with the calls in it
        that it may or must make. Raises BadRequestError for schemas that are too long, and for what leaves no place
        for a call."""
        ...

    def extend(self, prompt: EncodedPrompt, answer: bytes, request: Request, model: Hello) -> EncodedPrompt:
        """A prompt of `encode` with tokens of its answer behind it, TOKEN_BYTES each. Its chain of digests goes on."""
        ...

    def reader(self, request: Request, model: Hello) -> Reader:
        """For an answer to an encoded request."""
        ...

    def spell(self, prompt: TokenPrompt, model: Hello) -> str:
        """The text of its tokens."""
        ...

    def score(self, prompt: EncodedPrompt, logprobs: Sequence[TokenLogprobs], model: Hello) -> tuple[ScoredToken, ...]:
        """A prompt with the log probabilities of its tokens; the first has none, which is reported as 0."""
        ...


class Index(Protocol):
    """Step 3. Never raises: an index that is down has found nothing."""

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """Leading blocks of `digests` that each engine holds; engines without any may be missing."""
        ...

    def recall(self, incarnation: str, digests: bytes) -> int | None:
        """The same of one engine without waiting, as this gateway's own memory has it; None: that has nothing of the
        engine."""
        ...

    def lost(self, incarnation: str, digests: bytes, held: int) -> Lost | None:
        """What became of the block behind the first `held` ones of a prompt, where the engine had it."""
        ...


class Engine(Protocol):
    """Step 6. One engine that has said hello."""

    @property
    def name(self) -> str:
        """Short, stable while the engine is configured; what headers, logs and metrics show."""
        ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...

    @property
    def prefilling(self) -> Mapping[str, int]:
        """Tenant -> prompt tokens of its online requests from this gateway that have no token yet."""
        ...

    def reused(self, held_tokens: int, prompt_tokens: int) -> int:
        """What it reuses of a prompt of which it holds so many leading tokens: whole blocks of its own, and never the
        last token, which is always computed."""
        ...

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt:
        """The request's prompt in the tokens that it has at this engine: `prompt` itself, but for a server that is
        known to render it in another way. Raises EngineLostError when it does not answer, BadRequestError for what it
        refuses, UnsupportedError when it does not say its tokens."""
        ...

    def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Closing it aborts the sequence. Raises EngineLostError, EngineFailedError for this sequence alone, and
        DeadlineError at request.deadline_s."""
        ...


class Registry(Protocol):
    """Which engines there are. Joined, reachable and not draining."""

    def serving(self, model: str) -> Sequence[Engine]:
        """Never empty. Raises ModelNotFoundError, and NoEngineError when none of the model's engines can be reached."""
        ...

    def models(self) -> Mapping[str, int]:
        """Every known model, also without a reachable engine -> Unix second at which its newest engine started."""
        ...


class Hosted(Protocol):
    """Models of upstreams that speak another API than their clients."""

    def find(self, model: str, tenant: str) -> Hello | None:
        """What stands for an engine's hello; None where no upstream serves the model."""
        ...

    def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """See Pipeline.answer."""
        ...


class Queue(Protocol):
    """Steps 4 and 5. A bounded number of sequences per engine; waiting requests go to an engine when one has a slot."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        ...

    def slot(self, engines: Sequence[Any], ask: Ask) -> AbstractAsyncContextManager[Engine]:
        """Entering returns the engine, which is one of `engines` or has joined them since; there is at least one.

        Raises QueueFullError at once, DeadlineError after waiting, EngineLostError when the engines went away.
        """
        ...
