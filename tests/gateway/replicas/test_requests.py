"""What each kind of server is sent, and how its answer is read: events as the real ones write them."""

from __future__ import annotations

import json
from array import array
from typing import Any

import llguidance
import orjson
import pytest

from engine.protocol import Grammar, Namespace, Sampling, SequenceUpdate, TokenLogprobs
from gateway.errors import BadRequestError, EngineFailedError, EngineLostError, UnsupportedError
from gateway.replicas.answers import Answer, EventLines, failure
from gateway.replicas.base import Kind, ServerFacts
from gateway.replicas.requests import Target, find_refusal, lark_of, takes_salt, write
from gateway.types import Constraint, EncodedPrompt, Request, Tenant, TokenPrompt
from tests.fakes.pipeline import hello

FEATURES = {
    "vllm": {"completion_ids", "return_token_ids", "cache_salt", "structured_outputs", "min_p", "cached_tokens"},
    "sglang": {"completion_ids", "return_token_ids", "cache_salt", "structured_outputs", "min_p"},
    "tensorrt-llm": {"completion_ids", "chat_cache_salt", "response_format", "cached_tokens"},
}
PROMPT = EncodedPrompt(array("I", [5, 6, 7]).tobytes(), b"")


def target(kind: Kind = "vllm", *, without: str = "", **changes: Any) -> Target:
    values: dict[str, Any] = {"version": "1.2", "models": ("served",), "root": "r", "context_tokens": 2048}
    facts = ServerFacts(kind, **{**values, "features": frozenset(FEATURES[kind] - {without}), **changes})
    namespace = Namespace(weights="w", dtype="", kv_dtype="", block_size=16, salt="secret")
    return Target("r", facts, 1, hello(eos_ids=(0, 2), namespace=namespace))


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": "req_1",
        "tenant": Tenant("anonymous"),
        "model": "demo",
        "prompt": TokenPrompt(PROMPT.tokens),
        "sampling": Sampling(4),
        "received_s": 0.0,
        "deadline_s": 60.0,
        "stream": True,
    }
    return Request(**{**values, **changes})


def sent(to: Target, sampling: Sampling = Sampling(4), salt: str = "s", **changes: Any) -> dict[str, Any]:  # noqa: B008
    call = write(to, PROMPT, sampling, request(sampling=sampling, **changes), salt)
    body: dict[str, Any] = orjson.loads(call.body)
    return body


def read(to: Target, sampling: Sampling, *events: Any) -> list[SequenceUpdate]:
    answer = Answer(to, sampling)
    updates = [answer.feed(event if isinstance(event, bytes) else orjson.dumps(event)) for event in events]
    return [update for update in [*updates, answer.end()] if update is not None]


def chunk(*tokens: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(tokens), **more}]}


def usage(cached: int | None, prompt: int = 3) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "prompt_tokens_details": details}}


# -- what is sent ------------------------------------------------------------------------------------------------------


def test_a_vllm_is_sent_ids_and_every_parameter_because_it_has_defaults_of_its_own() -> None:
    body = sent(target(), Sampling(4, temperature=0.5, stop_ids=(9,), seed=3))
    assert body == {
        "model": "served",
        "prompt": [5, 6, 7],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "seed": 3,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [9, 0, 2],
        "ignore_eos": False,
        "min_tokens": 0,
        "return_token_ids": True,
        "cache_salt": "s",
    }


def test_one_of_several_ranks_is_named_in_a_header() -> None:
    def headers(ranks: int) -> dict[str, str]:
        return dict(write(target(ranks=ranks), PROMPT, Sampling(4), request(), "s").headers)

    assert headers(1) == {"x-request-id": "req_1"}
    assert headers(2)["X-data-parallel-rank"] == "1"


