"""Servers of others that are used as engines: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.config import ConfigError, Section
from gateway.config.units import Name, VariableName, check_key, http_url
from gateway.config.upstreams import ServedModel, served_model

ReplicaKind = Literal["vllm", "sglang", "tensorrt-llm"]
REPLICA_FLAG: Final = "--replica"
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/*\[\]]+):([0-9]{1,5})")


class ReplicaSettings(Section):
    """[[replicas]]: a vLLM, SGLang or TensorRT-LLM server that is used as an engine."""

    name: Name
    """Name in logs, metrics and headers; letters, digits and `._-`."""
    kind: ReplicaKind
    """What runs there."""
    url: str
    """As `http://host:8000`, with or without `/v1`."""
    key: SecretStr | None = None
    """Its API key."""
    api_key_env: VariableName | None = None
    """Environment variable that has the key, in place of `key`."""
    model: str | None = None
    """Name that clients use, or `served = name at the server`; the first of its `/v1/models` when not set."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Folder or hub id of its tokeniser; `root` of its `/v1/models` when not set."""
    kv_events: str = "auto"
    """Where rank 0 publishes KV events: `tcp://host:port`; `auto` asks the server, `off` follows none."""
    kv_replay: str = "auto"
    """Where missed events are asked for, in the same way."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        return http_url(url, "a replica", "api_key_env").removesuffix("/v1").rstrip("/")

    @field_validator("model")
    @classmethod
    def _is_a_model(cls, model: str | None) -> str | None:
        if model is not None and served_model(model).is_pattern:
            raise ValueError("a replica's model has a name of its own, without `*`, `?` and `[`")
        return model

    @field_validator("kv_events", "kv_replay")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str) -> str:
        found = _ENDPOINT.fullmatch(endpoint)
        if endpoint not in ("auto", "off") and (found is None or not 0 < int(found[2]) < 1 << 16):
            raise ValueError("an endpoint is `auto`, `off` or tcp://host:port")
        return endpoint

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        check_key(self.key, self.api_key_env, "api_key_env")
        if self.kv_events == "off" and self.kv_replay.startswith("tcp"):
            raise ValueError("kv_replay is of no use without kv_events")
        return self

    @property
    def served(self) -> ServedModel | None:
        """The name that clients use and, where it is another one, the server's. None: what the server says."""
        return None if self.model is None else served_model(self.model)


def replica_of_flag(text: str) -> dict[str, Any]:
    """What `kind=url` or `kind:name=url` says, as a table of the file would. Without a name, host and port are it.
    Raises ConfigError."""
    left, equals, url = text.partition("=")
    kind, _, name = left.partition(":")
    if not equals or kind not in get_args(ReplicaKind):
        kinds = ", ".join(get_args(ReplicaKind))
        raise ConfigError(f"{REPLICA_FLAG}: write KIND=URL or KIND:NAME=URL, where KIND is one of {kinds}")
    if not name:
        place = urlsplit(url).netloc.rpartition("@")[2]
        name = re.sub(r"[^A-Za-z0-9._]+", "-", place).strip("-._")
    return {"name": name or kind, "kind": kind, "url": url}
