"""A vLLM, SGLang or TensorRT-LLM on a real port, as far as a gateway asks one about itself: answers have the form of
the real ones (vLLM 0.32.0 and SGLang 0.5.23 were looked at; TensorRT-LLM's source was read).

Tokenises with transformers, as the real ones do, and with the demo model's files unless a test changes them.
`completions` is the handler of /v1/completions and of /v1/chat/completions; a test that wants answers brings its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from gateway.config import ReplicaKind, ReplicaSettings

DEMO = Path(__file__).parent.parent.parent / "engine/demo/model"
OWNERS = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt_llm"}
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "tensorrt-llm": "1.3.0"}
COMMON = ("model", "prompt", "max_tokens", "n", "seed", "stop", "stream", "temperature", "min_p", "response_format")
SCHEMAS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "CompletionRequest": (
            *COMMON,
            *("cache_salt", "priority", "return_token_ids", "structured_outputs", "prompt_logprobs", "vllm_xargs"),
        ),
        "ChatCompletionRequest": ("messages", "tools"),
        "TokenizeCompletionRequest": ("model", "prompt", "add_special_tokens"),
        "TokenizeChatRequest": ("model", "messages", "tools", "chat_template_kwargs"),
    },
    "sglang": {
        "CompletionRequest": (*COMMON, "cache_salt", "priority", "return_token_ids", "json_schema", "regex"),
        "ChatCompletionRequest": ("messages", "tools", "input_ids", "cache_salt"),
        "TokenizeRequest": ("model", "prompt", "messages", "tools", "chat_template_kwargs"),
    },
    "tensorrt-llm": {
        "CompletionRequest": COMMON,
        "ChatCompletionRequest": ("messages", "tools", "prompt_token_ids", "cache_salt"),
        "TokenizeRequest": ("prompt",),
    },
}
"""Fields by schema of /openapi.json, as far as somebody looks at them."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class ReplicaServer:
    """What it answers; a test may change everything at any time.

    answers  path -> JSON, text or status that it answers with in place of its own
    stalled  paths that it never answers
    ranks    one dict for each data-parallel rank: what its metrics say, by the names of `_metrics`
    """

    kind: ReplicaKind = "vllm"
    model: str = "demo"
    root: str = str(DEMO)
    tokenizer: Path = DEMO
    key: str | None = None
    context_tokens: int = 2048
    block_size: int = 128
    num_blocks: int = 1638
    events_port: int | None = 5557
    replay_port: int | None = 5558
    topic: str = "kv"
    reports_cached: bool = True
    schemas: Mapping[str, tuple[str, ...]] | None = None  # None: those of its kind
    answers: dict[str, Any] = field(default_factory=dict)
    stalled: set[str] = field(default_factory=set)
    ranks: list[dict[str, float]] = field(default_factory=lambda: [{}])
    started_s: float = field(default_factory=time.time)
    got: list[tuple[str, Any]] = field(default_factory=list)  # path and JSON body of each POST
    completions: Handler | None = None
    chats_otherwise: Path | None = None  # files of a chat, where they are not those of its tokenisation
    url: str = ""

    def settings(self, name: str = "r", **more: Any) -> ReplicaSettings:
        return ReplicaSettings.model_validate({"name": name, "kind": self.kind, "url": self.url, **more})

    # -- what the kinds say of themselves -----------------------------------------------------------------------------

    def models(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "created": 1795469277, "owned_by": OWNERS[self.kind]}
        if self.kind != "tensorrt-llm":
            root = self.root if self.kind == "vllm" else self.model
            card |= {"root": root, "parent": None, "max_model_len": self.context_tokens}
        return {"object": "list", "data": [card]}

    def event_sources(self) -> dict[str, Any]:
        def config(rank: int) -> dict[str, Any]:
            ports = [port and f"tcp://*:{port + rank}" for port in (self.events_port, self.replay_port)]
            return {
                "enable_kv_cache_events": self.events_port is not None,
                "publisher": "zmq" if self.events_port is not None else None,
                "endpoint": ports[0] or "tcp://*:5557",
                "replay_endpoint": ports[1],
                "buffer_steps": 10000,
                "hwm": 100000,
                "max_queue_size": 100000,
                "topic": self.topic,
            }

        return {str(rank): config(rank) for rank in range(len(self.ranks))}

    def server_info(self) -> dict[str, Any]:
        if self.kind == "tensorrt-llm":
            return {"disaggregated_params": None}
        events: dict[str, Any] | None = None
        if self.events_port is not None:
            events = {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": self.events_port}
            events |= {"topic": self.topic, "block_size": self.block_size, "dp_size": len(self.ranks)}
            events |= {} if self.replay_port is None else {"replay_endpoint_port_base": self.replay_port}
        state = {"effective_max_running_requests_per_dp": 48}
        state["memory_usage"] = {"token_capacity": self.num_blocks * self.block_size}  # type: ignore[assignment]
        return {
            "model_path": self.root,
            "page_size": self.block_size,
            "dp_size": len(self.ranks),
            "max_total_num_tokens": self.num_blocks * self.block_size,
            "enable_cache_report": self.reports_cached,
            "startup_time": self.started_s,
            "version": VERSIONS["sglang"],
            "internal_states": [state] * len(self.ranks),
            "kv_events": events,
        }

    def model_info(self) -> dict[str, Any]:
        info = {"model_path": self.root, "served_model_name": self.model, "tokenizer_path": str(self.tokenizer)}
        return info | {"is_generation": True, "weight_version": "default"}

    def loads(self) -> dict[str, Any]:
        names = ["num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "token_usage"]
        names += ["total_prefill_uncached_tokens", "total_prefill_busy_us", "gen_throughput"]
        ranks = enumerate(self.ranks)
        loads = [{"dp_rank": rank, **{name: said.get(name, 0) for name in names}} for rank, said in ranks]
        return {"timestamp": "2026-11-23T00:00:00+00:00", "version": VERSIONS["sglang"], "loads": loads}

    def metrics(self) -> str:
        """Values of `ranks` by the metric's own name, beside a few that are always there."""
        lines = ["# TYPE process_start_time_seconds gauge"]
        lines.append(f"process_start_time_seconds {self.started_s!r}")
        lines.append('http_requests_total{handler="/metrics",method="GET",status="2xx"} 3.0')
        label = {"vllm": "engine", "sglang": "dp_rank", "tensorrt-llm": "rank"}[self.kind]
        for rank, values in enumerate(self.ranks):
            labels = f'{label}="{rank}",model_name="{self.model}"'
            if self.kind == "vllm":
                lines.append(
                    f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="{rank}",'
                    f'hash_block_size="None",num_gpu_blocks="{self.num_blocks}",sliding_window="None"}} 1.0'
                )
            if self.kind == "tensorrt-llm":
                labels = f'model_name="{self.model}",engine_type="trtllm"'
                lines.append(f"trtllm_kv_cache_tokens_per_block{{{labels}}} {self.block_size}")
                lines.append(f"trtllm_kv_cache_max_blocks{{{labels}}} {self.num_blocks}")
            lines += [f"{name}{{{labels}}} {float(value)!r}" for name, value in values.items() if "_" in name]
        return "\n".join(lines) + "\n"

    def openapi(self) -> dict[str, Any]:
        schemas = SCHEMAS[self.kind] if self.schemas is None else self.schemas
        described: dict[str, Any] = {
            name: {"properties": {each: {} for each in fields}} for name, fields in schemas.items()
        }
        return {"openapi": "3.1.0", "info": {"title": "FastAPI"}, "components": {"schemas": described}}

    # -- the routes ---------------------------------------------------------------------------------------------------

    def routes(self) -> dict[str, Callable[[], Any]]:
        """GET path -> what is answered."""
        own: dict[str, Callable[[], Any]] = {
            "/v1/models": self.models,
            "/health": lambda: 200,
            "/openapi.json": self.openapi,
        }
        if self.kind == "vllm":
            own |= {"/kv_event_sources": self.event_sources, "/metrics": self.metrics}
        elif self.kind == "sglang":
            own |= {"/model_info": self.model_info, "/v1/loads": self.loads, "/metrics": self.metrics}
        else:
            own |= {"/prometheus/metrics": self.metrics}
        if self.kind != "vllm":
            own["/server_info"] = self.server_info
        if self.kind != "sglang":
            own["/version"] = lambda: {"version": VERSIONS[self.kind]}
        return own

    async def handle(self, http: web.Request) -> web.StreamResponse:
        if http.path in self.stalled:
            await asyncio.Event().wait()
        guarded = self.kind == "sglang" or http.path.startswith(("/v1", "/inference"))
        if self.key is not None and guarded and http.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if http.method == "POST":
            return await self._post(http)
        if http.path not in (own := self.routes()) and http.path not in self.answers:
            return web.json_response({"detail": "Not Found"}, status=404)
        return _answer(self.answers[http.path] if http.path in self.answers else own[http.path]())

    async def _post(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        self.got.append((http.path, body))
        if http.path in self.answers:
            return _answer(self.answers[http.path])
        if http.path in ("/v1/completions", "/v1/chat/completions"):
            rendered = "messages" in body or isinstance(body.get("prompt"), str)
            if self.completions is None or (rendered and body.get("max_tokens") == 1):  # its tokens are asked for
                return self._complete(body)
            return await self.completions(http)
        if http.path in {"vllm": ("/tokenize",), "sglang": ("/tokenize", "/v1/tokenize")}.get(
            self.kind, ("/_internal/tokenize",)
        ):
            return self._tokenize(body)
        return web.json_response({"detail": "Not Found"}, status=404)

    def _complete(self, body: dict[str, Any]) -> web.Response:
        """One token, 7, whatever was asked."""
        prompt = body.get("prompt") or body.get("input_ids") or body.get("prompt_token_ids") or []
        if not isinstance(prompt, list) or "messages" in body:
            try:
                prompt = self.render(body, self.chats_otherwise)
            except Exception as error:  # a template raises what it wants
                return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 1, "total_tokens": len(prompt) + 1}
        usage["prompt_tokens_details"] = {"cached_tokens": 0} if self.reports_cached else None
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "token_ids": [7]}
        if body.get("stream"):
            events = [orjson.dumps(one).decode() for one in ({"choices": [choice]}, {"choices": [], "usage": usage})]
            text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
            return web.Response(text=text, content_type="text/event-stream")
        answer = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}
        return web.json_response(answer | ({"prompt_token_ids": prompt} if body.get("return_token_ids") else {}))

    def render(self, body: dict[str, Any], files: Path | None = None) -> list[int]:
        """Its tokens of a text or a conversation. Raises what the template raises."""
        tokenizer = load_tokenizer(files or self.tokenizer)
        if "messages" not in body:
            return list(tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True)))
        text = tokenizer.apply_chat_template(
            [_parsed(message) for message in body["messages"]],
            tools=[_dumped(tool) for tool in body.get("tools") or ()] or None,
            add_generation_prompt=body.get("add_generation_prompt", not body.get("continue_final_message")),
            continue_final_message=body.get("continue_final_message", False),
            tokenize=False,
            **(body.get("chat_template_kwargs") or {}),
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    def _tokenize(self, body: dict[str, Any]) -> web.Response:
        if "messages" in body and self.kind == "tensorrt-llm":
            return web.json_response({"detail": "extra fields not permitted"}, status=400)
        try:
            ids = self.render(body)
        except Exception as error:  # a template raises what it wants
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        return web.json_response({"count": len(ids), "max_model_len": self.context_tokens, "tokens": ids})


def _dumped(tool: dict[str, Any]) -> dict[str, Any]:
    """As the servers hand it to a template: with null for what a client left out."""
    return {**tool, "function": {"name": None, "description": None, "parameters": None, **tool["function"]}}


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as the servers hand them to a template: parsed."""
    calls = [
        {**call, "function": {**call["function"], "arguments": orjson.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _answer(value: Any) -> web.Response:
    """JSON, a text, or a status alone."""
    if isinstance(value, int):
        return web.Response(status=value)
    if isinstance(value, str):
        return web.Response(text=value, content_type="text/plain")
    return web.json_response(value)


@lru_cache(maxsize=8)
def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


@asynccontextmanager
async def replica_server(kind: ReplicaKind = "vllm", **more: Any) -> AsyncIterator[ReplicaServer]:
    """Listens on a free port of 127.0.0.1 until the end of the block."""
    server = ReplicaServer(kind, **more)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
