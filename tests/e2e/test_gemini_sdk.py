"""`kvasir serve` with the demo model, spoken to with the real google-genai SDK, and with plain HTTP where it cannot."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel, Field

from tests.fakes.gemini import gemini
from tests.fakes.server import Server

POLICY = "You are the guard of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)


class Ticket(BaseModel):
    kind: int = Field(ge=0, le=9)
    bags: list[bool] = Field(max_length=3)


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[genai.Client]:
    client = gemini(server.url)
    yield client
    client.close()


def config(**options: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(
        **{"system_instruction": POLICY, "max_output_tokens": 12, "temperature": 0} | options
    )


def test_a_second_request_reuses_the_first_ones_prefix_and_says_the_same(sdk: genai.Client) -> None:
    cold, warm = (sdk.models.generate_content(model="demo", contents="Bags?", config=config()) for _ in range(2))
    assert cold.usage_metadata is not None
    assert warm.usage_metadata is not None
    assert cold.usage_metadata.cached_content_token_count is None
    prompt_tokens = cold.usage_metadata.prompt_token_count or 0
    assert (warm.usage_metadata.cached_content_token_count or 0) >= prompt_tokens - 32
    assert warm.text == cold.text
    counted = sdk.models.count_tokens(model="demo", contents="Bags?")
    assert 0 < (counted.total_tokens or 0) < prompt_tokens


def test_what_is_counted_is_what_is_computed(server: Server, sdk: genai.Client) -> None:
    asked = sdk.models.generate_content(model="demo", contents="How many?", config=config())
    assert asked.usage_metadata is not None
    whole = {
        "contents": [{"role": "user", "parts": [{"text": "How many?"}]}],
        "systemInstruction": {"parts": [{"text": POLICY}]},
    }
    counted = post(server, "/v1/models/demo:countTokens", {"generateContentRequest": {"model": "x", **whole}})
    assert counted["totalTokens"] == asked.usage_metadata.prompt_token_count


def test_a_stream_is_the_unstreamed_answer_in_pieces(server: Server, sdk: genai.Client) -> None:
    options = config(max_output_tokens=40)
    whole = sdk.models.generate_content(model="demo", contents="A story.", config=options)
    chunks = list(sdk.models.generate_content_stream(model="demo", contents="A story.", config=options))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text
    assert whole.usage_metadata is not None
    assert chunks[-1].usage_metadata is not None
    assert chunks[-1].usage_metadata.total_token_count == whole.usage_metadata.total_token_count
    body = {
        "contents": [{"parts": [{"text": "A story."}]}],
        "system_instruction": {"parts": [{"text": POLICY}]},
        "generation_config": {"temperature": 0, "max_output_tokens": 40},
    }
    array = post(server, "/v1beta/models/demo:streamGenerateContent?key=anybody", body)
    assert "".join(piece["candidates"][0]["content"]["parts"][0]["text"] for piece in array) == whole.text


async def test_the_asynchronous_half_does_the_same(server: Server, sdk: genai.Client) -> None:
    whole = sdk.models.generate_content(model="demo", contents="A story.", config=config())
    client = gemini(server.url, api_version="v1beta")
    try:
        same = await client.aio.models.generate_content(model="demo", contents="A story.", config=config())
        stream = await client.aio.models.generate_content_stream(model="demo", contents="A story.", config=config())
        pieces = [chunk.text or "" async for chunk in stream]
    finally:
        await client.aio.aclose()
        client.close()
    assert whole.text == same.text == "".join(pieces)


def test_a_chat_that_streams_reuses_its_turns(server: Server, sdk: genai.Client) -> None:
    chat = sdk.chats.create(model="demo", config=config())
    first = list(chat.send_message_stream("When does the train to the north leave?"))[-1]
    second = chat.send_message("And the next one?")
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    reused = second.usage_metadata.cached_content_token_count or 0
    assert reused > (first.usage_metadata.prompt_token_count or 0) - 1 - server.block_tokens


def test_an_answer_under_a_schema_is_of_its_kind(sdk: genai.Client) -> None:
    options = config(
        response_mime_type="application/json", response_schema=Ticket, max_output_tokens=200, temperature=1.0
    )
    for seed in range(3):
        options.seed = seed
        answer = sdk.models.generate_content(model="demo", contents="Which ticket?", config=options)
        assert isinstance(answer.parsed, Ticket)
    kinds = {"type": "STRING", "enum": ["first class", "second class"]}
    answer = sdk.models.generate_content(
        model="demo",
        contents="Which class?",
        config=config(response_mime_type="text/x.enum", response_schema=kinds, temperature=1.0),
    )
    assert answer.text in kinds["enum"]


def test_a_schema_that_cannot_be_carried_out_is_refused_with_its_path(server: Server, sdk: genai.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    options = config(response_mime_type="application/json", response_json_schema=schema)
    with pytest.raises(
        errors.ClientError, match="responseJsonSchema" if server.has_replicas else "properties"
    ) as refused:
        sdk.models.generate_content(model="demo", contents="a", config=options)
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")


def test_candidates_seeds_stops_and_log_probabilities(sdk: genai.Client) -> None:
    options = config(candidate_count=3, seed=40, temperature=1.0, response_logprobs=True, logprobs=2)
    answer = sdk.models.generate_content(model="demo", contents="A story.", config=options)
    again = sdk.models.generate_content(model="demo", contents="A story.", config=options)
    texts = ["".join(part.text or "" for part in one.content.parts) for one in answer.candidates]  # type: ignore[union-attr]
    assert len(set(texts)) > 1
    assert texts == ["".join(part.text or "" for part in one.content.parts) for one in again.candidates]  # type: ignore[union-attr]
    for one, text in zip(answer.candidates or [], texts, strict=True):
        assert one.logprobs_result is not None
        assert "".join(token.token or "" for token in one.logprobs_result.chosen_candidates or []) == text
    plain = sdk.models.generate_content(model="demo", contents="A story.", config=config()).text or ""
    cut = sdk.models.generate_content(model="demo", contents="A story.", config=config(stop_sequences=[plain[3:7]]))
    assert cut.text == plain[: plain.index(plain[3:7])]


def weather(tomorrow: bool) -> str:
    """What the weather is like.

    Args:
        tomorrow: or else today
    """
    return "rain" if tomorrow else "sun"


def forced(**options: Any) -> types.GenerateContentConfig:
    """One call or more, and nothing else."""
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
    return config(
        system_instruction=None,
        tools=[weather],
        tool_config=types.ToolConfig(function_calling_config=calling),
        max_output_tokens=200,
        **options,
    )


def test_a_function_that_has_to_be_called_is_called_streamed_or_not(sdk: genai.Client) -> None:
    options = forced(automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True))
    whole = sdk.models.generate_content(model="demo", contents="Rain?", config=options)
    assert whole.function_calls
    for call in whole.function_calls:
        assert call.name == "weather"
        assert (call.args or {}).get("tomorrow") in (True, False)
    chunks = sdk.models.generate_content_stream(model="demo", contents="Rain?", config=options)
    assert [call for chunk in chunks for call in chunk.function_calls or []] == whole.function_calls


def test_the_sdk_calls_the_function_itself_and_sends_what_it_returned(sdk: genai.Client) -> None:
    once = types.AutomaticFunctionCallingConfig(maximum_remote_calls=2)
    answer = sdk.models.generate_content(model="demo", contents="Rain?", config=forced(automatic_function_calling=once))
    history = answer.automatic_function_calling_history or []
    results = [part.function_response for turn in history for part in turn.parts or [] if part.function_response]
    assert results
    assert all((result.response or {})["result"] in ("rain", "sun") for result in results)
    assert answer.usage_metadata is not None
    assert (answer.usage_metadata.cached_content_token_count or 0) > 0


def test_functions_can_be_kept(server: Server, sdk: genai.Client) -> None:
    options = forced()
    declared = types.FunctionDeclaration.from_callable(client=sdk._api_client, callable=weather)
    tools = [types.Tool(function_declarations=[declared])]
    content = kept(sdk, "Functions.", tools=tools, tool_config=options.tool_config)
    asked = types.GenerateContentConfig(cached_content=content.name, max_output_tokens=200, temperature=0)
    answer = sdk.models.generate_content(model="demo", contents="Rain?", config=asked)
    assert [call.name for call in answer.function_calls or []][:1] == ["weather"]
    assert read_tokens(answer) >= least(server, content)


def test_models_are_listed_in_this_shape(server: Server, sdk: genai.Client) -> None:
    (model,) = list(sdk.models.list())
    assert (model.name, sdk.models.get(model="demo").name) == ("models/demo", "models/demo")
    assert (model.input_token_limit or 0) > 1000
    with pytest.raises(errors.ClientError) as missing:
        sdk.models.get(model="nobody")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
    assert "demo" in {one["id"] for one in server.get("/v1/models")["data"]}, "others see their own shape"


def kept(sdk: genai.Client, first: str, **options: Any) -> types.CachedContent:
    """The policy behind a first sentence that no other test uses."""
    contents: Any = [types.Content(role="user", parts=[types.Part(text=f"{first} {POLICY}")])]
    config = types.CreateCachedContentConfig(**{"contents": contents, "ttl": "300s"} | options)
    return sdk.caches.create(model="demo", config=config)


def total(content: types.CachedContent) -> int:
    assert content.usage_metadata is not None
    return content.usage_metadata.total_token_count or 0


def ask_kept(sdk: genai.Client, name: str | None, question: str = "Well?") -> types.GenerateContentResponse:
    options = types.GenerateContentConfig(cached_content=name, max_output_tokens=8, temperature=0)
    return sdk.models.generate_content(model="demo", contents=question, config=options)


def least(server: Server, content: types.CachedContent) -> int:
    """What a use reads of it: all; of others' servers, whole blocks."""
    return total(content) // server.block_tokens * server.block_tokens if server.has_replicas else total(content)


