"""What a Redis URL says, and what is said of a bad one: one line, without any part of it."""

from __future__ import annotations

import pytest

from engine.redis_url import parse

SECRET = "pa5sw0rd"


def test_sentinels_have_hosts_a_master_and_a_database() -> None:
    url = parse(f"redis+sentinel://user:{SECRET}@one,two:26380,[::1]:9/mymaster/3")
    assert (url.kind, url.master) == ("sentinel", "mymaster")
    assert url.hosts == (("one", 26379), ("two", 26380), ("::1", 9))
    assert url.server == f"redis://user:{SECRET}@one:26379/3"
    assert SECRET not in repr(url)


def test_sentinels_may_have_a_login_of_their_own() -> None:
    url = parse(f"rediss+sentinel://one/m?sentinel_username=u&sentinel_password={SECRET}&ssl_ca_certs=/a/ca.pem")
    assert url.sentinel == (("username", "u"), ("password", SECRET))
    assert url.server == "rediss://one:26379/0?ssl_ca_certs=%2Fa%2Fca.pem"
    assert SECRET not in repr(url)


def test_a_cluster_has_hosts() -> None:
    url = parse("rediss+cluster://one:7000,[fe80::2]/")
    assert (url.kind, url.hosts) == ("cluster", (("one", 7000), ("fe80::2", 6379)))
    assert url.server == "rediss://one:7000/0"


@pytest.mark.parametrize("url", ["redis://cache", "rediss://:p@cache:6380/2", "unix:///run/r.sock?db=1", "redis://"])
def test_one_server_is_what_redis_py_reads(url: str) -> None:
    assert (parse(url).kind, parse(url).server) == ("single", url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://{}@cache", "begins with redis://"),
        ("redis+sentinels://{}@cache/m", "begins with redis://"),
        ("redis://u:{}/x@cache:6379", "a port that is no number"),
        ("redis://u:{}@cache:0", "a port that is no number"),
        ("redis+sentinel://u:{}@one,two", "lacks the name of the master"),
        ("redis+sentinel://u:{}@one,two:x/m", "host 2 of the Redis URL has a port"),
        ("redis+sentinel://u:{}@one,,two/m", "host 2 of the Redis URL is no host"),
        ("redis+sentinel://u:{}@one,fe80::1/m", "host 2 of the Redis URL is no host"),
        ("redis+sentinel://u:{}@one/m/first", "a database that is no number"),
        ("redis+sentinel://u:{}@one/m/1/2", "a database that is no number"),
        ("redis+sentinel://one/m?sentinel_pasword={}", "an option that is not for it: sentinel_username"),
        ("redis+sentinel://u:{}@one/m?ssl_ca_certs=/ca", "an option that is not for it"),
        ("redis+cluster://u:{}@", "host 1 of the Redis URL is no host"),
        ("redis+cluster://u:{}@one:70000", "host 1 of the Redis URL has a port"),
        ("redis+cluster://u:{}@one/1", "a cluster has number 0 alone"),
        ("redis+cluster://u:{}@one?sentinel_password=x", "an option that is not for it: there are none"),
        ("rediss+cluster://u:{}@one?ssl_check_hostname=maybe", "neither true nor false"),
        ("redis://[{}", "cannot be read"),
    ],
)
def test_a_bad_url_is_one_clear_line_without_its_password(url: str, why: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(url.format(SECRET))
    assert why in str(error.value)
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None
