"""What a vLLM, SGLang or TensorRT-LLM answers, as SequenceUpdates, and its errors as ours. Pure: bytes in, values out;
requests.py writes what they answer.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

import orjson

from engine.protocol import Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import BadRequestError, EngineFailedError, EngineLostError, KvasirError
from gateway.replicas.calls import mapping, whole
from gateway.replicas.requests import Target
from gateway.types import Constraint, EncodedPrompt

MAX_EVENT_BYTES: Final = 64 << 20
"""Of one event of a stream, or of a whole answer: vLLM's first event has all ids of the prompt once more, and log
probabilities of a prompt take 2 kB a token."""

MAX_MESSAGE_CHARS: Final = 500
"""Of what a server says is wrong with a request, as clients are told."""

MOST_NEGATIVE: Final = -9999.0
"""Log probability of what cannot be: JSON has no infinity."""


class EventLines:
    """Cuts the bytes of a stream into the data of its events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises EngineFailedError for an event that is larger than MAX_EVENT_BYTES."""
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > MAX_EVENT_BYTES:
                raise EngineFailedError("The engine's answer has an event that is too long.")
            return
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            if line.startswith(b"data:"):
                yield bytes(line[5:]).strip()


class Answer:
    """Reads the events of one answer. `ended` once all of it was read."""

    def __init__(
        self,
        target: Target,
        sampling: Sampling,
        prompt: EncodedPrompt | None = None,
        constraint: Constraint | None = None,
        ids: bytes = b"",
    ) -> None:
        """`prompt` is what was sent; None: what the server says of its prompt is not compared. `ids`: see Call."""
        self._target = target
        self._prompt = prompt
        self._sampling = sampling
        self._constraint = constraint
        self._echo = ids if sampling.prompt_logprobs is None else b""
        self._read = {"sglang": self._read_sglang}.get(target.facts.kind, self._read_completion)
        self._seen = 0  # tokens, SGLang's
        self._last: SequenceUpdate | None = None  # with `finish`, until the end of the body
        self.cached_tokens: int | None = None  # as the server reported
        self.prompt_tokens: int | None = None
        self.wrong: str | None = None  # what is, with the prompt that the server says it answers
        self.ended = False

    def feed(self, data: bytes) -> SequenceUpdate | None:
        """What one event says. The last update is held back for `end`. Raises what `failure` makes of an error, and
        EngineFailedError for what is no answer."""
        if data == b"[DONE]":
            return None
        if self._echo:
            data, self._echo = _without(data, self._echo), b""
        try:
            event = orjson.loads(data)
        except ValueError:
            raise EngineFailedError(f"Engine {self._target.name} answered with what is no JSON.") from None
        if not isinstance(event, dict):
            raise EngineFailedError(f"Engine {self._target.name} answered with what is no object.")
        if "error" in event:
            status = whole(mapping(event["error"]).get("code"))
            raise failure(self._target, status if 400 <= status < 600 else 500, data, self._constraint)
        try:
            return self._read(event)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineFailedError(
                f"Engine {self._target.name} answered in a form that is not known ({type(error).__name__})."
            ) from error

    def _read_completion(self, event: Mapping[str, Any]) -> SequenceUpdate | None:
        if (usage := event.get("usage")) is not None:
            self._note_usage(usage)
        choices = event.get("choices")
        if not choices:
            return None
        choice = choices[0]
        if (ids := choice.get("prompt_token_ids")) is not None and self._prompt is not None:
            sent = array("I", self._prompt.tokens).tolist()
            self.wrong = None if ids == sent else wrong_count(len(sent), len(ids)) or "tokens that differ"
        tokens = list(choice.get("token_ids") or ())
        logprobs = None if self._sampling.logprobs is None else _logprobs(choice.get("logprobs"), self._sampling)
        update = SequenceUpdate(0, tokens, logprobs=logprobs)
        if choice.get("prompt_logprobs") is not None and self._sampling.prompt_logprobs is not None:
            update.prompt_logprobs = [
                _scored(one, self._sampling.prompt_logprobs)
                for one in zip_ids(choice["prompt_logprobs"], choice.get("prompt_token_ids"))
            ]
        return self._given(update, choice.get("finish_reason"), choice.get("stop_reason"))

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        self._count(usage.get("prompt_tokens"))
        details = usage.get("prompt_tokens_details")
        if details is not None or "cached_tokens" in self._target.facts.features:
            self.cached_tokens = whole(mapping(details).get("cached_tokens"))

    def _count(self, prompt_tokens: object) -> None:
        self.prompt_tokens = whole(prompt_tokens)
        if self._prompt is not None:
            self.wrong = self.wrong or wrong_count(self._prompt.num_tokens, self.prompt_tokens)

    def _read_sglang(self, event: Mapping[str, Any]) -> SequenceUpdate | None:
        """`output_ids` and log probabilities are all so far, or those of this event alone, as the server is set up."""
        meta: Mapping[str, Any] = event["meta_info"]
        if self._seen == 0:
            self.cached_tokens = whole(meta.get("cached_tokens"))
            self._count(meta.get("prompt_tokens"))
        new = max(0, whole(meta["completion_tokens"]) - self._seen)
        if new and event.get("output_ids") is None:
            raise EngineFailedError(f"{self._target.shown} answers without token ids.")
        update = SequenceUpdate(0, _last(event.get("output_ids"), new))
        if (most := self._sampling.logprobs) is not None:
            tops = _last(meta.get("output_top_logprobs"), new)
            update.logprobs = _ranked(_last(meta.get("output_token_logprobs"), new), tops, most)
        if (most := self._sampling.prompt_logprobs) is not None and self._seen == 0:
            tops = meta.get("input_top_logprobs") or []
            update.prompt_logprobs = _ranked(meta["input_token_logprobs"], tops, most)[1:]
        self._seen += new
        reason = meta.get("finish_reason")
        if reason is None:
            return self._given(update, None, None)
        if reason["type"] == "abort":
            status = whole(reason.get("status_code"))
            message = orjson.dumps({"message": reason.get("message")})
            raise failure(self._target, status, message, self._constraint) if status else _aborted(self._target)
        return self._given(update, reason["type"], reason.get("matched"))

    def _given(self, update: SequenceUpdate, reason: str | None, stop: object) -> SequenceUpdate | None:
        """An update without its stop token; the last one is held back until `end`."""
        if reason == "abort":
            raise _aborted(self._target)
        if reason == "stop" and update.tokens and not isinstance(stop, str):
            last = update.tokens[-1]
            stops = (*self._sampling.stop_ids, *self._target.hello.eos_ids)
            if last == stop or (stop is None and (self._target.facts.kind == "vllm" or last in stops)):
                update.stop_id = update.tokens.pop()
                if update.logprobs:
                    update.logprobs.pop()
        if not self._sampling.max_tokens:  # the server computes one token, all the same
            update.tokens, update.logprobs, update.stop_id = [], None, None
            reason = reason and "length"
        if reason is None:
            update.cached_tokens = self.cached_tokens
            return update
        if reason not in ("stop", "length"):
            raise EngineFailedError(f"Engine {self._target.name} ended the answer with {reason!r}.")
        update.finish = "stop" if reason == "stop" else "length"
        self._last = update
        return None

    def end(self) -> SequenceUpdate | None:
        """The last update, at the end of the body, when what it used is known. None: the answer broke off."""
        update, self._last = self._last, None
        if update is not None:
            self.ended = True
            update.cached_tokens = self.cached_tokens
        return update


def _without(data: bytes, ids: bytes) -> bytes:
    """vLLM's first event, or answer, without the prompt's ids where they are what was sent: so they are compared
    without being parsed."""
    key, found, rest = data.partition(b'"prompt_token_ids":')
    return b"".join((key, found, b"null", rest[len(ids) :])) if found and rest.startswith(ids) else data


def wrong_count(sent: int, counted: int) -> str | None:
    """Of tokens of a prompt; 0 are counted where the server does not say."""
    return f"{counted} tokens in place of {sent}" if counted and counted != sent else None


def zip_ids(scores: Sequence[Any], ids: Sequence[int] | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each prompt token but the first with vLLM's scores of its place. Without ids, the first one is the prompt's."""
    for at, one in enumerate(scores):
        if at and one:
            yield (int(next(iter(one))) if ids is None else ids[at]), one


