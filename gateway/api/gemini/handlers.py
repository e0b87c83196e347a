"""The routes of the Gemini dialect: generateContent, streamGenerateContent, countTokens and models, under /v1 and
/v1beta. request.py reads what comes in, response.py writes what goes out, answering.py does what is between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import Answering, Generation, parsed
from gateway.api.dialect import JSON, SSE, Route
from gateway.api.fields import table, text, used
from gateway.api.gemini.cached_contents import CachedContents
from gateway.api.gemini.files import VERSIONS, GeminiFiles
from gateway.api.gemini.parameters import COUNT, GENERATE, MAX_CANDIDATES
from gateway.api.gemini.request import model_name, parse_count, parse_generate, to_call
from gateway.api.gemini.response import GeminiShape, model_json
from gateway.api.gemini.wire import PAGE, page
from gateway.api.record import BODY, RECORD, TENANT
from gateway.api.replies import reply_json
from gateway.errors import ModelNotFoundError

EXAMPLE: Final = {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]}
STREAM: Final = table(used("alt", text(), "`sse`", "Server-sent events; without it the answer is one JSON array."))


class Gemini:
    """Holds what its handlers need."""

    def __init__(
        self,
        answering: Answering,
        cached: CachedContents,
        files: GeminiFiles,
    ) -> None:
        self._files = files
        self._answering = answering
        self._cached = cached

    def routes(self) -> list[Route]:
        return [route for version in VERSIONS for route in self._routes(f"/{version}")]

    def _routes(self, root: str) -> Iterator[Route]:
        model = f"{root}/models/{{model:.+}}"
        asks: Any = {"parameters": GENERATE, "required": ("contents",), "example": EXAMPLE}
        asks |= {"resends": True, "passes": "metered"}
        yield Route("POST", f"{model}:generateContent", self.generate, "The next turn of a conversation.", **asks)
        yield Route(
            "POST",
            f"{model}:streamGenerateContent",
            self.stream,
            "The same, as a stream.",
            **asks,
            query=STREAM,
            media=(SSE, JSON),
        )
        yield Route(
            "POST",
            f"{model}:countTokens",
            self.count,
            "Counts the tokens of a prompt.",
            COUNT,
            example=EXAMPLE,
            passes="counted",
        )
        yield Route("GET", f"{root}/models", self.list_models, "The models that are served.", query=PAGE)
        yield Route("GET", model, self.get_model, "One of them.")

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:generateContent"""
        return await self._answer(http, stream=False)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:streamGenerateContent"""
        return await self._answer(http, stream=True)

    async def _answer(self, http: web.Request, *, stream: bool) -> web.StreamResponse:
        tenant = http[TENANT]
        body, name = http[BODY], model_name(http.match_info["model"])
        has_files = await self._files.put_texts(http[RECORD], tenant, body)
        wanted = await parsed(http[RECORD], lambda _, body: parse_generate(body), body)
        kept = None
        if wanted.cached_content is not None:
            content, kept = await self._cached.use(tenant, wanted.cached_content, name)
            http[RECORD].work += content.num_bytes
        call = await parsed(http[RECORD], lambda _, body: to_call(name, wanted, kept, stream=stream), body)
        model = self._answering.model(name, http[RECORD])
        array = stream and http.query.get("alt") != "sse"
        shape = GeminiShape(model, call.choices.n, array=array)
        media_type = JSON if array else SSE
        # What is kept under a name is looked for each time.
        may_come_again = kept is None and not has_files and call.tool_use is None
        answered = Generation(call, model, shape, stamp=shape.stamp() if may_come_again else None)
        return await self._answering.answer(http, answered, media_type=media_type)

    async def count(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:countTokens"""
        tenant = http[TENANT]
        body, name = http[BODY], model_name(http.match_info["model"])
        await self._files.put_texts(http[RECORD], tenant, body)
        wanted, kept, cached = await parsed(http[RECORD], lambda _, body: parse_count(body), body), None, {}
        if wanted.cached_content is not None:
            content, kept = await self._cached.use(tenant, wanted.cached_content, name)
            http[RECORD].work += content.num_bytes
            cached = {"cachedContentTokenCount": content.tokens}
        call = await parsed(http[RECORD], lambda _, body: to_call(name, wanted, kept, max_answers=MAX_CANDIDATES), body)
        tokens = await self._answering.count(http[RECORD], tenant, call, self._answering.model(name, http[RECORD]))
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return reply_json({"totalTokens": tokens, "promptTokensDetails": details, **cached})

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models"""
        shown, token = page(self._answering.passthrough.models(http[RECORD]), http.query)
        listed = {"models": [model_json(name, self._answering.find_model(name)) for name, _ in shown]}
        return reply_json(listed | ({"nextPageToken": token} if token else {}))

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        name = model_name(http.match_info["model"])
        if name not in self._answering.passthrough.models(http[RECORD]):
            raise ModelNotFoundError(name)
        return reply_json(model_json(name, self._answering.find_model(name)))
