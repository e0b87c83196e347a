from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import LogSettings
from gateway.logs.writer import CHUNK_BYTES, Floods, Writer

LIMIT_S = 20.0
DOTS = "." * 90
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", re.MULTILINE)


class Pipe:
    """Both ends, and a writer into it. Each write of up to 4096 bytes is read as it was written (O_DIRECT)."""

    def __init__(self, **limits: Any) -> None:
        self.read_no, self.write_no = os.pipe2(os.O_DIRECT)
        self.writer = Writer(self.write_no, LogSettings(), **{"delay_s": 0.05, "max_alike": 1_000_000, **limits})
        self.log = logging.Logger("a.b")
        self.log.addHandler(self.writer)
        self.writer.setFormatter(logging.Formatter("%(message)s"))

    def read(self) -> str:
        """What one write wrote."""
        return os.read(self.read_no, 1 << 16).decode()

    def read_lines(self, last: str) -> list[str]:
        """Up to this one."""
        lines: list[str] = []
        while not lines or lines[-1] != last:
            lines += self.read().splitlines()
        return lines

    def fill(self) -> int:
        """The writer waits for somebody who reads. Returns how many lines it took."""
        count = 0
        while not self.writer._is_stuck:
            for _ in range(400):
                self.log.info("%d %s", count, DOTS)
                count += 1
            self.writer.flush()
        return count

    def close(self) -> None:
        os.set_blocking(self.read_no, False)
        closing = threading.Thread(target=self.writer.close)
        closing.start()
        while closing.is_alive() or self.writer._thread.is_alive():
            try:
                os.read(self.read_no, 1 << 16)
            except BlockingIOError:
                self.writer._thread.join(0.01)
        os.close(self.read_no)
        os.close(self.write_no)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(close_s=0.2)
    yield made
    made.close()


@pytest.fixture
def patient() -> Iterator[Pipe]:
    """Whose lines wait for others for longer than a test."""
    made = Pipe(delay_s=10.0)
    yield made
    made.close()


@pytest.fixture
def small() -> Iterator[Pipe]:
    made = Pipe(close_s=0.2, max_lines=1000)
    yield made
    made.close()


def test_a_line_is_written_without_another_one(pipe: Pipe) -> None:
    pipe.log.info("one %s", 1)
    assert pipe.read() == "one 1\n"
    pipe.log.info("two")
    assert pipe.read() == "two\n"


def test_lines_that_come_together_are_written_together_in_their_order(patient: Pipe) -> None:
    for number in range(20):
        patient.log.info("%d", number)
    patient.writer.flush()
    assert patient.read() == "".join(f"{number}\n" for number in range(20))


def test_a_warning_and_what_was_before_it_are_written_at_once(patient: Pipe) -> None:
    patient.log.info("one")
    patient.log.warning("two")
    assert patient.read_lines("two") == ["one", "two"]


def test_no_line_is_cut_by_the_end_of_a_write(patient: Pipe) -> None:
    for number in range(200):
        patient.log.info("%d %s", number, DOTS)
    flushing = threading.Thread(target=patient.writer.flush)
    flushing.start()
    pieces = [patient.read()]
    while not pieces[-1].endswith(f"199 {DOTS}\n"):
        pieces.append(patient.read())
    flushing.join(LIMIT_S)
    assert "".join(pieces) == "".join(f"{number} {DOTS}\n" for number in range(200))
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(CHUNK_BYTES - 100 < len(piece) <= CHUNK_BYTES for piece in pieces[:-1])


def test_a_line_longer_than_a_write_is_there_whole_and_alone(patient: Pipe) -> None:
    long = "x" * 3 * CHUNK_BYTES
    patient.log.info("one")
    patient.log.info(long)
    patient.log.warning("two")
    read = ""
    while not read.endswith("two\n"):
        read += patient.read()
    assert read == f"one\n{long}\ntwo\n"


def test_text_that_is_made_later_is_made_once_by_the_thread_and_in_its_place(patient: Pipe) -> None:
    makers: list[str] = []

    def said() -> str:
        makers.append(threading.current_thread().name)
        return "two"

    patient.log.info("one")
    patient.writer.later("a.c", logging.INFO, said)
    patient.log.info("three")
    assert makers == []
    patient.writer.flush()
    assert re.sub(TIME, "", patient.read()) == "one\nINFO a.c two\nthree\n"
    assert makers == ["log"]


def test_a_line_that_cannot_be_made_says_its_kind_and_not_its_text(pipe: Pipe) -> None:
    def fails() -> str:
        raise ValueError("a secret")

    pipe.log.info("%d of a secret", "one")
    pipe.writer.later("a.c", logging.INFO, fails)
    lines = pipe.read_lines("a.c: a line that cannot be written: ValueError")
    assert lines[0] == "a.b: a line that cannot be written: TypeError"
    pipe.log.info("on")
    assert pipe.read() == "on\n"


def test_what_is_no_utf_8_is_written_with_backslashes(pipe: Pipe) -> None:
    pipe.log.info("a \ud800 b")
    assert pipe.read() == "a \\ud800 b\n"


