"""The engine's HTTP server, around the loop that runs its model.

The event loop here never waits for the model: submits and aborts are handed to the loop's thread, and what a step did
comes back through call_soon_threadsafe, in order. Knows nothing about scheduling or tensors. The other end of the
stream is gateway/engines/bundled.py; the messages are those of engine/protocol/. serving.py starts and ends it.
`Gateways` has what each gateway is still to be sent: block events and step frames arrive in the order in which the
loop's thread made them, so a snapshot taken while a gateway is attached loses no event and doubles none.

    STREAM_PATH     WebSocket: hello, the blocks that can be hit, then one frame per step; closing aborts
    TOKENIZER_PATH  what a gateway needs to tokenise for the model
    STATS_PATH      counters
    PURGE_PATH      makes the engine forget a tenant or a namespace
    HEALTH_PATH     the only path that works without the secret
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from aiohttp import WSMsgType, web

from engine.config import EngineSettings
from engine.protocol import (
    DIGEST_BYTES,
    HEALTH_PATH,
    MOST_PREFIX_CHARS,
    PURGE_LIMIT_S,
    PURGE_PATH,
    SECRET_HEADER,
    STATS_PATH,
    STREAM_PATH,
    TOKEN_BYTES,
    TOKENIZER_PATH,
    Abort,
    BlockEvents,
    Hello,
    Load,
    ProtocolError,
    StepFrame,
    Submit,
    TokenizerFiles,
    decode,
    encode,
)
from engine.publish import Publisher, ResidencyTable
from engine.tiers.tier import PurgeReport

if TYPE_CHECKING:
    from engine.loop import EngineLoop

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 15.0
"""A gateway that has been silent for so long is asked whether it is there, and has half of it to answer."""

CLOSE_TIMEOUT_S: Final = 2.0


OnFrames = Callable[[Mapping[str, StepFrame]], None]
OnBlocks = Callable[[BlockEvents], None]


class EngineServer:
    """The HTTP application around a loop. Made and used on one event loop, except where it says so."""

    def __init__(
        self,
        hello: Hello,
        tokenizer: TokenizerFiles,
        settings: EngineSettings,
        make_loop: Callable[[OnFrames, OnBlocks], EngineLoop],
    ) -> None:
        """`make_loop` gets the two callbacks of the loop's thread."""
        self.gateways = Gateways(hello, buffer_bytes=settings.send_buffer_bytes)
        self.publisher: Publisher | None = None
        self.loop = make_loop(self._on_frames, self._on_blocks)
        self.hello = hello
        self._tokenizer = tokenizer
        self._event_loop = asyncio.get_running_loop()
        self._secret = (settings.secret or "").encode()
        self._draining = False
        # A prompt of full context with its digests, and a header of reasonable size.
        digest_bytes = DIGEST_BYTES / hello.namespace.block_size
        self._max_message_bytes = int(hello.context_tokens * (TOKEN_BYTES + digest_bytes)) + (1 << 20)
        self._sockets: dict[web.WebSocketResponse, Gateway] = {}

    def _on_frames(self, frames: Mapping[str, StepFrame]) -> None:
        """For the loop's thread: what a step did."""
        self._post(self.gateways.stepped, frames)

    def _on_blocks(self, events: BlockEvents) -> None:
        """For the loop's thread: what a step did to the blocks."""
        self._post(self._blocks_changed, events)

    def _post(self, call: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed, with all connections
            self._event_loop.call_soon_threadsafe(call, *values)

    def _blocks_changed(self, events: BlockEvents) -> None:
        self.gateways.blocks_changed(events)
        if self.publisher is not None:
            self.publisher.publish(events)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_secret])
        app.router.add_get(STREAM_PATH, self._stream)
        app.router.add_get(TOKENIZER_PATH, self._get_tokenizer)
        app.router.add_get(STATS_PATH, self._get_stats)
        app.router.add_post(PURGE_PATH, self._purge)
        app.router.add_get(HEALTH_PATH, self._get_health)
        app.on_shutdown.append(self._hang_up_on_all)
        return app

    def drain(self) -> None:
        """From now on the engine says that it is not healthy. The loop refuses what is new, and tells the gateways."""
        self._draining = True
        self.loop.drain()

    @web.middleware
    async def _check_secret(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get(SECRET_HEADER, "").encode("utf-8", "surrogateescape")
        if request.path != HEALTH_PATH and not hmac.compare_digest(given, self._secret) and self._secret:
            raise web.HTTPUnauthorized(text=f"the header {SECRET_HEADER} is missing or wrong")
        response: web.StreamResponse = await handler(request)
        return response

    async def _get_health(self, request: web.Request) -> web.Response:
        status = "draining" if self._draining else "ready" if self.loop.alive else "failed"
        return web.json_response({"status": status}, status=200 if status == "ready" else 503)

    async def _get_tokenizer(self, request: web.Request) -> web.Response:
        return web.json_response(self._tokenizer.to_json())

    async def _get_stats(self, request: web.Request) -> web.Response:
        own = {"gateways": len(self.gateways), "hittable_blocks": len(self.gateways.table)}
        return web.json_response({**self.loop.stats(), **own})

    async def _purge(self, request: web.Request) -> web.Response:
        """Answers when nothing of the scope is left, or after PURGE_LIMIT_S; it goes on then."""
        try:
            prefix = json.loads(await request.read())["salt_prefix"]
        except (ValueError, TypeError, KeyError):
            prefix = None
        # A scope's salt is made of fields that end so: half a name would match others, an empty one all.
        if not isinstance(prefix, str) or not 1 < len(prefix) <= MOST_PREFIX_CHARS or not prefix.endswith(";"):
            raise web.HTTPBadRequest(text='the body should be {"salt_prefix": "..."}, a scope that ends with `;`')
        answer: asyncio.Future[PurgeReport | None] = self._event_loop.create_future()

        def answer_once(report: PurgeReport | None) -> None:
            if not answer.done():
                answer.set_result(report)

        def deliver(report: PurgeReport | None) -> None:
            self._post(answer_once, report)

        self.loop.purge(prefix, deliver)
        try:
            report = await asyncio.wait_for(answer, PURGE_LIMIT_S)
        except TimeoutError:
            return web.json_response({"complete": False, "reason": f"not over after {PURGE_LIMIT_S:.0f} s"})
        if report is None:
            return web.json_response({"complete": False, "reason": "the engine is starting, or too many purges wait"})
        log.info("purged a scope: %s", json.dumps(asdict(report)))
        return web.json_response({"complete": not report.left, **asdict(report)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, compress=False, max_msg_size=self._max_message_bytes, timeout=CLOSE_TIMEOUT_S
        )
        transport = request.transport
        if transport is None or transport.is_closing():  # it hung up: nothing can be written
            return socket
        await socket.prepare(request)
        gateway = self.gateways.attach(transport.abort)
        log.info("gateway connected as %s", gateway.owner)
        self._sockets[socket] = gateway
        writer = asyncio.get_running_loop().create_task(gateway.write(socket.send_bytes), name=f"write {gateway.owner}")
        try:
            while (message := await socket.receive()).type is WSMsgType.BINARY:
                self._receive(gateway, message.data)
        except ProtocolError as error:
            log.warning("%s sent what cannot be read, hanging up: %s", gateway.owner, error)
        finally:
            self.gateways.detach(gateway)
            self.loop.abort_owner(gateway.owner)
            self._sockets.pop(socket, None)
            writer.cancel()
            await asyncio.wait([writer])
            if not writer.cancelled():
                writer.exception()  # it failed because the connection ended, which is being dealt with
            log.info("%s is gone", gateway.owner)
        await socket.close()
        return socket

    def _receive(self, gateway: Gateway, data: bytes) -> None:
        match decode(data):
            case Submit() as submit:
                self.loop.submit(gateway.owner, submit)
            case Abort(seq):
                self.loop.abort(gateway.owner, seq)
            case other:
                raise ProtocolError(f"unexpected {type(other).__name__}")

    async def _hang_up_on_all(self, app: web.Application) -> None:
        self.gateways.tell_load()  # with `draining` set, so that gateways know that this is on purpose
        for socket, gateway in list(self._sockets.items()):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(gateway.sent(), CLOSE_TIMEOUT_S)  # how its last sequences ended
                await socket.close(code=1001, message=b"the engine ends")


SNAPSHOT_PART_BYTES: Final = 1 << 20
LOAD_INTERVAL_S: Final = 0.1
"""Gateways without updates in a step get the load this often at most."""


class Gateway:
    """One connection. `owner` names it to the loop, and is never used twice."""

    def __init__(self, owner: str, limit_bytes: int, hang_up: Callable[[], None]) -> None:
        self.owner = owner
        self._limit_bytes = limit_bytes
        self._hang_up = hang_up
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._unsent_bytes = 0
        self._gone = False

    def send(self, data: bytes, *, beyond_limit: bool = False) -> None:
        """Queues a message. A gateway that lets more than the limit pile up is hung up on.

        beyond_limit  raises the limit by the message's size: what is sent first may be larger than any change
        """
        if self._gone:
            return
        if beyond_limit:
            self._limit_bytes += len(data)
        if self._unsent_bytes + len(data) > self._limit_bytes:
            log.warning("gateway %s does not read what it is sent; hanging up", self.owner)
            self.forget()
            self._hang_up()
            return
        self._unsent.put_nowait(data)
        self._unsent_bytes += len(data)

    def forget(self) -> None:
        """Nothing more is sent."""
        self._gone = True
        while not self._unsent.empty():
            self._unsent.get_nowait()
            self._unsent.task_done()

    async def sent(self) -> None:
        """Returns when everything queued is handed to the socket. Waits for as long as the gateway does not read."""
        await self._unsent.join()

    async def write(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Sends what is queued, in order, until it is cancelled or `send` fails."""
        while True:
            data = await self._unsent.get()
            await send(data)
            self._unsent_bytes -= len(data)
            self._unsent.task_done()


class Gateways:
    """All connections, and the table of blocks that a new one gets first."""

    def __init__(self, hello: Hello, *, buffer_bytes: int) -> None:
        self.table = ResidencyTable()
        self.load = Load(free_blocks=hello.num_blocks)
        self._hello = hello
        self._buffer_bytes = buffer_bytes
        self._connected: dict[str, Gateway] = {}
        self._numbers = itertools.count(1)
        self._told_s = 0.0  # loop time at which idle gateways were told the load
        self._telling: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connected)

    def attach(self, hang_up: Callable[[], None]) -> Gateway:
        """A new connection, with hello, the snapshot of all blocks and the load queued. `hang_up` ends its socket."""
        gateway = Gateway(f"gateway-{next(self._numbers)}", self._buffer_bytes, hang_up)
        gateway.send(encode(self._hello), beyond_limit=True)
        for events in self.table.snapshot(SNAPSHOT_PART_BYTES):
            gateway.send(encode(events), beyond_limit=True)
        gateway.send(encode(StepFrame([], self.load)), beyond_limit=True)
        self._connected[gateway.owner] = gateway
        return gateway

    def detach(self, gateway: Gateway) -> None:
        gateway.forget()
        self._connected.pop(gateway.owner, None)

    def blocks_changed(self, events: BlockEvents) -> None:
        """Applies events to the table and passes them on."""
        self.table.apply(events)
        data = encode(events)
        for gateway in list(self._connected.values()):
            gateway.send(data)

    def stepped(self, frames: Mapping[str, StepFrame]) -> None:
        """Passes a step's frames on, by owner. The others hear of the load, at most every LOAD_INTERVAL_S."""
        for owner, frame in frames.items():
            self.load = frame.load
            if (gateway := self._connected.get(owner)) is not None:
                gateway.send(encode(frame))
        if self._telling is None and any(owner not in frames for owner in self._connected):
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(max(loop.time(), self._told_s + LOAD_INTERVAL_S), self.tell_load)

    def tell_load(self) -> None:
        """Tells every gateway the load, now."""
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        self._told_s = asyncio.get_running_loop().time()
        data = encode(StepFrame([], self.load))
        for gateway in list(self._connected.values()):
            gateway.send(data)
