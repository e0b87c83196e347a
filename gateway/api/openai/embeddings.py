"""POST /v1/embeddings of the OpenAI dialect: parameters, limits, and the answer. The embedder behind it tokenises and
computes; what it is asked for here is tokens and vectors.
"""

from __future__ import annotations

import asyncio
from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson
from aiohttp import web

from gateway.api.answering import Answering, parsed
from gateway.api.dialect import Route
from gateway.api.fields import MAX_ITEMS, at_most, choice, integer, invalid, no_effect, read, table, text, used
from gateway.api.lines import Endpoint
from gateway.api.openai.inputs import Inputs, texts_or_ids
from gateway.api.openai.wire import OPENAI
from gateway.api.record import BODY, RECORD, TENANT, Record
from gateway.api.replies import reply
from gateway.api.tenants import set_aside
from gateway.config import EmbeddingSettings
from gateway.errors import BadRequestError, ContextLengthError, ModelNotFoundError, NotFoundError
from gateway.types import EmbeddingInput, Need, Tenant

ENCODED_AT_ONCE = 32
"""Vectors that are written before the event loop gets its turn: about a millisecond."""

_MAX_DIMENSIONS = 2**31 - 1

Encoding = Literal["float", "base64"]


class EmbeddingModel(Protocol):
    """A loaded model, as far as requests are checked against it."""

    @property
    def dimensions(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    def completed(self, ids: Sequence[int]) -> Sequence[int]:
        """Ids of a text with the special tokens around them, unless they are there already."""
        ...


class Embedder(Protocol):
    """Who tokenises and computes."""

    def models(self) -> Mapping[str, int]:
        """Names that it embeds under -> Unix second of its start; empty while the extra is missing."""
        ...

    async def model(self) -> EmbeddingModel: ...

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]: ...

    async def embed(self, texts: Sequence[EmbeddingInput], deadline_s: float, *, tenant: str) -> list[bytes]: ...


check_input = texts_or_ids(MAX_ITEMS, 1)
EMBEDDINGS = table(
    used("model", text(), "string, required", "Name of an embedding model, as in `GET /v1/models`."),
    used(
        "input",
        check_input,
        "string, array of strings, array of token ids, or array of arrays of token ids; required",
        "The texts, up to 2048, none of them empty. Token ids are the model's own.",
    ),
    used(
        "encoding_format",
        choice("float", "base64"),
        ", default `float`",
        "Numbers, or the base64 of little-endian float32.",
    ),
    used(
        "dimensions",
        integer(1, _MAX_DIMENSIONS),
        ", default: the model's",
        "The first so many numbers of each vector, scaled to length 1 again.",
    ),
    no_effect("user", text(), "string", "The key decides who asks."),
)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Holds what its handler needs."""

    settings: EmbeddingSettings
    answering: Answering
    embedder: Embedder

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v1/embeddings",
                self.create,
                "Embeds texts.",
                EMBEDDINGS,
                ("model", "input"),
                example={"model": self.settings.names[0], "input": "The weather is lovely today."},
                passes="metered",
            )
        ]

    def endpoints(self) -> dict[str, Endpoint]:
        """What lines of a batch may ask for."""
        return {"/v1/embeddings": Endpoint(OPENAI, "/v1/embeddings", self._answer)}

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/embeddings"""
        return reply(await self._answer(http[RECORD], http[TENANT], http[BODY]))

    async def _answer(self, record: Record, tenant: Tenant, body: dict[str, Any]) -> bytes:
        values = await parsed(record, lambda _, body: read(body, EMBEDDINGS, ("model", "input")), body)
        name: str = values["model"]
        vectors, tokens = await self.embed(record, tenant, name, values["input"], values.get("dimensions"))
        return await _body(name, vectors, values.get("encoding_format", "float"), tokens)

    async def embed(
        self, record: Record, tenant: Tenant, name: str, inputs: Inputs, dimensions: int | None
    ) -> tuple[list[bytes], int]:
        """A vector for each input, and the tokens that are accounted for: those of a text with the special ones around
        it, and as many as the client sent of ids. Raises KvasirError."""
        self.check_model(name)
        record.model = name
        # 1. The texts' tokens, within the limits.
        model = await self.embedder.model()
        size = model.dimensions if dimensions is None else integer(1, model.dimensions)(dimensions, "dimensions")
        texts = await self._tokens(inputs, model)
        tokens = sum(map(len, texts))
        if tokens > (limit := self.settings.max_request_tokens):
            message = f"The request has {tokens} tokens, and may have {limit}."
            raise BadRequestError(message, param="input", code="max_tokens_per_request")
        await set_aside(self.answering.limits, record, lambda: Need(input_tokens=tokens))
        # 2. Their vectors.
        wanted = [EmbeddingInput(one, size) for one in texts]
        vectors = await self.embedder.embed(wanted, self.answering.deadline_s(record), tenant=tenant.name)
        record.embedded_tokens = sum(
            len(tokens if isinstance(given, str) else given)
            for given, tokens in zip(inputs.values(), texts, strict=True)
        )
        return vectors, record.embedded_tokens

    def check_model(self, name: str) -> None:
        models = self.embedder.models()
        if name in models:
            return
        if name in self.answering.models.models():
            raise BadRequestError(
                f"The model `{name}` generates text and cannot be used to embed"
                + (f"; this server embeds with {', '.join(f'`{one}`' for one in models)}." if models else "."),
                param="model",
            )
        if not models:
            raise NotFoundError(
                "This server cannot embed: the extra `semantic` is not installed "
                "(`pip install -e '.[semantic]'` in the repository; see docs/configuration.md).",
                param="model",
                code=ModelNotFoundError.code,
            )
        raise ModelNotFoundError(name)

    async def _tokens(self, inputs: Inputs, model: EmbeddingModel) -> list[Sequence[int]]:
        """With special tokens, in the order of the inputs, which are all texts or all ids. Raises BadRequestError for
        texts beyond a limit, and for ids that are none."""
        at_most(self.settings.max_inputs, list(inputs), "input")
        strings: list[str] = []
        texts: list[Sequence[int]] = []
        for path, item in inputs.items():
            if isinstance(item, str):
                strings.append(text(self.settings.max_input_chars)(item, path))
            else:
                _check_ids(item, path, model.vocabulary)
                texts.append(model.completed(item))
        texts += await self.embedder.tokens(strings) if strings else []
        for path, tokens in zip(inputs, texts, strict=True):
            if len(tokens) > model.max_tokens:
                raise ContextLengthError(model.max_tokens, len(tokens), 0, param=path)
        return texts


async def _body(model: str, vectors: Sequence[bytes], encoding: Encoding, tokens: int) -> bytes:
    rows: list[bytes] = []
    for index, vector in enumerate(vectors):
        if index % ENCODED_AT_ONCE == ENCODED_AT_ONCE - 1:
            await asyncio.sleep(0)
        values = b'"%b"' % b64encode(vector) if encoding == "base64" else orjson.dumps(array("f", vector).tolist())
        rows.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, values))
    usage = orjson.dumps({"prompt_tokens": tokens, "total_tokens": tokens})
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (b",".join(rows), orjson.dumps(model), usage)


def _check_ids(ids: Sequence[int], path: str, vocabulary: int) -> None:
    if max(ids) >= vocabulary:
        index = next(index for index, one in enumerate(ids) if one >= vocabulary)
        raise invalid(
            f"{path}[{index}]",
            f"{ids[index]} is no token id of this model, whose ids are 0 to {vocabulary - 1}. Ids of another "
            "tokeniser, such as cl100k_base, mean other texts here: send the text itself",
        )
