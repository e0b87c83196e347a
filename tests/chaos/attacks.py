"""Sends what one tenant should not be able to hurt others with, and measures what another tenant notices.

    python -m tests.chaos.attacks [--tree PATH] [--only TEXT] [--fuzz 50] [--seed 1] [--seconds 20]

A gateway in a process of its own (of the tree at PATH, so that an older commit can be compared), in front of an engine
without a model and an upstream that answers at once, so that what is slow is the gateway. While each attack is sent,
again and again for a moment, another tenant asks for /health/liveness and for a small chat, one after the other. A row
is printed for each:

    stop      the longest that liveness took, in ms: about as long as the event loop stood still
    own       the same as the gateway's event loop found it, of the time in which the gateway itself ran (at most so
              much: the end of a bucket); - of a commit that has no such metric
    p99       of the small chats, in ms
    peak      MiB of memory of the gateway, above what it had before the attack
    statuses  what the attacker got

Bounded: loopback only, one attack at a time, `--seconds` for each. More attacks are more entries of NAMED.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.chaos.attack_bodies import (
    ARRAYS,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    MOST,
    RESPONSES,
    TEXTS,
    arguments,
    biases,
    compressed,
    gemini_joins,
    gemini_pairs,
    grammar,
    long_text,
    names,
    nested,
    of_array,
    of_array_of_texts,
    schema_chain,
    schema_properties,
    spaced,
    stops,
    to_upstream,
)
from tests.chaos.attacked import (
    CHATS,
    HURT_MS,
    MIB,
    SMALL,
    Make,
    Seen,
    Sent,
    gateway,
    measure,
    memory_mib,
)

QUIET: Final = "(a small chat)"
"""What is measured first, of each gateway."""

NAMED: Final[dict[str, Make]] = {
    "stop strings: 4 of 7 MB, n = 8, compressed": lambda: compressed(stops(4, 7 * MIB)),
    "900,000 chat messages, compressed": lambda: compressed(of_array("chat messages", 900_000)),
    "600,000 response items, compressed": lambda: compressed(of_array("response items", 600_000)),
    "600,000 gemini contents, compressed": lambda: compressed(of_array("gemini contents", 600_000)),
    "900,000 anthropic blocks, compressed": lambda: compressed(of_array("anthropic blocks", 900_000)),
    "300,000 tool messages, compressed": lambda: compressed(of_array("tool messages", 300_000)),
    "8 million {}, compressed": lambda: compressed(of_array("empty objects", 8_000_000)),
    "1.5 million biases, compressed": lambda: compressed(biases(1_500_000)),
    "a chat of 28 million letters": lambda: long_text(CHATS, "a", 28_000_000),
    "13 million blanks": lambda: long_text(CHATS, " ", 13_000_000),
    "16 bodies of 31 MB at once": lambda: long_text(CHATS, "lorem ipsum ", MOST)._replace(at_once=16),
    "9,000 chat messages": lambda: of_array("chat messages", 9_000),
    "a chain of 1,500 $ref": lambda: schema_chain(1_500),
    "9,000 properties, strict": lambda: schema_properties(9_000, strict=True),
    "10 million values in arguments, compressed": lambda: compressed(arguments(10_000_000)),
    "9,000 texts behind a large one (Gemini)": lambda: gemini_joins(9_000),
    "9,000 calls and answers (Gemini)": lambda: gemini_pairs(9_000),
    "a Lark grammar of 3,500 unit rules": lambda: grammar(
        "grammar", "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(3_500)) + 'r3500: "a"\n'
    ),
    "31 MB of escaped lines": lambda: long_text(CHATS, "\n", MOST),
    "480 texts of 64 KB": lambda: of_array_of_texts(480, 64 << 10),
    "31,000 texts of 1 KB": lambda: of_array_of_texts(31_000, 1 << 10),
    "31 MB of white space": lambda: spaced(MOST),
    "a text of 31 MB to an upstream": lambda: to_upstream(long_text(CHATS, "lorem ipsum ", MOST)),
    "31 MB of escaped lines to an upstream": lambda: to_upstream(long_text(MESSAGES, "\n", MOST)),
    "31 MB of emoji to an upstream": lambda: to_upstream(long_text(GENERATE, "\U0001f600", MOST)),
    "31 MB of white space to an upstream": lambda: to_upstream(spaced(MOST)),
    "9,000 messages to an upstream": lambda: to_upstream(of_array("anthropic messages", 9_000)),
    "20,000 blocks to an upstream": lambda: to_upstream(of_array("anthropic blocks", 20_000)),
    "49,000 items to an upstream": lambda: to_upstream(of_array("response items", 49_000)),
    "90,000 names to an upstream": lambda: to_upstream(names(90_000)),
    "90,000 biases": lambda: biases(90_000),
    "90,000 biases to an upstream": lambda: to_upstream(biases(90_000)),
    "300,000 token ids": lambda: of_array("completion token ids", 300_000),
    "16 texts of 31 MB at once to an upstream": lambda: to_upstream(long_text(CHATS, "lorem ipsum ", MOST))._replace(
        at_once=16
    ),
    "a pattern of 100,000 groups": lambda: grammar("regex", "(a|b)" * 100_000),
}


def fuzzed(number: int, seed: int) -> dict[str, Make]:
    """So many more, of random kinds and sizes."""
    dice = random.Random(seed)
    made: dict[str, Make] = {}
    for at in range(number):
        size = round(10 ** dice.uniform(3, 7))
        kind = dice.choice(("array", "array", "array", "text", "text", "stops", "nested", "object", "arguments"))
        make, name = _one(kind, size, dice)
        squeezed = dice.random() < 0.5
        made[f"{at + 1}: {name}{', compressed' if squeezed else ''}"] = (
            (lambda make=make: compressed(make())) if squeezed else make
        )
    return made


def _one(kind: str, size: int, dice: random.Random) -> tuple[Make, str]:
    if kind == "array":
        name = dice.choice(sorted(ARRAYS))
        return lambda: of_array(name, size), f"{size:,} {name}"
    if kind == "text":
        name, path = dice.choice(sorted(TEXTS)), dice.choice((CHATS, COMPLETIONS, RESPONSES, MESSAGES, GENERATE))
        return lambda: long_text(path, TEXTS[name], size), f"{size:,} bytes of {name}, {path}"
    if kind == "stops":
        return lambda: stops(4, size), f"4 stop strings of {size:,}"
    if kind == "nested":
        opened, closed = dice.choice(((b"[", b"]"), (b'{"a":', b"}")))
        return lambda: nested(size, opened, closed), f"{size:,} levels"
    if kind == "object":
        make = dice.choice((biases, names))
        return lambda: make(min(size, 2_000_000)), f"{min(size, 2_000_000):,} {make.__name__}"
    inside = dice.choice(("{}", "[]", "0", '{\\"a\\":1}'.replace("\\", "")))
    return lambda: arguments(min(size, MOST // 8), inside), f"{min(size, MOST // 8):,} values in arguments"


def run(attacks: Mapping[str, Make], tree: Path, seconds: float, say: Callable[[str], Any]) -> dict[str, Seen]:
    """All of them against one gateway, which is started again where one killed it."""
    found: dict[str, Seen] = {}
    left = dict(attacks)
    say("| attack | stop ms | own ms | p99 ms | peak MiB | statuses |\n| --- | --- | --- | --- | --- | --- |")
    while left:
        with gateway(tree) as (pid, port):
            quiet = found[QUIET] = measure(pid, port, lambda: Sent(CHATS, SMALL), seconds)
            say(_row(QUIET, quiet))
            for name in list(left):
                seen = found[name] = measure(pid, port, left.pop(name), seconds)
                say(_row(name, seen))
                if memory_mib(pid) == 0.0 or seen.stop_ms > HURT_MS:
                    break
    return found


def _row(name: str, seen: Seen) -> str:
    statuses = " ".join(f"{status}x{times}" for status, times in sorted(seen.statuses.items()))
    own = "-" if seen.own_ms is None else f"{seen.own_ms:.0f}"
    figures = f"{seen.stop_ms:.0f} | {own} | {seen.p99_ms:.0f} | {seen.peak_mib:.0f}"
    return f"| {name} | {figures} | {statuses}{' DIED' if seen.died else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent.parent)
    parser.add_argument("--only", default="", help="part of the names of the attacks")
    parser.add_argument("--fuzz", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    attacks = {**NAMED, **fuzzed(options.fuzz, options.seed)}
    chosen = {name: make for name, make in attacks.items() if options.only in name}
    found = run(chosen, options.tree.resolve(), options.seconds, lambda line: print(line, flush=True))
    worst = max(found.values(), key=lambda seen: seen.stop_ms)
    died = sum(seen.died for seen in found.values())
    print(f"\n{len(found)} attacks; longest stop {worst.stop_ms:.0f} ms; {died} with failures of others")


if __name__ == "__main__":
    main()
