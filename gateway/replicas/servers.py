"""What a server is asked when it joins: its facts, its features, and its own tokens of a conversation.

vLLM, SGLang and TensorRT-LLM answer the same questions at other paths and by other names. Features, as far as a server
has them (words in quotes are fields of its API):

    completion_ids      /v1/completions takes token ids
    chat_ids            /v1/chat/completions takes token ids beside the messages, which are then not rendered:
                        SGLang's "input_ids", TensorRT-LLM's "prompt_token_ids"
    return_token_ids    answers have the ids of their tokens
    cache_salt, chat_cache_salt, priority, min_p, response_format, prompt_logprobs
                        fields of completions, and of chat completions
    structured_outputs  of completions: vLLM's "structured_outputs"; SGLang's "json_schema", "regex" and "ebnf"
    report_mode         "vllm_xargs" with "kv_cache_report_mode", which announces a reused prefix again
    cached_tokens       usage says how many prompt tokens were reused
    rank_header         X-data-parallel-rank chooses one of several ranks
    tokenize, tokenize_chat
                        it says its own tokens of a text, and of a conversation
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from gateway.config import ReplicaSettings
from gateway.replicas.base import EventSource, Kind, ServerFacts
from gateway.replicas.calls import NAMES, Caller, mapping, number, whole
from gateway.replicas.load import MAX_RANKS, METRICS, RANK, Samples, parse

JOIN_TIMEOUT_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 60.0
"""For one token; the server may be busy."""

TOKENIZE_TIMEOUT_S: Final = 10.0

_OWNERS: Final[Mapping[str, Kind]] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt-llm"}
"""`owned_by` of each kind's /v1/models."""

_TOKENIZE: Final[Mapping[Kind, str]] = {
    "vllm": "tokenize",
    "sglang": "v1/tokenize",
    "tensorrt-llm": "_internal/tokenize",
}
_STARTED, _CACHE, _RUNNING = "process_start_time_seconds", "vllm:cache_config_info", "vllm:num_requests_running"
_BLOCKS, _BLOCK_TOKENS, _BATCH = "kv_cache_max_blocks", "kv_cache_tokens_per_block", "max_num_active_requests"
_READ: Final = (_STARTED, _CACHE, _RUNNING, f"trtllm_{_BLOCKS}", f"trtllm_{_BLOCK_TOKENS}", f"trtllm_{_BATCH}")

_FEATURES: Final = [
    row.split()
    for row in """
    completion_ids     CompletionRequest.prompt                0       0       0
    chat_ids           ChatCompletionRequest.input_ids         -       0.5.14  -
    chat_ids           ChatCompletionRequest.prompt_token_ids  -       -       -
    return_token_ids   CompletionRequest.return_token_ids      0.10.2  0.5.17  -
    cache_salt         CompletionRequest.cache_salt            0.11    0.5.5   -
    chat_cache_salt    ChatCompletionRequest.cache_salt        0.9     0.5.5   -
    priority           CompletionRequest.priority              0.7     0.5.3   -
    min_p              CompletionRequest.min_p                 0.5     0.4     0.21
    response_format    CompletionRequest.response_format       0.7     0.5     0.21
    prompt_logprobs    CompletionRequest.prompt_logprobs       0.7     -       -
    structured_outputs CompletionRequest.structured_outputs    0.11    -       -
    structured_outputs CompletionRequest.json_schema           -       0.4     -
    tokenize           TokenizeCompletionRequest.prompt        0.5     -       -
    tokenize           TokenizeRequest.prompt                  -       0.5.3   -
    tokenize_chat      TokenizeChatRequest.messages            0.9     -       -
    tokenize_chat      TokenizeRequest.messages                -       0.5.12  -
    report_mode        -                                       0.26    -       -
    rank_header        -                                       0.11.2  0.5.10  -
    """.strip().splitlines()
]
"""Feature, its field in /openapi.json, and without that page or field: since which version of vLLM, SGLang and
TensorRT-LLM it is there."""


