"""What `kvasir purge` does: it asks the gateway once, and shows what went from each engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.batch_cli.client import Client
from gateway.batch_cli.commands import run_client
from gateway.batch_cli.errors import FAILED, BatchCommandError


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 all is gone; 1 it is not, or nobody knows; 2 a bad URL."""
    kind = "tenant" if options.tenant is not None else "namespace"
    chosen = {kind: getattr(options, kind)}
    key = environ.get(options.api_key_env, "")
    return run_client("purge", options.url, environ, key, lambda client: _purge(client, chosen))


async def _purge(client: Client, chosen: dict[str, str]) -> int:
    answer = await client.purge(chosen)
    if not isinstance(answer.get("engines"), list):
        raise BatchCommandError("what answered is no gateway that can purge")
    for line in _lines(answer):
        print(line, flush=True)  # noqa: T201
    if answer["complete"]:
        return 0
    print(f"kvasir purge: {answer['message']}", file=sys.stderr, flush=True)  # noqa: T201
    return FAILED


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """One for each engine, and for each folder whose engine did not answer."""
    for engine in answer["engines"]:
        state = "complete" if engine["complete"] else "NOT COMPLETE"
        yield f"{engine['name']}: {state}: {engine.get('reason') or _amounts(engine)}"
    for owner in answer["in_use"]:
        yield f"NOT COMPLETE: a folder of blocks is in use by engine {owner or 'unknown'}, which did not answer"


def _amounts(engine: Mapping[str, Any]) -> str:
    amounts = {**engine.get("tiers", {}), "files": engine.get("files")}
    told = [f"{name} {one['blocks']} blocks, {one['bytes']} bytes" for name, one in amounts.items() if one]
    told.append(f"{engine.get('leases', 0)} leases")
    if engine.get("left"):
        told.append(f"{engine['left']} files could not be deleted")
    return "; ".join(told)
