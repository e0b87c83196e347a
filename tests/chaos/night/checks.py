"""What has to hold all night, and what it comes to. load.py judges each answer where it comes; here are the sums: lost
connections against what was killed, batches, the ledger, memory, descriptors and keys, and the event loops."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Final

import aiohttp
import redis

from tests.chaos.night.faults import Fault
from tests.chaos.night.load import LINES, Batch, Load, Sent
from tests.chaos.night.site import ADMIN, FLUSH_S, MAX_IN_FLIGHT, TENANTS, Place
from tests.fakes.waiting import until

STALL_S: Final = 0.25
LOOK_S: Final = 5.0
WARM_S: Final = 1800.0
"""Of a life that are no part of its slope: memos fill, and jobs that are kept for five minutes become as many as they
will be."""
BLOCK_S: Final = 300.0
"""Of a life that make one point of its slope: the time from one sweep of batches to the next."""
LEAST_BLOCKS: Final = 4
SLOPE: Final = 0.01
"""Of its size that anything may grow in an hour."""

REPLICATION_S: Final = 1.0
"""That a replica may be behind before a primary is lost."""
PARTS_S: Final = 15.0
"""Until what a killed gateway had half written is gone."""
GRACE_S: Final = 6.0
"""After a kill in which a connection to that gateway may still be lost or refused."""


@dataclass
class Watch:
    """Looks at the processes every few seconds."""

    place: Place
    begun_s: float = field(default_factory=time.monotonic)
    sizes: dict[tuple[str, str, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    stalls: int = 0
    lag_counts: dict[str, dict[str, dict[float, float]]] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    late: list[tuple[float, str, float]] = field(default_factory=list)

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(4)) as session:
            while True:
                self._measure()
                await asyncio.to_thread(self._measure_redis)
                for gateway in self.place.gateways:
                    with suppress(aiohttp.ClientError, TimeoutError):
                        async with session.get(f"http://127.0.0.1:{gateway.port}/metrics") as answer:
                            if answer.status == 200:
                                self._read_lags(gateway.name, await answer.text())
                await asyncio.sleep(LOOK_S)

    def _note(self, what: str, whose: str, life: int, value: float) -> None:
        self.sizes[what, whose, life].append((time.monotonic() - self.begun_s, value))

    def _measure(self) -> None:
        for role, pid in self.place.roles():
            with suppress(OSError, TypeError):
                found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
                self._note("memory MiB", role, pid, int(found[1]) / 1024)  # type: ignore[index]
                self._note("descriptors", role, pid, len(list(Path(f"/proc/{pid}/fd").iterdir())))

    def _measure_redis(self) -> None:
        node = self.place.primary()
        with suppress(redis.RedisError, OSError):
            if node is not None:
                with node.client(socket_timeout=1.0) as client:
                    # A writer of the ledger has a key of each book for a day: as many as processes were started.
                    of_writers = sum(1 for _ in client.scan_iter("*.added:*", count=1000))
                    self._note("keys", "redis", 0, client.dbsize() - of_writers)
                    self._note("memory MiB", "redis", 0, client.info("memory")["used_memory_dataset"] / (1 << 20))

    def _read_lags(self, name: str, text: str) -> None:
        for kind in ("lag", "own_lag"):
            lines = re.findall(rf'^kvasir_event_loop_{kind}_seconds_bucket{{le="(.*)"}} (\S+)$', text, re.MULTILINE)
            counts = {float(end): float(count) for end, count in lines}
            before = self.lag_counts.setdefault(name, {}).get(kind, {})
            if before and counts and counts[float("inf")] < before[float("inf")]:
                before = {}  # it was started again
            self.lag_counts[name][kind] = counts
            ends = sorted(counts)
            for less, end in zip([0.0, *ends], ends, strict=False):
                own = counts[end] - counts.get(less, 0.0)
                if own > before.get(end, 0.0) - before.get(less, 0.0):
                    self.longest[kind] = max(self.longest[kind], end)
                    if kind == "own_lag" and end > STALL_S:
                        self.stalls += 1
                        self.late.append((time.monotonic() - self.begun_s, name, end))

    def slopes(self) -> dict[str, dict[str, Any]]:
        """By what and whose: the mean size, the growth in an hour as a share of it, and the standard error of that. Of
        all long lives together, each with a level of its own; and the means of the last of them."""
        sums: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
        lives: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
        for (what, whose, _), points in self.sizes.items():
            blocks: dict[int, list[tuple[float, float]]] = defaultdict(list)
            for at, value in points:
                if (age := at - points[0][0]) >= WARM_S:
                    blocks[int(age / BLOCK_S)].append((at, value))
            means = [(mean(at for at, _ in block), mean(value for _, value in block)) for block in blocks.values()]
            if len(means) < LEAST_BLOCKS:
                continue
            lives[what, whose].append([round(value, 1) for _, value in means])
            middle, level = mean(at for at, _ in means), mean(value for _, value in means)
            sums[what, whose] += [(at - middle, value - level, level) for at, value in means]
        found = {}
        for (what, whose), all_means in sums.items():
            across = sum(at * at for at, _, _ in all_means)
            slope = sum(at * value for at, value, _ in all_means) / across
            rest = sum((value - slope * at) ** 2 for at, value, _ in all_means)
            error = math.sqrt(rest / max(1, len(all_means) - len(lives[what, whose]) - 1) / across)
            size = max(1.0, mean(level for _, _, level in all_means))
            found[f"{what} of {whose}"] = {
                "mean": round(size, 1),
                "an_hour": round(3600 * slope / size, 4),
                "error": round(3600 * error / size, 4),
                "last": lives[what, whose][-1],
            }
        return found

    def sizes_now(self) -> dict[str, tuple[float, float]]:
        """By what and whose: the largest, and the latest."""
        found: dict[str, tuple[float, float]] = {}
        for (what, whose, _), points in self.sizes.items():
            most = max(value for _, value in points)
            before = found.get(f"{what} of {whose}", (0.0, 0.0))
            found[f"{what} of {whose}"] = (round(max(before[0], most), 1), round(points[-1][1], 1))
        return found

    def keys(self) -> dict[str, int]:
        """How many there are in Redis now, by their names without numbers and ids."""
        node, found = self.place.primary(), Counter[str]()
        if node is not None:
            with node.client() as client:
                found.update(re.sub(r"[0-9a-f]{8,}|\d+", "*", key.decode()) for key in client.scan_iter(count=1000))
        return dict(found.most_common(12))


def may_be_lost(sent: Sent, faults: list[Fault]) -> bool:
    """Whether its gateway was killed meanwhile, or was on its way back."""
    return any(
        fault.gateway == sent.gateway and sent.begun_s < fault.ended_s + GRACE_S and sent.ended_s > fault.begun_s - 0.5
        for fault in faults
    )


def check_ends(load: Load, faults: list[Fault]) -> None:
    """Connections are lost only with a gateway, batches only with a fail-over, and nothing is silent."""
    for sent in load.sent:
        where = f"{sent.kind} of {sent.tenant} at gateway {sent.gateway}"
        if sent.outcome == "silent":
            load.violate("honest", f"{where}: {sent.why}")
        elif sent.outcome == "lost" and not may_be_lost(sent, faults):
            load.violate(
                "honest", f"{where}: {sent.why} at {sent.ended_s - load.begun_s:.1f} s, and no gateway was killed"
            )
        elif not sent.outcome:
            load.violate("honest", f"{where}: no outcome")
    for batch in load.batches:
        where = f"batch {batch.id} of {batch.tenant} ({batch.dialect}), {batch.state}"
        if batch.state.startswith("lost"):
            # A gateway whose clock is ahead by an hour forgets what is kept for five minutes.
            if not any(
                (f.redis and f.begun_s - REPLICATION_S < batch.made_s < f.ended_s)
                or (f.kind == "step clock" and f.begun_s < batch.lost_s and f.ended_s > batch.made_s)
                for f in faults
            ):
                load.violate("batches", f"{where}: and no fail-over when it was made")
        elif batch.undone_s and not any(f.redis and f.begun_s < batch.undone_s < f.ended_s + GRACE_S for f in faults):
            load.violate("batches", f"{where}: its end was undone, and no fail-over")
        elif batch.rows != batch.wanted:
            twice = {name: count for name, count in batch.rows.items() if count != 1}
            load.violate("batches", f"{where}: {len(batch.rows)} of {len(batch.wanted)} lines, not once: {twice}")
        elif "," in batch.state:
            load.violate("batches", f"{where}: lines without an answer")


def losses(sent: Sent, faults: list[Fault]) -> bool:
    """Whether what it used may be missing in the ledger. A gateway that is killed loses what it had not written: that
    of its last flush, or since Redis was away. A Redis that is lost loses what it had not replicated, which was used up
    to a flush before."""
    for fault in faults:
        since_s = fault.begun_s - FLUSH_S - REPLICATION_S
        if fault.redis and since_s < sent.ended_s < fault.ended_s + REPLICATION_S:
            return True
        if fault.gateway == sent.gateway:
            away = [f.begun_s for f in faults if f.redis and f.begun_s < fault.begun_s < f.ended_s + GRACE_S]
            if min([since_s, *away]) - 1.0 < sent.ended_s < fault.ended_s:
                return True
    return False


def bounds(load: Load, faults: list[Fault]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """By tenant and lane: tokens that the ledger has at least and at most, and requests that make the difference."""
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    for tenant in TENANTS:
        least = most = unsure = 0
        for sent in load.sent:
            if sent.tenant != tenant or not sum(sent.most):
                continue
            used = sum(sent.used)
            if sent.outcome == "answered" and not sent.reused:
                lost = losses(sent, faults)
                least, most, unsure = least + (0 if lost else used), most + used, unsure + lost
            elif sent.outcome != "refused" or sent.status in (502, 503, 504, 529):
                most, unsure = most + sum(sent.most), unsure + 1
        kills = [fault for fault in faults if fault.gateway is not None or fault.redis or "engine" in fault.kind]
        done = [batch for batch in load.batches if batch.tenant == tenant]
        used = sum(sum(batch.used) for batch in done)
        lines = sum(len(batch.rows) for batch in done)
        a_line = -(-used // max(1, lines)) * 2
        slack = len(kills) * MAX_IN_FLIGHT * a_line
        lost_jobs = sum(LINES * a_line for batch in done if batch.rows != batch.wanted)
        lane = max(0, used - slack), used + slack + lost_jobs, len(kills) * MAX_IN_FLIGHT
        found[tenant] = {"online": (least, most, unsure), "batch": lane}
    return found


async def check_files(load: Load, place: Place, faults: list[Fault]) -> None:
    """No file is there that no client knows, but for those whose answer was lost, and those of a batch that ended
    again, with other files, after a fail-over. None is there that was deleted, and nothing half-written."""
    found: set[str] = set()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
        for key in TENANTS.values():
            url = f"http://127.0.0.1:{place.gateways[1].port}/v1/files?limit=10000"
            async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as answer:
                found |= {one["id"] for one in (await answer.json())["data"]}
    unheard = [sent for sent in load.sent if sent.outcome == "lost" and sent.kind in ("POST files", "POST batches")]
    unread = [batch for batch in load.batches if batch.dialect == "chat" and not batch.rows]
    undone = sum(fault.redis for fault in faults)
    if len(found - load.uploaded) > len(unheard) + 2 * (len(unheard) + len(unread) + undone):
        load.violate("files", f"{len(found - load.uploaded)} files that no client knows, {len(unheard)} answers lost")
    if back := found & load.deleted:
        load.violate("files", f"deleted, and there: {sorted(back)[:5]}")

    def parts() -> list[Path]:
        return list((place.disk / "files").rglob("*.part"))

    try:
        await until(lambda: not parts(), PARTS_S)
    except TimeoutError:
        load.violate("files", f"half-written: {parts()[:5]}")


def calm_tokens(sent: Sequence[Sent], batches: Sequence[Batch]) -> dict[str, dict[str, int]]:
    """What clients were told, by tenant and lane; nothing else was used while nothing broke."""
    found = {tenant: {"online": 0, "batch": 0} for tenant in TENANTS}
    for one in sent:
        if one.outcome == "answered" and not one.reused:
            found[one.tenant]["online"] += sum(one.used)
    for batch in batches:
        found[batch.tenant]["batch"] += sum(batch.used)
    return found


async def read_ledger(place: Place) -> dict[str, dict[str, int]]:
    """Tokens by tenant and lane, when it stands still. Every gateway writes what it has, meanwhile."""
    latest: dict[str, dict[str, int]] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
        for _ in range(20):
            await asyncio.sleep(1.5 * FLUSH_S)
            found: dict[str, dict[str, int]] = {tenant: {"online": 0, "batch": 0} for tenant in TENANTS}
            url = f"http://127.0.0.1:{place.gateways[1].port}/admin/ledger?group_by=tenant,lane&from=2000-01-01"
            async with session.get(url, headers={"Authorization": f"Bearer {ADMIN}"}) as answer:
                told: Any = await answer.json()
            for row in told.get("rows", ()):
                used = row["used"]
                found[row["tenant"]][row["lane"]] += used["prompt_tokens"] + used["completion_tokens"]
            if found == latest:
                return found
            latest = found
    return latest


def check_calm(load: Load, before: dict[str, dict[str, int]], after: dict[str, dict[str, int]], told: Any) -> None:
    """To the token."""
    for tenant, lanes in told.items():
        for lane, tokens in lanes.items():
            if (counted := after[tenant][lane] - before[tenant][lane]) != tokens:
                load.violate("ledger", f"{tenant}, {lane}: {counted} tokens while nothing broke, clients saw {tokens}")


def check_ledger(load: Load, ledger: dict[str, dict[str, int]], within: Any) -> None:
    for tenant, lanes in within.items():
        for lane, (least, most, unsure) in lanes.items():
            if not least <= ledger[tenant][lane] <= most:
                why = f"{tenant}, {lane}: {ledger[tenant][lane]} tokens, not from {least} to {most} ({unsure} unsure)"
                load.violate("ledger", why)


def check_logs(load: Load, place: Place) -> None:
    for process in place.processes:
        for found in re.finditer(r"Traceback \(most recent call last\)", process.log.read_text(errors="replace")):
            text = process.log.read_text(errors="replace")[max(0, found.start() - 300) : found.start() + 1500]
            load.violate("logs", f"{process.name}: {text}")


def check_watch(load: Load, watch: Watch) -> dict[str, Any]:
    """The figures; violations where the run was long enough."""
    for at, name, end in watch.late:
        load.violate("event loop", f"{name} stood still for up to {end} s of its own time, at {at:.0f} s")
    slopes = watch.slopes()
    for name, slope in slopes.items():
        if slope["an_hour"] - 2 * slope["error"] > SLOPE:
            load.violate("flat", f"{name} grows by {slope['an_hour']:.1%} an hour, from {slope['mean']}")
    return {"slopes": slopes, "largest_and_last": watch.sizes_now(), "event_loop_s": dict(watch.longest)}