def _scored(one: tuple[int, Mapping[str, Any]], most: int) -> TokenLogprobs:
    token, scores = one
    all_of_them = [(int(other), _log(score["logprob"])) for other, score in scores.items()]
    own = dict(all_of_them)[token]
    return TokenLogprobs(own, _likeliest(all_of_them, most))


def _logprobs(found: Any, sampling: Sampling) -> list[TokenLogprobs]:
    """vLLM's, whose tokens are written `token_id:N`. The sampled one is listed too, wanted or not."""
    if found is None:
        return []
    most = sampling.logprobs or 0
    tops = found.get("top_logprobs") or [None] * len(found["tokens"])
    return [
        TokenLogprobs(_log(own), _likeliest([(_id(name), _log(score)) for name, score in (top or {}).items()], most))
        for own, top in zip(found["token_logprobs"], tops, strict=True)
    ]


def _likeliest(scores: list[tuple[int, float]], most: int) -> tuple[tuple[int, float], ...]:
    return tuple(sorted(scores, key=lambda pair: -pair[1])[:most])


def _last(values: Sequence[Any] | None, count: int) -> list[Any]:
    return list(values[-count:]) if values and count else []


def _ranked(own: Sequence[Any], tops: Sequence[Any], most: int) -> list[TokenLogprobs]:
    """SGLang's: [log probability, token id, text] of each token, and a list of them for the likeliest in its place."""
    return [
        TokenLogprobs(_log(one[0]), tuple((int(other[1]), _log(other[0])) for other in (top or ())[:most]))
        for one, top in zip_longest(own, tops[: len(own)])
    ]


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _log(value: float | None) -> float:
    return MOST_NEGATIVE if value is None else max(float(value), MOST_NEGATIVE)


