from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.config import LogSettings
from gateway.logs import writer as module
from gateway.logs.writer import CHUNK_BYTES, Floods, Writer

LIMIT_S = 20.0
DOTS = "." * 90
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", re.MULTILINE)


class Pipe:
    """Both ends, and a writer into it. Each write of up to 4096 bytes is read as it was written (O_DIRECT)."""

    def __init__(self) -> None:
        self.read_no, self.write_no = os.pipe2(os.O_DIRECT)
        self.writer = Writer(self.write_no, LogSettings())
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
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    for name, value in {"DELAY_S": 0.05, "MAX_ALIKE": 1_000_000, "CLOSE_S": 0.2, "MAX_BYTES": 1 << 18}.items():
        monkeypatch.setattr(module, name, value)
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """Whose lines wait for others for longer than a test."""
    monkeypatch.setattr(module, "DELAY_S", 10.0)
    made = Pipe()
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


def test_logging_never_waits_for_a_reader_and_dropped_lines_are_counted(pipe: Pipe) -> None:
    taken = pipe.fill()
    for number in range(4000):
        pipe.log.info("late %d %s", number, DOTS)
    lost = pipe.writer.lost
    assert 0 < lost < 4000 + taken
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(pipe.read_lines("again")))
    reader.start()
    while pipe.writer._waiting or pipe.writer._unreported:
        pipe.writer.flush()
    pipe.log.info("again")
    reader.join(LIMIT_S)
    assert not reader.is_alive()
    assert TIME.sub("", lines[-2]) == (
        f"WARNING gateway.logs.writer {lost} lines are missing here: the log is read too slowly"
    )
    assert len(lines) == taken + 4000 - lost + 2
    assert pipe.writer.lost == lost


def test_warnings_have_memory_that_other_lines_have_not(pipe: Pipe) -> None:
    pipe.fill()
    for number in range(4000):
        pipe.log.info("late %d %s", number, DOTS)
    lost = pipe.writer.lost
    for number in range(50):
        pipe.log.warning("warning %d", number)
    assert pipe.writer.lost == lost
    for number in range(4000):
        pipe.log.warning("flood %d %s", number, DOTS)
    assert pipe.writer.lost > lost + 1000
    assert pipe.writer._num_bytes <= 1 << 18


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
    writer = Writer(file_no, LogSettings())
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
    report = "WARNING gateway.logs.writer 5 lines are missing here: No space left on device"
    assert sorted(TIME.sub("", (tmp_path / "log").read_text()).splitlines()) == [report, "again"]


def test_a_pipe_that_somebody_made_one_that_does_not_wait_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_no, False)
    assert fcntl.fcntl(pipe.write_no, fcntl.F_GETFL) & os.O_NONBLOCK
    count = pipe.fill()
    pipe.log.info("end")
    lines = pipe.read_lines("end")
    assert [int(re.split(" ", line)[0]) for line in lines[:-1]] == list(range(count))
    assert pipe.writer.lost == 0


def test_a_flush_that_nobody_hears_is_not_waited_for_twice(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe.fill()
    assert pipe.writer._is_stuck
    monkeypatch.setattr(module, "CLOSE_S", 3600.0)
    pipe.writer.flush()  # returns
    monkeypatch.setattr(module, "CLOSE_S", 0.2)


def test_what_is_logged_after_the_end_is_written_at_once() -> None:
    pipe = Pipe()
    pipe.writer.close()
    pipe.log.info("one")
    assert pipe.read() == "one\n"
    os.close(pipe.read_no)
    os.close(pipe.write_no)


def test_errors_of_one_kind_are_a_few_lines_in_a_minute_and_then_a_number(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(module, "MAX_ALIKE", 2)
    pipe.writer._floods = Floods(lambda: now_s[0])
    for number in range(5):
        pipe.log.error("no room: %d", number)
        pipe.log.info("a request")
    now_s[0] = 61.0
    pipe.log.error("no room: %d", 5)
    lines = [TIME.sub("", line) for line in pipe.read_lines("no room: 5")]
    told = "WARNING gateway.logs.writer 3 more lines of a.b in a minute like: no room: %d"
    expected = ["no room: 0", "a request", "no room: 1", *["a request"] * 4, told, "no room: 5"]
    assert lines == expected
