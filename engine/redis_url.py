"""What a Redis URL says, for both packages. Pure; the clients are made in redis_client.py. No message has any part of
the URL: a password that was not quoted may be in each of them.

    redis://, rediss://, unix://                              one server, as redis-py reads it
    redis+sentinel://[USER:PASSWORD@]HOST[:26379],.../NAME[/DB]   the master that these sentinels name
    redis+cluster://[USER:PASSWORD@]HOST[:6379],...           a Redis Cluster that some of these nodes know

rediss+sentinel:// and rediss+cluster:// are the same over TLS, also to the sentinels, and take some of redis-py's
options, as in `?ssl_ca_certs=/etc/ca.pem`. Sentinels with a login of their own get `sentinel_username` and
`sentinel_password`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

PORTS: Final = {"sentinel": 26379, "cluster": 6379}
_SCHEMES: Final = ("redis", "rediss", "unix", *(f"{tls}+{kind}" for kind in PORTS for tls in ("redis", "rediss")))
_SENTINEL_LOGIN: Final = ("sentinel_username", "sentinel_password")
_SSL: Final = ("ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname", "ssl_ciphers")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """hosts     of sentinels or of nodes; empty for one server
    server    redis-py's URL: of the one server, else of the first host, with login, TLS, options and number of the
              database; secret
    master    the name that sentinels have for it
    sentinel  options of the connections to sentinels: their login; secret
    """

    kind: Literal["single", "sentinel", "cluster"]
    server: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...] = ()
    master: str = ""
    sentinel: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def parse(url: str) -> RedisUrl:
    """Raises ValueError with one line that says what is wrong."""
    try:
        split = urlsplit(url)
    except ValueError:
        raise ValueError("the Redis URL cannot be read: brackets are for IPv6 addresses alone") from None
    if split.scheme not in _SCHEMES:
        raise ValueError(f"a Redis URL begins with {'://, '.join(_SCHEMES[:-1])}:// or {_SCHEMES[-1]}://")
    tls, _, kind = split.scheme.partition("+")
    login, at, listed = split.netloc.rpartition("@")
    if not kind:
        if tls != "unix" and listed:
            _host(listed, 6379, "the host")
        return RedisUrl("single", url)
    hosts = tuple(_host(one, PORTS[kind], f"host {place}") for place, one in enumerate(listed.split(","), start=1))
    name, _, database = split.path.strip("/").partition("/")
    if kind == "cluster" and name not in ("", "0"):
        raise ValueError("the Redis URL has a database, but a cluster has number 0 alone: leave it out")
    if kind == "sentinel" and not name:
        raise ValueError("the Redis URL lacks the name of the master behind its hosts, as in /mymaster")
    if database and not database.isdecimal():
        raise ValueError("the Redis URL has a database that is no number: it ends with /NAME or /NAME/DB")
    options = dict(parse_qsl(split.query))
    known = (_SSL if tls == "rediss" else ()) + (_SENTINEL_LOGIN if kind == "sentinel" else ())
    if not options.keys() <= set(known):
        raise ValueError(f"the Redis URL has an option that is not for it: {', '.join(known) or 'there are none'}")
    if options.get("ssl_check_hostname", "true").lower() not in ("true", "false"):
        raise ValueError("the Redis URL has an ssl_check_hostname that is neither true nor false")
    own = tuple((one.removeprefix("sentinel_"), options.pop(one)) for one in _SENTINEL_LOGIN if one in options)
    first, port = hosts[0]
    where = f"[{first}]:{port}" if ":" in first else f"{first}:{port}"
    server = f"{tls}://{login}{at}{where}/{database or 0}" + (f"?{urlencode(options)}" if options else "")
    return RedisUrl("cluster" if kind == "cluster" else "sentinel", server, hosts, unquote(name), own)


def has_password(url: str) -> bool:
    """Whether a URL logs in with a password, also at sentinels. False for one that `parse` refuses."""
    try:
        parse(url)
        split = urlsplit(url)
        options = dict(parse_qsl(split.query))
        return bool(split.password or options.get("password") or options.get("sentinel_password"))
    except ValueError:
        return False


def _host(written: str, default_port: int, place: str) -> tuple[str, int]:
    bracketed = written.startswith("[")
    host, separator, port = written.rpartition(":") if ":" in written.rpartition("]")[2] else (written, "", "")
    host = host.removeprefix("[").removesuffix("]") if bracketed else host
    if not host or (":" in host and not bracketed):
        raise ValueError(
            f"{place} of the Redis URL is no host or host:port (characters of a password are to be quoted)"
        )
    if separator and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{place} of the Redis URL has a port that is no number from 1 to 65535")
    return host, int(port or default_port)
