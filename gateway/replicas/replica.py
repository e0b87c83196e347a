"""One data-parallel rank of a vLLM, SGLang or TensorRT-LLM, as an engine of the pipeline.

Sends sequences over HTTP, reads the answers, and reckons the load between two reports of the server. A request that is
closed closes its connection, which is how these servers learn of an abort. What is written and read is in requests.py;
joining.py makes replicas joined or not.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import aiohttp

from engine.protocol import Hello, Lane, Load, Sampling, SequenceUpdate
from engine.protocol.frozen import dataclass
from gateway.digests import derived_salt
from gateway.errors import DeadlineError, EngineFailedError, EngineLostError
from gateway.propagation import Call as TracedCall
from gateway.propagation import calling
from gateway.replicas.answers import MAX_EVENT_BYTES, Answer, EventLines, failure
from gateway.replicas.base import Trust
from gateway.replicas.calls import NAMES, read_most
from gateway.replicas.load import RankLoad
from gateway.replicas.prefix_leases import LeaseBudget
from gateway.replicas.rendering import Rendering
from gateway.replicas.requests import Call, write
from gateway.replicas.touching import Joined, LeaseKeeper
from gateway.replicas.warming import HotPrefixes
from gateway.storage.redis_calls import RedisCalls
from gateway.types import EncodedPrompt, Request

CONNECT_TIMEOUT_S: Final = 5.0
PURGE_TIMEOUT_S: Final = 30.0
AT_ONCE_BYTES: Final = 1 << 20
"""A larger body is written in parts, so that the event loop turns in between."""

MAX_REFUSAL_BYTES: Final = 1 << 20
"""Of an answer that says what is wrong; the rest is left."""

_PURGES: Final = {"vllm": "reset_prefix_cache", "sglang": "flush_cache"}

OnLoad = Callable[["Replica"], None]
OnComputed = Callable[[str, bytes], None]
Prefix = Callable[[str, bytes], int]


@dataclass(slots=True)
class _Flight:
    """A sequence that the server works on."""

    tenant: str
    cost: int  # prompt tokens that it will probably have to prefill
    lane: Lane
    sent_s: float
    started: bool = False  # its first token is here
    response: aiohttp.ClientResponse | None = None


class Replica:
    """stages.Engine, and what engines/registry.py needs. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        start: Callable[[], None],
        stop: Callable[[], Awaitable[None]],
        prefix: Prefix,
        on_load: OnLoad,
        on_computed: OnComputed,
        hot: HotPrefixes,
        leases: LeaseBudget = LeaseBudget(),  # noqa: B008
        calls: RedisCalls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        url          of its server; other ranks than the first add `#rank`
        start, stop  its server: all ranks join and leave together
        prefix       leading blocks of packed digests that an incarnation holds, as far as this gateway knows
        on_load      called when it has joined, and whenever its load was read
        on_computed  called with an incarnation and packed digests of a prompt that it has computed
        hot          is told what requests reuse
        calls        of Redis, where gateways share its leases; None without Redis
        """
        self.name = name
        self.url = url
        self.leases = LeaseKeeper(name, leases, calls, self._taken, self._is_idle, prefix, clock)
        self.draining = False
        self.why = ""  # it is not joined; empty before it was asked
        self.heard_s = float("-inf")  # by the clock: when bytes of an answer came last
        self._start, self._stop = start, stop
        self._prefix, self._on_load, self._hot, self._clock = prefix, on_load, hot, clock
        self._on_computed = on_computed
        self._hello: Hello | None = None
        self._joined: Joined | None = None
        self._rendering: Rendering | None = None  # of its server, from when it joined first
        self._is_joined = asyncio.Event()
        self._flights: dict[int, _Flight] = {}
        self._numbers = itertools.count(1)
        self._reported = RankLoad(0, 0, 0.0)
        self._reported_s = 0.0
        self._ended = 0  # sequences of the report that are none any more
        self._indexed = 0  # blocks of the index, at the last report
        self._counts = {"requests": 0, "failed": 0, "lost": 0, "warmed_tokens": 0}

    # -- for the pipeline and the registry -----------------------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        """Raises EngineLostError before it has joined for the first time."""
        if self._hello is None:
            raise EngineLostError(f"Engine {self.name} has not been reached yet.")
        return self._hello

    @property
    def model(self) -> str | None:
        return self._hello.model if self._hello else None

    @property
    def joined(self) -> bool:
        return self._joined is not None

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def trust(self) -> Trust:
        return self._joined.follower.trust if self._joined else "fallback"

    @property
    def load(self) -> Load:
        """As last reported, plus what this gateway has sent since, less what has ended."""
        reported, reported_s = self._reported, self._reported_s
        waiting, running = reported.waiting, max(0, reported.running - self._ended)
        backlog, new_tokens = 0, 0  # `new`: behind the report
        batch_waiting, batch_running, batch_backlog = 0, 0, 0
        for flight in self._flights.values():
            is_new, is_batch = flight.sent_s > reported_s, flight.lane == "batch"
            if flight.started:
                running += is_new
                batch_running += is_batch
                continue
            backlog += flight.cost
            if is_new:
                waiting += 1
                new_tokens += flight.cost
            if is_batch:
                batch_waiting += 1
                batch_backlog += flight.cost
        if reported.waiting_tokens is not None:
            backlog = max(backlog, reported.waiting_tokens + new_tokens)
        total = self._hello.num_blocks if self._hello else 0
        live = min(total, round(reported.kv_used * total))
        cached = min(total - live, max(0, self._indexed - live))
        return Load(
            waiting=waiting,
            running=max(running, len(self._flights) - waiting),
            prefill_backlog=backlog,
            free_blocks=total - live - cached,
            cached_blocks=cached,
            live_blocks=live,
            prefill_tokens_per_s=reported.prefill_tokens_per_s,
            decode_tokens_per_s=reported.decode_tokens_per_s,
            draining=self.draining,
            leased_blocks=self.leases.leased_blocks,
            batch_waiting=batch_waiting,
            batch_running=batch_running,
            batch_backlog=batch_backlog,
        )

    @property
    def prefilling(self) -> Mapping[str, int]:
        tokens: dict[str, int] = {}
        for flight in self._flights.values():
            if not flight.started and flight.lane == "online":
                tokens[flight.tenant] = tokens.get(flight.tenant, 0) + flight.cost
        return tokens

    def reused(self, held_tokens: int, prompt_tokens: int) -> int:
        """See stages.Engine. Its own blocks may be larger than those of the index."""
        joined = self._joined
        own = (joined.target.facts.block_size if joined else 0) or self.hello.namespace.block_size
        return min(held_tokens, max(0, prompt_tokens - 1)) // own * own

    def resync(self) -> None:
        """Its index said more than its cache holds: see follower.py. Does nothing while it is not joined."""
        if self._joined is not None:
            self._joined.follower.resync()

    def start(self) -> None:
        self._start()

    async def stop(self) -> None:
        """Leaves with its server. Sequences on it get EngineLostError."""
        await self._stop()

    @property
    def is_own(self) -> bool:
        """Whether what is to be done once for the fleet is this gateway's to do: it follows the KV events, or none can
        be followed."""
        follower = self._joined and self._joined.follower
        return follower is not None and (follower.trust == "fallback" or bool(follower.figures()["following"]))

    def warmed(self, num_tokens: int) -> None:
        """So many were computed before any request wanted them."""
        self._counts["warmed_tokens"] += num_tokens

    def drain(self, draining: bool) -> None:
        """It gets no new requests from now on, and those that run end; or it gets some again."""
        if draining != self.draining:
            self.draining = self.leases.draining = draining
            if self._joined is not None:
                self._on_load(self)

    async def wait_joined(self) -> None:
        """Returns when it is joined. May wait for ever."""
        await self._is_joined.wait()

    async def fetch_stats(self) -> dict[str, Any] | None:
        """Of leases alone: what else is known of it is in `figures`."""
        return {"leases": leases} if (leases := self.leases.figures()) else None

    def figures(self) -> dict[str, Any]:
        """What this gateway knows of it: why it is not joined, version and rank, its own counters, under `rendering`
        which requests it renders itself (rendering.py), and under `index` how far its cache is known (follower.py)."""
        joined = self._joined
        reason = "" if joined else self.why or "it has not been reached yet"
        figures: dict[str, Any] = {"reason": reason, "in_flight": self.in_flight, **self._counts}
        if joined is not None:
            target = joined.target
            figures |= {"version": target.facts.version, "rank": target.rank, "ranks": target.facts.ranks}
            figures["rendering"] = self._rendering.figures() if self._rendering else {}
            figures["index"] = joined.follower.figures()
        return figures

    async def purge(self, salt_prefix: str) -> dict[str, Any]:
        """Ends the leases, and empties the whole cache: these servers cannot empty the part of one salt. Raises
        EngineLostError for one that cannot, or does not."""
        self._hot.forget(salt_prefix)
        joined = self._joined
        self.leases.purge(salt_prefix)
        if joined is None:
            raise EngineLostError("It is unreachable.")
        kind = joined.target.facts.kind
        if kind not in _PURGES:
            raise EngineLostError(f"A {NAMES[kind]} cannot be told to empty its cache.")
        timeout = aiohttp.ClientTimeout(total=PURGE_TIMEOUT_S)
        try:
            async with joined.session.post(_PURGES[kind], timeout=timeout) as answer:
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError, RuntimeError) as error:
            raise EngineLostError(f"It did not answer: {error or type(error).__name__}") from None
        if status == 404:
            raise EngineLostError("A vLLM empties its cache with VLLM_SERVER_DEV_MODE=1 alone.")
        return {"complete": status == 200, "owner": joined.target.hello.incarnation}

    # -- for its server ------------------------------------------------------------------------------------------------

    def join(self, joined: Joined, rendering: Rendering) -> None:
        self._joined, self._hello, self._rendering = joined, joined.target.hello, rendering
        self._reported_s, self._ended = self._clock(), 0
        self._is_joined.set()
        self.leases.join(joined)
        self._on_load(self)

    def leave(self, why: str) -> None:
        """Sequences get EngineLostError, now or when the session is closed, which leaves those waiting that read."""
        self._joined, self.why = None, why
        for flight in self._flights.values():
            if flight.response is not None and not flight.response.content.is_eof():
                flight.response.content.set_exception(aiohttp.ClientPayloadError("its server was lost"))
        self._is_joined.clear()

    def report(self, load: RankLoad) -> None:
        """What the server says of itself, once a second."""
        self._reported, self._reported_s, self._ended = load, self._clock(), 0
        if self._joined is not None:
            self._indexed = int(self._joined.follower.figures().get("blocks", 0))
            self._on_load(self)

    def _taken(self) -> int:
        """Blocks that are live, or soon will be."""
        hello = self._hello
        if hello is None:
            return 0
        new = [
            flight.cost for flight in self._flights.values() if not flight.started or flight.sent_s > self._reported_s
        ]
        return round(self._reported.kv_used * hello.num_blocks) + sum(new) // hello.namespace.block_size

    def _is_idle(self) -> bool:
        return not self._reported.waiting and all(flight.started for flight in self._flights.values())

    # -- a sequence ----------------------------------------------------------------------------------------------------

    async def render(self, prompt: EncodedPrompt, request: Request) -> EncodedPrompt:
        """See stages.Engine."""
        joined, rendering = self._joined, self._rendering
        if joined is None or rendering is None:
            raise EngineLostError(f"Engine {self.name} is unreachable.")
        return await rendering.render(prompt, request, joined.target.hello)

    async def generate(
        self, prompt: EncodedPrompt, sampling: Sampling, request: Request
    ) -> AsyncGenerator[SequenceUpdate, None]:
        """Updates of one sequence; the last one has `finish`. Closing it closes the connection.

        Raises EngineLostError when the server is lost, is busy or gives the sequence up, UnsupportedError for what it
        cannot do, BadRequestError for what it refuses, DeadlineError at request.deadline_s, EngineFailedError when it
        fails on this sequence.
        """
        joined, rendering = self._joined, self._rendering
        if joined is None or rendering is None:
            raise EngineLostError(f"Engine {self.name} is unreachable.")
        target, hello = joined.target, joined.target.hello
        salt = derived_salt(hello.namespace.salt, request.salt)
        call = write(target, prompt, sampling, request, salt)
        held_tokens = 0
        if request.use_cache:
            held_tokens = self._prefix(hello.incarnation, prompt.digests) * hello.namespace.block_size
            held_tokens = max(held_tokens, request.trace.predicted_tokens or 0)  # by Redis, and what was just computed
            joined.follower.sent(prompt.digests)
        claim = await self.leases.open(prompt, request, held_tokens)
        cost, number = max(0, prompt.num_tokens - held_tokens), next(self._numbers)
        flight = self._flights[number] = _Flight(request.tenant.name, cost, request.lane, self._clock())
        self._counts["requests"] += 1
        answer, tokens = Answer(target, sampling, prompt, request.constraint, call.ids), 0
        response: aiohttp.ClientResponse | None = None
        try:
            with calling(self.name, target.facts.kind, request.model) as traced, self._translated(joined):
                response = flight.response = await self._send(joined, call, request, traced)
                if response.status != 200:
                    body = await read_most(response, MAX_REFUSAL_BYTES)
                    raise failure(target, response.status, body, request.constraint)
                rendering.sent(prompt, request)
                if call.whole:
                    answer.feed(await read_most(response, MAX_EVENT_BYTES))
                lines = EventLines()
                while not answer.ended:
                    if (update := await self._next(response, lines, answer)) is not None:
                        if answer.wrong is not None and not flight.started:
                            raise EngineLostError(f"Engine {self.name} answers another prompt: {answer.wrong}.")
                        self._note(flight, hello, prompt, request, update)
                        tokens += len(update.tokens)
                        if claim is not None:
                            self.leases.heard(claim, update)
                        yield update
        finally:
            del self._flights[number]
            self.leases.ended(tokens)
            rendering.answered(answer.wrong)
            self._ended += flight.sent_s <= self._reported_s
            if response is not None:
                if answer.ended:
                    response.release()  # closes it unless the body has been read
                else:
                    response.close()

    def _note(
        self, flight: _Flight, hello: Hello, prompt: EncodedPrompt, request: Request, update: SequenceUpdate
    ) -> None:
        if not flight.started and request.use_cache:
            self._on_computed(hello.incarnation, prompt.digests)
        flight.started = True
        if update.cached_tokens:
            self._hot.reused(hello, request, prompt, update.cached_tokens)

    async def _next(self, response: aiohttp.ClientResponse, lines: EventLines, answer: Answer) -> SequenceUpdate | None:
        """What the next bytes say; the last update at their end."""
        data = await response.content.readany()
        self.heard_s = self._clock()
        if data:
            return _merged([answer.feed(line) for line in lines.feed(data)])
        update = answer.end()
        if update is None:
            raise EngineLostError(f"Engine {self.name} ended the answer in its middle.")
        return update

    @contextmanager
    def _translated(self, joined: Joined) -> Iterator[None]:
        """Errors of aiohttp as ours. A server that was left because it was silent has not died of this sequence."""
        try:
            yield
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self._counts["lost"] += 1
            raise EngineLostError(f"Engine {self.name} cannot be reached.") from None
        except TimeoutError:
            raise DeadlineError("The answer took longer than this server allows (server.request_timeout_s).") from None
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # the last: a session that was closed
            self._counts["lost"] += 1
            lost = EngineLostError(f"The connection to engine {self.name} was lost.")
            lost.died = self._joined is joined
            raise lost from error
        except EngineFailedError:
            self._counts["failed"] += 1
            raise

    async def _send(
        self, joined: Joined, call: Call, request: Request, traced: TracedCall | None
    ) -> aiohttp.ClientResponse:
        left_s = max(0.001, request.deadline_s - time.monotonic())
        headers = {"content-type": "application/json", **call.headers}
        if traced is not None:
            traced.write(headers)
        response = await joined.session.post(
            call.path,
            data=call.body if len(call.body) <= AT_ONCE_BYTES else io.BytesIO(call.body),
            headers=headers,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_TIMEOUT_S),
        )
        if traced is not None:
            traced.status = response.status
        return response


def _merged(found: list[SequenceUpdate | None]) -> SequenceUpdate | None:
    """The updates that came together as one."""
    updates = [update for update in found if update is not None]
    if not updates:
        return None
    first = updates[0]
    for update in updates[1:]:
        first.tokens += update.tokens
        if update.logprobs is not None:
            first.logprobs = [*(first.logprobs or ()), *update.logprobs]
        first.prompt_logprobs = first.prompt_logprobs or update.prompt_logprobs
        first.cached_tokens = first.cached_tokens if update.cached_tokens is None else update.cached_tokens
        first.finish, first.stop_id = update.finish, update.stop_id
    return first