def test_each_threads_lines_are_all_there_in_order(pipe: Pipe) -> None:
    def log(name: str) -> None:
        for number in range(500):
            pipe.log.info("%s %d", name, number)

    threads = [threading.Thread(target=log, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    lines: list[str] = []
    while len(lines) < 2000:
        lines += pipe.read().splitlines()
    for thread in threads:
        thread.join(LIMIT_S)
    for name in "abcd":
        assert [line for line in lines if line[0] == name] == [f"{name} {number}" for number in range(500)]


def test_nobody_waits_for_a_reader_and_what_had_no_room_is_counted_where_it_is_missing(small: Pipe) -> None:
    taken = small.fill()
    for number in range(2000):
        small.log.info("late %d", number)
    lost = small.writer.lost
    assert 0 < lost < 2000 + taken
    reader = threading.Thread(target=lambda: lines.extend(small.read_lines("again")))
    lines: list[str] = []
    reader.start()
    small.writer.flush()
    while small.writer._waiting:
        small.writer.flush()
    small.log.info("again")
    reader.join(LIMIT_S)
    assert not reader.is_alive()
    missing = TIME.sub("", lines[-2])
    assert missing == f"WARNING gateway.logs.writer {lost} lines are missing here: what reads it is too slow"
    assert len(lines) == taken + 2000 - lost + 2
    assert small.writer.lost == lost


def test_warnings_have_room_that_other_lines_have_not(small: Pipe) -> None:
    small.fill()
    for number in range(2000):
        small.log.info("late %d", number)
    lost = small.writer.lost
    for number in range(50):
        small.log.warning("warning %d", number)
    assert small.writer.lost == lost
    for number in range(2000):
        small.log.warning("flood %d", number)
    assert small.writer.lost > lost + 1000
    assert len(small.writer._waiting) <= 1002  # and whom a flush tells


def test_bytes_that_wait_have_a_limit_of_their_own() -> None:
    pipe = Pipe(close_s=0.2, max_bytes=1 << 18)
    pipe.fill()
    for _ in range(100):
        pipe.log.info("x" * 10_000)
    assert pipe.writer._num_bytes <= 1 << 18
    assert pipe.writer.lost > 50
    pipe.close()


def test_whoever_nobody_reads_loses_lines_and_nothing_else() -> None:
    pipe = Pipe()
    os.close(pipe.read_no)
    pipe.log.info("one\ntwo")
    pipe.log.error("three")
    pipe.writer.flush()
    assert pipe.writer.lost == 3
    pipe.writer.close()
    os.close(pipe.write_no)


def test_when_the_disk_has_room_again_the_log_says_how_many_are_missing(tmp_path: Path) -> None:
    file_no = os.open("/dev/full", os.O_WRONLY)
    writer = Writer(file_no, LogSettings(), delay_s=0.01)
    log = logging.Logger("a.b")
    log.addHandler(writer)
    writer.setFormatter(logging.Formatter("%(message)s"))
    for number in range(5):
        log.info("%d", number)
        writer.flush()
    assert writer.lost == 5
    with (tmp_path / "log").open("wb") as file:
        os.dup2(file.fileno(), file_no)
    log.info("again")
    writer.flush()
    writer.close()
    os.close(file_no)
    told = "WARNING gateway.logs.writer 5 lines are missing here: No space left on device\nagain\n"
    assert TIME.sub("", (tmp_path / "log").read_text()) == told


def test_a_pipe_that_somebody_made_one_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_no, False)
    assert fcntl.fcntl(pipe.write_no, fcntl.F_GETFL) & os.O_NONBLOCK
    count = pipe.fill()
    pipe.log.info("end")
    lines = pipe.read_lines("end")
    assert [int(re.split(" ", line)[0]) for line in lines[:-1]] == list(range(count))
    assert pipe.writer.lost == 0


def test_a_flush_that_nobody_hears_is_not_waited_for_twice(pipe: Pipe) -> None:
    pipe.fill()
    waited = pipe.writer._is_stuck
    assert waited
    pipe.writer._close_s = 3600.0
    pipe.writer.flush()  # returns
    pipe.writer._close_s = 0.2


def test_what_is_logged_after_the_end_is_written_at_once() -> None:
    pipe = Pipe()
    pipe.writer.close()
    pipe.log.info("one")
    assert pipe.read() == "one\n"
    os.close(pipe.read_no)
    os.close(pipe.write_no)


def test_errors_of_one_kind_are_a_few_lines_in_a_minute_and_then_a_number() -> None:
    pipe, now_s = Pipe(max_alike=2), [0.0]
    pipe.writer._floods = Floods(2, lambda: now_s[0])
    for number in range(5):
        pipe.log.error("no room: %d", number)
        pipe.log.info("a request")
    now_s[0] = 61.0
    pipe.log.error("no room: %d", 5)
    lines = [TIME.sub("", line) for line in pipe.read_lines("no room: 5")]
    told = "WARNING gateway.logs.writer 3 more lines of a.b in a minute like: no room: %d"
    expected = ["no room: 0", "a request", "no room: 1", *["a request"] * 4, told, "no room: 5"]
    assert lines == expected
    pipe.close()
