"""Grammars in processes of their own: what one of them does is no other's business."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Grammar, Sampling
from engine.sampling import grammar_jobs, grammar_pool
from engine.sampling.grammar_worker import Matcher, StepMasks
from engine.sequence import NO_TOKEN, Sequence
from tests.fakes.grammars import LIMIT_S, VOCABULARY, Asked, GrammarDesk

A = 35 + 32
SLOW = Grammar("regex", "stand-in for a grammar that takes very long")


def regex(pattern: str) -> Grammar:
    return Grammar("regex", pattern)


@contextmanager
def desk_where(program: str, **options: Any) -> Iterator[GrammarDesk]:
    """A desk whose processes run `program` first: it can replace what compiles."""
    with pytest.MonkeyPatch.context() as patch:
        real = subprocess.Popen

        def start(command: list[str], **popen: Any) -> Any:
            assert command[1:4] == ["-P", "-m", "engine.sampling.grammar_server"]
            code = f"import sys\n{program}\nfrom engine.sampling.grammar_server import main\nmain()"
            return real([command[0], "-P", "-c", code, command[4]], **popen)

        patch.setattr("engine.sampling.fork_server.subprocess.Popen", start)
        with GrammarDesk(**options) as desk:
            yield desk


MISBEHAVE = """
import os, time
from engine.sampling.grammar import Grammars, GrammarState
compile, bits = Grammars.compile, GrammarState.bits
def misbehave(self, grammar):
    text = grammar.text
    if text.startswith("stand-in"):
        while True: pass
    if text == "sleep": time.sleep(3600)
    if text == "crash": os.kill(os.getpid(), 11)
    if text == "hungry": bytearray(1 << 30)
    if text == "panic": raise BaseException("a panic")
    return compile(self, grammar)
Grammars.compile = misbehave
"""
SLOW_MASKS = (
    MISBEHAVE
    + """
count = 0
def bits_of(self):
    global count
    count += 1
    if count > 1: time.sleep(3600)
    return bits(self)
