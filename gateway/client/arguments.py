"""The arguments of `kvasir batch`, `explain`, `purge`, `reload`, `replicas` and `top`. Imports nothing heavy: they are
in the help texts of `kvasir`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

URL_VARIABLE: Final = "KVASIR_URL"
KEY_VARIABLE: Final = "KVASIR_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8080"


def add_parser(commands: Any) -> None:
    """The command `batch` and its own commands. `commands` is what add_subparsers returned."""
    text = "submit files of requests to a running gateway, and fetch their results"
    batch = commands.add_parser("batch", help=text, description=text, allow_abbrev=False)
    own = batch.add_subparsers(dest="batch_command", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_url(shared)
    shared.add_argument("--key", help=f"API key of a tenant ({KEY_VARIABLE})")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = own.add_parser(
            name, parents=[shared], help=text, description=text, allow_abbrev=False
        )
        return added

    submit = command("submit", "upload a file, a request in each line, and have it answered when there is room")
    submit.add_argument("file", type=Path, metavar="FILE", help="JSONL: custom_id, method, url and body in each line")
    submit.add_argument("--wait", action="store_true", help="until it has ended")
    submit.add_argument("-o", "--output", type=Path, metavar="FILE", help="with --wait: the answers go there")
    submit.add_argument("--poll-s", type=_seconds, default=2.0, help="with --wait: seconds from one look to the next")
    command("status", "how far a batch is").add_argument("id", metavar="ID")
    command("cancel", "begin no more requests of a batch").add_argument("id", metavar="ID")
    results = command("results", "what a batch came to: JSONL, in any order")
    results.add_argument("id", metavar="ID")
    results.add_argument("-o", "--output", type=Path, metavar="FILE", help="in place of standard output")
    results.add_argument("--errors", action="store_true", help="the requests that failed, in place of the answers")
    command("list", "all batches, newest first")


def add_purge_parser(commands: Any) -> None:
    """The command `purge`."""
    text = "remove a tenant's or a namespace's KV blocks and leases from all engines of a running gateway"
    purge = commands.add_parser("purge", help=text, description=text, allow_abbrev=False)
    chosen = purge.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--tenant", metavar="NAME", help="blocks of its own")
    chosen.add_argument("--namespace", metavar="NAME", help="blocks that it shares")
    _add_admin(purge)


def add_reload_parser(commands: Any) -> None:
    """The command `reload`."""
    text = "have a running gateway read its settings again: tenants, keys, limits, prices, upstreams, aliases"
    _add_admin(commands.add_parser("reload", help=text, description=text, allow_abbrev=False))


def add_explain_parser(commands: Any) -> None:
    """The command `explain`."""
    text = "tell why a request missed the cache, or where two requests stop being equal"
    explain = commands.add_parser("explain", help=text, description=text, allow_abbrev=False)
    explain.add_argument("files", nargs="*", type=Path, metavar="FILE", help="two bodies (JSON), the earlier one first")
    explain.add_argument("--id", metavar="ID", help="in place of files: a request among the latest 2,000")
    explain.add_argument("--endpoint", metavar="PATH", help="where both are sent. Default: told by the bodies")
    explain.add_argument("--json", action="store_true", help="the answer as it is")
    _add_admin(explain)


def add_top_parser(commands: Any) -> None:
    """The command `top`."""
    text = "show what a running gateway does and saves, live; q ends it"
    top = commands.add_parser("top", help=text, description=text, allow_abbrev=False)
    top.add_argument("--span", choices=("hour", "day", "month"), default="hour", help="looked back at. Default: hour")
    top.add_argument("--once", action="store_true", help="print it once, as where output is no terminal")
    _add_admin(top)


def add_replicas_parser(commands: Any) -> None:
    """The command `replicas` and its own commands."""
    text = "show, add, drain and remove the vLLM, SGLang and TensorRT-LLM servers behind a running gateway"
    replicas = commands.add_parser("replicas", help=text, description=text, allow_abbrev=False)
    own = replicas.add_subparsers(dest="replicas_command", required=True, metavar="COMMAND")

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = own.add_parser(name, help=text, description=text, allow_abbrev=False)
        _add_admin(added)
        return added

    command("list", "all replicas, one in a line").add_argument(
        "--json", action="store_true", help="everything that is known of them"
    )
    add = command("add", "a server is used from now on, once it can be reached")
    add.add_argument("name", metavar="NAME")
    add.add_argument("kind", metavar="KIND", help="vllm, sglang or tensorrt-llm")
    add.add_argument("server_url", metavar="URL", help="as http://host:8000")
    for name, text in ADDED.items():
        add.add_argument(f"--{name.replace('_', '-')}", metavar="TEXT", help=text)
    drain = command("drain", "a replica gets no new requests; those that it has end")
    chosen = drain.add_mutually_exclusive_group(required=True)
    chosen.add_argument("name", nargs="?", metavar="NAME")
    chosen.add_argument("--least", action="store_true", help="the one whose cache is worth least")
    drain.add_argument("--undo", action="store_true", help="it gets requests again")
    remove = command("remove", "drain a replica that was added, and forget it")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("--force", action="store_true", help="at once: what it works on ends with an error")


ADDED: Final = {
    "key_env": "environment variable of the gateways with its key; begins with REPLICA_",
    "model": "name that clients use",
    "tokenizer": "folder or hub id of its tokeniser",
    "kv_events": "tcp://host:port, auto or off",
    "kv_replay": "the same, for events that were missed",
}
"""Of a server that is added. Default: what it says itself."""


def _add_admin(command: argparse.ArgumentParser) -> None:
    _add_url(command)
    command.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        default=KEY_VARIABLE,
        help=f"environment variable that has the admin key. Default: {KEY_VARIABLE}",
    )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"of the gateway. Default: {DEFAULT_URL}. ({URL_VARIABLE})")


def _seconds(text: str) -> float:
    """More than none; less would ask without end."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds
