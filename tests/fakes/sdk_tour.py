"""What an app asks through an SDK, and what it gets: run with an old and a new version of the same SDK, and compared.

    python -m tests.fakes.sdk_tour openai http://127.0.0.1:8080 demo

Prints one JSON object: name of a step -> what the app saw of it, without ids and times. Greedy, so that two runs agree.
Imports nothing but the SDK that is asked for: older versions run with PYTHONPATH alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0
POLL_S = 0.1

QUESTION: Any = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Where is Alice?"}]
TOOL: Any = {
    "name": "look_up",
    "description": "Looks a word up.",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": ["rabbit", "queen"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def until(ask: Callable[[], Any], ended: Callable[[Any], bool]) -> Any:
    """What is answered once it has ended, within LIMIT_S."""
    give_up_s = time.monotonic() + LIMIT_S
    while not ended(told := ask()):
        assert time.monotonic() < give_up_s, told
        time.sleep(POLL_S)
    return told


def tour_openai(url: str, model: str) -> dict[str, Any]:
    """Chats, completions, models, embeddings, files, batches and errors of the OpenAI API."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
    greedy: Any = {"model": model, "temperature": 0}
    chat: Any = {**greedy, "messages": QUESTION, "max_tokens": 12}
    function = {"type": "function", "function": TOOL}

    def plain() -> Any:
        answer = client.chat.completions.create(**chat)
        assert answer.usage is not None
        return answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.total_tokens

    def streamed() -> Any:
        chunks = list(client.chat.completions.create(**chat, stream=True))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason

    def several() -> Any:
        return [choice.message.content for choice in client.chat.completions.create(**chat, n=2).choices]

    def scored() -> Any:
        answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2)
        told = answer.choices[0].logprobs
        assert told is not None
        return [(one.token, round(one.logprob, 2), len(one.top_logprobs)) for one in told.content or ()]

    def forced() -> Any:
        answer = client.chat.completions.create(**{**chat, "max_tokens": 60}, tools=[function], tool_choice="required")
        call = (answer.choices[0].message.tool_calls or [None])[0]
        assert call is not None
        return call.function.name, call.function.arguments, answer.choices[0].finish_reason

    def continued() -> Any:
        return [one.text for one in client.completions.create(**greedy, prompt=["Alice", "The Queen"]).choices]

    def models() -> Any:
        return [one.id for one in client.models.list()], client.models.retrieve(model).id

    def embedded() -> Any:
        found = client.embeddings.create(model=EMBEDDER, input=["a rabbit", "a queen"], dimensions=8)
        return [[round(value, 3) for value in one.embedding] for one in found.data]

    def batched() -> Any:
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**chat, **more}}
            for name, more in (("good", {}), ("bad", {"temperature": 7}))
        ]
        data = b"\n".join(json.dumps(line).encode() for line in lines)
        file = client.files.create(file=("lines.jsonl", data), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"from": "a tour"}
        )
        ended = until(lambda: client.batches.retrieve(made.id), lambda one: one.completed_at is not None)
        listed = [one.id for one in client.batches.list(limit=1)]
        told = [
            [json.loads(line) for line in client.files.content(name or "").text.splitlines()]
            for name in (ended.output_file_id, ended.error_file_id)
        ]
        (good,), (bad,) = told
        deleted = client.files.delete(file.id).deleted
        late = error(lambda: client.batches.cancel(made.id))
        counts = ended.request_counts.model_dump() if ended.request_counts else None
        kept = sorted({one.purpose for one in client.files.list(purpose="batch_output")})
        answer = good["response"]["body"]["choices"][0]["message"]["content"]
        return (
            (ended.status, counts, ended.metadata, made.id in listed, deleted, file.bytes == len(data), kept),
            (good["custom_id"], answer, bad["custom_id"], bad["response"]["status_code"], late),
        )

    def unknown_model() -> Any:
        return error(lambda: client.chat.completions.create(**{**chat, "model": "nobody"}))

    def wrong_value() -> Any:
        return error(lambda: client.chat.completions.create(**{**chat, "temperature": 7}))

    def error(ask: Callable[[], Any]) -> Any:
        try:
            ask()
        except openai.APIStatusError as refused:
            body: Any = refused.body
            return type(refused).__name__, refused.status_code, refused.code, refused.param, body["message"]
        return None

    async def asynchronous() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60) as session:
            stream = await session.chat.completions.create(**chat, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    steps = (plain, streamed, several, scored, forced, continued, models, embedded, batched, unknown_model, wrong_value)
    seen = {step.__name__: step() for step in steps}
    seen["asynchronous"] = asyncio.run(asynchronous())
    client.close()
    return seen


def tour_anthropic(url: str, model: str) -> dict[str, Any]:
    """Messages, counts, batches, models and errors of the Anthropic API, in the version that every SDK can ask for."""
    import anthropic

    # Newer SDKs ask for a newer version of the API, and the answers are compared with those of older ones.
    headers = {"anthropic-version": "2023-06-01"}
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=60, default_headers=headers)
    extra: Any = {"extra_body": {"temperature": 0}}
    message: Any = {"model": model, "system": "You are brief.", "messages": QUESTION[1:]}
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}

    def plain() -> Any:
        answer = client.messages.create(**message, max_tokens=12, **extra)
        return [block.model_dump()["text"] for block in answer.content], answer.stop_reason, answer.usage.input_tokens

    def streamed() -> Any:
        with client.messages.stream(**message, max_tokens=12, **extra) as stream:
            text = "".join(stream.text_stream)
            return text, stream.get_final_message().stop_reason

    def forced() -> Any:
        choice: Any = {"type": "any"}
        answer = client.messages.create(**message, max_tokens=60, tools=[tool], tool_choice=choice, **extra)
        told = answer.content[0].model_dump()
        return told["name"], told["input"], answer.stop_reason

    def counted() -> Any:
        return client.messages.count_tokens(**message).input_tokens

    def models() -> Any:
        return [one.id for one in client.models.list()], client.models.retrieve(model).id

    def batched() -> Any:
        batches: Any = client.messages.batches
        asked = [
            {"custom_id": name, "params": {**message, "max_tokens": 12, "temperature": heat}}
            for name, heat in (("good", 0), ("bad", 7))
        ]
        made = batches.create(requests=asked)
        ended = until(lambda: batches.retrieve(made.id), lambda one: one.processing_status == "ended")
        results = {one.custom_id: one.result for one in batches.results(made.id)}
        listed = [one.id for one in batches.list(limit=1)]
        text = results["good"].message.content[0].text
        wrong = results["bad"].error.error.message
        deleted = batches.delete(made.id).type
        return ended.request_counts.model_dump(), text, wrong, made.id in listed, deleted

    def unknown_model() -> Any:
        try:
            client.messages.create(**{**message, "model": "nobody"}, max_tokens=5)
        except anthropic.APIStatusError as refused:
            body: Any = refused.body
            return type(refused).__name__, refused.status_code, body["error"]["type"], body["error"]["message"]
        return None

    async def asynchronous() -> Any:
        async with anthropic.AsyncAnthropic(
            base_url=url, api_key="any", max_retries=0, timeout=60, default_headers=headers
        ) as session:
            answer = await session.messages.create(**message, max_tokens=12, **extra)
            return [block.model_dump()["text"] for block in answer.content]

    seen = {step.__name__: step() for step in (plain, streamed, forced, counted, models, batched, unknown_model)}
    seen["asynchronous"] = asyncio.run(asynchronous())
    client.close()
    return seen


