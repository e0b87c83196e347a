"""embedContent and batchEmbedContents of the Gemini API: the embedder of /v1/embeddings, asked in this API's form."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import parsed
from gateway.api.dialect import Route
from gateway.api.fields import MAX_ITEMS, boolean, empty_text, invalid, missing, no_effect, refused, table, text, used
from gateway.api.gemini.contents import instruction
from gateway.api.gemini.files import VERSIONS
from gateway.api.gemini.proto import message, read, repeated, whole
from gateway.api.gemini.request import model_name
from gateway.api.openai.embeddings import Embeddings
from gateway.api.record import BODY, RECORD, TENANT
from gateway.api.replies import reply_json

_string = text()

EMBED: Final = table(
    used("content", instruction, "content of text, required", "The text: its parts, joined."),
    used("outputDimensionality", whole(1, 2**31 - 1), "integer from 1, default: the model's", "Numbers of a vector."),
    no_effect("taskType", _string, "string", "The model embeds all texts alike."),
    no_effect("title", _string, "string", "The model embeds all texts alike."),
    no_effect("model", _string, "string", "The URL names the model."),
    refused("autoTruncate", "A longer text is refused, never cut.", boolean, "boolean; only `false`", False),
)
BATCH: Final = table(
    used(
        "requests", repeated(message(EMBED), MAX_ITEMS), "array of 1 or more, required", "Each as for `embedContent`."
    ),
)


def embedding_routes(embeddings: Embeddings) -> Iterator[Route]:
    one = {"content": {"parts": [{"text": "The weather is lovely today."}]}}
    for version in VERSIONS:
        for verb, batch, summary, fields, example in (
            ("embedContent", False, "The vector of a text.", EMBED, one),
            ("batchEmbedContents", True, "The vectors of several texts.", BATCH, {"requests": [one]}),
        ):
            path, handler = f"/{version}/models/{{model:.+}}:{verb}", partial(_answer, embeddings, batch=batch)
            yield Route("POST", path, handler, summary, fields, tuple(example), example=example, passes="counted")


async def _answer(embeddings: Embeddings, http: web.Request, *, batch: bool) -> web.StreamResponse:
    tenant, record = http[TENANT], http[RECORD]
    requests = await parsed(record, lambda _, body: _requests(body, batch=batch), http[BODY])
    dimensions = {one.get("outputDimensionality") for one in requests.values()}
    if len(dimensions) > 1:
        raise invalid("requests[].outputDimensionality", "it is not the same in all requests")
    inputs = {f"{path}content": one["content"] for path, one in requests.items()}
    name = model_name(http.match_info["model"])
    vectors, tokens = await embeddings.embed(record, tenant, name, inputs, dimensions.pop())
    made = [{"values": array("f", vector).tolist()} for vector in vectors]
    usage = {"usageMetadata": {"promptTokenCount": tokens}}
    return reply_json({"embeddings": made, **usage} if batch else {"embedding": made[0], **usage})


def _requests(body: dict[str, Any], *, batch: bool) -> dict[str, dict[str, Any]]:
    """The path of each in the body, and its checked values; at least one. Raises BadRequestError."""
    requests = (
        {"": read(body, EMBED)}
        if not batch
        else {f"requests[{index}].": one for index, one in enumerate(read(body, BATCH).get("requests", ()))}
    )
    if not requests:
        raise missing("requests")
    for path, one in requests.items():
        if one.get("content") is None:
            raise missing(f"{path}content")
        if not one["content"]:
            raise empty_text(f"{path}content")
    return requests
