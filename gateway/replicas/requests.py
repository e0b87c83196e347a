"""A sequence as a request of a vLLM, SGLang or TensorRT-LLM, and its answer as SequenceUpdates. Pure: bytes and values
in and out; replica.py sends and reads them.

    vLLM          /v1/completions with ids, `return_token_ids`, log probabilities by token id
    SGLang        /generate with ids: its /v1/completions tells neither ids nor cached tokens before the end
    TensorRT-LLM  /v1/completions with ids and `detokenize` off, so that the answer has ids

Every sampling parameter is sent, also one that has the usual value: servers have defaults of their own for what is not.
Stop strings are not: they are the pipeline's, which ends the request. What a server cannot do is an UnsupportedError
that names it, never ignored.
"""

from __future__ import annotations

import json
import re
import uuid
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import orjson

from engine.protocol import Grammar, Hello, Sampling, SequenceUpdate, TokenLogprobs
from engine.protocol.frozen import dataclass
from gateway.errors import BadRequestError, EngineFailedError, EngineLostError, KvasirError, UnsupportedError
from gateway.replicas.base import Kind, ServerFacts
from gateway.replicas.calls import NAMES, mapping, whole
from gateway.types import Constraint, EncodedPrompt, Request

MAX_EVENT_BYTES: Final = 64 << 20
"""Of one event of a stream, or of a whole answer: vLLM's first event has all ids of the prompt once more, and log
probabilities of a prompt take 2 kB a token."""

MAX_MESSAGE_CHARS: Final = 500
"""Of what a server says is wrong with a request, as clients are told."""

MOST_NEGATIVE: Final = -9999.0
"""Log probability of what cannot be: JSON has no infinity."""

_CHUNK_TOKENS: Final = 16
"""In one event of an answer that no client reads as it comes."""


class Call(NamedTuple):
    """An HTTP request. The answer is a stream of events, or a body where `whole`. `ids`: JSON of the prompt's."""

    path: str
    body: bytes
    headers: Mapping[str, str]
    whole: bool
    ids: bytes = b""


@dataclass(frozen=True, slots=True)
class Target:
    """One rank of a server that has joined."""

    name: str  # of the replica
    facts: ServerFacts
    rank: int
    hello: Hello

    @property
    def shown(self) -> str:
        """What clients are told that cannot do something."""
        return f"{NAMES[self.facts.kind]} {self.facts.version}".strip()


def find_refusal(facts: ServerFacts) -> str | None:
    """Why no request can be sent to such a server. None: it can."""
    missing = {"completion_ids"} - facts.features
    if facts.kind == "vllm":
        missing |= {"return_token_ids"} - facts.features
    if not missing:
        return None
    version = f"{NAMES[facts.kind]} {facts.version}".strip()
    return f"{version} cannot be used: its API lacks {' and '.join(sorted(missing))} (vLLM has them since 0.10.2)"


def takes_salt(facts: ServerFacts) -> bool:
    """Whether it keeps what is computed under one salt apart from all others."""
    return facts.kind != "tensorrt-llm" and "cache_salt" in facts.features


def write(target: Target, prompt: EncodedPrompt, sampling: Sampling, request: Request, salt: str) -> Call:
    """The request that continues a prompt, under a salt that is empty where the server takes none. Raises
    UnsupportedError for what the server cannot do."""
    ids = orjson.dumps(array("I", prompt.tokens).tolist())
    path, body = _WRITERS[target.facts.kind](target, orjson.Fragment(ids), sampling, request)
    if salt:
        salt = salt if request.use_cache else uuid.uuid4().hex  # shares with nobody
        body["cache_salt"] = salt
        if target.facts.kind == "sglang":
            body["extra_key"] = salt  # releases that know no `cache_salt` here
    elif not request.use_cache:
        raise _lacks(target, "an answer without the cache", request.prompt_param)
    headers = {"x-request-id": request.request_id}
    if target.facts.ranks > 1:
        headers["X-data-parallel-rank"] = str(target.rank)
    return Call(path, orjson.dumps(body), headers, not body["stream"], ids)


def _lacks(target: Target, what: str, param: str | None) -> UnsupportedError:
    return UnsupportedError(f"{target.shown}, which serves this model, does not do {what}.", param=param)


# -- what each kind is sent --------------------------------------------------------------------------------------------

Body = dict[str, Any]


def _vllm(target: Target, ids: orjson.Fragment, sampling: Sampling, request: Request) -> tuple[str, Body]:
    body: Body = {
        **_completion(target, ids, sampling),
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "return_token_ids": True,
        "stream": not sampling.prompt_logprobs,  # only a whole answer has them
    }
    if not body["stream"]:
        del body["stream_options"]
    if sampling.logit_bias:
        body["logit_bias"] = _biases(sampling)
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if sampling.prompt_logprobs is not None:
        body["prompt_logprobs"] = sampling.prompt_logprobs
    if not request.stream:
        body["stream_interval"] = _CHUNK_TOKENS
    if (grammar := _grammar_of(request)) is not None:
        body |= _vllm_grammar(target, grammar, request)
    return "v1/completions", body


