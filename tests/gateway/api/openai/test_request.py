from __future__ import annotations

from array import array
from typing import Any

import pytest

from gateway.api.call import MAX_PROMPTS, NEW_DOCUMENT, Choices, settle
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.request import parse_chat, parse_completion
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, TextPrompt, TokenPrompt
from tests.fakes.pipeline import hello

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"model": "demo", "messages": MESSAGES, **fields}, LeaseSettings())


def completion(prompt: Any = "hi", **fields: Any) -> Any:
    return parse_completion({"model": "demo", "prompt": prompt, **fields})


def tokens(*ids: int) -> TokenPrompt:
    return TokenPrompt(array("I", ids).tobytes())


def test_a_plain_chat_has_the_defaults_of_the_api() -> None:
    call = chat()
    assert call.prompts == (ChatPrompt(MESSAGES),)
    assert (call.prompt_param, call.stream, call.include_usage, call.stop, call.prewarm) == (
        "messages",
        False,
        False,
        (),
        False,
    )
    assert call.sampling.max_tokens == 0
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.seed) == (1.0, 1.0, None)


def test_every_sampling_parameter_arrives() -> None:
    call = chat(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"5": 100, "6": -100.0},
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_p=0.1,
        repetition_penalty=1.5,
        min_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.0, 0.5, 40)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (-3, 1.0, -1.5)
    assert sampling.logit_bias == ((5, 100.0), (6, -100.0))
    assert (sampling.stop_ids, sampling.ignore_eos) == ((3, 4), True)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.5, 7)
    assert (call.stop, call.stream, call.include_usage) == (("a", "b"), True, True)


def test_log_probabilities_are_asked_for_in_each_routes_own_way() -> None:
    asked = [{}, {"logprobs": False}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 20}]
    assert [chat(**fields).sampling.logprobs for fields in asked] == [None, None, 0, 20]
    assert [completion(**fields).sampling.logprobs for fields in ({}, {"logprobs": 0}, {"logprobs": 5})] == [None, 0, 5]
    with pytest.raises(BadRequestError):
        completion(logprobs=6)
    scoring = completion(logprobs=2, echo=True, max_tokens=0)
    assert (scoring.sampling.prompt_logprobs, scoring.use_cache, scoring.prewarm) == (2, False, True)
    assert (completion(echo=True).sampling.prompt_logprobs, completion(echo=True).use_cache) == (None, True)


