"""Servers of others that are used as engines: vLLM, SGLang, TensorRT-LLM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from engine.config import ConfigError, Section
from gateway.config.units import Name, VariableName, check_key, http_url
from gateway.config.upstreams import ServedModel, served_model

ReplicaKind = Literal["vllm", "sglang", "tensorrt-llm"]
REPLICA_FLAG: Final = "--replica"
KUBERNETES_URL: Final = "k8s://"
_ENDPOINT = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|\*|[^\s:/*\[\]]+):([0-9]{1,5})")
_LABEL: Final = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_SERVICE = re.compile(rf"k8s://({_LABEL})/({_LABEL})(?::([-a-z0-9]{{1,15}}))?")


class KubernetesSettings(Section):
    """[kubernetes]: the cluster whose Services are in URLs of `[[replicas]]`."""

    url: str | None = None
    """Its API server, as `https://10.96.0.1:443`; in a pod the cluster's own."""
    account_dir: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Folder with `token` and `ca.crt`, which are read again for each request, as both rotate."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not http_url(url, "an API server", "account_dir").startswith("https://"):
            raise ValueError("an API server's URL begins with https://: its token would be sent in clear")
        return url


class Service(NamedTuple):
    """k8s://namespace/name:port. `port` is a name or a number of its pods, empty for their only one."""

    namespace: str
    name: str
    port: str


class ReplicaSettings(Section):
    """[[replicas]]: a vLLM, SGLang or TensorRT-LLM server that is used as an engine."""

    name: Name
    """Name in logs, metrics and headers; letters, digits and `._-`."""
    kind: ReplicaKind
    """What runs there."""
    url: str
    """As `http://host:8000`, with or without `/v1`; `k8s://namespace/service:port` is a replica for each ready pod of a
    Service (over HTTP). The port is a name or number of the pods', and may be left out where they have one."""
    key: SecretStr | None = None
    """Its API key."""
    api_key_env: VariableName | None = None
    """Environment variable that has the key, in place of `key`."""
    model: str | None = None
    """Name that clients use, or `served = name at the server`; the first of its `/v1/models` when not set."""
    tokenizer: Annotated[str, Field(min_length=1)] | None = None
    """Folder or hub id of its tokeniser; `root` of its `/v1/models` when not set."""
    kv_events: str = "auto"
    """Where rank 0 publishes KV events: `tcp://host:port` (`tcp://*:port` of each pod of a Service); `auto` asks the
    server, `off` follows none."""
    kv_replay: str = "auto"
    """Where missed events are asked for, in the same way."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        if url.startswith(KUBERNETES_URL):
            if _SERVICE.fullmatch(url) is None:
                raise ValueError("a Service is k8s://namespace/service:port, where the port is a name or number")
            return url
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
        if self.service is None and "*" in self.kv_events + self.kv_replay:
            raise ValueError("tcp://*:port is for a Service (k8s://...); write the server's host")
        return self

    @property
    def service(self) -> Service | None:
        """Whose pods are the replicas. None: the URL is a server's."""
        found = _SERVICE.fullmatch(self.url)
        return None if found is None else Service(found[1], found[2], found[3] or "")

    @property
    def place(self) -> str:
        """What tells this server from others that had its name."""
        return self.url

    @property
    def served(self) -> ServedModel | None:
        """The name that clients use and, where it is another one, the server's. None: what the server says."""
        return None if self.model is None else served_model(self.model)


class PodSettings(ReplicaSettings):
    """One pod of the Service that `entry` of [[replicas]] names."""

    entry: str
    uid: str

    @classmethod
    def of(cls, entry: ReplicaSettings, name: str, address: str, uid: str) -> PodSettings:
        """Raises ValidationError."""
        host = address.rpartition(":")[0]
        own = {
            "name": name,
            "url": f"http://{address}",
            "kv_events": entry.kv_events.replace("*", host),
            "kv_replay": entry.kv_replay.replace("*", host),
        }
        return cls.model_validate({**entry.model_dump(exclude_none=True), **own, "entry": entry.name, "uid": uid})

    @property
    def place(self) -> str:
        return f"{self.url} {self.uid}"


def replica_of_flag(text: str) -> dict[str, Any]:
    """What `kind=url` or `kind:name=url` says, as a table of the file would. Without a name, host and port are it.
    Raises ConfigError."""
    left, equals, url = text.partition("=")
    kind, _, name = left.partition(":")
    if not equals or kind not in get_args(ReplicaKind):
        kinds = ", ".join(get_args(ReplicaKind))
        raise ConfigError(f"{REPLICA_FLAG}: write KIND=URL or KIND:NAME=URL, where KIND is one of {kinds}")
    if not name:
        place = url.removeprefix(KUBERNETES_URL) if url.startswith(KUBERNETES_URL) else urlsplit(url).netloc
        place = place.rpartition("@")[2]
        name = re.sub(r"[^A-Za-z0-9._]+", "-", place).strip("-._")
    return {"name": name or kind, "kind": kind, "url": url}