def test_a_request_that_must_not_reuse_anything_has_a_salt_of_its_own() -> None:
    salts = {sent(target(), use_cache=False)["cache_salt"] for _ in range(3)}
    assert len(salts) == 3
    with pytest.raises(UnsupportedError, match=r"TensorRT-LLM 1\.2, which serves this model, does not do an answer"):
        sent(target("tensorrt-llm"), salt="", use_cache=False)


def test_log_probabilities_of_a_prompt_come_with_a_whole_answer() -> None:
    body = sent(target(), Sampling(0, prompt_logprobs=1, logprobs=2))
    assert not body["stream"]
    assert "stream_options" not in body
    assert (body["prompt_logprobs"], body["logprobs"], body["return_tokens_as_token_ids"]) == (1, 2, True)
    assert body["max_tokens"] == 1  # the least that a server computes


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def grammar(kind: Any, text: str = "") -> dict[str, Any]:
    return {"constraint": Constraint(Grammar(kind, text), "response_format")}


@pytest.mark.parametrize(
    ("kind", "text", "field", "value"),
    [
        ("json_schema", json.dumps(SCHEMA), "json", SCHEMA),
        ("json_object", "", "json", {"type": "object"}),
        ("regex", "a+", "regex", "a+"),
        ("lark", "start: /a/", "grammar", "start: /a/"),
    ],
)
def test_grammars_of_a_vllm(kind: str, text: str, field: str, value: Any) -> None:
    new = sent(target(), **grammar(kind, text))["structured_outputs"]
    old = sent(target(without="structured_outputs"), **grammar(kind, text))[f"guided_{field}"]
    assert list(new) == [field]
    assert new[field] == old
    found = {key: one for key, one in old.items() if key != "x-guidance"} if isinstance(old, dict) else old
    assert found == value


def test_schemas_in_a_grammar_of_tool_calls_become_rules_and_text_stays() -> None:
    nested = {"lark": 'start: "@a \\" @a" @a /@a/ @a', "schemas": {"a": SCHEMA}}
    lark = lark_of(Grammar("lark_schemas", json.dumps(nested)))
    assert lark.splitlines()[0] == 'start: "@a \\" @a" schema_a /@a/ schema_a'
    source = llguidance.LLMatcher.grammar_from_lark(lark)
    assert not llguidance.LLMatcher.validate_grammar(source, None)


def test_a_sglang_is_sent_ids_and_its_own_names() -> None:
    to = target("sglang")
    body = sent(to, Sampling(4, seed=1, top_k=3, logprobs=2), **grammar("json_schema", json.dumps(SCHEMA)))
    assert body["input_ids"] == [5, 6, 7]
    assert (body["cache_salt"], body["extra_key"], body["rid"]) == ("s", "s", "req_1")
    assert (body["return_logprob"], body["top_logprobs_num"], body["logprob_start_len"]) == (True, 2, -1)
    params = body["sampling_params"]
    assert json.loads(params["json_schema"]) == SCHEMA
    assert (params["max_new_tokens"], params["sampling_seed"], params["top_k"]) == (4, 1, 3)
    assert write(to, PROMPT, Sampling(4), request(), "s").path == "generate"


def test_a_tensorrt_llm_is_sent_nothing_that_it_does_not_know() -> None:
    body = sent(target("tensorrt-llm"), salt="", **grammar("regex", "a+"))
    assert body["response_format"] == {"type": "regex", "regex": "a+"}
    assert body["detokenize"] is False
    assert not {"cache_salt", "min_p", "seed", "return_token_ids"} & set(body)


@pytest.mark.parametrize(
    ("sampling", "more", "param"),
    [
        (Sampling(4, logprobs=1), {}, "logprobs"),
        (Sampling(4, logit_bias=((1, 2.0),)), {}, "logit_bias"),
        (Sampling(4, min_p=0.1), {}, "min_p"),
        (Sampling(4), grammar("lark", "start: /a/"), "response_format"),
    ],
)
def test_what_a_tensorrt_llm_cannot_do_is_refused_by_name(sampling: Sampling, more: Any, param: str) -> None:
    with pytest.raises(UnsupportedError, match=r"TensorRT-LLM 1\.2, which serves this model, does not do") as raised:
        sent(target("tensorrt-llm"), sampling, salt="", **more)
    assert raised.value.param == param


