"""What is kept for clients, and for how long: leases, responses, files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from engine.config import Section
from gateway.config.units import Duration, split


class LeaseSettings(Section):
    """[leases]: for how long clients may ask to have prefixes kept. How much is kept is the engine's to say."""

    ttls: Annotated[tuple[Duration, ...], Field(min_length=1)] = Field(
        ("5m", "30m", "1h", "12h"), description="Times to live that a breakpoint may ask for; any other is refused."
    )
    default_ttl: Duration = Field("30m", description="Time to live of a breakpoint that asks for none.")

    @model_validator(mode="before")
    @classmethod
    def _split_ttls(cls, data: object) -> object:
        return split(data, "ttls")


class StoredResponseSettings(Section):
    """[stored_responses]: what `/v1/responses` keeps, in Redis where there is one, else in the gateway."""

    ttl_s: Annotated[float, Field(gt=0)] = Field(
        2592000.0, description="Seconds that a response is kept, from its end; 30 days."
    )
    max_responses: ClassVar = 10_000
    """Of one tenant, the latest; `max_bytes` is what counts."""
    max_bytes: Annotated[int, Field(ge=0)] = Field(
        33554432,
        description="Bytes of one tenant's responses, with the items that they answered, that are kept at most.",
    )
    max_response_bytes: ClassVar = 8 << 20
    """Of one response, with the items that it answered; a larger one is not kept."""
    max_background: ClassVar = 256
    """Responses that one gateway works on in the background at a time; the next one gets 429."""


class FileSettings(Section):
    """[files]: what clients upload with `/v1/files`."""

    folder: Path | None = Field(
        None, description="Folder of the files; `files` in `server.data_dir` when not set. Gateways may share one."
    )
    max_file_bytes: Annotated[int, Field(ge=1)] = Field(
        512 << 20, description="Bytes of one file; a larger one is refused with 413."
    )
    max_batch_bytes: Annotated[int, Field(ge=1)] = Field(
        200 << 20, description="Bytes of one file with the purpose `batch`; a larger one is refused with 413."
    )
    max_files: Annotated[int, Field(ge=1)] = Field(10_000, description="Files of one tenant; the next one gets 429.")
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        10 << 30, description="Bytes of all files of one tenant; a file that would be more gets 429."
    )
    batch_ttl_s: Annotated[float, Field(gt=0)] = Field(
        2592000.0, description="Seconds that a file with the purpose `batch` is kept that does not say; 30 days."
    )
    min_free_bytes: ClassVar = 256 << 20
    """That files leave free on their disk; an upload that would take them gets 507."""
    max_uploads: ClassVar = 64
    """At the same time, over all tenants; the next one gets 429. Each takes 1 MiB of memory."""
    max_uploads_per_tenant: ClassVar = 16
    """The same of one tenant."""
    upload_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that an upload may take to arrive."
    )
    sweep_s: ClassVar = 60.0
    """From one look for files that are over their time to the next."""
