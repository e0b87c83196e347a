"""The stream as bytes: WebSocket binary messages, each `uint32 header length | header, JSON, may be empty | payload`.

    gateway -> engine   submit, abort
    engine  -> gateway  hello (first), blocks (a snapshot next, then changes), step (one per step of the engine)

Pure: bytes in, values out, and back.
"""

from __future__ import annotations

import json
import struct
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from engine.protocol.values import (
    DIGEST_BYTES,
    PROTOCOL_VERSION,
    TIER_CODES,
    TOKEN_BYTES,
    Abort,
    BlockEvents,
    Breakpoint,
    EngineMessage,
    GatewayMessage,
    Grammar,
    Group,
    Hello,
    Load,
    Sampling,
    SequenceUpdate,
    StepFrame,
    Submit,
    Taker,
    TokenLogprobs,
)

_HEADER = struct.Struct("<I")
_NO_HEADER: Final = _HEADER.pack(0)
_to_json: Final = json.JSONEncoder(separators=(",", ":")).encode


class ProtocolError(ValueError):
    """A message that this version of the protocol cannot read."""


def _join(header: dict[str, Any], *payload: bytes) -> bytes:
    head = _to_json(header).encode()
    return b"".join((_HEADER.pack(len(head)), head, *payload))


def _split(message: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        (size,) = _HEADER.unpack_from(message)
        if len(message) < _HEADER.size + size:
            raise ProtocolError(f"header of {size} bytes in a message of {len(message)}")
        header = json.loads(message[_HEADER.size : _HEADER.size + size])
    except (struct.error, ValueError, RecursionError) as error:  # brackets in brackets, by the ten thousand
        raise ProtocolError(f"unreadable message of {len(message)} bytes: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError("the header is not an object")
    return header, message[_HEADER.size + size :]


def encode(message: GatewayMessage | EngineMessage) -> bytes:
    """One stream message. `decode` is its inverse."""
    match message:
        case Submit():
            header = {
                "op": "submit",
                "seq": message.seq,
                "tokens": len(message.tokens) // TOKEN_BYTES,
                "salt": message.salt,
                "lane": message.lane,
                "request_id": message.request_id,
                "sampling": message.sampling.to_json(),
                "tenant": message.tenant,
            }
            if message.breakpoints:
                header["breakpoints"] = [[point.tokens, point.ttl_s] for point in message.breakpoints]
            if message.adapter:
                header["adapter"] = message.adapter
            if not message.use_cache:
                header["use_cache"] = False
            if message.grammar is not None:
                header["grammar"] = [message.grammar.kind, message.grammar.text]
            if message.group is not None:
                header["group"] = list(message.group)
            return _join(header, message.tokens, message.digests)
        case Abort():
            return _join({"op": "abort", "seq": message.seq})
        case StepFrame():
            return _encode_step(message)
        case BlockEvents():
            header = {"op": "blocks", "stored": len(message.stored), "reset": message.reset, "tier": message.tier}
            if message.takers:
                header["takers"] = [list(taker) for taker in message.takers]
            return _join(header, message.stored, message.removed)
        case Hello():
            return _join({"op": "hello", **message.to_json()})


def decode(message: bytes) -> GatewayMessage | EngineMessage:
    """The inverse of `encode`. Raises ProtocolError for anything else."""
    if message[: _HEADER.size] == _NO_HEADER:
        try:
            return _decode_step({}, memoryview(message)[_HEADER.size :])
        except (struct.error, IndexError, ValueError) as error:
            raise ProtocolError(f"bad step message: {error}") from None
    header, payload = _split(message)
    op = header.pop("op", None)
    try:
        match op:
            case "submit":
                cut = header.pop("tokens") * TOKEN_BYTES
                tokens, digests = payload[:cut], payload[cut:]
                if len(tokens) != cut or len(digests) % DIGEST_BYTES:
                    raise ProtocolError("the payload of a submit is cut short")
                grammar, group = header.pop("grammar", None), header.pop("group", None)
                return Submit(
                    tokens=tokens,
                    digests=digests,
                    sampling=Sampling.from_json(header.pop("sampling")),
                    breakpoints=tuple(Breakpoint(int(n), float(s)) for n, s in header.pop("breakpoints", ())),
                    grammar=None if grammar is None else Grammar(*map(str, grammar)),  # type: ignore[arg-type]
                    group=None if group is None else Group(*map(int, group)),
                    **header,
                )
            case "abort":
                return Abort(**header)
            case "step":
                return _decode_step(header["extras"], payload)
            case "blocks":
                cut = header["stored"]
                tier = header["tier"]
                if tier not in TIER_CODES:
                    raise ProtocolError(f"there is no tier {tier!r}")
                stored, removed = payload[:cut], payload[cut:]
                takers = _takers(header.get("takers", ()), len(removed) // DIGEST_BYTES)
                return BlockEvents(stored, removed, reset=header["reset"], tier=tier, takers=takers)
            case "hello":
                if header.get("version") != PROTOCOL_VERSION:
                    raise ProtocolError(f"the engine speaks version {header.get('version')}, not {PROTOCOL_VERSION}")
                return Hello.from_json(header)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ProtocolError(f"bad {op!r} message: {error}") from None
    raise ProtocolError(f"unknown message {op!r}")


def _takers(runs: Any, num_blocks: int) -> tuple[Taker, ...]:
    takers = tuple(Taker(int(count), str(tenant), str(request)) for count, tenant, request in runs)
    if takers and (sum(taker.blocks for taker in takers) != num_blocks or any(taker.blocks < 1 for taker in takers)):
        raise ProtocolError(f"the places of {num_blocks} blocks are told as others")
    return takers


# A stream consists mostly of steps, so they are numbers only: `load | n | n seqs | n token counts | token ids`. The
# header is empty but for steps in which something begins or ends, which carry those fields by index.

_LOAD: Final = struct.Struct("<7Q2d?3Q")
_load_values = attrgetter(*(spec.name for spec in fields(Load)))
_LOGPROB_EXTRAS: Final = ("logprobs", "prompt_logprobs")  # each token a flat list: own, id, theirs, id, theirs, ...
_UPDATE_EXTRAS: Final = tuple(
    spec.name for spec in fields(SequenceUpdate) if spec.name not in ("seq", "tokens", *_LOGPROB_EXTRAS)
)


def _encode_step(frame: StepFrame) -> bytes:
    updates, load = frame.updates, frame.load
    numbers = [len(updates), *(update.seq for update in updates), *(len(update.tokens) for update in updates)]
    extras: dict[int, dict[str, Any]] = {}
    for index, update in enumerate(updates):
        numbers += update.tokens
        if extra := {key: value for key in _UPDATE_EXTRAS if (value := getattr(update, key)) is not None}:
            extras[index] = extra
        for key in _LOGPROB_EXTRAS:
            if (found := getattr(update, key)) is not None:
                flat = [[one.logprob, *chain.from_iterable(one.top)] for one in found]
                extras.setdefault(index, {})[key] = flat
    payload = _LOAD.pack(*_load_values(load)) + struct.pack(f"<{len(numbers)}I", *numbers)
    return _join({"op": "step", "extras": extras}, payload) if extras else _HEADER.pack(0) + payload


def _decode_step(extras: dict[str, dict[str, Any]], payload: bytes | memoryview) -> StepFrame:
    load = Load(*_LOAD.unpack_from(payload))
    numbers = struct.unpack(f"<{(len(payload) - _LOAD.size) // 4}I", memoryview(payload)[_LOAD.size :])
    count, updates = numbers[0], []
    start = 1 + 2 * count
    if start + sum(numbers[1 + count : start]) != len(numbers):
        raise ProtocolError("the payload of a step is cut short")
    for seq, num_tokens in zip(numbers[1 : 1 + count], numbers[1 + count : start], strict=True):
        updates.append(SequenceUpdate(seq, list(numbers[start : start + num_tokens])))
        start += num_tokens
    for index, fields_ in extras.items():
        update = updates[int(index)]
        for key in _LOGPROB_EXTRAS:
            if (flat := fields_.pop(key, None)) is not None:
                found = [TokenLogprobs(one[0], tuple(zip(one[1::2], one[2::2], strict=True))) for one in flat]
                setattr(update, key, found)
        for key, value in fields_.items():
            setattr(update, key, value)
    return StepFrame(updates, load)