def test_a_server_without_ids_cannot_be_used_and_one_without_salts_shares() -> None:
    assert find_refusal(target().facts) is None
    assert "vLLM 1.2 cannot be used: its API lacks return_token_ids" in str(
        find_refusal(target(without="return_token_ids").facts)
    )
    assert takes_salt(target().facts)
    assert not takes_salt(target("tensorrt-llm").facts)
    assert not takes_salt(target(without="cache_salt").facts)


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_the_last_update_waits_for_the_usage() -> None:
    first, last = read(target(), Sampling(2), chunk(8), chunk(9, finish_reason="length"), usage(2), b"[DONE]")
    assert (first.tokens, first.cached_tokens, first.finish) == ([8], None, None)
    assert (last.tokens, last.cached_tokens, last.finish) == ([9], 2, "length")


def test_a_server_that_says_nothing_of_its_cache_is_not_taken_to_have_reused_nothing() -> None:
    events = (chunk(8, finish_reason="length"), usage(None))
    assert read(target(without="cached_tokens"), Sampling(1), *events)[-1].cached_tokens is None
    assert read(target(), Sampling(1), *events)[-1].cached_tokens == 0  # older ones leave it out until there are some


@pytest.mark.parametrize(("stop_reason", "tokens"), [(None, [8, 2]), (9, [8, 9])])
def test_a_stop_token_is_none_of_the_answer(stop_reason: int | None, tokens: list[int]) -> None:
    (update,) = read(target(), Sampling(8), chunk(*tokens, finish_reason="stop", stop_reason=stop_reason))
    assert (update.tokens, update.stop_id, update.finish) == ([8], tokens[-1], "stop")


def test_log_probabilities_are_by_token_and_the_sampled_one_is_no_candidate() -> None:
    scores = {
        "tokens": ["token_id:8", "token_id:2"],
        "token_logprobs": [-3.0, -0.5],
        "top_logprobs": [
            {"token_id:8": -3.0, "token_id:5": -0.25, "token_id:6": -1.0},
            {"token_id:2": -0.5, "token_id:4": -1.5},
        ],
    }
    event = chunk(8, 2, logprobs=scores, finish_reason="stop", stop_reason=None)
    (update,) = read(target(), Sampling(8, logprobs=2), event)
    assert update.logprobs == [TokenLogprobs(-3.0, ((5, -0.25), (6, -1.0)))]


def test_log_probabilities_of_a_prompt() -> None:
    scores = [None, {"6": {"logprob": -9.0}, "4": {"logprob": -1.0}}, {"7": {"logprob": None}}]
    event = chunk(8, finish_reason="length", prompt_logprobs=scores, prompt_token_ids=[5, 6, 7]) | {"usage": {}}
    (update,) = read(target(), Sampling(0, prompt_logprobs=1), event)
    assert update.prompt_logprobs == [TokenLogprobs(-9.0, ((4, -1.0),)), TokenLogprobs(-9999.0, ((7, -9999.0),))]
    assert (update.tokens, update.finish) == ([], "length")


