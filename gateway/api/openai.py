"""The OpenAI dialect: /v1/chat/completions, /v1/completions, /v1/models. Handlers only; see openai_request.py for what
comes in and openai_response.py for what goes out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import orjson
from aiohttp import web

from engine.protocol import Hello
from gateway.api.auth import Auth
from gateway.api.body import read_json
from gateway.api.namespaces import Namespaces
from gateway.api.openai_request import Call, parse_chat, parse_completion, settle
from gateway.api.openai_response import ChatShape, CompletionShape, model_json
from gateway.api.record import RECORD, Record
from gateway.api.stream import Answers, Echo, collect, stream
from gateway.api.wire import JSON, common_headers, kvasir_headers
from gateway.config import LeaseSettings, ServerSettings
from gateway.errors import ModelNotFoundError, NoEngineError
from gateway.street import Engine, TextDecoder
from gateway.types import Prompt, Request, Scope, Tenant, TextPrompt, TokenPrompt, Usage


class Models(Protocol):
    """The registry, as far as this dialect needs it."""

    def serving(self, model: str) -> Sequence[Engine]:
        """Never empty. Raises ModelNotFoundError, and NoEngineError when the model's engines are away."""
        ...

    def models(self) -> Mapping[str, int]:
        """Every known model, also those whose engines are away -> Unix second at which its newest engine started."""
        ...


class Decoders(Protocol):
    """The prompt stage, for echoing prompts that came as token ids."""

    def decoder(self, model: Hello, stop: tuple[str, ...]) -> TextDecoder: ...


class OpenAI:
    """Holds what its handlers need."""

    def __init__(
        self,
        server: ServerSettings,
        leases: LeaseSettings,
        auth: Auth,
        namespaces: Namespaces,
        street: Answers,
        models: Models,
        decoders: Decoders,
    ) -> None:
        self._server = server
        self._leases = leases
        self._auth = auth
        self._namespaces = namespaces
        self._street = street
        self._models = models
        self._decoders = decoders

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        tenant = self._admit(http)
        call = parse_chat(await read_json(http, self._server), self._leases, self._server.max_prompts)
        model = self._model(call.model, http[RECORD])
        shape = ChatShape(model, call.choices.n, include_usage=call.include_usage)
        return await self._answer(http, tenant, call, model, shape)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        tenant = self._admit(http)
        call = parse_completion(await read_json(http, self._server), self._server.max_prompts)
        model = self._model(call.model, http[RECORD])
        return await self._answer(http, tenant, call, model, CompletionShape(model, include_usage=call.include_usage))

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models"""
        self._admit(http)
        data = [model_json(name, created) for name, created in self._models.models().items()]
        return _json(orjson.dumps({"object": "list", "data": data}), http[RECORD])

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        self._admit(http)
        name = http.match_info["model"]
        if (created := self._models.models().get(name)) is None:
            raise ModelNotFoundError(name)
        return _json(orjson.dumps(model_json(name, created)), http[RECORD])

    def _admit(self, http: web.Request) -> Tenant:
        tenant = self._auth.tenant(http)
        http[RECORD].tenant = tenant.name
        return tenant

    def _model(self, name: str, record: Record) -> Hello:
        try:
            model = self._models.serving(name)[0].hello
        except NoEngineError:
            if name in self._models.models():  # else it may be anything, and no label of a metric
                record.model = name
            raise
        record.model = name
        return model

    async def _answer(
        self, http: web.Request, tenant: Tenant, call: Call, model: Hello, shape: ChatShape | CompletionShape
    ) -> web.StreamResponse:
        record = http[RECORD]
        record.stream = call.stream
        prompts = settle(call, model)
        scope = self._namespaces.scope(http, tenant, key=call.cache_key, cache_salt=call.cache_salt)
        requests = [one for prompt in prompts for one in self._requests(record, tenant, scope, call, prompt)]
        record.traces = [request.trace for request in requests]
        echo = self._echo(call, model) if call.echo else _no_echo
        at_once = self._server.prompts_at_once
        if call.stream:
            return await stream(http, self._street, requests, shape, echo, at_once=at_once)
        answers = await collect(self._street, requests, echo, at_once=at_once)
        usage = sum((answer.usage for answer in answers), Usage(0, 0))
        told = call.choices.told(answers, logprobs=call.sampling.logprobs is not None)
        return _json(shape.body(told, usage), record, **kvasir_headers(record))

    def _requests(self, record: Record, tenant: Tenant, scope: Scope, call: Call, prompt: Prompt) -> Iterator[Request]:
        """One for each answer to a prompt."""
        for number, group, sampling in call.choices.samplings(call.sampling):
            yield Request(
                request_id=record.request_id,
                tenant=tenant,
                model=call.model,
                prompt=prompt,
                sampling=sampling,
                received_s=record.received_s,
                deadline_s=record.received_s + self._server.request_timeout_s,
                stop=call.stop,
                prompt_param=call.prompt_param,
                scope=scope,
                use_cache=call.use_cache,
                prewarm=call.prewarm,
                constraint=call.constraint,
                group=group,
                number=number,
            )

    def _echo(self, call: Call, model: Hello) -> Echo:
        def echo(index: int) -> str:
            prompt = call.prompts[index // call.choices.best_of]
            if isinstance(prompt, TextPrompt):
                return prompt.text
            if isinstance(prompt, TokenPrompt) and prompt.tokens:
                decoder = self._decoders.decoder(model, ())
                return decoder.feed(array("I", prompt.tokens)) + decoder.flush()
            return ""

        return echo


def _no_echo(index: int) -> str:
    return ""


def _json(body: bytes, record: Record, **headers: str) -> web.Response:
    return web.Response(body=body, content_type=JSON, headers={**common_headers(record), **headers})
