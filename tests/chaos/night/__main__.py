"""A night of chaos: everything that Kvasir is, in 15 processes, under load, while something breaks every few seconds.

    python -m tests.chaos.night --minutes 60 [--seed 1] [--every 10] [--data DIR] [--report FILE] [--keep DIR]

Two gateways with two workers each, two engines with the demo model, a primary and a replica of Redis under three
sentinels, an upstream, three tenants. As root on Linux it runs in network, mount and process namespaces of its own: it
can cut connections off and spoil a disk, and nothing outlives it. Without, those faults are left out, and the report
says so. Ends with a report as text, and as JSON in FILE; exit status 1 when something did not hold.

`--minutes` is the time under load; start and end take half a minute more. `--data` has recorded conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import orjson

from tests.chaos.night import checks, conversations
from tests.chaos.night.faults import Fault, Faults
from tests.chaos.night.load import Load
from tests.chaos.night.report import made_report, written
from tests.chaos.night.site import Place

INSIDE: Final = "KVASIR_NIGHT_INSIDE"
DISK_MIB: Final = 640
"""Of a sparse file. Batches want 256 free."""
CALM_S: Final = 6.0
CONVERSATIONS: Final = 16
"""Conversations that the night makes, without --data."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=float, default=10.0, help="seconds from one fault to the next")
    parser.add_argument("--data", type=Path, help="folder with recorded conversations")
    parser.add_argument("--report", type=Path, help="file for the report as JSON")
    parser.add_argument("--keep", type=Path, help="folder that keeps the logs")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        can = shutil.which("unshare") and subprocess.run([*apart, "true"], capture_output=True).returncode == 0
        os.environ[INSIDE] = "yes" if can else "no"
        if can:
            os.execvp("unshare", [*apart, sys.executable, "-m", "tests.chaos.night", *sys.argv[1:]])
    apart_now = os.environ[INSIDE] == "yes"
    if apart_now:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="kvasir-night-") as name, _disk(Path(name), apart_now) as (disk, mounted):
        nft = apart_now and shutil.which("nft") is not None
        try:
            found = asyncio.run(night(options, Path(name), disk, nft=nft, mounted=mounted))
        finally:
            if options.keep:
                ignored = shutil.ignore_patterns("disk*", "*.sock")
                shutil.copytree(name, options.keep, ignore=ignored, dirs_exist_ok=True)
    print(written(found), flush=True)
    if options.report:
        options.report.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
    return 1 if found["violations"] else 0


@contextmanager
def _disk(folder: Path, apart: bool) -> Iterator[tuple[Path, bool]]:
    """A file system of its own, and whether it is one."""
    disk, image = folder / "disk", folder / "disk.image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_MIB << 20)
    tools = all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze")))
    mounted = apart and tools and _works("mkfs.ext4", "-q", "-m0", image) and _works("mount", "-o", "loop", image, disk)
    try:
        yield disk, bool(mounted)
    finally:
        if mounted:
            _works("umount", "--lazy", disk)


def _works(*command: Any) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0


async def night(options: argparse.Namespace, folder: Path, disk: Path, *, nft: bool, mounted: bool) -> dict[str, Any]:
    dice, began_s = random.Random(options.seed), time.monotonic()
    spoken = conversations.read(options.data) if options.data else conversations.made(dice, CONVERSATIONS)
    place = Place(folder, disk)
    faults = Faults(place, random.Random(options.seed), nft=nft, mounted=mounted)
    async with place:
        load = Load(place, spoken, dice, lambda since_s: _hurt(faults.log, since_s))
        watch, started_s = checks.Watch(place), time.monotonic()
        watching, loading = asyncio.create_task(watch.run()), asyncio.create_task(load.run())
        try:
            await faults.run(60 * options.minutes, options.every)
            load.over.set()
            await loading
            loaded_s = time.monotonic() - started_s
            within = checks.bounds(load, faults.log)
            ledger = await checks.read_ledger(place)
            told = await _calm(load, ledger, place)
            await checks.check_files(load, place, faults.log)
            keys = await asyncio.to_thread(watch.keys)
        finally:
            load.over.set()
            loading.cancel()
            watching.cancel()
            await asyncio.gather(loading, watching, return_exceptions=True)
    checks.check_ends(load, faults.log)
    checks.check_ledger(load, ledger, within)
    checks.check_logs(load, place)
    figures = checks.check_watch(load, watch) | {"keys in Redis": keys}
    left_out = sorted(set(Faults(place, dice, nft=True, mounted=True).kinds) - set(faults.kinds))
    again = f"python -m tests.chaos.night --minutes {options.minutes:g} --seed {options.seed} --every {options.every:g}"
    times = {"load_s": round(loaded_s, 1), "whole_s": round(time.monotonic() - began_s, 1)}
    return made_report(load, faults.log, figures, ledger, within, told, left_out, again, times)


async def _calm(load: Load, before: dict[str, dict[str, int]], place: Place) -> dict[str, dict[str, int]]:
    """The same load for a moment while nothing breaks: what clients were told, which the ledger has to the token."""
    load.over.clear()
    load.is_calm, sent, batches = True, len(load.sent), len(load.batches)
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(CALM_S)
    load.over.set()
    await loading
    told = checks.calm_tokens(load.sent[sent:], load.batches[batches:])
    checks.check_calm(load, before, await checks.read_ledger(place), told)
    return told


def _hurt(log: list[Fault], since_s: float) -> bool:
    return any(fault.target == "upstream" and fault.ended_s + 10.0 > since_s for fault in log)


if __name__ == "__main__":
    sys.exit(main())
