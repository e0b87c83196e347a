"""The night in figures: as values for JSON, and as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from tests.chaos.night.faults import Fault
from tests.chaos.night.load import Load

SHOWN = 12
"""Violations of one kind in a report; all are counted."""


def made_report(
    load: Load,
    faults: list[Fault],
    figures: dict[str, Any],
    ledger: dict[str, dict[str, int]],
    within: dict[str, dict[str, tuple[int, int, int]]],
    told: dict[str, dict[str, int]],
    left_out: list[str],
    again: str,
    times: dict[str, float],
) -> dict[str, Any]:
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for sent in load.sent:
        outcomes[sent.kind][sent.outcome + (f" {sent.status}" if sent.outcome == "refused" else "")] += 1
    violated = Counter(what for _, what, _ in load.violations)
    slowest = max((sent.ended_s - sent.begun_s for sent in load.sent), default=0.0)
    return {
        "again": again,
        "times": times,
        "faults": dict(Counter(fault.kind for fault in faults)),
        "faults_left_out": left_out,
        "faults_not_over": [f"{fault.kind} of {fault.target}: {fault.failed}" for fault in faults if fault.failed],
        "fault_log": [
            [fault.kind, fault.target, round(fault.begun_s - load.begun_s, 1), round(fault.ended_s - fault.begun_s, 1)]
            for fault in faults
        ],
        "requests": {kind: dict(counts) for kind, counts in sorted(outcomes.items())},
        "invariants": {
            "honest": f"{len(load.sent)} requests, the slowest {slowest:.1f} s",
            "batches": f"{sum(len(batch.rows) for batch in load.batches)} lines of {len(load.batches)} batches "
            + str(dict(Counter(batch.state.split(",")[0] for batch in load.batches))),
            "apart": f"{load.first_asked} first requests of a conversation",
            "same": f"{load.compared} answers compared with an earlier one",
            "files": str(dict(load.files)),
            "ledger": {
                tenant: {lane: [ledger[tenant][lane], *bound] for lane, bound in lanes.items()}
                for tenant, lanes in within.items()
            },
            "ledger while nothing broke": told,
            **figures,
        },
        "violations": dict(violated),
        "violations_shown": [
            f"{at:.0f} s, {what}: {why}"
            for kind in violated
            for at, what, why in [one for one in load.violations if one[1] == kind][:SHOWN]
        ],
    }


def written(found: dict[str, Any]) -> str:
    lines = [f"again        {found['again']}", f"times        {found['times']}"]
    lines += [f"faults       {sum(found['faults'].values())}: {found['faults']}"]
    lines += [f"left out     {found['faults_left_out'] or 'none'}"]
    lines += [f"not over     {one}" for one in found["faults_not_over"]]
    lines += [f"requests     {kind}: {counts}" for kind, counts in found["requests"].items()]
    lines += [f"invariant    {name}: {figures}" for name, figures in found["invariants"].items()]
    lines += [f"VIOLATION    {one}" for one in found["violations_shown"]]
    lines += [f"violations   {found['violations'] or 'none'}"]
    return "\n".join(lines)
