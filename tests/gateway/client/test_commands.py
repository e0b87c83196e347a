"""`kvasir batch` against a running gateway."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from codecs import BOM_UTF8
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.client.client import BatchCommandError, PassingError
from gateway.client.commands import wait
from gateway.client.progress import Progress, details
from gateway.config import TenantSettings
from tests.fakes.batch_sdk import BODY, row, rows, settings
from tests.fakes.gateway import Gateway, running

QUICK = ("--poll-s", "0.01")


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch, *, key: str = "", **more: Any) -> AsyncIterator[Gateway]:
    async with running(**settings(), **more) as gateway:
        monkeypatch.setenv("KVASIR_URL", f"{gateway.url}/v1")
        monkeypatch.setenv("KVASIR_API_KEY", key)
        yield gateway


async def kvasir(*arguments: str) -> int:
    """In a thread of its own: the command has its own event loop."""
    return await asyncio.to_thread(cli.main, ["batch", *arguments])


def written(folder: Path, *values: Any) -> str:
    path = folder / "in.jsonl"
    path.write_bytes(rows(*values))
    return str(path)


async def test_a_file_is_submitted_waited_for_and_its_answers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    async with served(monkeypatch) as gateway:
        gateway.worker.start()
        file = written(tmp_path, row("a"), row("b"))
        assert await kvasir("submit", file, "--wait", "-o", str(out), *QUICK) == 0
        shown = capsys.readouterr()
        batch_id = shown.out.strip()
        assert batch_id.startswith("batch_")
        assert shown.err.splitlines()[-1] == f"{batch_id} completed: 2 of 2, 0 failed"
        assert {json.loads(one)["custom_id"] for one in out.read_text().splitlines()} == {"a", "b"}
        assert await kvasir("results", batch_id) == 0
        assert capsys.readouterr().out == out.read_text()
        assert await kvasir("list") == 0
        made, model, rest = capsys.readouterr().out.split("  ")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", made)
        assert (model, rest) == ("demo", f"{batch_id} completed: 2 of 2, 0 failed\n")


async def test_a_file_that_begins_with_the_mark_of_utf_8_is_a_file_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(monkeypatch) as gateway:
        gateway.worker.start()
        file = tmp_path / "in.jsonl"
        file.write_bytes(BOM_UTF8 + rows(row("a", {"model": "demo", "prompt": "x"}, "/v1/completions")))
        assert await kvasir("submit", str(file), "--wait", *QUICK) == 0
        assert "1 of 1, 0 failed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nowhere/out.jsonl", "."])
async def test_answers_that_could_not_be_written_are_not_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(monkeypatch) as gateway:
        file, out = written(tmp_path, row("a")), tmp_path / name
        assert await kvasir("submit", file, "--wait", "-o", str(out), *QUICK) == 2
        assert str(out) in capsys.readouterr().err
        assert (await gateway.sdk().files.list()).data == []


async def test_results_that_cannot_be_written_to_their_end_leave_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("older")
    async with served(monkeypatch) as gateway:
        gateway.worker.start()
        assert await kvasir("submit", written(tmp_path, row("a")), "--wait", *QUICK) == 0
        batch_id = capsys.readouterr().out.strip()
        assert await kvasir("results", batch_id, "-o", "/dev/full") == 1
        assert "/dev/full: No space left on device" in capsys.readouterr().err
        (tmp_path / "out.jsonl.part").symlink_to("/dev/full")
        assert await kvasir("results", batch_id, "-o", str(out)) == 1
        assert out.read_text() == "older"
        assert await kvasir("results", batch_id, "-o", str(out)) == 0
        assert json.loads(out.read_text())["custom_id"] == "a"
        assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(("out", "status", "why"), [("/dev/full", 1, "No space left"), (None, 2, "closed")])
async def test_results_that_nobody_can_be_told_are_an_error(
    out: str | None,
    status: int,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served(monkeypatch) as gateway:
        gateway.worker.start()
        assert await kvasir("submit", written(tmp_path, row("a")), "--wait", *QUICK) == 0
        batch_id = capsys.readouterr().out.strip()
        with ExitStack() as closing:
            unbuffered = None if out is None else io.TextIOWrapper(closing.enter_context(io.FileIO(out, "w")))  # type: ignore[type-var]
            monkeypatch.setattr(sys, "stdout", unbuffered)
            assert await kvasir("results", batch_id) == status
        assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [(b"na\xffme.jsonl", "na\N{REPLACEMENT CHARACTER}me.jsonl"), ('ä "b".jsonl'.encode(), 'ä "b".jsonl')],
)
async def test_names_of_files_are_sent_as_they_are_or_as_near_as_can_be(
    name: bytes, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(monkeypatch) as gateway:
        file = os.path.join(tmp_path, os.fsdecode(name))
        os.rename(written(tmp_path, row("a")), file)
        assert await kvasir("submit", file) == 0
        (kept,) = (await gateway.sdk().files.list()).data
        assert kept.filename == told


async def test_what_can_be_read_once_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    async with served(monkeypatch):
        assert await kvasir("submit", f"/dev/fd/{reading}") == 2
    os.close(reading)
    assert "nothing was sent" in capsys.readouterr().err


async def test_requests_that_fail_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(monkeypatch) as gateway:
        gateway.worker.start()
        file = written(tmp_path, row("a"), row("bad", BODY | {"n": "x"}))
        assert await kvasir("submit", file, "--wait", *QUICK) == 1
        batch_id = capsys.readouterr().out.strip()
        assert await kvasir("results", batch_id) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["custom_id"] == "a"
        assert "--errors" in shown.err
        assert await kvasir("results", batch_id, "--errors") == 0
        assert json.loads(capsys.readouterr().out)["custom_id"] == "bad"
        assert await kvasir("status", batch_id) == 0
        shown = capsys.readouterr()
        assert "completed: 1 of 2, 1 failed" in shown.out
        assert "tokens" in shown.out


async def test_a_batch_is_cancelled_and_has_no_results_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served(monkeypatch):
        assert await kvasir("submit", written(tmp_path, row("a"))) == 0
        batch_id = capsys.readouterr().out.strip()
        assert await kvasir("results", batch_id) == 1
        assert "validating" in capsys.readouterr().err
        assert await kvasir("cancel", batch_id) == 0
        assert "cancelling" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([row("a"), row("a")], "in.jsonl:2: The custom_id 'a' is that of line 1, too."),
        ([row("a"), BODY], "in.jsonl:2: Missing required parameter: 'custom_id'."),
        ([BODY], "Missing required parameter: 'custom_id'."),
        ([row("a", url="/v1/images")], "in.jsonl:1: "),
        ([], "in.jsonl: The input file has no requests."),
        ([[1]] * 30, "and at least 20 lines more"),
    ],
)
async def test_a_file_that_would_be_refused_is_not_sent(
    values: list[Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with served(monkeypatch) as gateway:
        assert await kvasir("submit", written(tmp_path, *values)) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("kvasir batch submit: nothing was sent")
        assert told in shown
        assert (await gateway.sdk().files.list()).data == []


async def test_what_the_gateway_refuses_is_said_as_it_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tenants = (TenantSettings(name="a", keys=("key-of-a",)),)
    async with served(monkeypatch, key="wrong-key", tenants=tenants):
        assert await kvasir("list") == 1
        assert capsys.readouterr().err == "kvasir batch list: Incorrect API key provided.\n"
        assert await kvasir("list", "--key", "key-of-a") == 0
        assert await kvasir("status", "no/such?batch", "--key", "key-of-a") == 1
        assert "No batch found with id 'no/such?batch'." in capsys.readouterr().err
        assert await kvasir("submit", str(tmp_path / "nowhere"), "--key", "key-of-a") == 2
        assert "nowhere: No such file" in capsys.readouterr().err
    assert await kvasir("list") == 1
    assert "no answer from http://127.0.0.1" in capsys.readouterr().err


def batch(status: str, completed: int, failed: int = 0) -> dict[str, Any]:
    counts = {"total": 4, "completed": completed, "failed": failed}
    usage = {"total_tokens": 9, "input_tokens": 6, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 2}}
    files = {"input_file_id": "file-1", "output_file_id": None, "error_file_id": None}
    errors = {"data": [{"line": 3, "message": "Bad."}, {"line": None, "message": "Worse."}]}
    return {"id": "b", "status": status, "request_counts": counts, "usage": usage, "errors": errors, **files}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_lines_elsewhere() -> None:
    for out in (Terminal(), io.StringIO()):
        with Progress(out) as progress:
            for one in (batch("validating", 0), batch("in_progress", 1, 1), batch("in_progress", 1, 1)):
                progress.show(one)
        lines = ["b validating: 0 of 4, 0 failed", "b in_progress: 1 of 4, 1 failed"]
        shown = "".join(f"\r\033[K{line}" for line in lines) if isinstance(out, Terminal) else "\n".join(lines)
        assert out.getvalue() == f"{shown}\n"


def test_all_that_is_worth_reading_of_a_batch() -> None:
    assert details(batch("failed", 0)).splitlines() == [
        "b failed: 0 of 4, 0 failed",
        "  tokens   6 in, 2 of them cached; 3 out",
        "  input    file-1",
        "  error    line 3: Bad.",
        "  error    Worse.",
    ]


class Away:
    """A gateway that is away for so many looks."""

    def __init__(self, times: int) -> None:
        self.times = times

    async def batch(self, batch_id: str) -> dict[str, Any]:
        if self.times:
            self.times -= 1
            raise PassingError("away")
        return batch("completed", 4)


async def test_a_gateway_that_is_away_for_a_while_is_waited_for() -> None:
    progress = Progress(io.StringIO())
    assert (await wait(Away(20), "b", progress, 0.0))["status"] == "completed"  # type: ignore[arg-type]
    with pytest.raises(BatchCommandError, match="away"):
        await wait(Away(1000), "b", progress, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-o", "out.jsonl"), "--output needs --wait"),
        (("--wait", "--poll-s", "0"), "'0' is no number of seconds above 0"),
        (("--wait", "--poll-s", "nan"), "'nan' is no number of seconds above 0"),
        (("--url", "127.0.0.1:8080"), "begins with http:// or https://"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_sent(
    arguments: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["batch", "submit", written(tmp_path, row("a")), *arguments]
    try:
        status = cli.main(command)
    except SystemExit as error:  # of argparse
        status = error.code  # type: ignore[assignment]
    assert status == 2
    assert told in capsys.readouterr().err
