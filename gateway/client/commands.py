"""What `kvasir batch`, `kvasir explain`, `kvasir purge`, `kvasir reload`, `kvasir replicas` and `kvasir top` do."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gateway.client.arguments import ADDED, DEFAULT_URL, KEY_VARIABLE, URL_VARIABLE
from gateway.client.client import BAD_INPUT, FAILED, BatchCommandError, Client, PassingError
from gateway.client.explanation import lines as explanation_lines
from gateway.client.files import check_file, writing
from gateway.client.progress import Progress, details, list_row
from gateway.client.top import top as show_top

ENDS: Final = ("completed", "failed", "expired", "cancelled")
MISSED_POLLS: Final = 30
"""Failed polls in a row, after which the wait ends."""


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Runs one of them. Returns the exit status: 0 done, and nothing failed; 1 something failed; 2 a bad file."""
    key = options.key or environ.get(KEY_VARIABLE) or ""
    name = f"batch {options.batch_command}"
    return _with_client(name, options.url, environ, key, lambda client: _run(client, options))


def _with_client(
    name: str,
    url: str | None,
    environ: Mapping[str, str],
    key: str,
    work: Callable[[Client], Awaitable[int]],
) -> int:
    """What `work` returns, or the exit status of an error, which is printed under the command's name."""
    url = url or environ.get(URL_VARIABLE) or DEFAULT_URL

    async def run() -> int:
        async with Client(url, key) as client:
            return await work(client)

    try:
        if not url.startswith(("http://", "https://")):
            raise BatchCommandError(
                f"the URL of the gateway begins with http:// or https://, and {url!r} does not", BAD_INPUT
            )
        return asyncio.run(run())
    except BatchCommandError as error:
        _warn(f"kvasir {name}: {error}")
        return error.status
    except BrokenPipeError:
        raise
    except OSError as error:  # of standard output
        _warn(f"kvasir {name}: {error.strerror or error}")
        return FAILED


async def _run(client: Client, options: argparse.Namespace) -> int:
    match options.batch_command:
        case "submit":
            return await _submit(client, options)
        case "status":
            _say(details(await client.batch(options.id)))
        case "cancel":
            _say(details(await client.cancel(options.id)))
        case "results":
            await _results(client, options.id, options.output, errors=options.errors)
        case "list":
            async for batch in client.batches():
                _say(list_row(batch))
    return 0


async def _submit(client: Client, options: argparse.Namespace) -> int:
    if options.output is not None and not options.wait:
        raise BatchCommandError("--output needs --wait: there are no answers before", BAD_INPUT)
    endpoint = check_file(options.file)
    if options.output is not None and (options.output.is_dir() or not options.output.parent.is_dir()):
        raise BatchCommandError(f"{options.output} cannot be written", BAD_INPUT)
    file_id = await client.upload(options.file)
    batch = await client.create(file_id, endpoint)
    _say(batch["id"])
    if not options.wait:
        return 0
    try:
        batch = await wait(client, batch["id"], Progress(sys.stderr), options.poll_s)
    except asyncio.CancelledError:
        _warn(f"it goes on; look with: kvasir batch status {batch['id']}")
        raise
    if options.output is not None and batch["output_file_id"]:
        await _results(client, batch["id"], options.output, errors=False)
    if batch["status"] == "completed" and not batch["request_counts"]["failed"]:
        return 0
    _warn(details(batch))
    return FAILED


async def _results(client: Client, batch_id: str, output: Path | None, *, errors: bool) -> None:
    batch = await client.batch(batch_id)
    if batch["status"] not in ENDS:
        raise BatchCommandError(f"{batch_id} has no results yet: it is {batch['status']}")
    file_id = batch["error_file_id" if errors else "output_file_id"]
    if batch["error_file_id"] and not errors:
        _warn(f"some requests have no answer: kvasir batch results {batch_id} --errors")
    if file_id is None:
        if not errors:
            raise BatchCommandError(f"no request of {batch_id} was answered: it is {batch['status']}")
        return
    if output is None and sys.stdout is None:
        raise BatchCommandError("standard output is closed; name a file with -o", BAD_INPUT)
    with contextlib.nullcontext(sys.stdout.buffer) if output is None else writing(output) as file:
        async for chunk in client.content(file_id):
            file.write(chunk)
        file.flush()


async def wait(client: Client, batch_id: str, progress: Progress, poll_s: float) -> dict[str, Any]:
    """The batch, once it has ended. A gateway may be unreachable for a while."""
    missed = 0
    with progress:
        while True:
            try:
                batch = await client.batch(batch_id)
            except PassingError:
                missed += 1
                if missed >= MISSED_POLLS:
                    raise
            else:
                missed = 0
                progress.show(batch)
                if batch["status"] in ENDS:
                    return batch
            await asyncio.sleep(poll_s)


