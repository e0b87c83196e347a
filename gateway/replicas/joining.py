"""One server of others: joins, is looked after once a second, leaves, and joins again. Its ranks are replicas.

    1. facts       what it says of itself (servers.py)
    2. tokeniser   from a folder, a hub id or the server (tokenizer_files.py), loaded by the prompt stage, and compared
                   with what the server makes of prompts (rendering.py)
    3. hello       the same in all gateways: they share the index of an incarnation
    4. joined      requests may be sent; its KV events are followed (follower.py)
    5. lost        it has not answered, nor sent bytes of an answer, for SILENT_S: requests on it end

Why a server is not joined is one line in the log, once for each reason. Others are not concerned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import aiohttp
import xxhash

from engine.protocol import Hello, Namespace, TokenizerFiles
from gateway import tasks
from gateway.config import ReplicaSettings
from gateway.digests import UNSALTED
from gateway.errors import KvasirError, NativeError
from gateway.replicas.base import BLOCK_TOKENS, OnBlocks, ServerFacts
from gateway.replicas.calls import ServerError
from gateway.replicas.follower import Follower
from gateway.replicas.load import LoadMeter
from gateway.replicas.prefix_leases import LeaseBudget
from gateway.replicas.rendering import Prompts, Rendering
from gateway.replicas.replica import OnComputed, OnLoad, Prefix, Replica
from gateway.replicas.requests import Target, find_refusal, takes_salt
from gateway.replicas.secret import FleetSecret
from gateway.replicas.servers import find_facts
from gateway.replicas.tokenizer_files import ModelTokenizer, load_tokenizer, speller
from gateway.replicas.touching import Joined
from gateway.replicas.warming import HotPrefixes
from gateway.storage.redis_calls import RedisCalls

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
LOOK_TIMEOUT_S: Final = 2.5
SILENT_S: Final = 5.0
"""Without an answer to a look, and without bytes of any other answer, a server is lost."""

FIRST_RETRY_S: Final = 0.25
LONGEST_RETRY_S: Final = 5.0

KEEP_ALIVE_S: Final = 4.0
"""Of idle connections: less than the 5 s after which these servers close them."""

ASSUMED_SEQUENCES: Final = 256
"""That a rank runs at the same time, where it does not say: vLLM's default."""

ASSUMED_CONTEXT_TOKENS: Final = 32_768
"""Where a server does not say (TensorRT-LLM); it refuses what is longer itself."""

OnTokenizer = Callable[[Hello, TokenizerFiles], Awaitable[None]]


