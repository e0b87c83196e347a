"""Settings of an engine, and the loader that both packages read their settings with.

A setting comes from, weakest first: its default, the TOML file, the environment (KVASIR_<SECTION>_<SETTING>), a flag.
Nothing else reads the environment. Unknown keys and bad values stop the start with a ConfigError that says which
setting, where it came from and what would be right. No torch here: `kvasir --help` must be quick.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
)
from pydantic.fields import FieldInfo

from engine.protocol import HashName

ENVIRONMENT_PREFIX = "KVASIR_"


class ConfigError(ValueError):
    """A setting that cannot be used. The message says which, where, and what would be right."""


class Section(BaseModel):
    """A frozen group of settings. Each field has a default, and a docstring that starts with its unit."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True, slots=True)
class Secret:
    """In the annotation of a setting that no flag may give: every user of the machine can read a command line.

    within  whether a value has something secret in it; None: every value is secret
    """

    within: Callable[[str], bool] | None = None


def secret_of(field: FieldInfo) -> Secret | None:
    """That of a setting's annotation."""
    return next((one for one in field.metadata if isinstance(one, Secret)), None)


def _join(value: Any) -> Any:
    """A table or list of `name=folder` as one text, which the environment of an engine's process can hold."""
    if isinstance(value, Mapping):
        value = [f"{name}={folder}" for name, folder in value.items()]
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise ValueError("should be name=folder, with commas between, or a table")
    parts = [part.strip() for part in map(str, parts) if part.strip()]
    names = [part.partition("=")[0] for part in parts]
    if any(not re.fullmatch(r"[^\s,=]{1,200}=[^,]+", part) for part in parts) or len({*names}) < len(names):
        raise ValueError("should be name=folder, each name once, without spaces in names and commas in folders")
    return ",".join(parts)


