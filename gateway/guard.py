"""Runs a command that would outlive its parent: `python -m gateway.guard SECONDS COMMAND ...`.

The command has a process group of its own. It is asked to end (SIGTERM) when this process is, or when standard input
closes because the parent is gone; it has SECONDS for it. Whatever is left of the group is killed then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress


def main(stop_s: float, command: list[str]) -> int:
    """Returns the command's exit status, 128 and its signal where one ended it."""
    asked = False
    child: subprocess.Popen[bytes] | None = None

    def ask_to_end(*_: object) -> None:
        nonlocal asked
        asked = True
        if child is not None:
            child.terminate()
            signal.setitimer(signal.ITIMER_REAL, stop_s)

    signal.signal(signal.SIGTERM, ask_to_end)
    signal.signal(signal.SIGALRM, lambda *_: _kill_group(child))
    signal.signal(signal.SIGINT, lambda *_: None)  # of a terminal, for all of its processes: the parent decides
    threading.Thread(target=terminate_at_eof, name="until-eof", daemon=True).start()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - our parent's
    if asked:
        ask_to_end()
    status = child.wait()
    _kill_group(child)
    return status if status >= 0 else 128 - status


def terminate_at_eof() -> None:
    """Ends this process when its parent process is gone: standard input closes then."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_group(leader: subprocess.Popen[bytes] | None) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if leader is not None:
            os.killpg(leader.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