class Server:
    """Holds the replicas of one [[replicas]] entry, from `start` to `stop`."""

    def __init__(
        self,
        settings: ReplicaSettings,
        key: str | None,
        *,
        secret: FleetSecret,
        calls: Callable[[], RedisCalls | None],
        needs_salt: bool,
        prompts: Prompts,
        on_tokenizer: OnTokenizer,
        on_blocks: OnBlocks,
        on_lost: Callable[[str], None],
        on_load: OnLoad,
        on_rank: Callable[[Replica], None],
        prefix: Prefix,
        on_computed: OnComputed,
        hot: HotPrefixes,
        leases: LeaseBudget = LeaseBudget(),  # noqa: B008
    ) -> None:
        """
        calls         of Redis, for one replica; None without Redis
        needs_salt    tenants must not share its cache, so that a server without salts cannot be used
        prompts       encodes prompts, in our tokens and in a server's
        on_tokenizer  called before it counts as joined; may raise ValueError to refuse it
        on_blocks     called for an incarnation's block events, in order
        on_lost       called once for each incarnation that is lost
        on_load       called with a replica that has joined or whose load was read
        on_rank       called with each replica besides the first, once it is known that there is one
        prefix        leading blocks of packed digests that an incarnation holds, as far as this gateway knows
        on_computed   called with an incarnation and packed digests of a prompt that it has computed
        hot           is told what requests reuse
        """
        self.settings, self._key = settings, key
        self._draining = False
        self._secret, self._calls, self._needs_salt = secret, calls, needs_salt
        self._prompts = prompts
        self._rendering: Rendering | None = None
        self._held_s = 0.0  # before it is joined again, at least
        self._on_tokenizer, self._on_blocks, self._on_lost = on_tokenizer, on_blocks, on_lost
        self._on_load, self._on_rank, self._prefix = on_load, on_rank, prefix
        self._on_computed, self._hot, self._leases = on_computed, hot, leases
        self._followers: list[Follower] = []
        self._told = ""  # why it is not joined, as the log says
        self._warned: dict[str, str] = {}  # what the log says of it, by topic
        self._task: asyncio.Task[None] | None = None
        self.replicas = [self._replica(0)]

    def start(self) -> None:
        """Begins to ask it, and goes on until `stop`."""
        if self._task is None:
            self._task = tasks.spawn(self._run(), name=f"replica {self.settings.name}")

    async def stop(self) -> None:
        task, self._task = self._task, None
        await tasks.cancel(task)

    def drain(self, draining: bool) -> None:
        """Its ranks, also those that are found later, get no new requests; or they do again."""
        self._draining = draining
        for replica in self.replicas:
            replica.drain(draining)

    def _replica(self, rank: int) -> Replica:
        name, url = self.settings.name, self.settings.url
        replica = Replica(
            f"{name}-{rank}" if rank else name,
            f"{url}#{rank}" if rank else url,
            start=self.start,
            stop=self.stop,
            prefix=self._prefix,
            on_load=self._on_load,
            on_computed=self._on_computed,
            hot=self._hot,
            leases=self._leases,
            calls=self._calls(),
        )
        replica.drain(self._draining)
        return replica

    # -- its life ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not tasks.was_cancelled():
            began_s, why = time.monotonic(), ""
            async with self._session() as session:
                try:
                    await self._join(session)
                    why = await self._look_after(session)
                except ServerError as error:
                    why = str(error)
                except KvasirError as error:
                    why = f"replica {self.settings.name} ({self.settings.url}): {error.message}"
                except Exception as error:
                    log.exception("replica %s: joining failed", self.settings.name)
                    why = f"replica {self.settings.name} ({self.settings.url}): {type(error).__name__}"
                finally:
                    await self._leave(why, session)
            if why != self._told:
                self._told = why
                log.warning("%s", why)
            if time.monotonic() - began_s > 2 * LONGEST_RETRY_S:
                retry_s = FIRST_RETRY_S
            await asyncio.sleep(max(retry_s, self._held_s))
            self._held_s = 0.0
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)

    def _session(self) -> aiohttp.ClientSession:
        """Of one lifetime: closing it ends all that is under way. Slots bound the number of connections."""
        return aiohttp.ClientSession(
            f"{self.settings.url}/",
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding",),
        )

    async def _join(self, session: aiohttp.ClientSession) -> None:
        settings = self.settings
        # 1. What is it, and can it be used?
        facts = await find_facts(session, settings)
        self._warn_once("no KV events", facts.no_events)
        if (refusal := find_refusal(facts)) is not None:
            raise ServerError(f"replica {settings.name} ({settings.url}): {refusal}")
        if not takes_salt(facts) and self._needs_salt:
            raise ServerError(
                f"replica {settings.name} ({settings.url}): its API takes no cache_salt, so that tenants would share "
                "its cache; it can be used without [[tenants]] alone"
            )
        # 2. Its tokens.
        tokenizer = await load_tokenizer(settings, facts)
        model = settings.served.served if settings.served else facts.models[0]
        salted = takes_salt(facts)
        try:
            secret = await self._secret.of_model(model) if salted else UNSALTED
            hellos = [_hello(settings, facts, rank, model, tokenizer, secret) for rank in range(facts.ranks)]
            await self._on_tokenizer(hellos[0], tokenizer.files)
        except (ValueError, OSError, NativeError) as error:
            raise ServerError(f"replica {settings.name} ({settings.url}): {error}") from None
        self._rendering = Rendering(session, settings, facts, hellos[0], self._prompts, speller(tokenizer.files))
        await self._rendering.start()
        if settings.kind == "vllm":
            eos = tokenizer.files.special_tokens.get("eos_token", "")
            why = "" if await self._rendering.ends_turns(eos) else f"no turn ends with eos_token {eos!r}, and vLLM"
            self._warn_once("structured output may not end", why and f"{why} lets it end with no other token")
        # 3. and 4. Each rank is a replica, and its events are followed.
        while len(self.replicas) < facts.ranks:
            self.replicas.append(self._replica(len(self.replicas)))
            self._on_rank(self.replicas[-1])
        for replica, hello in zip(self.replicas, hellos, strict=False):
            rank = len(self._followers)
            source = facts.sources[rank] if salted and rank < len(facts.sources) else None
            follower = Follower(hello, source, self._on_blocks, self._calls(), name=replica.name)
            self._followers.append(follower)
            follower.start()
            replica.join(Joined(Target(replica.name, facts, rank, hello), session, follower), self._rendering)
            log.info("engine %s joined: %s, incarnation %s", replica.name, hello.model, hello.incarnation)
        self._told = ""

    def _warn_once(self, topic: str, why: str) -> None:
        """Again only when the reason is another one; empty: there is none."""
        if why not in ("", self._warned.get(topic)):
            log.warning("replica %s: %s: %s", self.settings.name, topic, why)
        self._warned[topic] = why

    async def _look_after(self, session: aiohttp.ClientSession) -> str:
        """Reads its load until it is lost. Returns why it is."""
        meter, answered_s = LoadMeter(self.settings), time.monotonic()
        assert self._rendering is not None
        while not self._rendering.refusal:
            try:
                async with asyncio.timeout(LOOK_TIMEOUT_S):
                    loads = await meter.read(session)
            except (ServerError, TimeoutError) as error:
                heard_s = max(answered_s, *(replica.heard_s for replica in self.replicas))
                gone = isinstance(error, ServerError) and "nothing can be reached" in str(error)
                if gone or time.monotonic() - heard_s > SILENT_S:
                    return str(error) or f"replica {self.settings.name} ({self.settings.url}): it is silent"
            else:
                answered_s = time.monotonic()
                for replica, load in zip(self.replicas, loads, strict=False):
                    replica.report(load)
            await asyncio.sleep(LOOK_S)
        self._held_s = self._rendering.retry_s
        return f"replica {self.settings.name} ({self.settings.url}): {self._rendering.refusal}"

    async def _leave(self, why: str, session: aiohttp.ClientSession) -> None:
        followers, self._followers = self._followers, []
        for replica in self.replicas:
            if replica.joined:
                self._on_lost(replica.hello.incarnation)
            replica.leave(why or "it was stopped")
        rendering, self._rendering = self._rendering, None
        if rendering is not None:
            await rendering.stop()
        await session.close()
        for replica in self.replicas:
            await replica.leases.leave()
        for follower in followers:
            with suppress(Exception):
                await follower.stop()


