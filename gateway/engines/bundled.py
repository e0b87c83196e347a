"""One bundled engine, seen from the gateway: one WebSocket that carries all of this gateway's sequences there.

Connects and reconnects, sorts the frames of each step into their sequences, and tells the memory index what the engine
holds. The other end is engine/server.py; the messages are those of engine/protocol/.

    joined   the engine sent its hello and its tokeniser is loaded; only then it gets requests
    lost     the connection ended or fell silent: every sequence on it gets EngineLostError, the next hello may be
             another incarnation
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from engine.protocol import (
    MIN_TAIL_TOKENS,
    SECRET_HEADER,
    STREAM_PATH,
    BlockEvents,
    Hello,
    Load,
    ProtocolError,
    Sampling,
    SequenceUpdate,
    TokenizerFiles,
    decode,
)
from engine.tls import Certificate
from gateway import tasks
from gateway.engines.connection import Connection
from gateway.engines.http_calls import fetch_stats, fetch_tokenizer, request_purge
from gateway.errors import DeadlineError, EngineLostError
from gateway.types import EncodedPrompt, Request

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 64 << 20
CONNECT_TIMEOUT_S: Final = 5.0
STATS_TIMEOUT_S: Final = 0.5
"""For an engine to report its counters; then it is shown without."""

LONGEST_RETRY_S: Final = 5.0
"""Between tries to reach a lost engine: it is used again within seconds, and its host is not flooded."""

FIRST_RETRY_S: Final = 0.05
LONGEST_LOCAL_RETRY_S: Final = 0.25

_CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, ProtocolError, EngineLostError)

OnTokenizer = Callable[[Hello, TokenizerFiles], Awaitable[None]]
OnBlocks = Callable[[str, BlockEvents], None]
OnLost = Callable[[str], None]
OnLoad = Callable[["BundledEngine"], None]
Prefix = Callable[[str, bytes], int]


class BundledEngine:
    """stages.Engine over the stream. `hello` and `load` are those of the last connection."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        secret: str | None = None,
        certificate: Certificate | None = None,
        on_tokenizer: OnTokenizer,
        on_blocks: OnBlocks,
        on_lost: OnLost,
        on_load: OnLoad,
        prefix: Prefix,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        longest_retry_s: float = LONGEST_RETRY_S,
        stats_timeout_s: float = STATS_TIMEOUT_S,
    ) -> None:
        """
        url           http://host:port, https://host:port, or unix:PATH
        certificate   of this gateway, for an engine with https; without one the CAs of the system are asked
        on_tokenizer  called before the engine counts as joined, when model or tokeniser are new to this object; may
                      raise to refuse the engine
        on_blocks     called for an incarnation's block events, in order
        on_lost       called once for each incarnation whose connection ended
        on_load       called with this object when it has joined, and whenever the engine has reported its load
        prefix        leading blocks of packed digests that an incarnation holds, as far as this gateway knows
        """
        self.name = name
        self.url = url
        self._connect_timeout_s, self._stats_timeout_s = connect_timeout_s, stats_timeout_s
        self._longest_retry_s = longest_retry_s
        self._secret, self._certificate = secret, certificate
        self._on_tokenizer = on_tokenizer
        self._on_blocks = on_blocks
        self._on_lost = on_lost
        self._on_load = on_load
        self._prefix = prefix
        self._hello: Hello | None = None
        self._tokenizer: tuple[str, str] | None = None  # model and fingerprint that on_tokenizer was called for
        self._connection: Connection | None = None  # only while joined
        self._session: aiohttp.ClientSession | None = None  # that of the connection
        self._joined = asyncio.Event()
        self._left_on_purpose = False  # the last connection was to an engine that announced its end
        self.why = ""  # it is not joined, as the log says; empty before it was asked
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    # -- for the pipeline and the registry --------------------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        """Raises EngineLostError before the first hello."""
        if self._hello is None:
            raise EngineLostError(f"Engine {self.name} has not been reached yet.")
        return self._hello

    @property
    def model(self) -> str | None:
        """The model it serves or last served; None before the first hello."""
        return self._hello.model if self._hello else None

    @property
    def joined(self) -> bool:
        return self._connection is not None

    @property
    def draining(self) -> bool:
        """Whether it has announced its end."""
        return self._connection is not None and self._connection.load.draining

    @property
    def load(self) -> Load:
        """As last reported, plus what this gateway has sent since."""
        connection = self._connection
        load = connection.load if connection else Load()
        if connection is None or not connection.unseen:
            return load
        sent, tokens, batch_sent, batch_tokens = 0, 0, 0, 0
        for _, cost, lane in connection.unseen.values():
            sent += 1
            tokens += cost
            if lane == "batch":
                batch_sent += 1
                batch_tokens += cost
        return Load(  # in place of dataclasses.replace, which takes 20 us
            waiting=load.waiting + sent,
            running=load.running,
            prefill_backlog=load.prefill_backlog + tokens,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            live_blocks=load.live_blocks,
            leased_blocks=load.leased_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            draining=load.draining,
            batch_waiting=load.batch_waiting + batch_sent,
            batch_running=load.batch_running,
            batch_backlog=load.batch_backlog + batch_tokens,
        )

    @property
    def prefilling(self) -> Mapping[str, int]:
        """Tenant -> prompt tokens of its online requests from this gateway that have no token yet."""
        tokens: dict[str, int] = {}
        for tenant, cost in self._connection.unstarted.values() if self._connection else ():
            tokens[tenant] = tokens.get(tenant, 0) + cost
        return tokens

    def reused(self, held_tokens: int, prompt_tokens: int) -> int:
        """See stages.Engine."""
        block_size = self.hello.namespace.block_size
        return min(held_tokens, max(0, prompt_tokens - MIN_TAIL_TOKENS)) // block_size * block_size

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt:
        """See stages.Engine. Its template is ours."""
        return prompt

    @property
    def in_flight(self) -> int:
        """Sequences of this gateway that the engine works on."""
        return len(self._connection.streams) if self._connection else 0

    async def wait_joined(self) -> None:
        """Returns when the engine is joined. May wait for ever."""
        await self._joined.wait()

    async def fetch_stats(self) -> dict[str, Any] | None:
        """See http_calls.fetch_stats."""
        return await fetch_stats(self._session, self._stats_timeout_s)

    async def purge(self, salt_prefix: str) -> dict[str, Any]:
        """See http_calls.request_purge."""
        return await request_purge(self._session, salt_prefix)

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Updates of one sequence; the last one has `finish`. Updates that waited together arrive as one.

        Closing it aborts the sequence. Raises EngineLostError when the engine is lost or aborts the sequence,
        DeadlineError at request.deadline_s even if the engine is silent, EngineFailedError when the reader is slower
        than BUFFER_UPDATES allow.
        """
        connection = self._connection
        if connection is None:
            raise EngineLostError(f"Engine {self.name} is unreachable.")
        cost = prompt.num_tokens
        if request.use_cache:
            cost -= self._prefix(connection.hello.incarnation, prompt.digests) * connection.hello.namespace.block_size
        stream = connection.open(prompt, sampling, request, cost)
        deadline = DeadlineError("The answer took longer than this server allows (server.request_timeout_s).")
        left_s = max(0.0, request.deadline_s - time.monotonic())
        timer = asyncio.get_running_loop().call_later(left_s, stream.fail, deadline)
        try:
            while True:
                update = await stream.take()
                if update.finish is not None:
                    connection.ended(stream)
                if update.finish == "abort":
                    why = f": {update.error}" if update.error else "."
                    raise EngineLostError(f"Engine {self.name} aborted the request{why}")
                yield update
                if update.finish is not None:
                    return
        finally:
            timer.cancel()
            connection.abort(stream)

    # -- the connection -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, and reconnects until `stop`."""
        self._task = tasks.spawn(self._run(), name=f"engine {self.name}")

    async def stop(self) -> None:
        """Closes the connection. Sequences on it get EngineLostError."""
        self._stopping.set()
        await tasks.cancel(self._task)

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        is_local = self.url.startswith("unix:")  # a try costs next to nothing
        longest_s = min(self._longest_retry_s, LONGEST_LOCAL_RETRY_S) if is_local else self._longest_retry_s
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                await self._connect()
            except* _CONNECTION_ERRORS as group:
                self._log_away(_first(group))
            except* Exception as group:
                log.error("engine %s: connecting failed", self.name, exc_info=_first(group))
            if self._stopping.is_set():  # a task group whose child fails while it is cancelled forgets that it was
                return
            if time.monotonic() - began_s > self._longest_retry_s:
                retry_s = FIRST_RETRY_S
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, longest_s)

    async def _connect(self) -> None:
        """One connection, from the handshake to its end. Always raises, at the latest when the engine closes it."""
        base, connector = _connector(self.url, self._certificate)
        headers = {SECRET_HEADER: self._secret} if self._secret else {}
        timeout_s = self._connect_timeout_s
        async with aiohttp.ClientSession(base, connector=connector, headers=headers) as session:
            # 1. Reach it, within the time limit.
            async with asyncio.timeout(timeout_s):
                socket = await session.ws_connect(
                    STREAM_PATH,
                    heartbeat=2 * timeout_s,  # an answer to each ping is due after half of it
                    compress=0,
                    max_msg_size=MAX_MESSAGE_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=timeout_s),
                )
            try:
                async with asyncio.timeout(timeout_s):
                    hello = decode(await _receive(socket))
                if not isinstance(hello, Hello):
                    raise ProtocolError(f"the first message is {type(hello).__name__}, not Hello")
                await self._use(session, socket, Connection(self.name, hello))
            finally:
                with contextlib.suppress(Exception):
                    await socket.close()

    async def _use(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, connection: Connection
    ) -> None:
        """2. Reads and writes until one of them fails; joins as soon as the tokeniser is there."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(socket, connection), name=f"read {self.name}")
                group.create_task(connection.write(socket.send_bytes), name=f"write {self.name}")
                group.create_task(self._join(session, connection), name=f"join {self.name}")
        finally:
            # 3. It is gone, whatever the reason.
            self._leave(connection)

    async def _join(self, session: aiohttp.ClientSession, connection: Connection) -> None:
        hello = connection.hello
        if self._tokenizer != (hello.model, hello.tokenizer):
            files = await fetch_tokenizer(session, hello, self._connect_timeout_s)
            await self._on_tokenizer(hello, files)
            self._tokenizer = (hello.model, hello.tokenizer)
        self._hello = hello
        self._connection, self._session = connection, session
        self._joined.set()
        self.why = ""
        log.info("engine %s joined: %s, incarnation %s", self.name, hello.model, hello.incarnation)
        self._on_load(self)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, connection: Connection) -> None:
        incarnation = connection.hello.incarnation
        while True:
            message = decode(await _receive(socket))
            if isinstance(message, BlockEvents):
                self._on_blocks(incarnation, message)
            elif not isinstance(message, Hello) and not connection.dispatch(message):
                raise ProtocolError(f"unexpected {type(message).__name__}")
            elif self._connection is connection:
                self._on_load(self)

    def _leave(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = self._session = None
            self._joined.clear()
        self._left_on_purpose = connection.load.draining
        self._on_lost(connection.hello.incarnation)
        lost = EngineLostError(f"The connection to engine {self.name} was lost.")
        lost.died = not self._left_on_purpose
        connection.fail(lost)

    def _log_away(self, error: BaseException) -> None:
        """Once for each outage; as a warning if the engine was there and did not announce its end."""
        if self.why:
            return
        self.why = str(error) or type(error).__name__
        lost = self._hello is not None and not self._left_on_purpose
        what = "was lost" if lost else "has ended" if self._hello else "is not there yet (as while it starts)"
        level = logging.WARNING if lost else logging.INFO
        log.log(level, "engine %s %s: %s", self.name, what, self.why)


def _connector(url: str, certificate: Certificate | None) -> tuple[str, aiohttp.BaseConnector]:
    """The base URL and the connector for `https://host:port`, `http://host:port`, `host:port` or `unix:PATH`."""
    if url.startswith("unix:"):
        return "http://engine", aiohttp.UnixConnector(url.removeprefix("unix:").removeprefix("//"))
    base = url if "://" in url else f"http://{url}"
    parts = urlsplit(base)
    context = True if certificate is None else certificate.context()
    return f"{parts.scheme}://{parts.netloc}", aiohttp.TCPConnector(ssl=context)


async def _receive(socket: aiohttp.ClientWebSocketResponse) -> bytes:
    message = await socket.receive()
    if message.type is aiohttp.WSMsgType.BINARY:
        data: bytes = message.data
        return data
    if message.type is aiohttp.WSMsgType.ERROR:
        raise EngineLostError(f"{message.data}")
    raise EngineLostError("the engine closed the connection")


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
