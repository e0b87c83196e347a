"""Answers a Call, in all dialects: its model, the requests for the pipeline, the answer, whole or as a stream. The
dialects parse and write; nothing here knows a wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from engine.protocol import Hello
from gateway.api.cache_control import stricter
from gateway.api.call import Call, settle, work_of_prompt
from gateway.api.dialect import JSON, SSE, Handler
from gateway.api.named_files import NamedFiles
from gateway.api.passthrough import Passthrough
from gateway.api.record import BODY, RECORD, TENANT, Record, kvasir_headers
from gateway.api.replies import Answer, reply
from gateway.api.resend import Rendered, find_keeper
from gateway.api.stream import NO_ACCOUNT, Account, Echo, Generation, collect, stream, stream_headers
from gateway.api.tenants import ONLY_COUNTED, Namespaces, need_of, set_aside
from gateway.config import ServerSettings
from gateway.errors import BadRequestError, ModelNotFoundError, NoEngineError
from gateway.limits.limits import TenantLimits
from gateway.pipeline import Pipeline, check_text
from gateway.stages import Prompts, Registry
from gateway.tasks import off_loop
from gateway.types import (
    ChatPrompt,
    Request,
    Tenant,
    TextPrompt,
    TokenPrompt,
    Trace,
    Usage,
)

_T = TypeVar("_T")


Parse = Callable[[Record, dict[str, Any]], Generation]


async def parsed(record: Record, parse: Callable[[Record, dict[str, Any]], _T], body: dict[str, Any]) -> _T:
    """A body, parsed by its dialect; a large one in a thread."""
    return await off_loop(record.work, lambda: parse(record, body))


@dataclass(frozen=True, slots=True)
class Answering:
    """Answers Calls of all dialects.

    embedding_models  those that only embed
    limits            of tenants
    passthrough       knows the models and stored answers of upstreams
    files             that requests name
    line_timeout_s    that a line of a batch may take
    """

    server: ServerSettings
    namespaces: Namespaces
    pipeline: Pipeline
    models: Registry
    decoders: Prompts
    embedding_models: Mapping[str, int]
    limits: TenantLimits
    passthrough: Passthrough
    files: NamedFiles
    line_timeout_s: float

    def generates(self, parse: Parse) -> Handler:
        """The handler of a route whose body holds the whole request."""

        async def handler(http: web.Request) -> web.StreamResponse:
            record, sent = http[RECORD], http[BODY]
            body = await self.with_files(record, http[TENANT], sent.get("model"), sent)
            generation = await parsed(record, parse, body)
            # Files are looked up for each request.
            return await self.answer(http, generation if body is sent else generation._replace(stamp=None))

        return handler

    async def with_files(self, record: Record, tenant: Tenant, model: object, value: _T, path: str = "") -> _T:
        """See NamedFiles.put. For a model of an upstream of another API: engines read none, and others have their own
        files."""
        if not isinstance(model, str) or self.pipeline.find_hosted(model, tenant.name) is None:
            return value
        return await self.files.put(record, tenant, value, path)

    def find_model(self, name: str) -> Hello | None:
        """The hello of its engines; None while they are unreachable, and for an upstream's model."""
        try:
            return self.models.serving(name)[0].hello.named(name)
        except (NoEngineError, ModelNotFoundError):
            return None

    def model(self, name: str, record: Record) -> Hello:
        """Of its engines, or of an upstream that speaks another API. Raises ModelNotFoundError, BadRequestError for a
        model that only embeds, and NoEngineError when the model's engines are unreachable."""
        try:
            model = self.models.serving(name)[0].hello.named(name)
        except (ModelNotFoundError, NoEngineError) as error:
            if isinstance(error, ModelNotFoundError) and name in self.embedding_models:
                raise BadRequestError(
                    f"The model `{name}` embeds texts and generates none; its route is POST /v1/embeddings.",
                    param="model",
                ) from None
            if (hosted := self.pipeline.find_hosted(name, record.tenant or "")) is not None:
                record.model = hosted.model
                return hosted
            if name in self.models.models():  # else it may be anything, and no label of a metric
                record.model = name
            raise
        record.model = name
        return model

    async def answer(self, http: web.Request, generation: Generation, *, media_type: str = SSE) -> web.StreamResponse:
        """Whole, or as a stream that is complete when this returns. Raises only while nothing was sent.

        media_type  of a stream
        """
        if not generation.call.stream:
            body = await self.whole(http[RECORD], http[TENANT], generation)
            self._remember(http, generation, {"Content-Type": JSON}, [body])
            return reply(body, kvasir_headers(http[RECORD]))
        noted: list[bytes] = []
        response = await self.stream(http, generation, media_type=media_type, noted=noted)
        self._remember(http, generation, stream_headers(media_type), noted)
        return response

    async def whole(self, record: Record, tenant: Tenant, generation: Generation) -> bytes:
        """The body of an answer that is no stream."""
        call, model, shape, account, _ = generation
        requests = await self.begun(record, tenant, call, model)
        answers, usage = await self.collect(requests, call, model, account=account)
        return shape.body(answers, usage)

    async def stream(
        self, http: web.Request, generation: Generation, *, media_type: str = SSE, noted: list[bytes] | None = None
    ) -> web.StreamResponse:
        """A stream that is complete when this returns. Raises only while nothing was sent. Its bytes are added to
        `noted`, if it may be sent again."""
        http[RECORD].stream = True
        call, model = generation.call, generation.model
        requests = await self.begun(http[RECORD], http[TENANT], call, model)
        is_held = requests[0].check is not None  # a ping would be the first byte
        return await stream(
            http,
            self.pipeline,
            requests,
            generation,
            self._echo(call, model),
            media_type=media_type,
            first_byte_s=0.0 if is_held else self.server.first_byte_s,
            noted=noted,
        )

    async def collect(
        self, requests: list[Request], call: Call, model: Hello, *, account: Account = NO_ACCOUNT
    ) -> tuple[list[Answer], Usage]:
        """The answers that are returned, and the usage of all that were generated."""
        answers = await collect(self.pipeline, requests, self._echo(call, model), account)
        usage = sum((answer.usage for answer in answers), Usage(0, 0))
        return call.choices.best(answers, logprobs=call.sampling.logprobs is not None), usage

    async def prewarm(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> Usage:
        """Computes its prompt, so that it is cached; the record's trace has its leases."""
        _, usage = await self.collect(await self.begun(record, tenant, call, model), call, model)
        return usage

    async def count(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> int:
        """Tokens of its prompt, for a request for that alone. Raises RateLimitError."""
        await set_aside(self.limits, record, lambda: ONLY_COUNTED)
        return await self.tokens(record, tenant, call, model)

    async def tokens(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> int:
        """Tokens of its prompt, with nothing generated."""
        (request,) = self.requests(record, tenant, call, model)
        return await self.pipeline.count(request)

    async def begun(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> list[Request]:
        """Its requests, once the tenant's limits have let it in. Raises RateLimitError, and what `requests` raises."""
        requests = self.requests(record, tenant, call, model)
        await set_aside(self.limits, record, lambda: need_of(call, record.body_bytes, model.context_tokens))
        return requests

    def requests(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> list[Request]:
        """One for each answer to each prompt, whose traces the record gets. Raises BadRequestError for token ids that
        the model does not have, UnsupportedError for images and files that no upstream is given, ForbiddenError for a
        namespace that the tenant may not use."""
        for prompt in call.prompts:
            if isinstance(prompt, ChatPrompt) and prompt.media and call.model in self.models.models():
                check_text(prompt)
        scope = self.namespaces.scope(record.namespace, tenant, key=call.cache_key, cache_salt=call.cache_salt)
        affinity = "" if self.namespaces.separating_key(tenant, call.cache_key) else call.cache_key
        reuse, deadline_s = stricter(record.reuse, call.reuse), self.deadline_s(record)
        requests = [
            Request(
                request_id=record.request_id,
                tenant=tenant,
                model=call.model,
                prompt=prompt,
                sampling=sampling,
                received_s=record.received_s,
                deadline_s=deadline_s,
                lane=record.lane,
                tier=record.tier,
                priority=call.priority,
                stop=call.stop,
                prompt_param=call.prompt_param,
                scope=scope,
                affinity=affinity,
                use_cache=call.use_cache,
                only_leased=call.only_leased,
                prewarm=call.prewarm,
                fit=call.fit,
                constraint=call.constraint,
                tool_use=call.tool_use,
                thinking=call.thinking,
                group=group,
                number=number,
                trace=Trace(fork=number > 0, prompt=prompt, salt=scope.salt, uncached=not call.use_cache),
                work=work,
                stream=call.stream,
                reuse=reuse,
                check=None if record.target is None else record.target.check,
            )
            for prompt, work in [(prompt, max(record.work, work_of_prompt(prompt))) for prompt in settle(call, model)]
            for number, group, sampling in call.choices.samplings(call.sampling)
        ]
        record.traces = [request.trace for request in requests]
        return requests

    def deadline_s(self, record: Record) -> float:
        """By the monotonic clock."""
        return record.received_s + (self.line_timeout_s if record.lane == "batch" else self.server.request_timeout_s)

    def _remember(
        self, http: web.Request, generation: Generation, headers: Mapping[str, str], chunks: Sequence[bytes]
    ) -> None:
        """For the resend path."""
        record, keep = http[RECORD], find_keeper(http)
        if keep is None or generation.stamp is None or record.status:
            return
        call, model = generation.call, generation.model
        need = need_of(call, record.body_bytes, model.context_tokens)
        keep(Rendered(call.model, model, need, headers, b"".join(chunks), generation.stamp()))

    def _echo(self, call: Call, model: Hello) -> Echo:
        if not call.echo:
            return _no_echo

        def echo(index: int) -> str:
            prompt = call.prompts[index // call.choices.best_of]
            if isinstance(prompt, TextPrompt):
                return prompt.text
            if isinstance(prompt, TokenPrompt) and prompt.tokens:
                return self.decoders.spell(prompt, model)
            return ""

        return echo


def _no_echo(index: int) -> str:
    return ""
