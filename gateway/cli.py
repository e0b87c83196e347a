"""The command `kvasir`: serve | gateway | engine | batch | explain | purge | reload | replicas | top. Reads flags, file
and environment, and hands over.

Nothing heavy is imported before a command is known: `kvasir --help` is quick, and `kvasir gateway` needs no torch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine.config import ConfigError, flag_name, load, secret_of, sections, variable_name
from gateway import heap
from gateway.client.arguments import (
    KEY_VARIABLE,
    URL_VARIABLE,
    add_explain_parser,
    add_purge_parser,
    add_reload_parser,
    add_replicas_parser,
    add_top_parser,
)
from gateway.client.arguments import add_parser as add_batch_parser
from gateway.config import REPLICA_FLAG, Settings, replica_of_flag
from gateway.guard import terminate_at_eof
from gateway.logs import flush, set_up
from gateway.processes import BAD_SETTING_EXIT, ChildStartError
from gateway.version import installed_version

CONFIG_VARIABLE = "KVASIR_CONFIG"

NO_SETTINGS = (CONFIG_VARIABLE, URL_VARIABLE, KEY_VARIABLE)
"""Variables of the commands themselves; the last two are often set for clients in the shell that starts a server."""

ENGINE_MODULES = ("numpy", "torch", "transformers", "safetensors", "gguf")
"""What the extra `engine` brings."""

INTERRUPTED_EXIT = 130

PRIVATE = 0o077
"""The umask of servers and of all that they start: folders and files hold what tenants sent, so they are this user's
alone, also those that pathlib and Redis create."""

COMMANDS = {
    "serve": "start everything on this machine: Redis, engines, gateway",
    "gateway": "start only a gateway, in front of engines that run elsewhere",
    "engine": "start only an engine",
}


CLIENTS = ("batch", "explain", "purge", "reload", "replicas", "top")
"""Commands for a gateway that runs."""

SERVER = ("server.host", "server.port", "server.data_dir", "server.log_level", "redis.url")
ENGINE = ("engine.model", "engine.served_name", "engine.device", "engine.kv_cache_bytes")
MAIN = {
    "serve": (*SERVER, "engine.model", "engine.device", "engine.kv_cache_bytes", "engines.kind", "engines.count"),
    "gateway": (*SERVER, "server.workers", "engines.urls", "logs.format"),
    "engine": (*ENGINE, "engine.listen", "engine.dtype", "engine.max_context_tokens", "engine.log_level", "redis.url"),
}
"""Settings that --help shows for a command; --help-all has every one."""

MORE = "All other settings: --help-all, and docs/configuration.md."

OLD_FLAGS = {"engine.kv_cache_bytes": ["--kv-cache-bytes"]}
"""Further names of flags, which have another now."""

_UNITS = {
    "_bytes": "BYTES",
    "_s": "SECONDS",
    "_ms": "MILLISECONDS",
    "_tokens": "TOKENS",
    "port": "PORT",
    "dir": "FOLDER",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0 ended as asked, 1 failed, 2 a bad flag or setting."""
    os.environ.setdefault("RUST_BACKTRACE", "0")  # of a panic, which native.py logs in one line
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(show_all="--help-all" in arguments).parse_args(arguments)
    if options.command in CLIENTS:
        return _client(options)
    config = options.config or os.environ.get(CONFIG_VARIABLE)
    flags = {path: getattr(options, path, None) for path in _paths()}
    mask = os.umask(PRIVATE)
    if options.command != "engine":
        heap.keep_small()

    def work() -> int:
        tables = {"replicas": [replica_of_flag(text) for text in getattr(options, "replica", ())]}

        def read() -> Settings:
            current = {name: text for name, text in os.environ.items() if name not in NO_SETTINGS}
            file = Path(config) if config else None
            return load(Settings, file=file, environ=current, flags=flags, tables=tables)

        settings = read()
        set_up((settings.engine if options.command == "engine" else settings.server).log_level, settings.logs)
        return run(_COMMANDS[options.command](settings, options, read))

    try:
        return guarded(options.command, work)
    finally:
        os.umask(mask)


