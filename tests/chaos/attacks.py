"""Sends what one tenant should not be able to hurt others with, and measures what another tenant notices.

    python -m tests.chaos.attacks [--tree PATH] [--only TEXT] [--fuzz 60] [--seed 1] [--seconds 20]

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
import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.chaos.attack_bodies import (
    ARRAYS,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    MOST,
    RESPONSES,
    SCHEMAS,
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
    own_fields,
    properties,
    schema_chain,
    schema_properties,
    spaced,
    stops,
    structured,
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


def _kinds() -> dict[str, tuple[Callable[[int], Sent], int]]:
    """Every shape, in dialects that have it: a body by its size, and the largest size that is of use."""
    paths = (CHATS, COMPLETIONS, RESPONSES, MESSAGES, GENERATE)
    kinds: dict[str, tuple[Callable[[int], Sent], int]] = {}
    for name in ARRAYS:
        kinds[name] = (partial(of_array, name), 8_000_000)
    for at, (name, text) in enumerate(TEXTS.items()):
        for path in (paths[at % len(paths)], paths[(at + 2) % len(paths)]):
            kinds[f"bytes of {name}, {path}"] = (partial(long_text, path, text), MOST)
    for path in (CHATS, COMPLETIONS, MESSAGES, GENERATE):
        kinds[f"characters of 4 stop strings, {path}"] = (lambda size, path=path: stops(4, size, path), MOST)
    for opened, closed, field in (
        (b"[", b"]", "messages"),
        (b'{"a":', b"}", "messages"),
        (b"[", b"]", "metadata"),
        (b'[{"a":', b"}]", "tools"),
    ):
        make = partial(nested, opened=opened, closed=closed, name=field)
        kinds[f"levels of {opened.decode()} in {field}"] = (make, MOST)
    for make in (biases, names, own_fields, properties):
        kinds[make.__name__] = (make, 500_000)
    for inside in ("{}", "[]", "0", '{"a":1}'):
        kinds[f"values {inside} in arguments"] = (partial(arguments, inside=inside), MOST // 8)
    for at, (name, schema) in enumerate(SCHEMAS.items()):
        for path in (CHATS, (RESPONSES, MESSAGES, GENERATE)[at % 3]):
            kinds[f"{name}, {path}"] = (lambda size, schema=schema, path=path: structured(schema(size), path), 30_000)
    for name, (kind, one) in GRAMMARS.items():
        kinds[name] = (lambda size, kind=kind, one=one: grammar(kind, one(size)), 100_000)
    return kinds


GRAMMARS: Final[Mapping[str, tuple[str, Callable[[int], str]]]] = {
    "unit rules": (
        "grammar",
        lambda size: f'start: r0\n{"".join(f"r{at}: r{at + 1}{chr(10)}" for at in range(size))}r{size}: "a"\n',
    ),
    "terminals": (
        "grammar",
        lambda size: (
            f"start: {' | '.join(f'T{at}' for at in range(size))}\n" + "".join(f'T{at}: "{at}"\n' for at in range(size))
        ),
    ),
    "brackets of a grammar": ("grammar", lambda size: f'start: {"(" * size}"a"{")" * size}\n'),
    "groups of a pattern": ("regex", lambda size: "(a|b)" * size),
    "groups in groups of a pattern": ("regex", lambda size: "(" * size + "a" + ")" * size),
}

KINDS: Final = _kinds()


def fuzzed(number: int | None, seed: int) -> dict[str, Make]:
    """So many kinds, or all of them, of a random size each; sent as they are, and compressed."""
    dice = random.Random(seed)
    chosen = list(KINDS) if number is None else dice.sample(list(KINDS), number)
    made: dict[str, Make] = {}
    for name in chosen:
        make, most = KINDS[name]
        size = round(10 ** dice.uniform(3, math.log10(most)))

        def both(make: Callable[[int], Sent] = make, size: int = size) -> tuple[Sent, ...]:
            sent = make(size)
            return sent, compressed(sent)

        made[f"{size:,} {name}"] = both
    return made


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
    parser.add_argument("--fuzz", type=int, help="so many kinds of random size; all without it")
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
