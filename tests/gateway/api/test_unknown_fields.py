"""Fields that the gateway does not know: ignored and named everywhere, or refused."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from gateway.admin.tallies import MAX_NAMES, OTHER, IgnoredFieldCounts
from gateway.api.anthropic.parameters import MESSAGES
from gateway.api.gemini.parameters import GENERATE, GENERATION
from gateway.api.lines import LineRequest
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.responses.parameters import RESPONSE
from gateway.api.routes import RUNNER
from gateway.api.unknown_fields import (
    HEADER,
    MAX_HEADER_CHARS,
    MAX_NAME_CHARS,
    IgnoredFields,
    collected,
    ignored,
    typo_of,
)
from gateway.config import ApiSettings, TenantSettings
from gateway.types import Tenant
from tests.fakes.gateway import response_cache, running
from tests.fakes.pipeline import FakePipeline

USER: dict[str, Any] = {"role": "user", "content": "Hi."}
ASK: dict[str, Any] = {"model": "demo", "messages": [USER]}
VERSION = {"anthropic-version": "2026-10-21"}
FUNCTION = {"type": "function", "function": {"name": "f"}}

FIELDS = """
add_generation_prompt allowed_token_ids background_mode bad_words betas cache_prompt chat_id chat_template_kwargs
client_metadata context_management continue_final_message debug deferred documents drop_params enable_thinking
extra_body fallbacks id id_slot include_reasoning include_stop_str_in_output keep_alive length_penalty mcp_servers
mirostat mirostat_tau n_predict num_ctx num_predict options parallel_tool_calls plugins presence prompt_mode
provider provider_specific_fields random_seed reasoning reasoning_details reasoning_format repeat_penalty request_id
rid route safe_prompt samplers search_parameters session_id skip_special_tokens slot_id speed tags template thinking
thread top_a trace transforms truncate_prompt_tokens typical_p use_beam_search user_id vllm_xargs web_search
"""
WILD = FIELDS.split()
"""Fields that clients send to other servers."""

CASES: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    (
        "/v1/chat/completions",
        {
            **ASK,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "Yes.",
                    "id": "m",
                    "reasoning_details": [],
                    "provider_specific_fields": {},
                },
                {"role": "user", "content": [{"type": "text", "text": "Go on.", "source": "x"}]},
            ],
            "tools": [FUNCTION | {"index": 0}, {"type": "function", "function": {"name": "g", "returns": {}}}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {},
        "messages[].id, messages[].provider_specific_fields, "
        "messages[].content[].source, tools[].index, tools[].function.returns, chat_template_kwargs",
    ),
    ("/v1/completions", {"model": "demo", "prompt": "a", "cache_prompt": True}, {}, "cache_prompt"),
    (
        "/v1/responses",
        {
            "model": "demo",
            "input": [{**USER, "mood": 1}, {"role": "user", "content": [{"type": "input_text", "text": "x", "y": 1}]}],
            "client_metadata": {"x": "y"},
            "reasoning": {"budget": 1},
            "text": {"tone": "x"},
        },
        {},
        "input[].mood, input[].content[].y, client_metadata, reasoning.budget, text.tone",
    ),
    (
        "/v1/messages",
        {
            **ASK,
            "max_tokens": 9,
            "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}],
            "messages": [{**USER, "uuid": "1"}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "parameters": {}}],
            "betas": ["x"],
        },
        VERSION,
        "system[].cache_control.scope, messages[].uuid, tools[].parameters, betas",
    ),
    ("/v1/messages/count_tokens", {**ASK, "betas": []}, VERSION, "betas"),
    (
        "/v1beta/models/demo:generateContent",
        {
            "contents": [{"parts": [{"text": "Hi.", "mood": 1}], "name": "x"}],
            "generationConfig": {"noSuchThing": 1},
            "extra_body": {},
        },
        {},
        "contents[].parts[].mood, contents[].name, generationConfig.noSuchThing, extra_body",
    ),
]


@pytest.mark.parametrize(("path", "body", "headers", "names"), CASES, ids=[case[0] for case in CASES])
async def test_unknown_fields_are_ignored_and_the_answer_names_them(
    path: str, body: dict[str, Any], headers: dict[str, str], names: str
) -> None:
    async with running() as gateway:
        status, answer, told = await gateway.post(path, body, headers=headers)
        assert (status, set(told[HEADER].split(", "))) == (200, set(names.split(", "))), answer
        if path != "/v1/messages/count_tokens" and "contents" not in body:
            streamed = gateway.session.post(gateway.url + path, json=body | {"stream": True}, headers=headers)
            async with streamed as stream:
                assert (stream.status, stream.headers[HEADER]) == (200, told[HEADER])
        page = (await gateway.get("/metrics"))[1]
        assert all(f'kvasir_ignored_fields_total{{field="{name}"}}' in page for name in names.split(", "))
    async with running(api=ApiSettings(unknown_fields="refuse")) as gateway:
        status, answer, told = await gateway.post(path, body, headers=headers)
        assert status == 400
        assert HEADER not in told


TYPOS = [
    ({**ASK, "temprature": 0}, "temprature", "temperature"),
    ({**ASK, "max_token": 3}, "max_token", "max_tokens"),
    ({**ASK, "Stream": True}, "Stream", "stream"),
    ({**ASK, "stpo": "x"}, "stpo", "stop"),
    ({"model": "demo", "messages": [{**USER, "nmae": "x"}]}, "messages[0].nmae", "name"),
    (
        {**ASK, "tools": [FUNCTION | {"function": {"name": "f", "paramters": {}}}]},
        "tools[0].function.paramters",
        "param",
    ),
    ({**ASK, "stream": True, "stream_options": {"includ_usage": True}}, "stream_options.includ_usage", "include_usage"),
]


@pytest.mark.parametrize(("body", "param", "meant"), TYPOS)
async def test_what_looks_like_a_typo_of_a_known_field_is_refused(body: dict[str, Any], param: str, meant: str) -> None:
    async with running() as gateway:
        status, answer, _ = await gateway.post("/v1/chat/completions", body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "unknown_parameter", param)
        assert f"Did you mean '{meant}" in answer["error"]["message"]


@pytest.mark.parametrize(
    "known", [CHAT, COMPLETION, RESPONSE, MESSAGES, GENERATE, GENERATION], ids=lambda table: next(iter(table))
)
def test_no_field_that_clients_are_seen_to_send_is_taken_for_a_typo(known: dict[str, Any]) -> None:
    assert not {name: typo_of(name, known, ()) for name in WILD if name not in known and typo_of(name, known, ())}


def test_no_field_of_one_route_is_taken_for_a_typo_on_another() -> None:
    tables = [CHAT, COMPLETION, RESPONSE, MESSAGES, GENERATE, GENERATION]
    found = {
        (name, meant)
        for known in tables
        for other in tables
        for name in other
        if name not in known and (meant := typo_of(name, known, ())) is not None
    }
    assert not [
        (name, meant) for name, meant in found if name.replace("_", "").lower() != meant.replace("_", "").lower()
    ]


def test_a_field_beside_the_one_that_it_looks_like_is_no_typo() -> None:
    assert typo_of("models", CHAT, ["models"]) == "model"
    assert typo_of("models", CHAT, ["model", "models"]) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({**ASK, "response_format": {"type": "text", "strength": 1}}, "response_format.strength"),
        ({**ASK, "structured_outputs": {"words": ["a"]}}, "structured_outputs.words"),
        ({**ASK, "cache": {"no-caching": True}}, "cache.no-caching"),
        ({**ASK, "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, None),
        ({**ASK, "grammar": "root ::= x"}, "grammar"),
    ],
)
async def test_what_would_change_the_meaning_of_its_neighbours_is_refused(
    body: dict[str, Any], param: str | None
) -> None:
    async with running() as gateway:
        status, answer, _ = await gateway.post("/v1/chat/completions", body)
        assert status == 400
        assert param is None or answer["error"]["param"] == param


async def test_more_different_unknown_fields_than_any_client_sends_are_refused() -> None:
    async with running() as gateway:
        many = {f"unknown_{chr(97 + number) * 9}": 1 for number in range(26)}
        assert (await gateway.post("/v1/chat/completions", {**ASK, **many}))[0] == 200
        more = {name[::-1]: 1 for name in many}
        status, answer, headers = await gateway.post("/v1/chat/completions", {**ASK, **many, **more})
        assert (status, answer["error"]["code"]) == (400, "unknown_parameter")
        assert len(headers[HEADER]) <= MAX_HEADER_CHARS


def test_names_are_short_and_of_letters_whatever_a_client_sends() -> None:
    fields = IgnoredFields()
    with collected(fields):
        assert ignored("a[0].b\r\nc: \x1b[31m\u2028\ud83d[17].d", "x", (), ())
        assert ignored("y" * 9000, "y" * 9000, CHAT, ())
        assert ignored("a[1].b\r\nc: \x1b[31m\u2028\ud83d[3].d", "x", (), ())
    odd, long = fields.names
    assert odd == "a[].b??c???[31m??[].d"
    assert len(long) == MAX_NAME_CHARS
    assert fields.header == f"{odd}, {long}"


def test_outside_of_a_request_every_unknown_field_is_refused() -> None:
    assert not ignored("x", "x", (), ())


async def test_a_tenant_may_have_its_unknown_fields_refused_in_batches_too() -> None:
    tenants = [
        TenantSettings(name="strict", keys=("key-of-strict",), unknown_fields="refuse"),
        TenantSettings(name="other", keys=("key-of-other",)),
    ]
    async with running(tenants=tenants) as gateway:
        for name, status in (("strict", 400), ("other", 200)):
            asked = {**ASK, "provider": {}}
            key = {"Authorization": f"Bearer key-of-{name}"}
            assert (await gateway.post("/v1/chat/completions", asked, headers=key))[0] == status
            line = LineRequest("/v1/chat/completions", Tenant(name), asked, "", "req_1")
            assert (await gateway.app[RUNNER].answer(line)).status == status
            found = await gateway.app[RUNNER].find_beginning(line)
            assert (found is not None) == (status == 200)


async def test_requests_that_differ_in_ignored_fields_alone_are_one_to_the_response_cache() -> None:
    pipeline = FakePipeline(responses=response_cache())
    async with running(pipeline) as gateway:
        asked = {**ASK, "temperature": 0}
        for body, outcome, names in (
            (asked, "miss", None),
            ({**asked, "provider": {"order": ["a"]}}, "exact", "provider"),
            ({**asked, "provider": {"order": ["b"]}}, "exact", "provider"),
            ({**asked, "provider": {"order": ["b"]}}, "exact", "provider"),  # on the resend path
            ({**asked, "provider": {"order": ["b"]}}, "exact", "provider"),
            ({**asked, "guided_choice": ["a"]}, "miss", None),
        ):
            _, _, headers = await gateway.post("/v1/chat/completions", body)
            assert (headers["x-kvasir-cache"].partition(";")[0], headers.get(HEADER)) == (outcome, names)
        page = (await gateway.get("/metrics"))[1]
        assert 'kvasir_ignored_fields_total{field="provider"} 4.0' in page


def test_names_of_ignored_fields_are_bounded() -> None:
    counts = IgnoredFieldCounts()
    for number in range(5 * MAX_NAMES):
        counts.add([f"x{number}", "x0"])
    (family,) = counts.collect()
    samples = {sample.labels["field"]: sample.value for sample in family.samples}
    assert len(samples) == MAX_NAMES + 1
    assert (samples["x0"], samples[OTHER]) == (5 * MAX_NAMES + 1, 4 * MAX_NAMES)


async def test_what_means_nothing_is_no_error_in_any_dialect() -> None:
    async with running() as gateway:
        for path, body, headers in (
            ("/v1/chat/completions", {**ASK, "tools": [], "tool_choice": "auto"}, {}),
            ("/v1/chat/completions", {**ASK, "functions": [], "function_call": "auto"}, {}),
            ("/v1/chat/completions", {**ASK, "tool_choice": "auto", "parallel_tool_calls": False}, {}),
            ("/v1/chat/completions", {**ASK, "messages": [USER, {**USER, "role": "assistant", "tool_calls": []}]}, {}),
            ("/v1/chat/completions", {**ASK, "user": {"id": "1", "name": "x"}}, {}),
            ("/v1/responses", {"model": "demo", "input": "x", "tools": [], "tool_choice": "auto", "user": {}}, {}),
            ("/v1/responses", {"model": "demo", "input": "x", "context_management": []}, {}),
            ("/v1/messages", {**ASK, "max_tokens": 9, "tools": [], "mcp_servers": []}, VERSION),
            ("/v1/messages", {**ASK, "max_tokens": 9, "context_management": {"edits": []}}, VERSION),
            ("/v1beta/models/demo:generateContent", {"contents": [{"parts": [{"text": "x"}]}], "tools": []}, {}),
        ):
            status, answer, told = await gateway.post(path, body, headers=headers)
            assert (status, told.get(HEADER)) == (200, None), (body, answer)


async def test_a_call_that_has_to_be_made_without_tools_is_still_refused() -> None:
    async with running() as gateway:
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            status, answer, _ = await gateway.post("/v1/chat/completions", {**ASK, "tools": [], "tool_choice": choice})
            assert (status, answer["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("kind", "value"), [("json", {"type": "object"}), ("regex", "a+"), ("choice", ["a", "b"]), ("grammar", "start: x")]
)
async def test_guided_decoding_is_structured_output_by_its_older_name(kind: str, value: Any) -> None:
    pipeline = FakePipeline()
    async with running(pipeline) as gateway, gateway.sdk() as client:
        for extra in ({f"guided_{kind}": value}, {"structured_outputs": {kind: value}}):
            await client.chat.completions.create(model="demo", messages=[USER], extra_body=extra)  # type: ignore[list-item]
        one, other = (request.constraint for request in pipeline.requests)
        assert one is not None
        assert other is not None
        assert one.grammar == other.grammar
        with pytest.raises(openai.BadRequestError, match="at the same time"):
            both = {f"guided_{kind}": value, "structured_outputs": {kind: value}}
            await client.chat.completions.create(model="demo", messages=[USER], extra_body=both)  # type: ignore[list-item]


async def test_cache_control_in_a_chat_is_a_breakpoint() -> None:
    pipeline = FakePipeline()
    marked = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    other = {"cache_control": {"type": "ephemeral", "ttl": "17m"}}
    async with running(pipeline) as gateway:
        part = {"type": "text", "text": "Long."}
        messages = [
            {"role": "system", "content": [{**part, **marked}, part]},
            {**USER, **other},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": "No.", **marked},
        ]
        status, answer, headers = await gateway.post("/v1/chat/completions", {**ASK, "messages": messages})
        assert (status, headers.get(HEADER)) == (200, None), answer
        wrong = {**ASK, "messages": [{**USER, "cache_control": {"type": "forever"}}]}
        status, answer, _ = await gateway.post("/v1/chat/completions", wrong)
        assert (status, answer["error"]["param"]) == (400, "messages[0].cache_control.type")
    markers = pipeline.requests[0].prompt.markers  # type: ignore[union-attr]
    assert [(one.message, one.chars, one.ttl_s) for one in markers] == [(0, 5, 3600.0), (1, 3, 1800.0), (2, 3, 3600.0)]


async def test_edits_of_a_conversation_are_accepted_as_far_as_they_do_nothing() -> None:
    async with running() as gateway:
        for kind, status in (("clear_thinking_20251015", 200), ("clear_tool_uses_20250919", 400)):
            edits = {"context_management": {"edits": [{"type": kind, "keep": "all"}]}}
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                body = {**ASK, **edits} | ({"max_tokens": 9} if path == "/v1/messages" else {})
                found, answer, _ = await gateway.post(path, body, headers=VERSION)
                assert found == status, answer


async def test_the_older_form_of_output_config_is_carried_out() -> None:
    pipeline = FakePipeline(pieces=["{}"])
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    async with running(pipeline) as gateway:
        for more in ({"output_format": form}, {"output_config": {"format": form}}):
            status, answer, _ = await gateway.post("/v1/messages", {**ASK, "max_tokens": 9, **more}, headers=VERSION)
            assert status == 200, answer
    one, other = (request.constraint for request in pipeline.requests)
    assert one is not None
    assert other is not None
    assert one.grammar == other.grammar


async def test_the_sdks_tool_runner_goes_on_without_threads() -> None:
    pipeline = FakePipeline(pieces=["Done."])
    async with running(pipeline) as gateway, gateway.anthropic() as client:

        @anthropic.beta_async_tool
        async def find(what: str) -> str:
            """Finds."""
            return json.dumps(what)

        runner = client.beta.messages.tool_runner(
            model="demo",
            max_tokens=64,
            tools=[find],
            messages=[{"role": "user", "content": "Find it."}],
        )
        assert [message.content[0].text async for message in runner] == ["Done."]  # type: ignore[union-attr]
        status, answer, _ = await gateway.post(
            "/v1/messages", {**ASK, "max_tokens": 9, "thread": {"type": "create"}}, headers=VERSION
        )
        assert (status, answer["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})
