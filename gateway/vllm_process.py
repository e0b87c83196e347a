"""The vLLM that `kvasir serve` runs in place of the bundled engine (engines.kind): when, with which arguments, and its
process. To the rest of the gateway it is one of [[replicas]], with the name `vllm`.

It listens on the loopback alone, with a key of this start, and what it prints is logged line by line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from engine.compute.machine import has_cuda
from engine.config import ENVIRONMENT_PREFIX, ConfigError
from gateway import tasks
from gateway.config import ReplicaSettings, Settings
from gateway.processes import Child, Children, ChildStartError

log = logging.getLogger(__name__)

NAME: Final = "vllm"
COMMAND: Final = "vllm"
HOST: Final = "127.0.0.1"

PORTS: Final = range(20_000, 30_000)
"""One is taken here, and not by the system, whose own are taken for connections while a model is loaded."""

STOP_S: Final = 30.0
"""That it gets to end after SIGTERM; then it is killed, with all that it started."""

MORE_S: Final = 10.0
READ_S: Final = 2.0
"""For its last lines to be read after its end."""

MAX_LINE_BYTES: Final = 1 << 20
MAX_LINE_CHARS: Final = 2000
"""Of a line that is logged."""

FLAGS: Final[Mapping[str, str]] = {
    "revision": "--revision",
    "dtype": "--dtype",
    "max_context_tokens": "--max-model-len",
    "max_sequences": "--max-num-seqs",
    "kv_cache_bytes": "--kv-cache-memory-bytes",
}
"""Settings of [engine] that it is started with if they are set. Ours have defaults that are not right for a GPU."""

TAKEN: Final = {*FLAGS, "model", "served_name", "secret", "log_level"}

_UNPRINTABLE: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x1f\x7f]")
_PROMPTS: Final = "Received request"
"""vLLM before 0.10 writes prompts into such lines."""

_ERROR: Final = re.compile(r"\b\w*(Error|Exception|error): (?!Engine core initialization failed)")
"""Of the last lines the one that says why. vLLM's very last one only says that another process has said it."""


def choose_engine(settings: Settings, environ: Mapping[str, str], cuda: Callable[[], bool] = has_cuda) -> Settings:
    """With `bundled` or `vllm` as engines.kind, and a vLLM among the replicas. `auto` is a vLLM where there are one, a
    CUDA device and the extra `fleet`, for one engine of a model that is not the bundled one. Raises ConfigError."""
    engines, kind = settings.engines, settings.engines.kind
    found = shutil.which(COMMAND, path=environ.get("PATH"))
    if kind == "auto":
        wanted = engines.count == 1 and settings.engine.model != "demo" and settings.engine.device in ("auto", "cuda")
        able = found and wanted and all(map(find_spec, ("zmq", "msgspec"))) and cuda()
        kind = "vllm" if able else "bundled"
        if able:
            log.info("a CUDA device and %s are there: the engine is a vLLM (--engine bundled: the bundled one)", found)
    if kind == "vllm" and engines.count:
        if found is None:
            raise ConfigError(
                f"engines.kind: there is no `{COMMAND}` on the PATH; install it (`pip install vllm`, in an environment "
                "of its own) and put the folder of its command on the PATH"
            )
        if engines.count > 1:
            raise ConfigError(
                f"engines.count: of vLLM one server is started, not {engines.count}; for several GPUs write "
                'engines.vllm_arguments = ["--data-parallel-size", "2"]'
            )
        if NAME in [one.name for one in settings.replicas] + [one.name for one in settings.upstreams]:
            raise ConfigError(f"engines.kind: {NAME!r} is the name of the vLLM that is started; call yours another")
        unused = sorted(settings.engine.model_fields_set - TAKEN)
        if unused:
            log.warning("settings of the bundled engine that a vLLM has not: %s", ", ".join(unused))
        settings = settings.model_copy(update={"replicas": (*settings.replicas, _replica())})
    return settings.model_copy(update={"engines": engines.model_copy(update={"kind": kind})})