def guarded(command: str, work: Callable[[], int]) -> int:
    """What `work` returns; the exit status and a line on stderr where it raises what an operator can help."""
    try:
        return work()
    except (ConfigError, ChildStartError) as error:
        print(f"kvasir {command}: {error}", file=sys.stderr)  # noqa: T201
        return BAD_SETTING_EXIT
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_MODULES:
            raise
        print(  # noqa: T201
            f"kvasir {command}: an engine needs {error.name}, which is not installed; "
            "`pip install 'kvasir[engine]'` brings it, and `kvasir gateway` does without",
            file=sys.stderr,
        )
        return BAD_SETTING_EXIT
    except OSError as error:
        print(f"kvasir {command}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 0


def _client(options: argparse.Namespace) -> int:
    from gateway.client import commands

    run = commands.COMMANDS[options.command]
    try:
        return run(options, os.environ)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


async def _serve(settings: Settings, options: argparse.Namespace, read: Callable[[], Settings]) -> None:
    if settings.server.workers > 1:
        from gateway.workers import serve_workers as serve
    else:
        from gateway.serving import serve

    await serve(settings, environ=os.environ, own_engines=options.command == "serve", say=_say, read=read)


async def _engine(settings: Settings, options: argparse.Namespace, read: Callable[[], Settings]) -> None:
    # For libraries that look when they are imported. An engine does not tokenise, and its idle threads must not spin.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from engine.serving import serve as run_engine

    if options.until_eof:
        threading.Thread(target=terminate_at_eof, name="until-eof", daemon=True).start()
    await run_engine(settings.engine, settings.redis.url)


_COMMANDS = {"serve": _serve, "gateway": _serve, "engine": _engine}


def run(work: Coroutine[Any, Any, None]) -> int:
    """Runs it in an event loop, until it ends."""
    try:
        import uvloop
    except ImportError:
        run = asyncio.run
    else:
        run = uvloop.run
    try:
        run(work)
    finally:
        flush()  # in front of what stderr gets now
    return 0


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _paths() -> list[str]:
    return [f"{section}.{name}" for section, model in sections(Settings).items() for name in model.model_fields]


def _parser(*, show_all: bool = False) -> argparse.ArgumentParser:
    """`show_all`: the help of a command has every setting, and not only those of MAIN."""
    parser = argparse.ArgumentParser(prog="kvasir", description="A prompt-caching gateway.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kvasir {installed_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            usage=f"kvasir {name} [--config FILE] [--SETTING VALUE ...]",
            epilog=None if show_all else MORE,
            allow_abbrev=False,
        )
        command.add_argument("--help-all", action="help", help="show all settings, by section")
        if name != "engine":
            text = "a server to use as an engine, one of [[replicas]]: vllm=http://host:8001; may be repeated"
            command.add_argument(REPLICA_FLAG, action="append", default=[], metavar="KIND[:NAME]=URL", help=text)
        if name == "engine":
            command.add_argument("--until-eof", action="store_true", help="end when standard input is closed")
        _add_settings(command, _paths() if show_all else MAIN[name])
    add_batch_parser(commands)
    add_explain_parser(commands)
    add_purge_parser(commands)
    add_reload_parser(commands)
    add_replicas_parser(commands)
    add_top_parser(commands)
    return parser


def _add_settings(command: argparse.ArgumentParser, shown: Collection[str]) -> None:
    """A flag for each setting; the help has those that are `shown`."""
    command.add_argument("--config", metavar="FILE", help=f"TOML file with settings ({CONFIG_VARIABLE})")
    for section, model in sections(Settings).items():
        group = command.add_argument_group(f"[{section}]")
        for name, field in model.model_fields.items():
            path = f"{section}.{name}"
            default = "" if field.default in (None, PydanticUndefined, ()) else f" Default: {field.default}."
            text = f"{field.description}{default} ({variable_name(path)})".replace("%", "%%")
            if (secret := secret_of(field)) is not None and secret.within is None:
                text = f"Refused, as every user can read a command line: set {variable_name(path)}."
            text = text if path in shown else argparse.SUPPRESS
            group.add_argument(
                flag_name(path), *OLD_FLAGS.get(path, ()), dest=path, metavar=_unit(name, field), help=text
            )


def _unit(name: str, field: FieldInfo) -> str:
    """What a flag's value is, in a word."""
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    if field.annotation is bool:
        return "true|false"
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return unit or ("NUMBER" if isinstance(field.default, int | float) else "TEXT")


if __name__ == "__main__":
    sys.exit(main())
