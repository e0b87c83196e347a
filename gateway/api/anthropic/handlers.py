"""The routes of the Anthropic dialect: messages, counting their tokens, models. request.py reads what comes in,
response.py writes what goes out, answering.py does what is between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import Answering, parsed
from gateway.api.anthropic.accounting import Diagnosis, MessageAccount
from gateway.api.anthropic.parameters import COUNT, MESSAGES
from gateway.api.anthropic.request import check_line, parse_count, parse_message
from gateway.api.anthropic.response import SERVED_TIERS, MessageShape, ServiceTier, model_json
from gateway.api.anthropic.wire import ANTHROPIC, MODELS, VERSIONS, Version, read_page, read_version
from gateway.api.dialect import EXAMPLE_MODEL, JSON, SSE, Route
from gateway.api.lines import Endpoint, generating
from gateway.api.record import BODY, RECORD, TENANT, Record
from gateway.api.replies import page_json, reply_json
from gateway.api.stream import Generation
from gateway.api.tiers import grant
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import ModelNotFoundError
from gateway.storage.byte_store import ByteStore

_EXAMPLE: Final = {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "Hello."}]}


def endpoint_name(version: Version) -> str:
    return f"/v1/messages {version}"


@dataclass(frozen=True, slots=True)
class Anthropic:
    """Handlers of messages and models. `fingerprints` stores those of prompts, for diagnostics."""

    leases: LeaseSettings
    settings: AnthropicSettings
    answering: Answering
    fingerprints: ByteStore

    def routes(self) -> list[Route]:
        example: Any = {**_EXAMPLE, "max_tokens": 64}
        asks: Any = {"parameters": MESSAGES, "required": ("model", "max_tokens", "messages"), "example": example}
        asks |= {"media": (JSON, SSE), "resends": True, "passes": "translated"}
        counts: Any = {"parameters": COUNT, "required": ("model", "messages"), "example": _EXAMPLE, "passes": "counted"}
        counted = "Counts the tokens of a message's prompt."
        return [
            Route("POST", "/v1/messages", self.message, "The next message of a conversation.", **asks),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens, counted, **counts),
            Route("GET", "/v1/models", self.list_models, "The models that are served, newest first.", query=MODELS),
            Route("GET", "/v1/models/{model:.+}", self.get_model, "One of them."),
        ]

    def endpoints(self) -> dict[str, Endpoint]:
        """Endpoints for lines of batches, by `endpoint_name` of the batch's version."""

        return {
            endpoint_name(version): generating(
                self.answering,
                ANTHROPIC,
                "/v1/messages",
                partial(self._line, version=version),
                (("anthropic-version", version),),
            )
            for version in VERSIONS
        }

    def _line(self, record: Record, body: dict[str, Any], version: Version) -> Generation:
        check_line(body)
        return self._message(record, body, version)

    async def message(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        return await self.answering.generates(partial(self._message, version=read_version(http)))(http)

    def _message(self, record: Record, body: dict[str, Any], version: Version) -> Generation:
        message = parse_message(body, version, self.settings, self.leases)
        call = message.call
        model = self.answering.model(call.model, record)
        served: ServiceTier = "batch" if record.lane == "batch" else SERVED_TIERS[grant(call.tier, record)]
        shape = MessageShape(model.model, record.request_id, call.sampling.max_tokens, service_tier=served)
        diagnosis = Diagnosis(self.fingerprints, message.diagnosis, shape.message_id) if message.diagnosis else None
        account = MessageAccount(self.answering.pipeline, message.caching, shape, diagnosis)
        # Tool calls have ids of their own, and a diagnosis belongs to one message.
        is_resendable = call.tool_use is None and diagnosis is None
        return Generation(call, model, shape, account, shape.stamp if is_resendable else None)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages/count_tokens"""
        record = http[RECORD]
        call = await parsed(record, lambda _, body: parse_count(body, self.settings, self.leases), http[BODY])
        model = self.answering.model(call.model, record)
        count = await self.answering.count(record, http[TENANT], call, model)
        return reply_json({"input_tokens": count})

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models, newest first"""
        models = sorted(self.answering.passthrough.models(http[RECORD]).items(), key=lambda item: (-item[1], item[0]))
        names, has_more = read_page(http.query, [name for name, _ in models])
        created = dict(models)
        return reply_json(page_json([self._model(name, created[name]) for name in names], has_more=has_more))

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        name = http.match_info["model"]
        if (created := self.answering.passthrough.models(http[RECORD]).get(name)) is None:
            raise ModelNotFoundError(name)
        return reply_json(self._model(name, created))

    def _model(self, name: str, created: int) -> dict[str, Any]:
        model = self.answering.find_model(name)
        return model_json(name, created, None if model is None else model.context_tokens)
