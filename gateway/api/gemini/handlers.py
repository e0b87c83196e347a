"""The routes of the Gemini dialect: generateContent, streamGenerateContent, countTokens and models, under /v1 and
/v1beta. request.py reads what comes in, response.py writes what goes out, answering.py does what is between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import Answering, parsed
from gateway.api.call import Call
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
from gateway.api.stream import Generation
from gateway.errors import ModelNotFoundError
from gateway.types import CachedContent

EXAMPLE: Final = {"contents": [{"role": "user", "parts": [{"text": "Hello."}]}]}
STREAM: Final = table(used("alt", text(), "`sse`", "Server-sent events; without it the answer is one JSON array."))


@dataclass(frozen=True, slots=True)
class Gemini:
    """Handlers of generateContent, countTokens and models."""

    answering: Answering
    cached: CachedContents
    files: GeminiFiles

    def routes(self) -> list[Route]:
        return [route for version in VERSIONS for route in self._routes(f"/{version}")]

    def _routes(self, root: str) -> Iterator[Route]:
        model = f"{root}/models/{{model:.+}}"
        asks: Any = {"parameters": GENERATE, "required": ("contents",), "example": EXAMPLE}
        asks |= {"resends": True, "passes": "translated"}
        streams: Any = {**asks, "query": STREAM, "media": (SSE, JSON)}
        counts: Any = {"parameters": COUNT, "example": EXAMPLE, "passes": "counted"}
        yield Route("POST", f"{model}:generateContent", self.generate, "The next turn of a conversation.", **asks)
        yield Route("POST", f"{model}:streamGenerateContent", self.stream, "The same, as a stream.", **streams)
        yield Route("POST", f"{model}:countTokens", self.count, "Counts the tokens of a prompt.", **counts)
        yield Route("GET", f"{root}/models", self.list_models, "The models that are served.", query=PAGE)
        yield Route("GET", model, self.get_model, "One of them.")

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:generateContent"""
        return await self._answer(http, stream=False)

    async def stream(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:streamGenerateContent"""
        return await self._answer(http, stream=True)

    async def _answer(self, http: web.Request, *, stream: bool) -> web.StreamResponse:
        name, tenant = model_name(http.match_info["model"]), http[TENANT]
        texts_only = self.answering.pipeline.find_hosted(name, tenant.name) is None
        has_files = await self.files.put(http[RECORD], tenant, http[BODY], texts_only=texts_only)
        call, content = await self._call(http, parse_generate, stream=stream)
        model = self.answering.model(call.model, http[RECORD])
        array = stream and http.query.get("alt") != "sse"
        shape = GeminiShape(model, call.choices.n, array=array)
        # Files and cached contents are looked up for each request.
        is_resendable = content is None and not has_files and call.tool_use is None
        answered = Generation(call, model, shape, stamp=shape.stamp if is_resendable else None)
        return await self.answering.answer(http, answered, media_type=JSON if array else SSE)

    async def count(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/models/{model}:countTokens"""
        await self.files.put(http[RECORD], http[TENANT], http[BODY])
        call, content = await self._call(http, parse_count, max_answers=MAX_CANDIDATES)
        model = self.answering.model(call.model, http[RECORD])
        tokens = await self.answering.count(http[RECORD], http[TENANT], call, model)
        cached = {} if content is None else {"cachedContentTokenCount": content.tokens}
        details = [{"modality": "TEXT", "tokenCount": tokens}]
        return reply_json({"totalTokens": tokens, "promptTokensDetails": details, **cached})

    async def _call(
        self, http: web.Request, parse: Callable[[dict[str, Any]], dict[str, Any]], **options: Any
    ) -> tuple[Call, CachedContent | None]:
        """The call of a request, and the cached content that it names. `options` are those of `to_call`."""
        record, body, name = http[RECORD], http[BODY], model_name(http.match_info["model"])
        values = await parsed(record, lambda _, body: parse(body), body)
        content = cached = None
        if "cachedContent" in values:
            content, cached = await self.cached.use(http[TENANT], values["cachedContent"], name)
            record.work += content.num_bytes
        return await parsed(record, lambda _, values: to_call(name, values, cached, **options), values), content

    async def list_models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models"""
        shown, token = page(self.answering.passthrough.models(http[RECORD]), http.query)
        listed = {"models": [model_json(name, self.answering.find_model(name)) for name, _ in shown]}
        return reply_json(listed | ({"nextPageToken": token} if token else {}))

    async def get_model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}"""
        name = model_name(http.match_info["model"])
        if name not in self.answering.passthrough.models(http[RECORD]):
            raise ModelNotFoundError(name)
        return reply_json(model_json(name, self.answering.find_model(name)))