class EngineSettings(Section):
    """[engine]: the bundled engine; `kvasir serve` hands these to every engine it starts."""

    model: str = "demo"
    """Folder or hub id of a decoder-only causal LM; `demo` is the bundled one."""
    revision: str | None = None
    """Hub revision of the model; the default branch when not set."""
    served_name: str | None = None
    """Name that clients ask for; the model's id or the folder's name when not set."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the model computes in; `auto` is what it was saved in, if this machine is quick at it."""
    quantize: Literal["auto", "none", "int8", "int4"] = "auto"
    """Bits of weights: int8 and int4 are made while a model is loaded, `auto` does it where it would not fit else."""
    lora: Annotated[str, BeforeValidator(_join)] = ""
    """LoRA adapters in PEFT's format, each served as a model of its own: `name=folder`, with commas between."""
    device: str = "auto"
    """`auto` is the CPU; `cuda` or `cuda:1` is an experiment. With `cuda` several engines have a GPU each."""
    listen: str = "127.0.0.1:8090"
    """Where gateways connect: `host:port`, or `unix:PATH` for a socket file."""
    advertise: str | None = None
    """URL under which gateways on other machines reach this engine; `listen` when not set."""
    secret: Annotated[str | None, Secret()] = None
    """Shared with the gateways; this or `tls_dir` is required where `listen` is neither loopback nor a socket file."""
    tls_dir: Path | None = None
    """Folder with `tls.crt`, `tls.key` and `ca.crt` of an engine or a gateway: each verifies the other by the CA."""
    block_size: Annotated[int, Field(ge=4, le=1024)] = 16
    """Tokens per block."""
    kv_cache_bytes: Annotated[NonNegativeInt, BeforeValidator(lambda value: 0 if value == "auto" else value)] = 0
    """Bytes of memory for keys and values; 0 or `auto` is half of what the loaded model leaves free."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """What keys and values are kept in: the model's dtype, or int8 with a scale each, of which more fit."""
    memory_bytes: NonNegativeInt = 0
    """Bytes of memory for all of one engine; 0 is what is free, shared by the engines of `kvasir serve`."""
    disk_bytes: NonNegativeInt = 4 << 30
    """Bytes on disk for blocks that outlive a restart, of each engine; 0 is none."""
    disk_dir: Path | None = None
    """Folder of the blocks on disk, none without one; `kvasir serve` puts it into its data_dir."""
    disk_max_age_s: PositiveFloat = 604800.0
    """Seconds after which unused blocks on disk are deleted, of all models; a lease keeps its prefix longer."""
    copy_queue_bytes: ClassVar = 16 << 20
    """Of token ids and hashes that wait for their blocks to be copied to disk."""
    max_context_tokens: Annotated[int, Field(ge=16)] | None = None
    """Tokens of prompt and completion together; what the model was made for when not set."""
    max_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences that run at the same time."""
    max_waiting: ClassVar = 4096
    """Sequences that wait in the engine; gateways send no more than they have slots."""
    step_ms: PositiveFloat = 100.0
    """Milliseconds that a step's prefills take at most while others wait for it; never less than 16 tokens."""
    prefill_per_decode: ClassVar = 1.5
    """Beside decodes of the online queue prefills take at most so many times as long as these."""
    step_tokens: ClassVar = 1024
    """Prefilled tokens of one step, beside one token for each running decode."""
    batch_step_tokens: ClassVar = 256
    """Prefilled tokens of the batch queue in one step."""
    grammar_cache: ClassVar = 64
    """Compiled grammars, in use or kept, each in a process of its own; one tenant has at most half."""
    threads: NonNegativeInt = 0
    """CPU threads of one engine; 0 leaves one core to the gateway and shares the rest."""
    hash_name: HashName = "xxh3_128"
    """Hash of the block chain; a hit is verified in any case."""
    heartbeat_s: ClassVar = 2.0
    """Between renewals of the index entries of this engine."""
    lease_s: ClassVar = 10.0
    """Without a heartbeat after which an engine's index is deleted: five heartbeats."""
    speculation: Literal["prompt-lookup", "none"] = "prompt-lookup"
    """Tokens computed ahead where a text repeats what it or its prompt has; the answer stays the same."""
    draft_model: str | None = None
    """Folder or hub id of a small model with the same tokeniser that drafts where nothing repeats."""
    eviction: Literal["lru", "hit-density"] = "lru"
    """Which cached block goes first: the least recently used, or the one that promises the fewest hits."""
    lease_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the blocks that leases keep at most; past it the least valuable lease degrades."""
    lease_tenant_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """Share of the blocks that the leases of one tenant keep at most."""
    lease_max_s: PositiveFloat = 43200.0
    """Seconds that a breakpoint may ask for; a request that asks for more is refused."""
    max_leases: ClassVar = 4096
    """That are remembered; of one tenant its share of them, as of the blocks."""
    drain_s: NonNegativeFloat = 30.0
    """Seconds that running sequences get to end after SIGTERM."""
    send_buffer_bytes: ClassVar = 16 << 20
    """That wait for a gateway which does not read, before its connection is closed."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least level that is logged."""

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of `lora` by name."""
        pairs = (one.split("=", 1) for one in self.lora.split(",") if one)
        return {name: Path(folder) for name, folder in pairs}


_Root = TypeVar("_Root", bound=BaseModel)


def load(
    root: type[_Root],
    *,
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
) -> _Root:
    """Reads the settings of `root`, a model whose fields are sections.

    file     a TOML file, or None
    environ  KVASIR_<SECTION>_<SETTING>=value; variables without the prefix are not looked at
    flags    {"section.setting": value} from the command line; None means not given
    tables   {list of tables: further tables of it} from the command line
    Raises ConfigError for a missing file, bad TOML, unknown keys, values of the wrong type or range, and a secret in a
    flag.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if file is not None:
        values = _read_toml(file)
        origin = {
            f"{name}.{key}": str(file) for name, table in values.items() if isinstance(table, dict) for key in table
        }
    known = {f"{section}.{key}" for section, model in sections(root).items() for key in model.model_fields}
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            path = _variable_path(variable, known)
            _put(values, path, text)
            origin[path] = f"environment variable {variable}"
    for path, value in flags.items():
        if value is not None:
            _check_flag(root, path, value)
            _put(values, path, value)
            origin[path] = f"flag {flag_name(path)}"
    for name, items in tables.items():
        if items and isinstance(own := values.setdefault(name, []), list):  # else it is reported by the validation
            origin |= {f"{name}.{i}": "command line" for i in range(len(own), len(own) + len(items))}
            own.extend(items)
    try:
        return root.model_validate(values)
    except ValidationError as error:
        items = error.errors()
        within = [item["loc"] for item in items]
        # A list whose item is wrong is then called too short as well.
        told = [item for item in items if not any(_is_inside(loc, item["loc"]) for loc in within)]
        raise ConfigError("\n".join(_explain(item, origin, file) for item in told)) from None