GrammarState.bits = bits_of
"""
)


def test_what_crashes_hangs_or_takes_too_much_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "COMPILE_S", 0.2)
    with desk_where(MISBEHAVE) as desk:
        other = desk.compile(regex("a+"), tenant="b")
        reasons = {
            "stand-in": "more than 0.2 s",
            "sleep": "more than 0.2 s",
            "crash": "too deeply",
            "hungry": "more than 256 MiB",
            "panic": "the compiler failed",
        }
        asked = {text: desk.begin(regex(text)) for text in reasons}
        desk.run_until(lambda: all(one.answered for one in asked.values()))
        for text, one in asked.items():
            assert one.refusal is not None
            assert (one.refusal.path, reasons[text] in one.refusal.reason) == ("", True), one.refusal
        assert masks_of(desk, other)  # its worker never noticed
        assert desk.compile(regex("b+")).find(0)


def masks_of(desk: GrammarDesk, matcher: Matcher, *tokens: int) -> bool:
    """Whether a mask behind these tokens comes, or behind one "a"."""
    sequence = Sequence("", 0, array("I", [5, *(tokens or (A,))]), 1, [], Sampling(9), matcher=matcher)
    desk.run_until(lambda: sequence.can_sample)
    step = StepMasks(VOCABULARY)
    for _ in range(200):
        step.begin([sequence])
        mask = step.take()[0]
        if not isinstance(mask, int):
            return True
        if mask == NO_TOKEN:
            return False
        desk.run_until(lambda: sequence.can_sample)
    raise AssertionError("no mask came")


def test_a_grammar_of_one_tenant_does_not_keep_another_from_compiling() -> None:
    with desk_where(MISBEHAVE, at_once=2) as desk:
        slow = [desk.begin(Grammar("regex", f"{SLOW.text} {number}"), "a") for number in range(8)]
        assert desk.compile(regex("a+"), tenant="b").find(0)
        assert not any(one.answered for one in slow)
        # A client that leaves ends what is compiled for it.
        for one in slow:
            one.matcher.close()
        assert desk.compile(regex("b+"), tenant="a").find(0)
        assert desk.pool.num_waiting == 0


def test_tenants_take_turns_and_the_online_lane_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    with GrammarDesk(at_once=1) as desk:
        begin = desk.pool._begin
        monkeypatch.setattr(desk.pool, "_begin", lambda job: (begun.append(job.key[1].text), begin(job)))
        asked = [
            desk.begin(regex(f"{tenant}{number}"), tenant, lane=lane)  # type: ignore[arg-type]
            for tenant, lane, numbers in (("z", "batch", 2), ("a", "online", 3), ("b", "online", 2), ("c", "online", 1))
            for number in range(numbers)
        ]
        desk.run_until(lambda: all(one.answered for one in asked))
    assert begun == ["a0", "b0", "c0", "a1", "b1", "a2", "z0", "z1"]


def test_what_one_tenant_compiled_is_not_there_for_another() -> None:
    with GrammarDesk() as desk:
        first = desk.compile(regex("a+"), tenant="a")
        again, other = desk.begin(regex("a+"), "a"), desk.begin(regex("a+"), "b")
        shared = [desk.begin(regex("c+"), tenant, salt="a namespace for both") for tenant in ("a", "b")]
        assert (again.answered, other.answered) == (True, False)
        desk.run_until(lambda: other.answered and all(one.answered for one in shared))
        assert again.matcher.worker is first.worker
        assert other.matcher.worker is not first.worker
        assert shared[0].matcher.worker is shared[1].matcher.worker


def test_sequences_of_one_grammar_share_its_worker_while_it_is_compiled_too() -> None:
    with GrammarDesk() as desk:
        asked = [desk.begin(regex("a+")) for _ in range(9)]
        desk.run_until(lambda: all(one.answered for one in asked))
        assert len({one.matcher.worker for one in asked}) == 1
        asked[0].matcher.close()
        assert masks_of(desk, asked[1].matcher)


def test_one_tenant_keeps_half_of_the_grammars_and_the_last_used_ones() -> None:
    with GrammarDesk(max_kept=4) as desk:
        desk.compile(regex("x"), tenant="b").close()
        for pattern in ("a", "b"):
            desk.compile(regex(pattern)).close()
        used = desk.compile(regex("a"))
        desk.compile(regex("c")).close()
        assert len(desk.pool) == 3
        assert desk.begin(regex("x"), "b").answered
        assert desk.begin(regex("a")).answered
        # Those that sequences follow are not ended for more; the next one waits.
        held = desk.compile(regex("c"))
        waits = desk.begin(regex("d"))
        desk.compile(regex("y"), tenant="b")
        assert not waits.answered
        held.close()
        desk.run_until(lambda: waits.answered)
        assert used.worker is not None


def test_only_so_many_sequences_and_bytes_of_a_tenant_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_jobs, "WAITING_BYTES", 400)
    with desk_where(MISBEHAVE, max_waiting=4) as desk:
        for number in range(2):
            assert desk.pool.find_refusal("a", SLOW) is None
            desk.begin(Grammar("regex", f"{SLOW.text} {number}"))
        assert "tenant" in str(desk.pool.find_refusal("a", SLOW))
        assert desk.pool.find_refusal("b", SLOW) is None
        assert "tenant" in str(desk.pool.find_refusal("b", regex("x" * 201)))
        assert "full" in str(desk.pool.find_refusal("c", regex("x" * 399)))


def test_a_worker_that_is_killed_is_replaced_from_the_tokens() -> None:
    with GrammarDesk() as desk:
        matcher = desk.compile(regex("a[ab]+"))
        assert masks_of(desk, matcher)
        before = matcher.worker
        assert before is not None
        assert desk.pool._server is not None
        desk.pool._server.kill(before.number)
        desk.run_until(lambda: matcher.worker is None)
        assert masks_of(desk, matcher, A, A)
        assert matcher.worker is not before


def test_a_sequence_whose_masks_hang_ends_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "MASK_S", 0.1)
    with desk_where(SLOW_MASKS) as desk:
        hangs, other = desk.compile(regex("a+")), desk.compile(regex("b+"), tenant="b")
        assert not masks_of(desk, hangs)
        assert hangs.failure is not None
        assert "more than 0.1 s" in hangs.failure.reason
        assert hangs.failure.path == ""
        assert other.find(0)


def test_the_fork_server_is_replaced_and_what_was_compiled_comes_back() -> None:
    with GrammarDesk() as desk:
        matcher = desk.compile(regex("a+"))
        waiting = desk.begin(regex("b+"))
        assert desk.pool._server is not None
        desk.pool._server.end()
        desk.run_until(lambda: waiting.answered)
        assert waiting.refusal is None
        assert masks_of(desk, matcher)


def test_a_fork_server_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_pool, "LATE_S", 3.0)
    with GrammarDesk() as desk:
        desk.compile(regex("a+"))
        first = desk.pool._server
        assert first is not None
        assert first._process is not None
        os.kill(first._process.pid, signal.SIGSTOP)
        assert desk.compile(regex("b+")).find(0)
        assert desk.pool._server is not first


def test_a_fork_server_that_hangs_before_it_begins_refuses_what_waits_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grammar_pool, "LATE_S", 3.0)
    program = f"""
import os, pathlib, signal
hung = pathlib.Path({str(tmp_path / "hung")!r})
if not hung.exists():
    hung.touch()
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    with desk_where(program) as desk:
        waiting = desk.begin(regex("b+"))
        desk.run_until(lambda: waiting.answered)
        assert waiting.refusal is not None
        assert waiting.refusal.path is None  # not its fault
        assert desk.compile(regex("c+")).find(0)