def _hello(
    settings: ReplicaSettings, facts: ServerFacts, rank: int, model: str, tokenizer: ModelTokenizer, secret: str
) -> Hello:
    """What all gateways say of one rank in one lifetime of its server."""
    own = facts.block_size
    block_size = own if own and own % BLOCK_TOKENS and BLOCK_TOKENS % own else BLOCK_TOKENS
    place = xxhash.xxh3_64_hexdigest(f"{settings.place} {rank} {facts.lifetime}".encode())
    weights = facts.root.rstrip("/").rsplit("/", 1)[-1]
    return Hello(
        incarnation=f"{settings.name}-{rank}-{place}",
        model=model,
        namespace=Namespace(
            weights=f"{weights}@{facts.weight_version}", dtype="", kv_dtype="", block_size=block_size, salt=secret
        ),
        context_tokens=facts.context_tokens or ASSUMED_CONTEXT_TOKENS,
        vocab_size=tokenizer.vocab_size,
        num_blocks=facts.num_blocks * own // block_size,
        max_sequences=facts.max_sequences or ASSUMED_SEQUENCES,
        eos_ids=tokenizer.eos_ids,
        tokenizer=tokenizer.files.fingerprint(),
        created=int(float(facts.lifetime)) if facts.lifetime else int(time.time()),
    )
