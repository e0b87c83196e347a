"""Bodies that one tenant should not be able to hurt others with, made by size. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.chaos.attacked import CHATS, MIB, UPSTREAM_MODELS, Sent

MOST: Final = 31 * MIB
"""Bytes of a body, below server.max_body_bytes."""

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GENERATE, EMBEDDINGS = "/v1beta/models/demo:generateContent", "/v1/embeddings"
MESSAGE_BATCHES = "/v1/messages/batches"


def repeat(one: bytes, times: int) -> bytes:
    """An array's inside."""
    return b",".join([one] * times)


def fitting(one: bytes, times: int) -> int:
    return min(times, MOST // (len(one) + 1))


def chat(messages: bytes, more: bytes = b"", path: str = CHATS) -> Sent:
    return Sent(path, b'{"model":"demo","max_tokens":4,"messages":[' + messages + b"]" + more + b"}")


def wrapped(before: bytes, one: bytes, times: int, after: bytes, path: str) -> Sent:
    return Sent(path, before + repeat(one, fitting(one, times)) + after)


def quoted(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).encode()


HI: Final = b'{"role":"user","content":"hi"}'
ARRAYS: Final[Mapping[str, tuple[str, bytes, bytes, bytes]]] = {
    "chat messages": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b'{"role":"user","content":"a"}', b"]}"),
    "empty objects": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b"{}", b"]}"),
    "empty arrays": (CHATS, b'{"model":"demo","max_tokens":4,"messages":[', b"[]", b"]}"),
    "content parts": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"}',
        b"]}]}",
    ),
    "tool messages": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
        b'"function":{"name":"f","arguments":"{}"}}]},',
        b'{"role":"tool","tool_call_id":"a","content":"a"}',
        b"]}",
    ),
    "tool calls": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b',{"role":"assistant","tool_calls":[',
        b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}',
        b"]}," + HI + b"]}",
    ),
    "tools": (
        CHATS,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b'],"tools":[',
        b'{"type":"function","function":{"name":"f"}}',
        b"]}",
    ),
    "completion prompts": (COMPLETIONS, b'{"model":"demo","max_tokens":4,"prompt":[', b'"a"', b"]}"),
    "completion token ids": (COMPLETIONS, b'{"model":"demo","max_tokens":4,"prompt":[', b"5", b"]}"),
    "response items": (
        RESPONSES,
        b'{"model":"demo","max_output_tokens":16,"input":[',
        b'{"role":"user","content":"a"}',
        b"]}",
    ),
    "response calls": (
        RESPONSES,
        b'{"model":"demo","max_output_tokens":16,"input":[',
        b'{"type":"function_call","call_id":"a","name":"f","arguments":"{}"}',
        b',{"role":"user","content":"a"}]}',
    ),
    "anthropic messages": (MESSAGES, b'{"model":"demo","max_tokens":4,"messages":[', HI, b"]}"),
    "anthropic blocks": (
        MESSAGES,
        b'{"model":"demo","max_tokens":4,"messages":[{"role":"user","content":[',
        b'{"type":"text","text":"a"}',
        b"]}]}",
    ),
    "anthropic system": (
        COUNT,
        b'{"model":"demo","messages":[' + HI + b'],"system":[',
        b'{"type":"text","text":"a"}',
        b"]}",
    ),
    "anthropic stops": (
        MESSAGES,
        b'{"model":"demo","max_tokens":4,"messages":[' + HI + b'],"stop_sequences":[',
        b'"ab"',
        b"]}",
    ),
    "message batch": (
        MESSAGE_BATCHES,
        b'{"requests":[{"custom_id":"a","params":{"model":"demo","max_tokens":4,"messages":[',
        b"{}",
        b"]}}]}",
    ),
    "gemini contents": (GENERATE, b'{"contents":[', b'{"role":"user","parts":[{"text":"a"}]}', b"]}"),
    "gemini parts": (GENERATE, b'{"contents":[{"parts":[', b'{"text":"a"}', b"]}]}"),
    "gemini turns of one role": (GENERATE, b'{"contents":[', b'{"role":"model","parts":[{"text":"ab"}]}', b"]}"),
    "gemini calls": (
        GENERATE,
        b'{"contents":[{"role":"model","parts":[',
        b'{"functionCall":{"name":"f"}}',
        b']},{"role":"user","parts":[{"text":"a"}]}]}',
    ),
    "embeddings": (EMBEDDINGS, b'{"model":"all-minilm-l6-v2","input":[', b'"a"', b"]}"),
    "unknown array": (CHATS, b'{"model":"demo","messages":[' + HI + b'],"nothing":[', b"0", b"]}"),
}
"""Name -> path, what comes before, one element, what comes behind."""