async def find_facts(session: aiohttp.ClientSession, settings: ReplicaSettings) -> ServerFacts:
    """What the server says of itself. A vLLM computes one or two tokens for it.

    Raises ServerError for one that is not reachable or not ready, is none or of another kind, refuses the key, or does
    not have the model that is configured.
    """
    caller, kind = Caller(session, settings), settings.kind
    cards = await _cards(caller, settings)
    card, model = cards[0], str(cards[0]["id"])
    info = mapping(await caller.ask("server_info", JOIN_TIMEOUT_S, optional=kind != "sglang"))
    about = mapping(await caller.ask("model_info", JOIN_TIMEOUT_S, optional=True)) if kind == "sglang" else {}
    state = mapping(info.get("internal_states"))
    metrics = parse(await caller.fetch(METRICS[kind], JOIN_TIMEOUT_S, optional=True), _READ)
    version = info.get("version") or mapping(await caller.ask("version", JOIN_TIMEOUT_S, optional=True)).get("version")
    sources, no_events = await _sources(caller, settings, info, metrics)
    num_blocks, block_size = _blocks(info, state, metrics)
    features = await _features(caller, kind, str(version or ""))
    probe_tokens = min(2 * block_size or 64, max(whole(card.get("max_model_len")) - 2, 1))
    if await _reports_cached(caller, settings, model, features, info, probe_tokens):
        features.add("cached_tokens")
    if len(sources) == 1:
        features.discard("rank_header")
    return ServerFacts(
        kind=kind,
        version=str(version or ""),
        models=tuple(str(one["id"]) for one in cards),
        root=str(about.get("model_path") or info.get("model_path") or card.get("root") or ""),
        context_tokens=whole(card.get("max_model_len")),
        tokenizer=str(about.get("tokenizer_path") or ""),
        lifetime=_lifetime(kind, info, metrics),
        weight_version=str(about.get("weight_version") or ""),
        ranks=len(sources),
        sources=sources,
        no_events=no_events,
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=whole(state.get("effective_max_running_requests_per_dp") or _value(metrics, f"trtllm_{_BATCH}")),
        features=frozenset(features),
    )


async def find_lifetime(session: aiohttp.ClientSession, settings: ReplicaSettings) -> str:
    """Of the process that answers now: see ServerFacts. Raises ServerError."""
    caller, kind = Caller(session, settings), settings.kind
    if kind == "sglang":
        return _lifetime(kind, mapping(await caller.ask("server_info", JOIN_TIMEOUT_S)), {})
    page = await caller.fetch(METRICS[kind], JOIN_TIMEOUT_S, optional=True)
    return _lifetime(kind, {}, parse(page, (_STARTED,)))


def _lifetime(kind: Kind, info: Mapping[str, Any], metrics: Samples) -> str:
    started = number(info.get("startup_time")) if kind == "sglang" else _value(metrics, _STARTED)
    return f"{started:.6f}" if started else ""


async def ask_tokens(session: aiohttp.ClientSession, settings: ReplicaSettings, body: Mapping[str, Any]) -> list[int]:
    """The server's own token ids of `prompt` (a text), or of `messages` and `tools`, as its API writes them.

    Raises ServerError when it refuses, and for an answer without ids.
    """
    caller, path = Caller(session, settings), _TOKENIZE[settings.kind]
    answer = mapping(await caller.ask(path, TOKENIZE_TIMEOUT_S, body))
    ids = answer.get("tokens", answer.get("token_ids"))
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise caller.error(f"/{path} answered without token ids")
    return ids


async def _cards(caller: Caller, settings: ReplicaSettings) -> list[Mapping[str, Any]]:
    """Its list of models, the one that is used first; adapters (which have a parent) come last. Raises ServerError."""
    data = mapping(await caller.ask("v1/models", JOIN_TIMEOUT_S)).get("data")
    cards: list[Mapping[str, Any]]
    cards = [one for one in data if isinstance(one, dict) and "id" in one] if isinstance(data, list) else []
    if not cards:
        raise caller.error(f"/v1/models lists no model; is this the URL of a {NAMES[settings.kind]}?")
    owner = str(cards[0].get("owned_by"))[:40]
    if (kind := _OWNERS.get(owner)) != settings.kind:
        what = f'it is a {NAMES[kind]}: write kind = "{kind}"' if kind else f"its models are owned by {owner!r}"
        raise caller.error(f"it is no {NAMES[settings.kind]}; {what}")
    wanted = settings.served and (settings.served.upstream or settings.served.served)
    cards.sort(key=lambda card: (card["id"] != wanted, bool(card.get("parent"))))
    if settings.served is not None and cards[0]["id"] != wanted:
        have = ", ".join(str(card["id"]) for card in cards[:5])
        hint = f'model = "{settings.served.served} = {cards[0]["id"]}"'
        raise caller.error(f"it has no model {wanted!r}, only {have}; {hint} serves one under another name")
    return cards


def _blocks(info: Mapping[str, Any], state: Mapping[str, Any], metrics: Samples) -> tuple[int, int]:
    """Blocks of one rank, and the tokens of each; 0 where it does not say."""
    for labels, _ in metrics.get(_CACHE, ()):
        return whole(labels.get("num_gpu_blocks")), whole(labels.get("block_size"))
    if page := whole(info.get("page_size")):
        tokens = info.get("max_total_num_tokens") or mapping(state.get("memory_usage")).get("token_capacity")
        return whole(tokens) // page, page
    return whole(_value(metrics, f"trtllm_{_BLOCKS}")), whole(_value(metrics, f"trtllm_{_BLOCK_TOKENS}"))


# -- where KV events are published -------------------------------------------------------------------------------------