def sections(root: type[BaseModel]) -> dict[str, type[Section]]:
    """The sections of a settings model by name, without lists of tables."""
    return {
        name: spec.annotation
        for name, spec in root.model_fields.items()
        if isinstance(spec.annotation, type) and issubclass(spec.annotation, Section)
    }


SHORT_FLAGS: dict[str, str] = {}
"""Settings whose flag is shorter than --section-setting. Filled by the packages' own config files."""


_NO_SETTING = "there is no such setting (docs/configuration.md lists all, docs/changelog.md those that were removed)"


def flag_name(path: str) -> str:
    """`engine.block_size` -> `--engine-block-size`, or its short form."""
    return SHORT_FLAGS.get(path) or "--" + path.replace(".", "-").replace("_", "-")


def variable_name(path: str) -> str:
    """`engine.block_size` -> `KVASIR_ENGINE_BLOCK_SIZE`."""
    return ENVIRONMENT_PREFIX + path.replace(".", "_").upper()


def _check_flag(root: type[BaseModel], path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    secret = secret_of(sections(root)[section].model_fields[name])
    if secret is not None and (secret.within is None or secret.within(str(value))):
        raise ConfigError(
            f"{path} (flag {flag_name(path)}): every user of the machine can read a command line, which is no place "
            f"for a secret; set {variable_name(path)}, or write it into the file"
        )


def _variable_path(variable: str, known: set[str]) -> str:
    for path in known:
        if variable_name(path) == variable:
            return path
    raise ConfigError(f"environment variable {variable}: {_NO_SETTING}")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML: {error}") from None


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    section, _, key = path.partition(".")
    table = values.setdefault(section, {})
    if isinstance(table, dict):  # anything else is reported by the validation
        table[key] = value


_BRACKETS: dict[str, str] = {
    "tuple_type": "[[{0}]] for each of them, not [{0}]",
    "model_type": "[{0}] once, not [[{0}]]",
}
"""For a table where a list of tables is wanted, and the other way round."""


def _is_inside(loc: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return len(loc) > len(outer) and loc[: len(outer)] == outer


def _explain(item: Any, origin: Mapping[str, str], file: Path | None) -> str:
    path = ".".join(str(part) for part in item["loc"])
    setting = ".".join(str(part) for part in item["loc"][:2])
    where = origin.get(setting) or (str(file) if file else "default")
    if item["type"] == "extra_forbidden":
        return f"{path} ({where}): {_NO_SETTING}"
    if len(item["loc"]) == 1 and item["type"] in _BRACKETS and isinstance(item["input"], dict | list):
        return f"{path} ({where}): write {_BRACKETS[item['type']].format(path)}"
    message = item["msg"].removeprefix("Value error, ")
    if not path:  # a rule about several settings names them itself
        return f"{message} ({where})"
    shown = isinstance(item["input"], str | int | float) and not _is_secret(path)
    return f"{path} ({where}): {message[:1].lower()}{message[1:]}" + (f", not {item['input']!r}" if shown else "")


def _is_secret(path: str) -> bool:
    return any(word in path for word in ("key", "secret", "url", "header"))
