"""The HTTP side, the log, Redis, and the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from engine.config import SHORT_FLAGS, Section
from gateway.config.units import split

SHORT_FLAGS.update(
    {
        "server.host": "--host",
        "server.port": "--port",
        "server.data_dir": "--data-dir",
        "server.log_level": "--log-level",
        "redis.url": "--redis-url",
        "engines.count": "--engines",
        "engines.urls": "--engine-urls",
    }
)


class ServerSettings(Section):
    """[server]: the HTTP side of the gateway."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for every interface.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="TCP port; 0 takes a free one.")
    data_dir: Path = Field(
        Path(".kvasir"),
        description="Folder for what must survive a restart (the embedded Redis, blocks); made when missing.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        32 << 20, description="Bytes; a larger request body is refused with 413."
    )
    max_bodies_bytes: Annotated[int, Field(ge=1024)] = Field(
        512 << 20,
        description="Bytes of all bodies in flight, decoded and parsed (503 beyond); one tenant has half of it (429).",
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that one request may take altogether."
    )
    first_byte_s: Annotated[float, Field(ge=0)] = Field(
        2.0,
        description="Seconds after which a stream whose prompt is still being computed gets headers and a ping; 0 "
        "never.",
    )
    keep_alive_s: Annotated[float, Field(gt=0)] = Field(
        75.0, description="Seconds that an idle client connection is kept open."
    )
    shutdown_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds that requests in flight get to end after SIGTERM."
    )
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")], ...] = Field(
        (),
        description="Origins of web pages that may read answers, as `https://example.com`, or `*`.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged.")

    @model_validator(mode="before")
    @classmethod
    def _split_origins(cls, data: object) -> object:
        return split(data, "cors_origins")


class LogSettings(Section):
    """[logs]: how lines are written. What is logged is said by `log_level` of [server] and [engine]."""

    format: Literal["text", "json"] = Field(
        "text", description="How lines are written. `json`: an object per line, with the empty fields of requests, too."
    )


class RedisSettings(Section):
    """[redis]: where the index lives."""

    url: str | None = Field(
        None, description="`redis://`, `rediss://` or `unix://` URL; without one, an own Redis is started."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        0.25, description="Seconds that one Redis command may take before the memory index answers instead."
    )
    max_memory_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        256 << 20, description="Bytes that the embedded Redis may use."
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        """The message never has the URL, in which there may be a password."""
        if url is not None and urlsplit(url).scheme not in ("redis", "rediss", "unix"):
            raise ValueError("a Redis URL begins with redis://, rediss:// or unix://")
        if url is not None:
            _ = urlsplit(url).port  # raises ValueError for what is no number
        return url


class EnginesSettings(Section):
    """[engines]: the bundled engines behind this gateway."""

    count: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="Engines that `kvasir serve` starts on this machine and starts again when they end."
    )
    urls: tuple[str, ...] = Field(
        (), description="Engines that run already: `http://host:port` or `unix:PATH`; several separated by commas."
    )
    discover: bool = Field(True, description="Also use the engines that announce themselves in the same Redis.")
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that a started engine may take to load its model."
    )

    @model_validator(mode="before")
    @classmethod
    def _split_urls(cls, data: object) -> object:
        return split(data, "urls")