async def _sources(
    caller: Caller, settings: ReplicaSettings, info: Mapping[str, Any], metrics: Samples
) -> tuple[tuple[EventSource | None, ...], str]:
    """Of each data-parallel rank: by /kv_event_sources of a vLLM, /server_info of a SGLang, and the settings. And why
    the server names none."""
    host, described = urlsplit(settings.url).hostname or "", mapping(info.get("kv_events"))
    answer = None
    if settings.kind == "vllm":
        answer = await caller.ask("kv_event_sources", JOIN_TIMEOUT_S, optional=True)
    announced = mapping(answer)  # empty where it publishes none
    found = [_vllm_source(mapping(announced[rank]), host) for rank in sorted(announced, key=whole)[:MAX_RANKS]]
    labels = {labels.get(RANK[settings.kind]) for labels, _ in metrics.get(_RUNNING, ())}
    ranks = min(max(len(found), whole(described.get("dp_size") or info.get("dp_size")), len(labels), 1), MAX_RANKS)
    if described:
        found = [_sglang_source(described, host, rank) for rank in range(ranks)]
    found += [None] * (ranks - len(found))
    why = ""
    if settings.kv_events == "auto" and not any(found):
        told = answer is not None or settings.kind == "sglang"
        why = f"the server {'publishes none' if told else 'does not say where'} (kv_events sets an endpoint)"
    return tuple(_configured(settings, source, rank) for rank, source in enumerate(found)), why


def _configured(settings: ReplicaSettings, source: EventSource | None, rank: int) -> EventSource | None:
    """With what the settings say in place of the server. Every kind publishes rank r at the port of rank 0, plus r."""
    events, replay = (
        None if setting == "off" else answer if setting == "auto" else _shifted(setting, rank)
        for setting, answer in (
            (settings.kv_events, source and source.events),
            (settings.kv_replay, source and source.replay),
        )
    )
    return None if events is None else EventSource(events, replay, source.topic if source else "")


def _shifted(endpoint: str, rank: int) -> str:
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + rank}"


def _vllm_source(config: Mapping[str, Any], host: str) -> EventSource | None:
    """One value of /kv_event_sources, whose ports are those of the rank already."""
    events = _reachable(config.get("endpoint"), host)
    if not config.get("enable_kv_cache_events") or config.get("publisher") != "zmq" or events is None:
        return None
    return EventSource(events, _reachable(config.get("replay_endpoint"), host), str(config.get("topic") or ""))


def _sglang_source(described: Mapping[str, Any], host: str, rank: int) -> EventSource | None:
    events, replay = (
        _reachable(f"tcp://{described.get('endpoint_host')}:{whole(described[name]) + rank}", host)
        if name in described
        else None
        for name in ("endpoint_port_base", "replay_endpoint_port_base")
    )
    if described.get("publisher") != "zmq" or events is None:
        return None
    return EventSource(events, replay, str(described.get("topic") or ""))


def _reachable(endpoint: object, host: str) -> str | None:
    """With the host that the server is reached at in place of a wildcard. None for what is no TCP endpoint."""
    found = re.fullmatch(r"tcp://(.+):([0-9]{1,5})", endpoint) if isinstance(endpoint, str) else None
    if found is None or not 0 < int(found[2]) < 1 << 16:
        return None
    place = found[1]
    if place.strip("[]") in ("*", "0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        place = f"[{host}]" if ":" in host else host
    return f"tcp://{place}:{found[2]}"


# -- features ----------------------------------------------------------------------------------------------------------


async def _features(caller: Caller, kind: Kind, version: str) -> set[str]:
    described = mapping(await caller.ask("openapi.json", JOIN_TIMEOUT_S, optional=True))
    schemas = mapping(mapping(described.get("components")).get("schemas"))
    column, found = 2 + list(NAMES).index(kind), set()
    for row in _FEATURES:
        schema, _, field = row[1].partition(".")
        if field and "CompletionRequest" in schemas:
            there = field in mapping(mapping(schemas.get(schema)).get("properties"))
        else:
            there = row[column] != "-" and _number(version) >= _number(row[column])
        if there:
            found.add(row[0])
    return found


async def _reports_cached(
    caller: Caller,
    settings: ReplicaSettings,
    model: str,
    features: set[str],
    info: Mapping[str, Any],
    probe_tokens: int,
) -> bool:
    """Whether `usage` has cached tokens. A vLLM does not say: it computes a token, and again if its answer has nothing,
    because older ones say nothing until something was reused."""
    if settings.kind != "vllm":
        return settings.kind == "tensorrt-llm" or bool(info.get("enable_cache_report"))
    body = {"model": model, "prompt": [1] * probe_tokens, "max_tokens": 1, "temperature": 0}
    if "cache_salt" in features:
        body["cache_salt"] = uuid.uuid4().hex  # a prefix of its own, which no request reuses
    for _ in range(2):
        answer = mapping(await caller.ask("v1/completions", PROBE_TIMEOUT_S, body, optional=True))
        if mapping(answer.get("usage")).get("prompt_tokens_details"):
            return True
    return False


def _value(metrics: Samples, name: str) -> float:
    return next((number(value) for _, value in metrics.get(name, ())), 0.0)


def _number(version: str) -> tuple[int, ...]:
    """`0.11.2rc1` -> (0, 11, 2); empty for what is no version."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()