@pytest.mark.parametrize("cumulative", [True, False])
def test_a_sglang_repeats_what_it_said_before_or_not(cumulative: bool) -> None:
    def event(count: int, *, end: Any = None) -> dict[str, Any]:
        ids, first = [7, 8, 9, 2], 0 if cumulative else max(0, count - 2)
        scores = [[-0.5 * token, token, "x"] for token in ids]
        meta = {"completion_tokens": count, "cached_tokens": 16, "prompt_tokens": 20, "finish_reason": end}
        meta |= {
            "output_token_logprobs": scores[first:count],
            "output_top_logprobs": [[one] for one in scores[first:count]],
        }
        return {"output_ids": ids[first:count], "meta_info": meta}

    updates = read(
        target("sglang"), Sampling(8, logprobs=1), event(2), event(4, end={"type": "stop", "matched": 2}), b"[DONE]"
    )
    assert [(update.tokens, update.cached_tokens) for update in updates] == [([7, 8], 16), ([9], 16)]
    assert (updates[-1].finish, updates[-1].stop_id) == ("stop", 2)
    scores = [score for update in updates for score in update.logprobs or ()]
    assert scores == [TokenLogprobs(-0.5 * token, ((token, -0.5 * token),)) for token in (7, 8, 9)]


@pytest.mark.parametrize("space", [b"", b" "])
@pytest.mark.parametrize(
    ("echo", "wrong"),
    [(b"[5,6,7]", None), (b"[5,6,8]", "tokens that differ"), (b"[5,6,7,8]", "4 tokens in place of 3")],
)
def test_what_a_vllm_says_of_its_prompt_is_compared(space: bytes, echo: bytes, wrong: str | None) -> None:
    call = write(target(), PROMPT, Sampling(4), request(), "")
    answer = Answer(target(), Sampling(4), PROMPT, ids=call.ids)
    event = orjson.dumps(chunk(5, 6, 7, prompt_token_ids=None))
    key = b'"prompt_token_ids":'
    update = answer.feed(event.replace(key + b"null", key + space + echo.replace(b",", b"," + space)))
    assert update == SequenceUpdate(0, [5, 6, 7])
    assert answer.wrong == wrong


def test_an_answer_that_breaks_off_has_no_last_update() -> None:
    assert read(target(), Sampling(4), chunk(8)) == [SequenceUpdate(0, [8])]


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b"{", EngineFailedError),
        (b"[1]", EngineFailedError),
        ({"choices": [7]}, EngineFailedError),
        ({"error": {"message": "too hard", "code": 400}}, BadRequestError),
        ({"error": {"message": "boom", "code": 500}}, EngineFailedError),
        (chunk(8, finish_reason="abort"), EngineLostError),
        (chunk(8, finish_reason="strange"), EngineFailedError),
    ],
)
def test_what_is_no_answer_is_an_error(event: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(target(), Sampling(4), event)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequestError),
        (422, BadRequestError),
        (401, EngineLostError),
        (404, EngineLostError),
        (429, EngineLostError),
        (503, EngineLostError),
        (500, EngineFailedError),
    ],
)
def test_statuses(status: int, error: type[Exception]) -> None:
    body = orjson.dumps({"error": {"message": "Grammar\nerror: x"}})
    found = failure(target(), status, body, request(**grammar("regex", "a")).constraint)
    assert type(found) is error
    if isinstance(found, BadRequestError):
        assert found.message == "vLLM 1.2, which serves this model, refuses the request: Grammar error: x"
        assert (found.param, found.code) == ("response_format", "invalid_grammar")
    if isinstance(found, EngineLostError):
        assert not found.died


def test_a_grammar_that_is_refused_in_a_stream_names_the_field_as_well() -> None:
    answer = Answer(target(), Sampling(4), constraint=request(**grammar("regex", "a")).constraint)
    with pytest.raises(BadRequestError) as refused:
        answer.feed(orjson.dumps({"error": {"message": "Grammar error: x", "code": 400}}))
    assert (refused.value.param, refused.value.code) == ("response_format", "invalid_grammar")


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_events_are_cut_out_of_any_chunks(size: int) -> None:
    stream, lines = b'data: {"a":1}\r\n\r\n: note\n\ndata:{"b":2}\n\ndata: [DONE]\n\n', EventLines()
    found = [line for at in range(0, len(stream), size) for line in lines.feed(stream[at : at + size])]
    assert found == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
