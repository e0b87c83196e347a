"""The HTTP side, the log, Redis, and the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from engine import redis_url
from engine.config import Secret, Section
from gateway.config.units import COMMAS, WORDS, Share, http_url

Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]


class ServerSettings(Section):
    """[server]: the HTTP side of the gateway."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for every interface."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port; 0 takes a free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes on that port, one core each; more than one need Redis, and share out the limits of a gateway."""
    data_dir: Path = Path(".kvasir")
    """Folder for what must survive a restart (the embedded Redis, blocks); made when missing."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 << 20
    """Bytes; a larger request body is refused with 413."""
    max_bodies_bytes: Annotated[int, Field(ge=1024)] = 512 << 20
    """Bytes of all bodies in flight, decoded and parsed (503 beyond); one tenant has half of it (429)."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds that one request may take altogether."""
    first_byte_s: NonNegativeFloat = 2.0
    """Seconds after which a stream whose prompt is still being computed gets headers and a ping; 0 never."""
    keep_alive_s: PositiveFloat = 75.0
    """Seconds that an idle client connection is kept open."""
    min_warm: Share = 0.0
    """Share of a model's `[[warm]]` prompts that one engine has before the gateway is ready; 1 is all."""
    warm_timeout_s: NonNegativeFloat = 300.0
    """Seconds from the start until it is ready with fewer, with a warning in the log."""
    shutdown_s: NonNegativeFloat = 30.0
    """Seconds that requests in flight get to end after SIGTERM."""
    cors_origins: Annotated[tuple[Origin, ...], COMMAS] = ()
    """Origins of web pages that may read answers, as `https://example.com`, or `*`."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""


class TlsSettings(Section):
    """[tls]: the certificate of the gateway's port. Files that change are used within seconds, by new connections."""

    cert: Path | None = None
    """PEM file of the certificate, with those between it and its CA behind it; without one the port speaks HTTP."""
    key: Path | None = None
    """PEM file of its key, without a password."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError(f"tls.{'key' if self.key is None else 'cert'} is missing: a certificate needs its key")
        return self


class LogSettings(Section):
    """[logs]: how lines are written. What is logged is said by `log_level` of [server] and [engine]."""

    format: Literal["text", "json"] = "text"
    """How lines are written. `json`: an object per line, with the empty fields of requests, too."""


class SloSettings(Section):
    """[slo]: objectives that `kvasir_slo_requests_total` counts answered requests by."""

    first_token_ms: NonNegativeFloat = 0
    """Milliseconds from arrival to the first token; 0 is no objective."""
    inter_token_ms: NonNegativeFloat = 0
    """Milliseconds from one token to the next, as a mean of the answer; 0 is no objective."""


class OtelSettings(Section):
    """[otel]: traces for OpenTelemetry, without any text of prompts. Needs the extra `otel`."""

    endpoint: str = ""
    """Base URL of a collector that takes OTLP over HTTP, as `http://127.0.0.1:4318`; none when not set."""
    sample: Share = 0.05
    """Share of requests that are traced, of those without a `traceparent`, which decides for the others."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str) -> str:
        """The message never has the URL."""
        return endpoint and http_url(endpoint, "otel.endpoint", "OTEL_EXPORTER_OTLP_HEADERS")


class RedisSettings(Section):
    """[redis]: where the index lives."""

    url: Annotated[str | None, Secret(redis_url.has_password)] = None
    """`redis://`, `rediss://` or `unix://` URL, `redis+sentinel://HOST:26379,HOST:26379/MASTER` or
    `redis+cluster://HOST:6379,HOST:6379` (`rediss+...` over TLS); without one, an own Redis is started."""
    timeout_s: PositiveFloat = 0.25
    """Seconds that one Redis command may take before the memory index answers instead."""
    max_memory_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Bytes that the embedded Redis may use."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        """The message never has the URL, in which there may be a password."""
        if url is not None:
            redis_url.parse(url)
        return url


class EnginesSettings(Section):
    """[engines]: the engines behind this gateway."""

    kind: Literal["auto", "bundled", "vllm"] = "auto"
    """What `kvasir serve` starts: bundled engines, or `vllm serve` from the PATH; `auto` is a vLLM where there are one
    and a CUDA device, for one engine of another model than the demo."""
    vllm_arguments: Annotated[tuple[str, ...], WORDS] = ()
    """Further arguments of `vllm serve`, as `["--tensor-parallel-size", "2"]`."""
    count: Annotated[int, Field(ge=0, le=64)] = 1
    """Engines that `kvasir serve` starts on this machine and starts again when they end."""
    urls: Annotated[tuple[str, ...], COMMAS] = ()
    """Engines that run already: `http://host:port`, `https://` or `unix:PATH`; several separated by commas."""
    discover: bool = True
    """Also use the engines that announce themselves in the same Redis."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds that a started engine may take to load its model."""