def purge(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 all was removed; 1 it was not, or that is unknown; 2 a bad URL."""
    kind = "tenant" if options.tenant is not None else "namespace"
    chosen = {kind: getattr(options, kind)}
    key = environ.get(options.api_key_env, "")
    return _with_client("purge", options.url, environ, key, lambda client: _purge(client, chosen))


async def _purge(client: Client, chosen: dict[str, str]) -> int:
    answer = await client.purge(chosen)
    if not isinstance(answer.get("engines"), list):
        raise BatchCommandError("what answered is no gateway that can purge")
    for line in _lines(answer):
        _say(line)
    if answer["complete"]:
        return 0
    _warn(f"kvasir purge: {answer['message']}")
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
    texts = [f"{name} {one['blocks']} blocks, {one['bytes']} bytes" for name, one in amounts.items() if one]
    texts.append(f"{engine.get('leases', 0)} leases")
    if engine.get("left"):
        texts.append(f"{engine['left']} files could not be deleted")
    return "; ".join(texts)


def reload(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 the settings hold; 1 that is unknown; 2 they cannot be used, and nothing changed."""
    return _with_client("reload", options.url, environ, environ.get(options.api_key_env, ""), _reload)


async def _reload(client: Client) -> int:
    answer = await client.reload()
    for name in answer["changed"]:
        _say(f"changed: {name}")
    for name in answer["needs_restart"]:
        _say(f"needs a restart, and is as it was: {name}")
    if not (answer["changed"] or answer["needs_restart"]):
        _say("nothing has changed")
    return 0


def explain(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 done; 1 not answered; 2 files that cannot be read or compared."""
    return _with_client(
        "explain",
        options.url,
        environ,
        environ.get(options.api_key_env, ""),
        lambda client: _explain(client, options),
    )


async def _explain(client: Client, options: argparse.Namespace) -> int:
    if len(options.files) != (0 if options.id else 2):
        raise BatchCommandError("give two files, or --id and none", BAD_INPUT)
    asked: dict[str, Any] = (
        {"id": options.id} if options.id else dict(zip("ab", map(_body, options.files), strict=True))
    )
    if options.endpoint:
        asked["endpoint"] = options.endpoint
    told = await client.explain(asked)
    _say(json.dumps(told) if options.json else "\n".join(explanation_lines(told)))
    return 0


def _body(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise BatchCommandError(f"{file}: {error.strerror}", BAD_INPUT) from None
    except ValueError as error:
        raise BatchCommandError(f"{file} is no JSON: {error}", BAD_INPUT) from None


def top(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status."""
    url = options.url or environ.get(URL_VARIABLE) or DEFAULT_URL

    async def show(client: Client) -> int:
        return await show_top(client, url, options.span, once=options.once)

    return _with_client("top", options.url, environ, environ.get(options.api_key_env, ""), show)


def replicas(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Returns the exit status: 0 done; 1 it was not, or that is unknown; 2 a bad URL."""
    key, name = environ.get(options.api_key_env, ""), f"replicas {options.replicas_command}"
    return _with_client(name, options.url, environ, key, lambda client: _replicas(client, options))


async def _replicas(client: Client, options: argparse.Namespace) -> int:
    path = f"/{quote(options.name, safe='')}" if getattr(options, "name", None) else ""
    match options.replicas_command:
        case "list":
            answer = await client.replicas("GET")
            for one in answer["replicas"]:
                _say(json.dumps(one) if options.json else _replica(one))
            return 0
        case "add":
            table = {"name": options.name, "kind": options.kind, "url": options.server_url}
            table |= {"api_key_env" if name == "key_env" else name: getattr(options, name) for name in ADDED}
            answer = await client.replicas("POST", json={name: text for name, text in table.items() if text})
        case "drain":
            if options.undo and options.least:
                raise BatchCommandError("--undo needs the name of a replica", BAD_INPUT)
            answer = await client.replicas("POST", f"{path}/drain", params={"undo": "true"} if options.undo else {})
        case "remove":
            answer = await client.replicas("DELETE", path, params={"force": "true"} if options.force else {})
    _say(f"{answer['name']}: {answer['state']}")
    return 0


def _replica(one: Mapping[str, Any]) -> str:
    if one.get("state") != "joined":
        return f"{one['name']}: {one['state']}{': ' if one.get('reason') else ''}{one.get('reason') or ''}"
    receipts, load = one["receipts"], one["load"]
    shown = [f"{one['model']} on {one['kind']} {one['version']} at {one['url']}", f"index {one['trust']}"]
    shown[1] += f" ({one['trust_reason']})" if one.get("trust_reason") else ""
    shown.append(f"{one['in_flight']} in flight, {load['running']} running, {load['waiting']} waiting")
    if receipts:
        shown.append(f"{receipts['exact']} of {receipts['receipts']} receipts exact")
        shown.append(f"cache worth {receipts['recent_tokens']:.0f} tokens")
    return f"{one['name']}: joined: {'; '.join(shown)}"


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def _warn(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace, Mapping[str, str]], int]]] = {
    "batch": run,
    "explain": explain,
    "purge": purge,
    "reload": reload,
    "replicas": replicas,
    "top": top,
}
