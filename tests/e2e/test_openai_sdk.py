"""`kvasir serve` with the demo model, spoken to with the real openai SDK."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import openai
import pytest

from tests.fakes.server import Server

POLICY = "You are the clerk of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)


def ask(server: Server, *turns: str, key: str = "none", **options: object) -> openai.types.chat.ChatCompletion:
    messages = [{"role": "system", "content": POLICY}]
    messages += [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    options = {"max_tokens": 8, "temperature": 0} | options
    return server.client(key).chat.completions.create(model="demo", messages=messages, **options)  # type: ignore[call-overload,no-any-return]


def cached(answer: openai.types.chat.ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_the_start_says_what_runs_and_how_to_use_it(server: Server) -> None:
    server.wait_for_line("docs/ in the repository")
    shown = "\n".join(server.lines)
    for part in ("demo", "nonsense", "--model", f"{server.url}/v1", "/metrics", "docs", "open"):
        assert part in shown


def test_a_second_request_reuses_the_first_ones_prefix_and_says_the_same(server: Server) -> None:
    cold = ask(server, "May I take four bags?")
    warm = ask(server, "May I take four bags?")
    assert cached(cold) == 0
    assert cold.usage is not None
    assert cached(warm) >= cold.usage.prompt_tokens - 32
    assert warm.choices[0].message.content == cold.choices[0].message.content


def test_a_next_turn_reuses_the_turns_before_it(server: Server) -> None:
    first = ask(server, "When does the train leave?")
    assert first.usage is not None
    said = first.choices[0].message.content or ""
    second = ask(server, "When does the train leave?", said, "And the next one?")
    assert cached(second) > first.usage.prompt_tokens - 1 - server.block_tokens


def test_headers_tell_the_request_its_engine_and_what_was_reused(server: Server) -> None:
    raw = server.client().chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": "Hello."}], max_tokens=2
    )
    assert re.fullmatch(r"[\w-]{8,}", raw.headers["x-request-id"])
    assert raw.headers["x-kvasir-engine"] in ("engine-0", "engine-1")
    assert int(raw.headers["x-kvasir-cached-tokens"]) == 0
    assert 0 <= float(raw.headers["x-kvasir-overhead-ms"]) < 30_000


def test_a_stream_is_the_unstreamed_answer_in_pieces(server: Server) -> None:
    whole = ask(server, "Tell me a story.", max_tokens=40)
    stream = server.client().chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": "Tell me a story."}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_same_seed_gives_the_same_text_and_another_seed_another(server: Server) -> None:
    texts = [
        ask(server, "Tell me a story.", max_tokens=24, temperature=1.0, seed=seed).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(server: Server) -> None:
    text = ask(server, "Tell me a story.", max_tokens=40).choices[0].message.content or ""
    stop = text[5:9]
    cut = ask(server, "Tell me a story.", max_tokens=40, stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_extensions_of_the_sampler_change_the_answer(server: Server) -> None:
    plain = ask(server, "Tell me a story.", max_tokens=24)
    varied = ask(server, "Tell me a story.", max_tokens=24, extra_body={"repetition_penalty": 10.0})
    assert varied.choices[0].message.content != plain.choices[0].message.content
    narrow = ask(server, "Tell me a story.", max_tokens=24, temperature=1.0, extra_body={"min_p": 1.0})
    assert narrow.choices[0].message.content == plain.choices[0].message.content
    ends = {"0": 100, "2": 100}  # the demo model's ends of a text and of a turn
    for least, reason in ((0, "stop"), (2, "length")):
        ended = server.client().completions.create(
            model="demo", prompt="It was", max_tokens=2, logit_bias=ends, extra_body={"min_tokens": least}
        )
        assert ended.choices[0].finish_reason == reason


def test_log_probabilities_add_up_to_the_text_streamed_or_not(server: Server) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 20, "seed": 3, "temperature": 1.0}
    answer = ask(server, "Tell me a story.", **asked)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    # Where a processor rounds otherwise, the same seed may draw an early end, or half of a character as the last token.
    assert b"".join(bytes(one.bytes or ()) for one in content).decode(errors="replace") == choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens - len(content) == (choice.finish_reason == "stop")
    assert content
    for one in content:
        tops = [top.logprob for top in one.top_logprobs]
        assert len(tops) == 20
        assert tops == sorted(tops, reverse=True)
        assert sum(math.exp(top) for top in tops) <= 1.0001
        assert one.logprob <= tops[0] <= 0
        assert one.logprob in tops or one.logprob <= tops[-1]
    chunks = list(
        server.client().chat.completions.create(
            model="demo",
            messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": "Tell me a story."}],
            stream=True,
            **asked,
        )
    )
    streamed = [one for chunk in chunks if (found := chunk.choices[0].logprobs) for one in found.content or []]
    assert [one.token for one in streamed] == [one.token for one in content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=1e-3)


def test_log_probabilities_of_completions_are_parallel_lists(server: Server) -> None:
    asked: Any = {"prompt": "It was a dark", "max_tokens": 5, "logprobs": 3, "temperature": 0}
    answer = server.client().completions.create(model="demo", **asked)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert [choice.text[start:].startswith(token) for token, start in zip(tokens, offsets, strict=True)] == [True] * 5
    assert all(3 <= len(tops) <= 4 for tops in choice.logprobs.top_logprobs or [])
    for token, own, tops in zip(
        tokens, choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True
    ):
        assert tops[token] == own


def test_no_tokens_warm_the_prompt_for_the_next_request(server: Server) -> None:
    create = server.client().completions.create
    prompt = "The station was built in a year that nobody remembers. " * 4
    warm = create(model="demo", prompt=prompt, max_tokens=0)
    assert warm.usage is not None
    assert (warm.choices[0].text, warm.choices[0].finish_reason, warm.usage.completion_tokens) == ("", "length", 0)
    after = create(model="demo", prompt=prompt, max_tokens=1)
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    assert (after.usage.prompt_tokens_details.cached_tokens or 0) >= after.usage.prompt_tokens - 32


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_prompt_is_scored_with_echo(server: Server, max_tokens: int) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "It was a dark and stormy night.", "temperature": 0}
    for _ in range(2):  # the second time the prompt could be cached
        choice = server.client().completions.create(max_tokens=max_tokens, echo=True, logprobs=1, **asked).choices[0]
        logprobs = choice.logprobs
        assert logprobs is not None
        assert "".join(logprobs.tokens or []) == choice.text
        own: list[float | None] = list(logprobs.token_logprobs or [])
        assert own[0] is None
        assert all(one is not None and one <= 0 for one in own[1:])
        starts = zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True)
        assert all(choice.text[start:].startswith(token) for token, start in starts)


def test_eight_answers_compute_their_prompt_once(server: Server) -> None:
    def count(figure: str) -> int:
        return int(server.get("/admin/stats")["engines"][0]["sharing"][figure])

    prefilled, forks = count("prefilled_tokens"), count("forks")
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 40}
    many = ask(server, "A question that nobody asked before.", n=8, **asked)
    assert [choice.index for choice in many.choices] == list(range(8))
    usage = many.usage
    assert usage is not None
    assert usage.completion_tokens <= 8 * 12
    server.wait_until(lambda: count("prefilled_tokens") > prefilled, "newer counters")  # they are fetched once a second
    # Eight messages of a busy gateway: one that comes when the others have ended would compute what fills no block.
    assert count("prefilled_tokens") - prefilled <= usage.prompt_tokens
    assert count("forks") - forks >= 4
    assert len({choice.message.content for choice in many.choices}) > 4
    alone = ask(server, "A question that nobody asked before.", **{**asked, "seed": 43})
    assert alone.choices[0].message.content == many.choices[3].message.content
    assert alone.usage is not None
    assert alone.usage.prompt_tokens == usage.prompt_tokens


def test_several_answers_are_streamed_side_by_side(server: Server) -> None:
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 40, "n": 3}
    whole = ask(server, "Tell me a story.", **asked)
    messages: Any = [{"role": "system", "content": POLICY}, {"role": "user", "content": "Tell me a story."}]
    said = dict.fromkeys(range(3), "")
    for chunk in server.client().chat.completions.create(model="demo", messages=messages, stream=True, **asked):
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(said.values()) == [choice.message.content for choice in whole.choices]


def test_the_best_of_several_completions_is_the_likeliest(server: Server) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "It was a", "max_tokens": 6, "seed": 9, "logprobs": 0}
    every = server.client().completions.create(n=5, **asked).choices
    best = server.client().completions.create(best_of=5, **asked).choices

    def mean(choice: openai.types.CompletionChoice) -> float:
        assert choice.logprobs is not None
        logprobs = choice.logprobs.token_logprobs or []
        return sum(logprobs) / len(logprobs) if logprobs else float("-inf")

    assert [choice.text for choice in best] == [max(every, key=mean).text]


def test_completions_continue_text_and_token_ids(server: Server) -> None:
    client = server.client()
    text = client.completions.create(model="demo", prompt="It was a dark", max_tokens=4, temperature=0, echo=True)
    assert text.choices[0].text.startswith("It was a dark")
    ids = client.completions.create(model="demo", prompt=[[5, 6, 7], [8, 9]], max_tokens=3, temperature=0)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 5


def test_a_typed_special_token_is_text_and_not_a_role(server: Server) -> None:
    plain = ask(server, "x")
    typed = ask(server, "x<|im_end|>")
    assert plain.usage is not None
    assert typed.usage is not None
    assert typed.usage.prompt_tokens > plain.usage.prompt_tokens + 1


def test_models_are_listed(server: Server) -> None:
    assert next(iter(server.client().models.list())).id == "demo"
    assert server.client().models.retrieve("demo").id == "demo"


def test_errors_arrive_as_the_sdks_exceptions(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "x"}])
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as long:
        ask(server, "word " * 40_000)
    assert long.value.code == "context_length_exceeded"
    assert len(re.findall(r"\d{4,}", str(long.value))) >= 2
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(server, "x", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        ask(server, "x", tools=[{"type": "custom", "custom": {"name": "f g"}}])
    assert (tools.value.code, tools.value.param) == ("invalid_value", "tools[0].custom.name")


async def test_sixteen_at_once_say_what_each_says_alone(server: Server) -> None:
    prompts = [f"Tell me about platform {number}, and then about {number * 7}." for number in range(16)]
    alone = [ask(server, prompt, max_tokens=12).choices[0].message.content for prompt in prompts]
    async with server.async_client() as client:

        async def one(prompt: str) -> str | None:
            answer = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": prompt}],
                max_tokens=12,
                temperature=0,
            )
            return answer.choices[0].message.content

        together = await asyncio.gather(*(one(prompt) for prompt in prompts))
    assert together == alone


def test_blocks_add_up_and_nothing_is_live_when_idle(server: Server) -> None:
    server.wait_until(lambda: idle(server), "an idle engine whose blocks add up")


def idle(server: Server) -> bool:
    every = [engine["blocks"] for engine in server.get("/admin/stats")["engines"]]
    assert all(blocks["free"] + blocks["cached"] + blocks["live"] == blocks["total"] for blocks in every)
    return not any(blocks["live"] for blocks in every)


def test_health_metrics_and_the_front_page_answer(server: Server) -> None:
    for path in ("/health", "/health/liveness", "/health/readiness"):
        server.get(path)
    metrics = server.get("/metrics")
    assert "kvasir_redis_up 1" in metrics
    assert "/v1/chat/completions" in server.get("/")


def test_tenants_share_nothing(tenants: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(tenants, "x", key="nobodys-key-1")
    ask(tenants, "x", key="north-key-123")
    assert cached(ask(tenants, "x", key="south-key-123")) == 0
    assert cached(ask(tenants, "x", key="north-key-123")) > 0
    assert cached(ask(tenants, "x", key="south-key-123")) > 0
    assert tenants.get("/admin/stats", key="admin-key-123")
    assert not [line for line in tenants.lines if "key-123" in line]


STATION = {
    "type": "object",
    "properties": {
        "open": {"type": "boolean"},
        "tracks": {"type": "integer", "minimum": 1, "maximum": 12},
        "kind": {"enum": ["small", "größer"]},
    },
    "required": ["open", "tracks", "kind"],
    "additionalProperties": False,
}


def schema_format(schema: object, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "station", "schema": schema, "strict": strict}}


def test_an_answer_under_a_schema_parses_whatever_the_model_wants_to_say(server: Server) -> None:
    for seed in range(4):
        answer = ask(
            server, "Describe it.", max_tokens=100, temperature=1.5, seed=seed, response_format=schema_format(STATION)
        )
        assert answer.choices[0].finish_reason == "stop"
        said = json.loads(answer.choices[0].message.content or "")
        assert list(said) == ["open", "tracks", "kind"]
        assert 1 <= said["tracks"] <= 12


def test_a_stream_under_a_regular_expression_matches_it(server: Server) -> None:
    chunks = server.client().chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "When?"}],
        stream=True,
        extra_body={"structured_outputs": {"regex": "([01][0-9]|2[0-3]):[0-5][0-9]"}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert re.fullmatch("[0-2][0-9]:[0-5][0-9]", text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_carried_out_is_a_400_with_its_path(server: Server, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "integer"}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, "Hello.", stream=stream, response_format=schema_format(schema, strict=False))
    path = "response_format.json_schema.schema"
    assert refused.value.param == (path if server.has_replicas else f"{path}.properties.a.not")
    assert refused.value.code == "invalid_grammar"
    assert re.search("['\"]not['\"]", refused.value.message)
