"""A reload: the settings are read again, as at the start, and what may change then changes at once, or nothing does.

At SIGHUP, or POST /admin/reload. With workers their parent reads and tells all of them. Requests in flight end under
the settings that they began with.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

from engine.config import ConfigError
from gateway import tasks
from gateway.config import Reloaded, Settings, differences, mixed
from gateway.errors import KvasirError

log = logging.getLogger(__name__)


class Reloading:
    """The settings that run, and how others come in their place."""

    def __init__(
        self,
        read: Callable[[], Settings],
        settings: Settings,
        running: Settings,
        use: Callable[[Settings], Awaitable[None]],
    ) -> None:
        """
        read      the settings of file, environment and flags. Blocks. Raises ConfigError
        settings  what it returned at the start
        running   what was made of them
        use       makes other ones hold, or raises ConfigError or a KvasirError and changes nothing
        """
        self._read = read
        self._settings = settings
        self._running = running
        self._use = use
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> Reloaded:
        """Raises ConfigError and KvasirError; nothing has changed then."""
        async with self._one_at_a_time:
            try:
                read = await asyncio.to_thread(self._read)
                settings, running = mixed(self._settings, read), mixed(self._running, read)
                report = Reloaded(differences(self._settings, settings), differences(settings, read))
                if report.changed:
                    await self._use(running)
            except (ConfigError, KvasirError) as error:
                log.warning("settings are not reloaded, and stay as they were: %s", error)
                raise
            self._settings, self._running = settings, running
        log.info("settings reloaded; changed: %s", ", ".join(report.changed) or "nothing")
        if report.needs_restart:
            log.warning("changed settings that need a restart: %s", ", ".join(report.needs_restart))
        return report

    def at_hangup(self, stop: Callable[[], None], note: Callable[[Reloaded], Awaitable[None]]) -> None:
        """Reloads at each SIGHUP, and notes it. That of a terminal which was closed is one to `stop` after, as ever."""
        loop, on_terminal = asyncio.get_running_loop(), _has_terminal()

        async def reload() -> None:
            with suppress(ConfigError, KvasirError):  # it is in the log
                await note(await self.reload())

        def hung_up() -> None:
            if on_terminal and not _has_terminal():
                stop()
            else:
                tasks.spawn(reload(), name="reload the settings")

        loop.add_signal_handler(signal.SIGHUP, hung_up)


def _has_terminal() -> bool:
    """Whether there is a terminal that this process would be hung up with."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
