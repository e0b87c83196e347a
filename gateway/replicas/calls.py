"""Questions to a server over HTTP: every answer has a limit in bytes and time, and what is wrong is one line.

The file that translates aiohttp's errors. What is asked is in servers.py and load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from gateway.config import ReplicaSettings
from gateway.replicas.base import Kind

MAX_ANSWER_BYTES: Final = 16 << 20
"""Of one answer. The description of vLLM's API has 0.3 MB, its metrics 56 kB for each rank."""

NAMES: Final[Mapping[Kind, str]] = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}


class ServerError(Exception):
    """A server that cannot be used as it is configured, or not now. The message is one line for the log. `status` is
    that of an answer which refuses the question; None where there was no such answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def open_session(settings: ReplicaSettings, key: str | None) -> aiohttp.ClientSession:
    """For what a server is asked here. Close it."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(base_url=f"{settings.url}/", headers=headers)


class Caller:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, settings: ReplicaSettings) -> None:
        self._session = session
        self._settings = settings

    def error(self, why: str, status: int | None = None) -> ServerError:
        return ServerError(f"replica {self._settings.name} ({self._settings.url}): {why}", status)

    async def ask(self, path: str, timeout_s: float, body: object = None, *, optional: bool = False) -> Any:
        """The JSON that it answers to GET, or to POST with a body. None where `optional` and it has no such page, or
        refuses. Raises ServerError."""
        found = await self.fetch(path, timeout_s, body, optional=optional)
        try:
            return None if found is None else orjson.loads(found)
        except ValueError:
            raise self.error(f"/{path} is no JSON; {self._is_it()}") from None

    async def fetch(self, path: str, timeout_s: float, body: object = None, *, optional: bool = False) -> bytes | None:
        """The same as bytes."""
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        headers = {} if body is None else {"content-type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                found = await read_body(answer)
        except TimeoutError:
            raise self.error(f"no answer to {method} /{path} within {timeout_s:g} s") from None
        except aiohttp.ClientSSLError as error:
            raise self.error(f"its TLS cannot be used: {_line(error)}") from None
        except aiohttp.ClientConnectorDNSError:
            raise self.error(f"its host name {urlsplit(self._settings.url).hostname} is not known") from None
        except aiohttp.ClientConnectorError as error:
            raise self.error(f"nothing can be reached there: {error.strerror or _line(error)}") from None
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:  # the last: a closed session
            raise self.error(f"{method} /{path} broke off: {_line(error)}") from None
        if found is None:
            raise self.error(f"{method} /{path} answered more than {MAX_ANSWER_BYTES >> 20} MiB")
        if answer.status == 200:
            return found
        if optional and 400 <= answer.status < 500:
            return None
        raise self._refused(f"{method} /{path}", answer.status, found)

    def _refused(self, what: str, status: int, body: bytes) -> ServerError:
        if status in (401, 403):
            keyed = "Authorization" in self._session.headers
            which = "its API key" if keyed else "requests without an API key"
            return self.error(f"it refuses {which} (HTTP {status}); set key or api_key_env")
        elsewhere = status in (404, 405) or 300 <= status < 400
        if elsewhere:
            return self.error(f"{what} answered HTTP {status}; {self._is_it()}")
        return self.error(f"{what} answered HTTP {status}; {message_of(body)}", status)

    def _is_it(self) -> str:
        return f"is this the URL of a {NAMES[self._settings.kind]}?"


async def read_body(answer: aiohttp.ClientResponse) -> bytes | None:
    """None for a body that is larger than it may be."""
    body = bytearray()
    while chunk := await answer.content.read(1 << 18):
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            return None
    return bytes(body)


async def read_most(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """The body, cut off at the limit."""
    body = bytearray()
    while len(body) < limit_bytes and (chunk := await response.content.read(limit_bytes - len(body))):
        body += chunk
    return bytes(body)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def message_of(body: bytes) -> str:
    """Of an error's body, in one line."""
    try:
        value = orjson.loads(body)
    except ValueError:
        value = None
    found = mapping(value).get("error", value)
    text = mapping(found).get("message") or mapping(found).get("detail") or (found if isinstance(found, str) else "")
    return " ".join(str(text or "it says no more").split())[:200]


# -- values that others wrote ------------------------------------------------------------------------------------------


def mapping(value: object) -> Mapping[str, Any]:
    """An object, or the first one of a list of them; else an empty one."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}


def number(value: object) -> float:
    """0 for what is no finite number."""
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0
    return found if abs(found) < 1e18 else 0.0


def whole(value: object) -> int:
    return int(number(value))
