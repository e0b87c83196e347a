"""The routes of the Responses API. request.py reads what comes in, response.py writes what goes out."""

from __future__ import annotations

from aiohttp import web

from gateway.api.answering import Answering
from gateway.api.body import read_json
from gateway.api.dialect import EXAMPLE_MODEL, JSON, SSE, Route
from gateway.api.openai.responses.items import with_ids
from gateway.api.openai.responses.parameters import RESPONSE
from gateway.api.openai.responses.request import parse, to_call
from gateway.api.openai.responses.response import ResponseShape, new_token
from gateway.api.record import RECORD
from gateway.config import LeaseSettings, ServerSettings


class Responses:
    """Holds what its handlers need."""

    def __init__(self, server: ServerSettings, leases: LeaseSettings, answering: Answering) -> None:
        self._server = server
        self._leases = leases
        self._answering = answering

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/responses",
                self.create,
                "The answer to items, told as items.",
                RESPONSE,
                ("model", "input"),
                media=(JSON, SSE),
                example={"model": EXAMPLE_MODEL, "input": "Hello."},
            ),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        tenant = self._answering.admit(http)
        asked = parse(await read_json(http, self._server))
        model = self._answering.model(asked.values["model"], http[RECORD])
        token = new_token()
        items = with_ids(asked.items, token)
        call = to_call(asked, items, self._leases)
        shape = ResponseShape(asked, token, leases=self._leases)
        return await self._answering.answer(http, tenant, call, model, shape)
