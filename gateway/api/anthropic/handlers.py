"""The routes of the Anthropic dialect: messages, counting their tokens, models. request.py reads what comes in,
response.py writes what goes out, answering.py does what is between.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from aiohttp import web

from gateway.api.answering import Answering, reply
from gateway.api.anthropic.accounting import Accounted
from gateway.api.anthropic.diagnosis import Diagnosis
from gateway.api.anthropic.pages import MODELS, read_page
from gateway.api.anthropic.parameters import COUNT, MESSAGES
from gateway.api.anthropic.request import parse_count, parse_message
from gateway.api.anthropic.response import MessageShape, model_json
from gateway.api.anthropic.wire import read_version
from gateway.api.body import read_json
from gateway.api.dialect import EXAMPLE_MODEL, JSON, SSE, Route
from gateway.api.record import RECORD
from gateway.config import AnthropicSettings, LeaseSettings, ServerSettings
from gateway.errors import ModelNotFoundError, NoEngineError
from gateway.stores.base import Backend

_EXAMPLE: Final = {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "Hello."}]}


class Anthropic:
    """Holds what its handlers need."""

    def __init__(
        self,
        server: ServerSettings,
        leases: LeaseSettings,
        settings: AnthropicSettings,
        answering: Answering,
        fingerprints: Backend,
    ) -> None:
        """`fingerprints` keeps those of prompts, for diagnostics."""
        self._server = server
        self._leases = leases
        self._fingerprints = fingerprints
        self._settings = settings
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/messages",
                self.message,
                "The next message of a conversation.",
                MESSAGES,
                ("model", "max_tokens", "messages"),
                media=(JSON, SSE),
                example={**_EXAMPLE, "max_tokens": 64},
            ),
            Route(
                "POST",
                "/v1/messages/count_tokens",
                self.count_tokens,
                "How many tokens the prompt of a message has.",
                COUNT,
                ("model", "messages"),
                example=_EXAMPLE,
            ),
            Route("GET", "/v1/models", self.list_models, "The models that are served, newest first.", query=MODELS),
            Route("GET", "/v1/models/{model:.+}", self.get_model, "One of them."),
        ]

    async def message(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        tenant, version = self._answering.admit(http), read_version(http)
        asked = parse_message(await read_json(http, self._server), version, self._settings, self._leases)
        call = asked.call
        model = self._answering.model(call.model, http[RECORD])
        shape = MessageShape(model.model, http[RECORD].request_id, call.sampling.max_tokens)
        diagnosis = Diagnosis(self._fingerprints, asked.question, shape.message_id) if asked.question else None
        street = Accounted(self._answering.street, asked.caching, shape, diagnosis)
        return await self._answering.answer(http, tenant, call, model, shape, street=street)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens"""
        tenant, version = self._answering.admit(http), read_version(http)
        call = parse_count(await read_json(http, self._server), version, self._settings, self._leases)
        model = self._answering.model(call.model, http[RECORD])
        count = await self._answering.count(http[RECORD], tenant, call, model)
        return reply(orjson.dumps({"input_tokens": count}))

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models, newest first"""
        self._answering.admit(http)
        read_version(http)
        models = sorted(self._answering.models.models().items(), key=lambda item: (-item[1], item[0]))
        page = read_page(http.query, [name for name, _ in models])
        created = dict(models)
        data = [self._model(name, created[name]) for name in page.ids]
        return reply(orjson.dumps(page.body(data)))

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        self._answering.admit(http)
        read_version(http)
        name = http.match_info["model"]
        if (created := self._answering.models.models().get(name)) is None:
            raise ModelNotFoundError(name)
        return reply(orjson.dumps(self._model(name, created)))

    def _model(self, name: str, created: int) -> dict[str, Any]:
        try:
            context_tokens = self._answering.models.serving(name)[0].hello.context_tokens
        except NoEngineError:
            context_tokens = None
        return model_json(name, created, context_tokens)
