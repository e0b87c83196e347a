"""The log of a whole process, in one of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys

LIMIT_S = 60
BEGIN = """
import logging, sys, threading
import gateway.logs as logs
from gateway.config import LogSettings
logs.set_up("INFO", LogSettings())
log = logging.getLogger("a.b")
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def told(program: str, *, status: int = 0) -> str:
    """What it writes to stderr until its end."""
    run = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=LIMIT_S)
    assert (run.returncode, run.stdout) == (status, ""), run.stderr
    return run.stderr


def test_lines_of_the_level_go_to_stderr_with_their_time_and_name() -> None:
    lines = told("log.info('one %s', 1); log.debug('two'); logs.later(log, 20, lambda: 'three'); log.warning('four')")
    assert re.fullmatch(rf"{TIME} INFO a\.b one 1\n{TIME} INFO a\.b three\n{TIME} WARNING a\.b four\n", lines), lines


def test_what_was_logged_last_is_there_when_a_process_fails() -> None:
    lines = told("log.info('one')\nraise ValueError('two')", status=1)
    assert "INFO a.b one\n" in lines
    assert "ValueError: two\n" in lines


def test_a_flush_puts_lines_in_front_of_what_stderr_gets_by_itself() -> None:
    lines = told("log.info('one'); logs.flush(); print('two', file=sys.stderr)")
    assert re.fullmatch(rf"{TIME} INFO a\.b one\ntwo\n", lines), lines


def test_a_process_that_forks_to_start_another_one_says_nothing_of_it() -> None:
    fork = "import os, warnings; warnings.simplefilter('ignore')\nif not (child := os.fork()): os._exit(0)\n"
    lines = told(fork + "os.waitpid(child, 0); log.info('one')")
    assert re.fullmatch(rf"{TIME} INFO a\.b one\n", lines), lines


def test_a_crash_of_native_code_says_where() -> None:
    lines = told("import faulthandler; log.info('one'); logs.flush(); faulthandler._sigsegv()", status=-11)
    assert "INFO a.b one\n" in lines
    assert "Segmentation fault" in lines
    assert 'File "<string>", line' in lines


def test_a_process_ends_though_nobody_reads_its_log() -> None:
    program = "for number in range(3000): log.info('%d' + 100 * '.', number)"
    with subprocess.Popen([sys.executable, "-c", BEGIN + program], stderr=subprocess.PIPE) as process:
        assert process.wait(LIMIT_S) == 0
        assert process.stderr is not None
        lines = process.stderr.read().decode().splitlines()
    numbers = [int(re.findall(r"a\.b (\d+)\.", line)[0]) for line in lines]
    assert numbers == list(range(len(numbers)))
    assert 100 < len(numbers) < 3000


def test_a_process_without_stderr_runs_all_the_same() -> None:
    program = BEGIN + "log.warning('one'); logs.flush(); assert logs.lost_lines() == 0"
    command = f'exec {sys.executable} -c "$PROGRAM" 2>&-'
    subprocess.run(["/bin/sh", "-c", command], env={"PROGRAM": program}, check=True, timeout=LIMIT_S)


def test_lines_of_several_processes_in_one_pipe_are_never_mixed() -> None:
    patient = "import gateway.logs.writer; gateway.logs.writer.CLOSE_S = 20.0\n"  # a reader may have no core for 1 s
    program = BEGIN + patient + "for number in range(2000): log.info('%s-%d' + 150 * '.', sys.argv[1], number)"
    command = [sys.executable, "-c", program]
    read, write = os.pipe()
    with open(read, "rb") as reader:
        processes = [subprocess.Popen([*command, name], stderr=write) for name in "xyz"]
        os.close(write)
        lines = reader.read().decode().splitlines()
    assert [process.wait(LIMIT_S) for process in processes] == [0, 0, 0]
    found = [re.fullmatch(rf"{TIME} INFO a\.b ([xyz])-(\d+)\.{{150}}", line) for line in lines]
    assert None not in found
    for name in "xyz":
        assert [int(one[2]) for one in found if one is not None and one[1] == name] == list(range(2000))