TEXTS: Final[Mapping[str, str]] = {
    "letters": "a",
    "words": "lorem ipsum ",
    "blanks": " ",
    "lines": "\n",
    "digits": "1234567890",
    "special marks": "<|im_end|>",
    "beginnings of marks": "<",
    "quotes": '"',
    "accents": "e\u0301",
    "ideographs": "\u6f22",
    "emoji": "\U0001f600",
}


def long_text(path: str, text: str, num_bytes: int) -> Sent:
    """One text of so many bytes."""
    one = len(quoted(text)) - 2
    said = quoted(text * max(1, min(num_bytes, MOST) // one))
    if path == COMPLETIONS:
        return Sent(path, b'{"model":"demo","max_tokens":4,"prompt":' + said + b"}")
    if path == RESPONSES:
        return Sent(path, b'{"model":"demo","max_output_tokens":16,"input":' + said + b"}")
    if path == GENERATE:
        return Sent(path, b'{"contents":[{"parts":[{"text":' + said + b"}]}]}")
    return chat(b'{"role":"user","content":' + said + b"}", path=path)


def stops(times: int, num_chars: int, path: str = CHATS) -> Sent:
    one = quoted("ab" * max(1, min(num_chars, MOST // times) // 2))
    if path == MESSAGES:
        return chat(HI, b',"stop_sequences":[' + repeat(one, times) + b"]", path)
    if path == GENERATE:
        config = b'"generationConfig":{"stopSequences":[' + repeat(one, times) + b"]}"
        return Sent(path, b'{"contents":[{"parts":[{"text":"hi"}]}],' + config + b"}")
    if path == COMPLETIONS:
        return Sent(path, b'{"model":"demo","max_tokens":4,"prompt":"a","n":8,"stop":[' + repeat(one, times) + b"]}")
    return chat(HI, b',"n":8,"stop":[' + repeat(one, times) + b"]")


def nested(levels: int, opened: bytes = b"[", closed: bytes = b"]", name: str = "messages") -> Sent:
    levels = min(levels, MOST // (len(opened) + len(closed)))
    inside = opened * levels + b"1" + closed * levels
    if name == "messages":
        return Sent(CHATS, b'{"model":"demo","messages":' + inside + b"}")
    return chat(HI, b',"' + name.encode() + b'":' + inside)


def biases(times: int) -> Sent:
    return chat(HI, b',"logit_bias":{' + b",".join(b'"%d":1' % number for number in range(times)) + b"}")


def names(times: int) -> Sent:
    return chat(HI, b',"metadata":{' + b",".join(b'"%d":"a"' % number for number in range(times)) + b"}")


def own_fields(times: int) -> Sent:
    """Fields of the body that nobody knows."""
    return chat(HI, b"".join(b',"f%d":0' % number for number in range(times)))


def properties(times: int) -> Sent:
    """Of a tool."""
    named = b",".join(b'"p%d":{"type":"string"}' % number for number in range(times))
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{' + named + b"}}}}"
    return chat(HI, b',"tools":[' + tool + b"]")


def arguments(times: int, inside: str = "{}") -> Sent:
    """One call whose arguments are a text that is JSON with many values."""
    written = quoted('{"a":[' + ",".join([inside] * times) + "]}")
    call = b'{"id":"a","type":"function","function":{"name":"f","arguments":' + written + b"}}"
    answer = b'{"role":"tool","tool_call_id":"a","content":"a"}'
    return chat(HI + b',{"role":"assistant","tool_calls":[' + call + b"]}," + answer)


def schema_chain(links: int) -> Sent:
    """References that lead from one to the next; the engine has its own limits, this is what the gateway does."""
    return structured(chain_of(links))


def chain_of(links: int, each: int = 1) -> dict[str, Any]:
    """Definitions that refer to the next one, so often each: with two, as many ways through it as 2 ** links."""
    last = {f"d{links}": {"type": "string"}}
    return {"$defs": {f"d{at}": _referring(f"d{at + 1}", each) for at in range(links)} | last, "$ref": "#/$defs/d0"}


def ring_of(links: int) -> dict[str, Any]:
    definitions = {f"d{at}": {"items": {"$ref": f"#/$defs/d{(at + 1) % links}"}} for at in range(links)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def fan_of(links: int) -> dict[str, Any]:
    """Many references to the same definition."""
    return {"$defs": {"a": {"type": "string"}}, "anyOf": [{"$ref": "#/$defs/a"}] * links}


def levels_of(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(min(levels, 300)):  # what json.dumps writes without a recursion of its own
        schema = {"type": "array", "items": schema}
    return schema


def enum_of(times: int) -> dict[str, Any]:
    return {"enum": [f"v{at}" for at in range(times)]}


def patterns_of(times: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{at}": {"pattern": "(a|b)*c{1,9}"} for at in range(times)}}


def _referring(name: str, times: int) -> dict[str, Any]:
    reference = {"$ref": f"#/$defs/{name}"}
    return reference if times == 1 else {"type": "array", "prefixItems": [reference] * times}


SCHEMAS: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = {
    "chained references": chain_of,
    "doubled references": lambda links: chain_of(links, 2),
    "references in a ring": ring_of,
    "references to the same": fan_of,
    "nested schemas": levels_of,
    "enum values": enum_of,
    "patterns": patterns_of,
}


def structured(schema: dict[str, Any], path: str = CHATS) -> Sent:
    """An answer, or a tool's arguments, by this schema, in the dialect of the path."""
    written = json.dumps(schema).encode()
    if path == RESPONSES:
        wanted = b'{"format":{"type":"json_schema","name":"a","schema":' + written + b"}}"
        return Sent(path, b'{"model":"demo","max_output_tokens":16,"input":"hi","text":' + wanted + b"}")
    if path == GENERATE:
        wanted = b'{"responseMimeType":"application/json","responseJsonSchema":' + written + b"}"
        return Sent(path, b'{"contents":[{"parts":[{"text":"hi"}]}],"generationConfig":' + wanted + b"}")
    if path == MESSAGES:
        return chat(HI, b',"tools":[{"name":"a","input_schema":' + written + b"}]", path)
    return chat(HI, b',"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":' + written + b"}}")


def schema_properties(times: int, *, strict: bool = False) -> Sent:
    fields = {f"p{at}": {"type": "string"} for at in range(times)}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    return chat(HI, b',"response_format":' + json.dumps(wanted).encode())


def grammar(kind: str, text: str) -> Sent:
    return chat(HI, b',"structured_outputs":' + json.dumps({kind: text}).encode())


def of_array_of_texts(times: int, num_chars: int) -> Sent:
    """Messages with a text of so many characters each."""
    one = b'{"role":"user","content":' + quoted("lorem ipsum " * (num_chars // 12)) + b"}"
    return chat(repeat(one, fitting(one, times)))


def gemini_joins(times: int) -> Sent:
    """A large text of the model, and many small ones behind it."""
    first = b'{"role":"model","parts":[{"text":"' + b"a" * (8 * MIB) + b'"}]}'
    others = repeat(b'{"role":"model","parts":[{"text":"a"}]}', times)
    return Sent(GENERATE, b'{"contents":[' + first + b"," + others + b"]}")


def gemini_pairs(times: int) -> Sent:
    calls = repeat(b'{"functionCall":{"name":"f"}}', times)
    last = b'{"functionCall":{"name":"g"}}'
    answers = repeat(b'{"functionResponse":{"name":"g","response":{}}}', times)
    model = b'{"role":"model","parts":[' + calls + b"," + last + b"]}"
    return Sent(GENERATE, b'{"contents":[' + model + b',{"role":"user","parts":[' + answers + b"]}]}")


def of_array(name: str, times: int) -> Sent:
    path, before, one, after = ARRAYS[name]
    return wrapped(before, one, times, after, path)


def to_upstream(sent: Sent) -> Sent:
    """The same for a model that an upstream serves, in the answers' cache."""
    dialect = "gemini" if sent.path == GENERATE else "anthropic" if sent.path.startswith(MESSAGES) else "openai"
    model, more = UPSTREAM_MODELS[dialect], b'"temperature":0,'
    body = sent.body.replace(b'"model":"demo"', f'"model":"{model}"'.encode(), 1)
    if dialect == "gemini":
        more = b'"generationConfig":{"temperature":0},'
    elif sent.path == RESPONSES:
        more += b'"store":false,'
    return sent._replace(path=sent.path.replace("demo", model), body=body.replace(b"{", b"{" + more, 1))


def spaced(num_bytes: int) -> Sent:
    """A small chat, and white space between two of its tokens."""
    return chat(HI + b" " * num_bytes)


def compressed(sent: Sent) -> Sent:
    return sent._replace(body=gzip.compress(sent.body, 1), compressed=True)
