"""The fields of generateContent and countTokens as tables: what each may be, and whether it is carried out, accepted
without effect, or refused. docs/http-api.md is held to these tables by a test.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.api.fields import (
    MAX_STOP_CHARS,
    anything,
    boolean,
    choice,
    invalid,
    made,
    no_effect,
    number,
    refused,
    string_map,
    table,
    text,
    used,
)
from gateway.api.gemini.contents import contents, instruction
from gateway.api.gemini.proto import enum, message, repeated, whole
from gateway.api.gemini.schemas import schema
from gateway.api.gemini.tools import tool_config, tools

MAX_TOKENS: Final = 2**31 - 1
MAX_CANDIDATES: Final = 128
MAX_STOPS: Final = 5
MAX_TOP: Final = 20
MIME_TYPES: Final = ("text/plain", "application/json", "text/x.enum")

_CONTENT: Final = re.compile(r"(?:cachedContents/)?([A-Za-z0-9_-]{1,64})")
_string = text()


def _content_name(value: str, path: str) -> str:
    found = _CONTENT.fullmatch(value)
    if found is None:
        raise invalid(path, "cachedContents/ID is expected")
    return found[1]


cached_content: Final = made(_string, _content_name)
"""The name of a cached content, without its collection."""

SAFETY: Final = table(
    no_effect("category", _string, "", ""),
    no_effect("threshold", _string, "", ""),
    no_effect("method", _string, "", ""),
)
THINKING: Final = table(
    used("includeThoughts", boolean, "", ""),
    used("thinkingBudget", whole(-1, MAX_TOKENS), "", ""),
    used("thinkingLevel", _string, "", ""),
)

GENERATION: Final = table(
    used("temperature", number(0, 2), "number 0 to 2, default 1", "0 takes the likeliest token."),
    used("topP", number(0, 1), "number 0 to 1, default 1", "Samples from the likeliest tokens of this total."),
    used("topK", whole(0, MAX_TOKENS), "integer, default 0", "Samples from that many likeliest tokens; 0 from all."),
    used("maxOutputTokens", whole(1, MAX_TOKENS), "integer from 1, default: what fits", "Tokens to generate at most."),
    used(
        "stopSequences",
        repeated(text(MAX_STOP_CHARS, 1), MAX_STOPS),
        "array of up to 5 strings of up to 1024 characters",
        "End the answer; none of them is ever returned.",
    ),
    used("seed", whole(-(2**31), 2**31 - 1), "32-bit integer", "The same seed gives the same answer."),
    used("candidateCount", whole(1, MAX_CANDIDATES), "integer 1 to 128, default 1", "Answers to one computed prompt."),
    used("presencePenalty", number(-2, 2), "number -2 to 2, default 0", "Lowers tokens that were generated before."),
    used("frequencyPenalty", number(-2, 2), "number -2 to 2, default 0", "Lowers them by how often they were."),
    used("responseMimeType", choice(*MIME_TYPES), "", "What the answer has to be."),
    used("responseSchema", schema, "Schema", "And which JSON, or which one of several values."),
    used("responseJsonSchema", anything, "JSON Schema", "The same; not together with `responseSchema`."),
    used("responseLogprobs", boolean, "boolean, default false", "Log probabilities of the answer's tokens."),
    used(
        "logprobs",
        whole(0, MAX_TOP),
        "integer 0 to 20; only with `responseLogprobs`",
        "And of so many of the likeliest tokens in the place of each.",
    ),
    used(
        "thinkingConfig",
        message(THINKING),
        "object",
        "For translated requests; engines' models reason as made.",
    ),
    no_effect("mediaResolution", _string, "string", "There are no media."),
    no_effect("enableEnhancedCivicAnswers", boolean, "boolean", "There is only one kind of answers."),
    refused(
        "responseModalities",
        "Only text is generated.",
        repeated(enum("MODALITY_UNSPECIFIED", "TEXT", "IMAGE", "AUDIO", "VIDEO")),
        'array; only `["TEXT"]`',
        ["TEXT"],
        [],
    ),
    refused("responseFormat", "Ask with `responseMimeType` and `responseJsonSchema`."),
    refused("speechConfig", "Only text is generated."),
    refused("imageConfig", "Only text is generated."),
    refused("audioTimestamp", "There is no audio.", boolean, "boolean; only `false`", False),
    refused("audioTranscriptionConfig", "There is no audio."),
    refused("translationConfig", "There is no audio."),
    refused("enableAffectiveDialog", "There is no audio.", boolean, "boolean; only `false`", False),
    refused("routingConfig", "The URL names the model."),
    refused("modelSelectionConfig", "The URL names the model."),
)

GENERATE: Final = table(
    used("contents", contents, "array of 1 or more contents, required", "The conversation."),
    used("systemInstruction", instruction, "content of text", "What the model is told before it."),
    used("tools", tools, "array: `functionDeclarations`", "Functions that may be called."),
    used("toolConfig", tool_config, "object: `functionCallingConfig`", "Which of them, and whether."),
    used("generationConfig", message(GENERATION), "object", "How the answer is made."),
    no_effect("model", _string, "string", "The URL names the model."),
    no_effect("safetySettings", repeated(message(SAFETY)), "array of objects", "Nothing is filtered."),
    no_effect("labels", string_map(64, 64, 256), "up to 64 pairs", "Not kept."),
    no_effect("store", boolean, "boolean", "Nothing is stored."),
    no_effect("serviceTier", _string, "string", "There is one."),
    used("cachedContent", cached_content, "`cachedContents/ID`", "What the prompt begins with."),
    refused("continuationToken", "Every answer is complete."),
)

COUNT: Final = table(
    used("contents", contents, "array of contents", "What is counted, as a conversation."),
    used("generateContentRequest", message(GENERATE), "object", "Or a whole request, as for `generateContent`."),
    no_effect("model", _string, "string", "The URL names the model."),
)