def test_one_answer_is_asked_for_unless_told_otherwise() -> None:
    assert chat().choices == completion().choices == Choices(1, 1)
    assert chat(n=3).choices == completion(n=3).choices == Choices(3, 3)
    assert completion(n=2, best_of=4).choices == Choices(2, 4)
    assert completion(["a", "b"], n=2, stream=True, best_of=2).choices == Choices(2, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"prompt": ["a"] * 129, "n": 2}, "n"),
        ({"n": 129}, "n"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_answers_that_cannot_be_generated_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        completion(**fields)
    assert refused.value.param == param


def test_null_is_not_given() -> None:
    assert chat(**dict.fromkeys(set(CHAT) - {"model", "messages"})) == chat()
    assert completion(**dict.fromkeys(set(COMPLETION) - {"model", "prompt"})) == completion()


@pytest.mark.parametrize(
    "fields", [{"top_k": -1}, {"top_k": 0}, {"stop": []}, {"logit_bias": {}}, {"ignore_eos": False}]
)
def test_values_that_switch_something_off_are_the_default(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


def test_keys_and_salts_arrive_up_to_their_limits() -> None:
    for parse in (chat, completion):
        call = parse(prompt_cache_key="k" * 512, cache_salt="s" * 128)
        assert (call.cache_key, call.cache_salt) == ("k" * 512, "s" * 128)
        assert (parse().cache_key, parse().cache_salt) == ("", "")


WRONG = [
    ({"model": None}, "model", "missing_required_parameter"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"model": 3}, "model", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "empty_array"),
    ({"stream": "true"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": []}, "stream_options", "invalid_type"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "invalid_type"),
    ({"stream": True, "stream_options": {"often": True}}, "stream_options.often", "unknown_parameter"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 16.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": 2**31}, "max_tokens", "integer_above_max_value"),
    ({"max_tokens": 1e30}, "max_tokens", "integer_above_max_value"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "invalid_parameter_combination"),
    ({"temperature": -0.1}, "temperature", "decimal_below_min_value"),
    ({"temperature": 2.1}, "temperature", "decimal_above_max_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 1.1}, "top_p", "decimal_above_max_value"),
    ({"top_k": -2}, "top_k", "integer_below_min_value"),
    ({"seed": 2**63}, "seed", "integer_above_max_value"),
    ({"seed": -1e30}, "seed", "integer_below_min_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "array_above_max_length"),
    ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
    ({"stop": ["a", ""]}, "stop[1]", "empty_string"),
    ({"stop": ""}, "stop", "empty_string"),
    ({"stop_token_ids": []}, "stop_token_ids", "empty_array"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "integer_below_min_value"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "array_above_max_length"),
    ({"logit_bias": []}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"word": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "decimal_above_max_value"),
    ({"logit_bias": {"1": None}}, "logit_bias.1", "invalid_type"),
    ({"n": 0}, "n", "integer_below_min_value"),
    ({"n": 129}, "n", "integer_above_max_value"),
    ({"safety_identifier": "x" * 129}, "safety_identifier", "string_above_max_length"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "object_above_max_properties"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "string_above_max_length"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", "string_above_max_length"),
    ({"reasoning_effort": "some"}, "reasoning_effort", "invalid_value"),
    ({"prompt_cache_key": "k" * 513}, "prompt_cache_key", "string_above_max_length"),
    ({"cache_salt": ""}, "cache_salt", "empty_string"),
    ({"cache_salt": "s" * 129}, "cache_salt", "string_above_max_length"),
    ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode", "invalid_value"),
    ({"prompt_cache_options": {"ttl": 30}}, "prompt_cache_options.ttl", "invalid_type"),
    ({"prompt_cache_options": {"ttl": "31m"}}, "prompt_cache_options.ttl", "invalid_value"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "unknown_parameter"),
    ({"prompt_cache_retention": "in-memory"}, "prompt_cache_retention", "invalid_value"),
    ({"response_format": "text"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_type"),
    ({"min_p": 1.5}, "min_p", "decimal_above_max_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    ({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "invalid_value"),
    ({"foo": 1}, "foo", "unknown_parameter"),
    ({"best_of": 1}, "best_of", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named_by_its_path_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert len(refused.value.message) < 400


REFUSED = [
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "alloy"}},
    {"prediction": {"type": "content", "content": "x"}},
    {"web_search_options": {}},
    {"moderation": {}},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_what_is_not_carried_out_is_refused_and_never_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (next(iter(fields)), "unsupported_parameter")


HARMLESS = {
    "n": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "tool_choice": "none",
    "function_call": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "user": "somebody",
    "safety_identifier": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "verbosity": "low",
    "parallel_tool_calls": False,
    "prompt_cache_retention": "24h",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_changes_nothing(name: str) -> None:
    assert chat(**{name: HARMLESS[name]}) == chat()


def test_every_parameter_without_effect_is_tried_above() -> None:
    assert {name for name, parameter in CHAT.items() if parameter.effect == "none"} <= set(HARMLESS)


# -- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", (TextPrompt("hi"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2, 999], (tokens(1, 2, 999),)),
        ([[1], [2, 3]], (tokens(1), tokens(2, 3))),
        (["a", ""], (TextPrompt("a"), NEW_DOCUMENT)),
        ("", (NEW_DOCUMENT,)),
        (None, (NEW_DOCUMENT,)),
    ],
    ids=str,
)
def test_a_prompt_may_be_text_or_token_ids_once_or_several_times(prompt: Any, expected: Any) -> None:
    assert completion(prompt).prompts == expected


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ([], "prompt", "empty_array"),
        ([[]], "prompt[0]", "empty_array"),
        ([[1], []], "prompt[1]", "empty_array"),
        (5, "prompt", "invalid_type"),
        ({}, "prompt", "invalid_type"),
        ([1, True], "prompt[1]", "invalid_type"),
        ([1, 2.0], "prompt[1]", "invalid_type"),
        ([1.5], "prompt[0]", "invalid_type"),
        ([True], "prompt[0]", "invalid_type"),
        ([None], "prompt[0]", "invalid_type"),
        ([1, "a"], "prompt[1]", "invalid_type"),
        (["a", 1], "prompt[1]", "invalid_type"),
        ([[1], "a"], "prompt[1]", "invalid_type"),
        ([[1, "a"]], "prompt[0][1]", "invalid_type"),
        ([1, -2], "prompt[1]", "invalid_value"),
        ([1, 2**32], "prompt[1]", "invalid_value"),
        (["a"] * (MAX_PROMPTS + 1), "prompt", "array_above_max_length"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_prompt_that_is_neither_is_named_by_its_path(prompt: Any, param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        completion(prompt)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_completions_end_after_sixteen_tokens_unless_told_otherwise() -> None:
    assert completion().sampling.max_tokens == 16
    assert completion(max_tokens=3).sampling.max_tokens == 3


def test_no_tokens_at_all_computes_the_prompt() -> None:
    call = completion(max_tokens=0)
    assert (call.prewarm, call.sampling.max_tokens) == (True, 0)


def test_the_least_tokens_may_not_be_more_than_the_most() -> None:
    assert completion(min_tokens=16).sampling.min_tokens == 16
    assert chat(min_tokens=100).sampling.min_tokens == 100
    for fields in ({"min_tokens": 17}, {"min_tokens": 1, "max_tokens": 0}):
        with pytest.raises(BadRequestError) as refused:
            completion(**fields)
        assert refused.value.param == "min_tokens"


# -- against a model --------------------------------------------------------------------------------------------------


def test_no_prompt_is_the_beginning_of_a_document() -> None:
    assert settle(completion(None), hello(eos_ids=(7, 8))) == (tokens(7),)
    assert settle(completion(None), hello(eos_ids=())) == (TextPrompt(""),)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (chat(logit_bias={"1000": 1}), "logit_bias"),
        (chat(stop_token_ids=[0, 1000]), "stop_token_ids[1]"),
        (completion([1, 1000]), "prompt"),
    ],
)
def test_token_ids_outside_of_the_vocabulary_are_refused(call: Any, param: str) -> None:
    with pytest.raises(BadRequestError, match="vocabulary of 1000 tokens") as refused:
        settle(call, hello(vocab_size=1000))
    assert refused.value.param == param


def test_the_last_token_id_of_the_vocabulary_is_allowed() -> None:
    settle(chat(logit_bias={"999": 1}, stop_token_ids=[999]), hello(vocab_size=1000))
    settle(completion([999]), hello(vocab_size=1000))