def kill_server(desk: GrammarDesk) -> None:
    """As the kernel does when memory is short; the pool has not heard of it yet."""
    assert desk.pool._server is not None
    process = desk.pool._server._process
    assert process is not None
    process.kill()
    process.wait()


def test_a_fork_server_that_died_between_two_grammars_is_replaced_for_the_second() -> None:
    with GrammarDesk() as desk:
        first = desk.compile(regex("a+"))
        kill_server(desk)
        second = desk.begin(regex("b+"))  # nothing was heard of it
        assert not second.answered
        desk.run_until(lambda: second.answered)
        assert second.refusal is None
        assert masks_of(desk, second.matcher, A + 1)
        assert masks_of(desk, first)
        kill_server(desk)
        other = desk.compile(regex("c+"), tenant="b")  # an earlier death counts for the grammar that met it alone
        assert other.find(0)


@pytest.mark.parametrize("times", [1, grammar_pool.MAX_TRIES])
def test_a_grammar_whose_fork_server_dies_while_it_is_compiled_is_tried_once_more(times: int, tmp_path: Path) -> None:
    begun = [tmp_path / f"begun{number}" for number in range(grammar_pool.MAX_TRIES)]
    program = f"""
import os, pathlib, time
from engine.sampling.grammar import Grammars
compile = Grammars.compile
def held(self, grammar):
    begun = [path for path in map(pathlib.Path, {[str(path) for path in begun]}) if not path.exists()]
    if begun and grammar.text == "held":
        begun[0].touch()
        if {len(begun)} - len(begun) < {times}: time.sleep(3600)
    return compile(self, grammar)
Grammars.compile = held
"""
    with desk_where(program) as desk:
        asked = desk.begin(regex("held"))
        for path in begun[:times]:
            desk.run_until(lambda: desk.pool._ready)
            wait_for(lambda path=path: (desk.pool.pump(), path.exists())[1])
            assert not asked.answered
            kill_server(desk)
            desk.run_until(lambda: not desk.pool._ready)
        desk.run_until(lambda: asked.answered)
        assert desk.compile(regex("a+"), tenant="b").find(0)
        if times < grammar_pool.MAX_TRIES:
            assert asked.refusal is None
            assert asked.matcher.find(0)
        else:
            assert asked.refusal is not None
            assert asked.refusal.path is None  # not the grammar's fault: it may work on another engine


def wait_for(holds: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < limit_s, "it did not come to be"
        os.sched_yield()


def test_a_fork_server_that_cannot_start_refuses_what_waits_and_is_tried_again() -> None:
    with desk_where("sys.exit(1)") as desk:
        for _ in range(2):
            asked = desk.begin(regex("a"))
            desk.run_until(lambda one=asked: one.answered)
            assert asked.refusal is not None
            assert asked.refusal.path is None  # may work on another engine


def test_all_workers_together_stay_below_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with GrammarDesk() as desk:
        kept = desk.compile(regex("a+"), tenant="b")
        assert kept.worker is not None
        desk.compile(regex("b+")).close()
        hungry = desk.compile(regex("c+"))
        assert hungry.worker is not None
        hungry.worker.grown_bytes = 3 << 30
        desk.pool._bound_memory()
        assert len(desk.pool) == 1
        assert "2048 MiB" in str(hungry.failure)
        assert masks_of(desk, kept)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("end", ["close", "kill"])
def test_no_process_outlives_the_engine_or_has_its_files(end: str, tmp_path: Path) -> None:
    program = f"""
import os, sys, time
secret = open({str(tmp_path / "secret")!r}, "w"); os.set_inheritable(secret.fileno(), True)
from tests.fakes.grammars import GrammarDesk
from engine.protocol import Grammar
desk = GrammarDesk().__enter__()
desk.compile(Grammar("regex", "a+"))
desk.begin(Grammar("regex", "(.{{1,500}}a){{1,500}}"))
server = desk.pool._server._process.pid
workers = open(f"/proc/{{server}}/task/{{server}}/children").read().split()
for pid in (server, *workers):
    for fd in os.listdir(f"/proc/{{pid}}/fd"):
        assert "secret" not in os.readlink(f"/proc/{{pid}}/fd/{{fd}}")
    assert b"KVASIR" not in open(f"/proc/{{pid}}/environ", "rb").read()
print(server, *workers, flush=True)
{"desk.pool.close()" if end == "close" else "os.kill(os.getpid(), 9)"}
"""
    environ = os.environ | {"PYTHONPATH": os.getcwd(), "KVASIR_ENGINE_SECRET": "s"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2, done.stderr
    wait_for(lambda: not any(map(running, pids)))
    assert done.returncode == (0 if end == "close" else -signal.SIGKILL)


def test_an_engine_ends_promptly_while_a_grammar_is_compiled() -> None:
    with desk_where(MISBEHAVE) as desk:
        asked: Asked = desk.begin(SLOW)
        desk.run_until(lambda: desk.pool._by_number)
        assert not asked.answered
    assert not asked.answered
