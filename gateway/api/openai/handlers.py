"""The routes of the OpenAI dialect: chats, completions, models. request.py reads what comes in, response.py writes what
goes out, answering.py does what is between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import Answering
from gateway.api.dialect import EXAMPLE_MODEL, JSON, SSE, Route
from gateway.api.fields import choice, in_url, integer, read_query, table, text, used
from gateway.api.lines import Endpoint, generating
from gateway.api.openai.parameters import CHAT, COMPLETION
from gateway.api.openai.request import parse_chat, parse_completion
from gateway.api.openai.response import ChatShape, CompletionShape, model_json
from gateway.api.openai.wire import OPENAI
from gateway.api.record import RECORD, Record, listed
from gateway.api.replies import page_json, reply_json
from gateway.api.stream import Generation
from gateway.api.tiers import grant
from gateway.config import LeaseSettings
from gateway.errors import ModelNotFoundError

LIST: Final = table(
    used("after", text(), "id of a chat", "Only those that come after this one."),
    used("limit", in_url(integer(1, 10_000)), "", "Chats at most."),
    used("order", choice("asc", "desc"), "", "Their order by age."),
    used("model", text(), "string", "Only those of this model."),
)


class OpenAI:
    """Holds what its handlers need."""

    def __init__(self, leases: LeaseSettings, answering: Answering) -> None:
        self._leases = leases
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/chat/completions",
                self._answering.generates(self._chat),
                "The next message of a conversation.",
                CHAT,
                ("model", "messages"),
                media=(JSON, SSE),
                resends=True,
                passes="translated",
                example={"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "Hello."}]},
            ),
            Route(
                "POST",
                "/v1/completions",
                self._answering.generates(self._completion),
                "The continuation of one or several texts.",
                COMPLETION,
                ("model",),
                media=(JSON, SSE),
                resends=True,
                passes="metered",
                example={"model": EXAMPLE_MODEL, "prompt": "Once upon a time", "max_tokens": 32},
            ),
            Route("GET", "/v1/chat/completions", self.list_chats, "Stored chats: none, ever.", query=LIST),
            Route("GET", "/v1/models", self.list_models, "The models that are served."),
            Route("GET", "/v1/models/{model:.+}", self.get_model, "One of them."),
        ]

    def endpoints(self) -> dict[str, Endpoint]:
        """What lines of a batch may ask for."""
        parsers = {"/v1/chat/completions": self._chat, "/v1/completions": self._completion}
        return {
            path: generating(self._answering, OPENAI, path, parse, chats=parse == self._chat)
            for path, parse in parsers.items()
        }

    async def list_chats(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/chat/completions"""
        read_query(http.query, LIST)
        return reply_json({"object": "list", **page_json([], has_more=False)})

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models"""
        data = [self._model(name, created) for name, created in self._models(http).items()]
        return reply_json({"object": "list", "data": data})

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        name = http.match_info["model"]
        if (created := self._models(http).get(name)) is None:
            raise ModelNotFoundError(name)
        return reply_json(self._model(name, created))

    def _model(self, name: str, created: int) -> dict[str, Any]:
        return model_json(name, created, self._answering.find_model(name))

    def _chat(self, record: Record, body: dict[str, Any]) -> Generation:
        call = parse_chat(body, self._leases)
        model = self._answering.model(call.model, record)
        shape = ChatShape(model, call, body, tier=grant(call.tier, record))
        is_resendable = call.tool_use is None  # each call has an id of its own
        return Generation(call, model, shape, stamp=shape.stamp if is_resendable else None)

    def _completion(self, record: Record, body: dict[str, Any]) -> Generation:
        call = parse_completion(body)
        model = self._answering.model(call.model, record)
        shape = CompletionShape(model, call)
        return Generation(call, model, shape, stamp=shape.stamp)

    def _models(self, http: web.Request) -> Mapping[str, int]:
        """Embedding models are last: a client that takes the first model wants one that generates."""
        models = self._answering.passthrough.models(http[RECORD])
        embedding = listed(self._answering.embedding_models, http[RECORD])
        return {**models, **{name: at for name, at in embedding.items() if name not in models}}