def tour_gemini(url: str, model: str) -> dict[str, Any]:
    """Answers, streams, functions, cached contents, models and errors of the Gemini API."""
    from google import genai
    from google.genai import errors, types

    client = genai.Client(api_key="any-key", http_options=types.HttpOptions(base_url=url, timeout=60_000))
    question, greedy = QUESTION[1]["content"], {"temperature": 0, "max_output_tokens": 12}
    ask = {"model": model, "contents": question}
    brief: Any = {**greedy, "system_instruction": QUESTION[0]["content"]}

    def plain() -> Any:
        answer = client.models.generate_content(**ask, config=brief)
        return answer.text, answer.candidates[0].finish_reason.value, answer.usage_metadata.total_token_count  # type: ignore[index,union-attr]

    def streamed() -> Any:
        chunks = list(client.models.generate_content_stream(**ask, config=brief))
        return "".join(chunk.text or "" for chunk in chunks), chunks[-1].usage_metadata.total_token_count  # type: ignore[union-attr]

    def forced() -> Any:
        config: Any = {
            **greedy,
            "max_output_tokens": 60,
            "tools": [{"function_declarations": [{**TOOL, "parameters": None, "parameters_json_schema": SCHEMA}]}],
            "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["look_up"]}},
        }
        call = (client.models.generate_content(**ask, config=config).function_calls or [])[0]
        return call.name, call.args

    def structured() -> Any:
        wide = {**greedy, "max_output_tokens": 60}
        config: Any = {**wide, "response_mime_type": "application/json", "response_schema": KIND}
        return client.models.generate_content(**ask, config=config).parsed

    def kept() -> Any:
        config: Any = {"contents": "Alice was here. " * 40, "system_instruction": "You are brief.", "ttl": "300s"}
        content = client.caches.create(model=model, config=config)
        answer = client.models.generate_content(**ask, config={**greedy, "cached_content": content.name})  # type: ignore[arg-type]
        listed = [one.name == content.name for one in client.caches.list(config={"page_size": 1})]
        later = client.caches.update(name=content.name or "", config={"ttl": "600s"})
        client.caches.delete(name=content.name or "")
        gone = error(lambda: client.caches.get(name=content.name or ""))
        tokens = content.usage_metadata.total_token_count  # type: ignore[union-attr]
        read = answer.usage_metadata.cached_content_token_count >= tokens  # type: ignore[operator,union-attr]
        return answer.text, tokens, read, listed, later.expire_time > content.expire_time, gone[:3]  # type: ignore[operator]

    def counted() -> Any:
        return client.models.count_tokens(**ask).total_tokens

    def models() -> Any:
        return [one.name for one in client.models.list()], client.models.get(model=model).input_token_limit

    def unknown_model() -> Any:
        return error(lambda: client.models.generate_content(model="nobody", contents="a"))

    def wrong_value() -> Any:
        return error(lambda: client.models.generate_content(**ask, config={"temperature": 7}))

    def error(ask: Callable[[], Any]) -> Any:
        try:
            ask()
        except errors.APIError as refused:
            return type(refused).__name__, refused.code, refused.status, refused.message
        return None

    async def asynchronous() -> Any:
        stream = await client.aio.models.generate_content_stream(**ask, config=brief)
        return "".join([chunk.text or "" async for chunk in stream])

    steps = (plain, streamed, forced, structured, kept, counted, models, unknown_model, wrong_value)
    seen = {step.__name__: step() for step in steps}
    seen["asynchronous"] = asyncio.run(asynchronous())
    return seen


SCHEMA = TOOL["parameters"]
KIND = {"type": "OBJECT", "properties": {"kind": {"type": "STRING", "enum": ["rabbit", "queen"]}}, "required": ["kind"]}
EMBEDDER = "all-MiniLM-L6-v2"
TOURS = {"openai": tour_openai, "anthropic": tour_anthropic, "gemini": tour_gemini}

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    print(json.dumps(TOURS[name](url, model)))