# -- errors ------------------------------------------------------------------------------------------------------------


def _aborted(target: Target) -> EngineLostError:
    return EngineLostError(f"Engine {target.name} aborted the request.")


def failure(target: Target, status: int, body: bytes, constraint: Constraint | None = None) -> KvasirError:
    """What a status that is not 200 means. Another engine may take what this one has no room for, or is set up wrong
    for; what is wrong with the request is its client's."""
    said = message_of(body)
    if status in (400, 413, 422):
        message = f"{target.shown}, which serves this model, refuses the request: {said}"
        if constraint is not None and _GRAMMATICAL.search(said):
            return BadRequestError(message, param=constraint.param, code="invalid_grammar")
        return BadRequestError(message)
    if status in (429, 503):
        return EngineLostError(f"Engine {target.name} takes no more requests (HTTP {status}).")
    if status in (401, 403, 404, 405):
        return EngineLostError(f"Engine {target.name} is not set up for this gateway (HTTP {status}).")
    return EngineFailedError(f"Engine {target.name} failed on this request (HTTP {status}): {said}")


_GRAMMATICAL: Final = re.compile("grammar|schema|regex|structured|guid", re.IGNORECASE)


def message_of(body: bytes) -> str:
    """Of an error's body, in one line."""
    try:
        value = orjson.loads(body)
    except ValueError:
        value = None
    found = mapping(mapping(value).get("error", value))
    text = found.get("message") or found.get("detail") or mapping(value).get("message") or "it does not say why"
    return " ".join(str(text).split())[:MAX_MESSAGE_CHARS]