def _replica() -> ReplicaSettings:
    http, events, replay = _free_ports(3)
    return ReplicaSettings(
        name=NAME,
        kind="vllm",
        url=f"http://{HOST}:{http}",
        key=SecretStr(secrets.token_urlsafe(24)),
        kv_events=f"tcp://{HOST}:{events}",
        kv_replay=f"tcp://{HOST}:{replay}",
    )


def _free_ports(count: int) -> list[int]:
    """No process has them at the moment. Raises OSError."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(PORTS, 100):
            one = stack.enter_context(socket.socket())
            try:
                one.bind((HOST, port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise OSError(f"no {count} free ports among {PORTS.start} to {PORTS.stop - 1}")


def command_of(settings: Settings, replica: ReplicaSettings) -> list[str]:
    """`vllm serve` of the model, on the ports of the replica. Arguments of the operator are last, and win."""
    engine, demo = settings.engine, settings.engine.model == "demo"
    model = str(files("engine.demo").joinpath("model")) if demo else str(Path(engine.model).expanduser())
    name = "demo" if demo else Path(model).resolve().name if Path(model).is_dir() else engine.model
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv",
        # vLLM binds what has a `*` or `::`, and connects to all else; this is the loopback of IPv4, written for IPv6.
        "endpoint": f"tcp://[::ffff:{HOST}]:{_port(replica.kv_events)}",
        "replay_endpoint": f"tcp://{HOST}:{_port(replica.kv_replay)}",
    }
    command = [COMMAND, "serve", model, "--served-model-name", engine.served_name or name]
    command += ["--host", HOST, "--port", str(_port(replica.url)), "--disable-uvicorn-access-log"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)]
    for field, flag in FLAGS.items():
        if field in engine.model_fields_set and (value := getattr(engine, field)):
            command += [flag, str(value)]
    return [*command, *settings.engines.vllm_arguments]


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


class VllmProcess(Children):
    """That vLLM, started again when it ends. One that never answered is given up when it ends."""

    urls: Final[Mapping[str, str]] = {}  # it is no bundled engine

    def __init__(
        self,
        settings: Settings,
        *,
        environ: Mapping[str, str],
        worked: Callable[[str], bool],
        on_fatal: Callable[[ChildStartError], None],
    ) -> None:
        """
        settings  of choose_engine
        environ   what it inherits, as this process got it
        worked    whether the replica at this URL has ever joined
        on_fatal  called once when it is given up, with the line that says why
        """
        replica = next(one for one in settings.replicas if one.name == NAME)
        self._command = command_of(settings, replica)
        self._environ = {name: value for name, value in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        self._environ["VLLM_API_KEY"] = replica.key.get_secret_value() if replica.key else ""
        self._reader: asyncio.Task[None] | None = None
        self._why = ""
        worked = partial(worked, replica.url)
        super().__init__([Child(NAME, self._start, worked, STOP_S + MORE_S, tries=1, why=self._last_words)], on_fatal)

    async def _start(self) -> asyncio.subprocess.Process:
        self._why = ""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.guard", str(STOP_S), *self._command),
            env=self._environ,
            stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
        )
        assert process.stdout is not None
        self._reader = tasks.spawn(self._read(process.stdout), name="read what vllm prints")
        return process

    async def _read(self, output: asyncio.StreamReader) -> None:
        """Logs line by line until the process ends; longer ones than MAX_LINE_BYTES are passed over."""
        while True:
            try:
                raw = await output.readline()
            except ValueError:
                continue
            if not raw:
                return
            text = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
            line = _UNPRINTABLE.sub("", text)[:MAX_LINE_CHARS].rstrip()
            if line and _PROMPTS not in line:
                log.info("vllm: %s", line)
                if _ERROR.search(line) or not _ERROR.search(self._why):
                    self._why = line

    async def _last_words(self) -> str:
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=READ_S)
        return self._why
