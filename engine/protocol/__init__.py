"""The contract between gateways and engines: block identity, messages, their bytes, Redis key names.

Both sides import this package and nothing else of each other. Standard library and xxhash only, so that a gateway
without torch, a test or a benchmark can speak to an engine.

Knows nothing about models, HTTP or Redis clients. Its neighbours are engine/server.py and gateway/engines/bundled.py,
the two ends of the stream.
"""

from engine.protocol.endpoints import (
    HEALTH_PATH,
    MOST_PREFIX_CHARS,
    PURGE_LIMIT_S,
    PURGE_PATH,
    SECRET_HEADER,
    STATS_PATH,
    STREAM_PATH,
    TOKENIZER_PATH,
    TokenizerFiles,
)
from engine.protocol.identity import (
    DIGEST_BYTES,
    HASHES,
    TOKEN_BYTES,
    HashName,
    Namespace,
    chain_digests,
    split_digests,
)
from engine.protocol.index_keys import ENGINES_KEY, TIER_CODES, Tier, announcement_key, blocks_key
from engine.protocol.reports import (
    BlockEvents,
    EngineMessage,
    FinishReason,
    Hello,
    Load,
    SequenceUpdate,
    StepFrame,
    TokenLogprobs,
)
from engine.protocol.requests import (
    LANES,
    MAX_GRAMMAR_BYTES,
    Abort,
    Breakpoint,
    GatewayMessage,
    Grammar,
    GrammarKind,
    Group,
    Lane,
    Sampling,
    Submit,
)
from engine.protocol.schema_limits import SchemaError, check_schema, follow_reference
from engine.protocol.wire import ProtocolError, decode, encode

__all__ = [
    "DIGEST_BYTES",
    "ENGINES_KEY",
    "HASHES",
    "HEALTH_PATH",
    "LANES",
    "MAX_GRAMMAR_BYTES",
    "MOST_PREFIX_CHARS",
    "PURGE_LIMIT_S",
    "PURGE_PATH",
    "SECRET_HEADER",
    "STATS_PATH",
    "STREAM_PATH",
    "TIER_CODES",
    "TOKENIZER_PATH",
    "TOKEN_BYTES",
    "Abort",
    "BlockEvents",
    "Breakpoint",
    "EngineMessage",
    "FinishReason",
    "GatewayMessage",
    "Grammar",
    "GrammarKind",
    "Group",
    "HashName",
    "Hello",
    "Lane",
    "Load",
    "Namespace",
    "ProtocolError",
    "Sampling",
    "SchemaError",
    "SequenceUpdate",
    "StepFrame",
    "Submit",
    "Tier",
    "TokenLogprobs",
    "TokenizerFiles",
    "announcement_key",
    "blocks_key",
    "chain_digests",
    "check_schema",
    "decode",
    "encode",
    "follow_reference",
    "split_digests",
]
