"""What every dialect does with a Call: its model, the requests for the pipeline, and the answer, whole or as a stream.
The dialects parse and write; nothing here knows a wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from engine.protocol import Hello
from gateway.api.cache_control import stricter
from gateway.api.call import Call, requests_of, settle
from gateway.api.dialect import JSON, SSE, Handler
from gateway.api.passthrough import Passthrough
from gateway.api.record import BODY, RECORD, TENANT, Record, kvasir_headers
from gateway.api.replies import Answer, Stamp, reply
from gateway.api.resend import Rendered, find_keeper
from gateway.api.stream import NO_ACCOUNT, Account, Echo, Shape, collect, stream, stream_headers
from gateway.api.tenants import ONLY_COUNTED, Limits, Namespaces, need_of, set_aside
from gateway.config import ServerSettings
from gateway.errors import BadRequestError, ModelNotFoundError, NoEngineError
from gateway.pipeline import Pipeline
from gateway.stages import Prompts, Registry
from gateway.tasks import off_loop
from gateway.types import (
    Need,
    Request,
    Tenant,
    TextPrompt,
    TokenPrompt,
    Usage,
)

PROMPTS_AT_ONCE = 16
"""Of one completion request that are computed at the same time."""

_T = TypeVar("_T")


class AnswerShape(Shape):
    """A dialect's answer, in either form."""

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The answer to a request that does not stream. `usage` is that of all generated answers together."""
        raise NotImplementedError


class Generation(NamedTuple):
    """A Call, its model, and how its answer is written and accounted for.

    stamp  what is new in each answer, of one that may be given again as it was written; None: it may not
    """

    call: Call
    model: Hello
    shape: AnswerShape
    account: Account = NO_ACCOUNT
    stamp: Stamp | None = None


Parse = Callable[[Record, dict[str, Any]], Generation]


async def parsed(record: Record, parse: Callable[[Record, dict[str, Any]], _T], body: dict[str, Any]) -> _T:
    """What a dialect makes of a body. That of a large one is made in a thread."""
    return await off_loop(record.work, lambda: parse(record, body))


class Answering:
    """Holds what answering a Call needs, for all dialects. `embedding_models` are those that only embed."""

    def __init__(
        self,
        server: ServerSettings,
        namespaces: Namespaces,
        pipeline: Pipeline,
        models: Registry,
        decoders: Prompts,
        embedding_models: Mapping[str, int],
        limits: Limits,
        passthrough: Passthrough,
        *,
        line_timeout_s: float,
    ) -> None:
        """limits          what tenants may ask for
        passthrough     knows the models and stored answers of upstreams
        line_timeout_s  that a line of a batch may take
        """
        self.passthrough = passthrough
        self._line_timeout_s = line_timeout_s
        self._limits = limits
        self.models = models
        self.embedding_models = embedding_models
        self._server = server
        self.namespaces = namespaces
        self.pipeline = pipeline
        self._decoders = decoders

    def generates(self, parse: Parse) -> Handler:
        """A handler of requests whose body says all that they ask."""

        async def handler(http: web.Request) -> web.StreamResponse:
            return await self.answer(http, await parsed(http[RECORD], parse, http[BODY]))

        return handler

    def find_model(self, name: str) -> Hello | None:
        """What one says of itself; None while its engines are unreachable, and of an upstream's."""
        try:
            return self.models.serving(name)[0].hello
        except (NoEngineError, ModelNotFoundError):
            return None

    def model(self, name: str, record: Record) -> Hello:
        """Raises ModelNotFoundError, BadRequestError for a model that only embeds, and NoEngineError when the model's
        engines are away."""
        try:
            model = self.models.serving(name)[0].hello
        except ModelNotFoundError:
            if name in self.embedding_models:
                raise BadRequestError(
                    f"The model `{name}` embeds texts and generates none; its route is POST /v1/embeddings.",
                    param="model",
                ) from None
            raise
        except NoEngineError:
            if name in self.models.models():  # else it may be anything, and no label of a metric
                record.model = name
            raise
        record.model = name
        return model

    async def answer(self, http: web.Request, generation: Generation, *, media_type: str = SSE) -> web.StreamResponse:
        """Whole, or as a stream that is complete when this returns. Raises only while nothing was sent.

        media_type  of a stream
        """
        call, model, shape, account, _ = generation
        if not call.stream:
            body = await self.whole(http[RECORD], http[TENANT], generation)
            self._remember(http, generation, {"Content-Type": JSON}, [body])
            return reply(body, kvasir_headers(http[RECORD]))
        noted: list[bytes] = []
        response = await self.stream(http, call, model, shape, media_type=media_type, account=account, noted=noted)
        self._remember(http, generation, stream_headers(media_type), noted)
        return response

    async def whole(self, record: Record, tenant: Tenant, generation: Generation) -> bytes:
        """The body of an answer that is no stream."""
        call, model, shape, account, _ = generation
        requests = await self.begun(record, tenant, call, model)
        answers, usage = await self.collect(requests, call, model, account=account)
        return shape.body(answers, usage)

    async def stream(
        self,
        http: web.Request,
        call: Call,
        model: Hello,
        shape: Shape,
        *,
        media_type: str = SSE,
        account: Account = NO_ACCOUNT,
        noted: list[bytes] | None = None,
    ) -> web.StreamResponse:
        """A stream that is complete when this returns. Raises only while nothing was sent. `noted` gets what was
        written, of an answer that may come again."""
        http[RECORD].stream = True
        requests = await self.begun(http[RECORD], http[TENANT], call, model)
        return await stream(
            http,
            self.pipeline,
            requests,
            shape,
            self._echo(call, model),
            at_once=PROMPTS_AT_ONCE,
            first_byte_s=self._server.first_byte_s,
            account=account,
            media_type=media_type,
            noted=noted,
        )

    async def collect(
        self, requests: list[Request], call: Call, model: Hello, *, account: Account = NO_ACCOUNT
    ) -> tuple[list[Answer], Usage]:
        """The answers to the call's own requests that are told, and the usage of all that were generated."""
        echo = self._echo(call, model)
        answers = await collect(self.pipeline, requests, echo, at_once=PROMPTS_AT_ONCE, account=account)
        usage = sum((answer.usage for answer in answers), Usage(0, 0))
        return call.choices.best(answers, logprobs=call.sampling.logprobs is not None), usage

    async def prewarm(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> Usage:
        """Computes its prompt, so that it is cached; the record's trace says what became of its breakpoints."""
        requests = await self.begun(record, tenant, call, model)
        (answer,) = await collect(self.pipeline, requests, _no_echo, at_once=1)
        return answer.usage

    async def count(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> int:
        """Tokens of its prompt, for a request that asks for nothing else. Raises RateLimitError."""
        await self.set_aside(record, lambda: ONLY_COUNTED)
        return await self.tokens(record, tenant, call, model)

    async def tokens(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> int:
        """Tokens of its prompt, with nothing generated."""
        (request,) = self.requests(record, tenant, call, model)
        return await self.pipeline.count(request)

    async def begun(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> list[Request]:
        """Its requests, once the tenant's limits have let it in. Raises RateLimitError, and what `requests` raises."""
        requests = self.requests(record, tenant, call, model)
        await self.set_aside(record, lambda: need_of(call, record.body_bytes, model.context_tokens))
        return requests

    async def set_aside(self, record: Record, need: Callable[[], Need]) -> None:
        """What the record's request needs of its tenant's limits. Raises RateLimitError."""
        await set_aside(self._limits, record, need)

    def requests(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> list[Request]:
        """One for each answer to each prompt, whose traces the record gets. Raises BadRequestError for token ids that
        the model does not have, ForbiddenError for a namespace that the tenant may not use."""
        prompts, reuse = settle(call, model), stricter(record.reuse, call.reuse)
        scope = self.namespaces.scope(record.namespace, tenant, key=call.cache_key, cache_salt=call.cache_salt)
        deadline_s = self.deadline_s(record)
        affinity = "" if self.namespaces.separating_key(tenant, call.cache_key) else call.cache_key
        requests = requests_of(
            call, prompts, record, tenant, scope=scope, affinity=affinity, reuse=reuse, deadline_s=deadline_s
        )
        record.traces = [request.trace for request in requests]
        return requests

    def deadline_s(self, record: Record) -> float:
        """By the monotonic clock."""
        return record.received_s + (self._line_timeout_s if record.lane == "batch" else self._server.request_timeout_s)

    def _remember(
        self, http: web.Request, generation: Generation, headers: Mapping[str, str], chunks: Sequence[bytes]
    ) -> None:
        """For the resend path."""
        record, keep = http[RECORD], find_keeper(http)
        if keep is None or generation.stamp is None or record.status:
            return
        call, model = generation.call, generation.model
        need = need_of(call, record.body_bytes, model.context_tokens)
        keep(Rendered(call.model, model, need, headers, b"".join(chunks), generation.stamp))

    def _echo(self, call: Call, model: Hello) -> Echo:
        if not call.echo:
            return _no_echo

        def echo(index: int) -> str:
            prompt = call.prompts[index // call.choices.best_of]
            if isinstance(prompt, TextPrompt):
                return prompt.text
            if isinstance(prompt, TokenPrompt) and prompt.tokens:
                return self._decoders.spell(prompt, model)
            return ""

        return echo


def _no_echo(index: int) -> str:
    return ""