def read_tokens(answer: types.GenerateContentResponse) -> int:
    assert answer.usage_metadata is not None
    return answer.usage_metadata.cached_content_token_count or 0


def test_what_is_kept_is_read_from_the_first_use_on(server: Server, sdk: genai.Client) -> None:
    content = kept(sdk, "Tokens.", system_instruction="Be brief.")
    assert total(content) > 1000
    first = ask_kept(sdk, content.name)
    assert total(content) <= read_tokens(first) < total(content) + 16  # what the template puts behind it is shared, too
    assert first.sdk_http_response is not None
    lease = (first.sdk_http_response.headers or {})["x-kvasir-lease"]
    assert lease.startswith(f"kept; tokens={total(content)}; ttl=")
    assert 200 < float(lease.rpartition("=")[2]) <= 300
    plain = sdk.models.generate_content(
        model="demo",
        contents=[types.Content(role="user", parts=[types.Part(text=text)]) for text in (f"Tokens. {POLICY}", "Well?")],
        config=types.GenerateContentConfig(system_instruction="Be brief.", max_output_tokens=8, temperature=0),
    )
    assert plain.text == first.text, "what is kept changes no answer"
    assert plain.usage_metadata is not None
    assert first.usage_metadata is not None
    assert plain.usage_metadata.prompt_token_count == first.usage_metadata.prompt_token_count
    body = {"generateContentRequest": {"contents": [{"parts": [{"text": "Well?"}]}], "cachedContent": content.name}}
    counted = post(server, "/v1/models/demo:countTokens", body)
    assert counted["totalTokens"] == first.usage_metadata.prompt_token_count
    assert counted["cachedContentTokenCount"] == total(content)