def _completion(target: Target, ids: orjson.Fragment, sampling: Sampling) -> Body:
    """What vLLM's and TensorRT-LLM's completions share."""
    return {
        "model": target.facts.models[0],
        "prompt": ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max(1, sampling.max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop_token_ids": _stops(target, sampling),
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
    }


def _stops(target: Target, sampling: Sampling) -> list[int]:
    """The model's own too: a server may have read other files."""
    own = () if sampling.ignore_eos else target.hello.eos_ids
    return list(dict.fromkeys((*sampling.stop_ids, *own)))


def _biases(sampling: Sampling) -> dict[str, float]:
    return {str(token): bias for token, bias in sampling.logit_bias}


def _grammar_of(request: Request) -> Grammar | None:
    return None if request.constraint is None else request.constraint.grammar


def _vllm_grammar(target: Target, grammar: Grammar, request: Request) -> Body:
    """`structured_outputs`, or `guided_*` of releases before 0.12. Lark needs the guidance backend, which vLLM takes by
    itself for what its other ones refuse."""
    older = "structured_outputs" not in target.facts.features
    if grammar.kind in ("json_schema", "json_object"):
        name, value = "json", _bounded(_schema(grammar))
    elif grammar.kind == "regex":
        name, value = "regex", grammar.text
    else:
        name, value = "grammar", lark_of(grammar)
    return {f"guided_{name}": value} if older else {"structured_outputs": {name: value}}


def _schema(grammar: Grammar) -> Any:
    return orjson.loads(grammar.text) if grammar.kind == "json_schema" else {"type": "object"}


def _bounded(schema: Any) -> Any:
    """With as little white space as the bundled engine allows, so that a weak model's answer comes to an end. Backends
    other than guidance pass it over."""
    return {"x-guidance": _GUIDANCE, **schema} if isinstance(schema, dict) else schema


_GUIDANCE: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def lark_of(grammar: Grammar) -> str:
    """One Lark grammar, in which the schemas that it refers to stand as rules. llguidance's dialect."""
    if grammar.kind == "lark":
        return grammar.text
    nested = json.loads(grammar.text)
    rules = [f"schema_{name}: %json {json.dumps(_bounded(one))}" for name, one in nested["schemas"].items()]
    lark = _REFERENCE.sub(lambda found: f"schema_{found[1]}" if found[1] else found[0], nested["lark"])
    return "\n".join([lark, *rules])


_REFERENCE: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|@(\w+)')
"""Strings and regular expressions, in which nothing is a reference, and references."""


def _sglang(target: Target, ids: orjson.Fragment, sampling: Sampling, request: Request) -> tuple[str, Body]:
    params: Body = {
        "max_new_tokens": max(1, sampling.max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": _stops(target, sampling),
        "ignore_eos": sampling.ignore_eos,
        "min_new_tokens": sampling.min_tokens,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        params["logit_bias"] = _biases(sampling)
    if (grammar := _grammar_of(request)) is not None:
        if grammar.kind == "regex":
            params["regex"] = grammar.text
        elif grammar.kind in ("lark", "lark_schemas"):
            params["ebnf"] = lark_of(grammar)  # with --grammar-backend llguidance
        else:
            params["json_schema"] = json.dumps(_schema(grammar))
    body: Body = {"input_ids": ids, "sampling_params": params, "stream": True, "rid": request.request_id}
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        scored = sampling.prompt_logprobs is not None
        top = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        body |= {"return_logprob": True, "top_logprobs_num": top, "logprob_start_len": 0 if scored else -1}
    return "generate", body


def _tensorrt(target: Target, ids: orjson.Fragment, sampling: Sampling, request: Request) -> tuple[str, Body]:
    """Its API refuses fields that it does not know."""
    if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
        raise _lacks(target, "log probabilities by token id", "logprobs")
    if sampling.logit_bias:
        raise _lacks(target, "a bias of single tokens", "logit_bias")
    if sampling.min_p and "min_p" not in target.facts.features:
        raise _lacks(target, "min_p", "min_p")
    body = _completion(target, ids, sampling)
    body |= {"top_k": sampling.top_k, "repetition_penalty": sampling.repetition_penalty, "detokenize": False}
    if sampling.min_p:
        body["min_p"] = sampling.min_p
    if (grammar := _grammar_of(request)) is not None and request.constraint is not None:
        if grammar.kind == "json_schema":
            body["response_format"] = {"type": "json", "schema": _schema(grammar)}
        elif grammar.kind == "json_object":
            body["response_format"] = {"type": "json_object"}
        elif grammar.kind == "regex":
            body["response_format"] = {"type": "regex", "regex": grammar.text}
        else:
            raise _lacks(target, "the grammar that this needs (Lark)", request.constraint.param)
    return "v1/completions", {name: value for name, value in body.items() if value is not None}


_WRITERS: Final[Mapping[Kind, Callable[[Target, orjson.Fragment, Sampling, Request], tuple[str, Body]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt,
}


# -- answers -----------------------------------------------------------------------------------------------------------


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
