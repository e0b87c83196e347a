"""A sequence as a request of a vLLM, SGLang or TensorRT-LLM. Pure: values in, bytes out; replica.py sends them, and
answers.py reads what comes.

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
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from engine.protocol import Grammar, Hello, Sampling
from engine.protocol.frozen import dataclass
from gateway.errors import UnsupportedError
from gateway.replicas.base import Kind, ServerFacts
from gateway.replicas.calls import NAMES
from gateway.types import EncodedPrompt, Request

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