def test_what_is_kept_streams_and_is_changed_listed_and_deleted(server: Server, sdk: genai.Client) -> None:
    content = kept(sdk, "Life.", display_name="Life")
    whole = ask_kept(sdk, content.name)
    options = types.GenerateContentConfig(cached_content=content.name, max_output_tokens=8, temperature=0)
    chunks = list(sdk.models.generate_content_stream(model="demo", contents="Well?", config=options))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text
    assert read_tokens(chunks[-1]) >= least(server, content)
    assert content.name in {one.name for one in sdk.caches.list()}
    later = sdk.caches.update(name=content.name or "", config=types.UpdateCachedContentConfig(ttl="1200s"))
    assert later.expire_time is not None
    assert content.expire_time is not None
    assert (later.expire_time - content.expire_time).total_seconds() >= 900
    assert sdk.caches.get(name=content.name or "").display_name == "Life"
    sdk.caches.delete(name=content.name or "")
    with pytest.raises(errors.ClientError) as gone:
        ask_kept(sdk, content.name)
    assert (gone.value.code, gone.value.status) == (404, "NOT_FOUND")


def test_what_has_ended_is_not_found(server: Server, sdk: genai.Client) -> None:
    content = kept(sdk, "Briefly.", ttl="1s")

    def is_gone() -> bool:
        try:
            sdk.caches.get(name=content.name or "")
        except errors.ClientError as error:
            return error.code == 404
        return False

    server.wait_until(is_gone, "the cached content has ended")


@pytest.mark.slow
def test_what_is_kept_outlives_a_restart_of_everything(tmp_path: Path) -> None:
    flags = ("--kv-cache-bytes", str(32 << 20), "--engine-disk-bytes", str(64 << 20), "--dtype", "float32")
    with Server(tmp_path, *flags) as server:
        body = {"model": "models/demo", "contents": [{"parts": [{"text": POLICY}]}], "ttl": "300s"}
        resource = post(server, "/v1/cachedContents", body)
        assert resource["cacheLease"] == "kept"
        server.wait_until(lambda: bool(list(tmp_path.rglob("*.leases"))), "the lease is written")
    with Server(tmp_path, *flags) as server:
        asked = {"contents": [{"parts": [{"text": "Well?"}]}], "cachedContent": resource["name"]}
        answer = post(server, "/v1/models/demo:generateContent", asked)
        assert answer["usageMetadata"]["cachedContentTokenCount"] >= resource["usageMetadata"]["totalTokenCount"]


def test_without_room_a_cached_content_says_that_its_lease_degraded(no_room: Server) -> None:
    body = {"model": "models/demo", "contents": [{"parts": [{"text": POLICY}]}], "ttl": "60.5s"}
    resource = post(no_room, "/v1beta/cachedContents?key=anybody", body)
    assert resource["cacheLease"] == "degraded"
    asked = {"contents": [{"parts": [{"text": "Well?"}]}], "cached_content": resource["name"]}
    answer = post(no_room, "/v1beta/models/demo:generateContent", asked)
    assert answer["usageMetadata"]["cachedContentTokenCount"] > 100, "ordinary reuse is there all the same"


def post(server: Server, path: str, body: object) -> Any:
    request = urllib.request.Request(server.url + path, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())
