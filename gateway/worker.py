"""A worker of a gateway, as workers.py starts it: `python -m gateway.worker`, with what it is told on standard input.

Standard input stays open as long as the parent runs; when it closes, the worker ends as after SIGTERM.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading

from gateway import heap
from gateway.cli import guarded, run
from gateway.guard import terminate_at_eof
from gateway.logs import set_up


def main() -> int:
    """Runs until SIGTERM, SIGINT, or the end of the parent. Returns the exit status, as cli.main."""
    from gateway.parent import Parent
    from gateway.serving import serve

    heap.keep_small()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is the parent's
    place, numbers, peer = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
    threading.Thread(target=terminate_at_eof, name="until-eof", daemon=True).start()
    sockets = [socket.socket(fileno=number) for number in numbers]
    set_up(place.settings.server.log_level, place.settings.logs)
    parent = Parent(place, sockets, socket.socket(fileno=peer))
    working = serve(place.settings, environ=os.environ, own_engines=place.own_engines, say=parent.say, parent=parent)
    return guarded("gateway", lambda: run(working))


if __name__ == "__main__":
    sys.exit(main())
