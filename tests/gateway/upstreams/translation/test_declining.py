"""What a model or a filter of an upstream refuses, is a refusal in the client's own form, and never remembered."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from google.genai import types as google

from tests.fakes.declining import NO, declines
from tests.fakes.gemini import gemini
from tests.fakes.hosted import CLIENTS, UPSTREAMS
from tests.gateway.upstreams.translation.test_matrix import gateway

PAIRS = [(client, dialect) for client in CLIENTS for dialect in UPSTREAMS if client != dialect]


async def ask(client: str, url: str, *, stream: bool) -> tuple[str, str]:
    """Why the answer ended, and what was said."""
    hi: Any = [{"role": "user", "content": "Hi"}]
    if client == "anthropic":
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as claude:
            given: Any = {"model": "up-1", "max_tokens": 50, "messages": hi}
            if stream:
                async with claude.messages.stream(**given) as found:
                    message = await found.get_final_message()
            else:
                message = await claude.messages.create(**given)
            assert message.stop_details is not None
            return str(message.stop_reason), "".join(block.text for block in message.content if block.type == "text")
    if client == "gemini":
        models = gemini(url).aio.models
        if stream:
            answers = [one async for one in await models.generate_content_stream(model="up-1", contents="Hi")]
        else:
            answers = [await models.generate_content(model="up-1", contents="Hi")]
        reason = (answers[-1].candidates or [google.Candidate()])[0].finish_reason
        return reason.value if reason else "", "".join(one.text or "" for one in answers)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        if client == "responses":
            if stream:
                async with sdk.responses.stream(model="up-1", input="Hi", store=False) as parts:
                    answer: Any = [event async for event in parts][-1]
                    answer = answer.response
            else:
                answer = await sdk.responses.create(model="up-1", input="Hi", store=False)
            texts = [part.refusal for item in answer.output for part in item.content if part.type == "refusal"]
            return f"{answer.status} {answer.incomplete_details.reason}", "".join(texts)
        if stream:
            chunks = [one async for one in await sdk.chat.completions.create(model="up-1", messages=hi, stream=True)]
            choices = [choice for one in chunks for choice in one.choices]
            return str(choices[-1].finish_reason), "".join(choice.delta.refusal or "" for choice in choices)
        whole = await sdk.chat.completions.create(model="up-1", messages=hi)
        assert not whole.choices[0].message.content
        return whole.choices[0].finish_reason, whole.choices[0].message.refusal or ""


ENDS = {
    "openai": "content_filter",
    "responses": "incomplete content_filter",
    "anthropic": "refusal",
    "gemini": "SAFETY",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "dialect"), PAIRS)
async def test_a_refusal_is_one_in_the_clients_form_and_is_not_remembered(
    client: str, dialect: str, stream: bool
) -> None:
    told = declines(dialect, stream=stream)
    cache = {"response_cache": {"mode": "on", "requests": "all"}}
    async with gateway(dialect, told, told, sections=cache) as (url, stub):
        for _ in range(2):
            reason, text = await ask(client, url, stream=stream)
            assert reason == ENDS[client]
            assert NO in text
    assert len(stub.got) == 2
