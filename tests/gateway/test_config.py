"""Settings: where they come from, what stops the start, and that every one of them is documented."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from engine.config import ConfigError, flag_name, load, secret_of, sections, variable_name
from gateway.config import Settings, TenantSettings

EXAMPLES = Path(__file__).parents[2] / "deploy/examples"
PATHS = [f"{section}.{name}" for section, model in sections(Settings).items() for name in model.model_fields]


def read(
    tmp_path: Path, toml: str = "", environ: dict[str, str] | None = None, flags: dict[str, object] | None = None
) -> Settings:
    file = tmp_path / "kvasir.toml"
    file.write_text(toml, encoding="utf-8")
    return load(Settings, file=file, environ=environ or {}, flags=flags or {})


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    toml, environ = "[server]\nport = 1", {"KVASIR_SERVER_PORT": "2"}
    assert read(tmp_path).server.port == 8080
    assert read(tmp_path, toml).server.port == 1
    assert read(tmp_path, toml, environ).server.port == 2
    assert read(tmp_path, toml, environ, {"server.port": "3"}).server.port == 3
    assert read(tmp_path, toml, environ, {"server.port": None}).server.port == 2


def test_tenants_come_from_the_file(tmp_path: Path) -> None:
    settings = read(
        tmp_path, '[auth]\nadmin_keys = ["admin-key-1"]\n[[tenants]]\nname = "search"\nkeys = ["key-number-1"]'
    )
    assert settings.tenants == (TenantSettings(name="search", keys=("key-number-1",)),)
    assert settings.auth.admin_keys == ("admin-key-1",)


def test_admin_keys_come_from_a_variable_too(tmp_path: Path) -> None:
    found = read(tmp_path, environ={"KVASIR_AUTH_ADMIN_KEYS": "admin-key-1,admin-key-2"})
    assert found.auth.admin_keys == ("admin-key-1", "admin-key-2")


@pytest.mark.parametrize("path", PATHS)
def test_no_secret_is_taken_from_the_command_line(tmp_path: Path, path: str) -> None:
    """A setting of a section that is named like a secret is one, or is listed here with the reason."""
    no_secrets = {
        "auth.admin_content",  # a switch
        "limits.count_cached_tokens",
        "prompt.cache_key",  # what a client's field of that name does
        "slo.first_token_ms",
        "slo.inter_token_ms",
        "tls.key",  # the path of a file
    }
    section, _, name = path.partition(".")
    secret = secret_of(sections(Settings)[section].model_fields[name])
    named = section == "auth" or any(word in name.split("_") for word in ("key", "keys", "secret", "password", "token"))
    assert (secret is not None and secret.within is None) == (named and path not in no_secrets)
    if secret is not None and secret.within is None:
        with pytest.raises(ConfigError, match=f"set {variable_name(path)}, or write it into the file") as caught:
            read(tmp_path, flags={path: "pa5sw0rd"})
        assert "pa5sw0rd" not in str(caught.value)
        assert read(tmp_path, environ={variable_name(path): "pa5sw0rd"})


@pytest.mark.parametrize(
    "url",
    [
        "redis://:{}@cache:6379",
        "rediss://cache?password={}",
        "redis+sentinel://one/m?sentinel_username=u&sentinel_password={}",
        "redis+cluster://u:{}@one,two",
    ],
)
def test_a_password_of_redis_is_not_taken_from_the_command_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="KVASIR_REDIS_URL") as caught:
        read(tmp_path, flags={"redis.url": url.format("pa5sw0rd")})
    assert "pa5sw0rd" not in str(caught.value)
    assert read(tmp_path, environ={"KVASIR_REDIS_URL": url.format("pa5sw0rd")}).redis.url
    assert read(tmp_path, flags={"redis.url": "redis://u@cache:6379"}).redis.url


def test_urls_of_engines_are_split_at_commas(tmp_path: Path) -> None:
    assert read(tmp_path, flags={"engines.urls": "unix:/a,http://b:1"}).engines.urls == ("unix:/a", "http://b:1")


def test_times_to_live_are_split_at_commas_and_checked(tmp_path: Path) -> None:
    assert read(tmp_path, flags={"leases.ttls": "5m,90s"}).leases.ttls == ("5m", "90s")
    with pytest.raises(ConfigError, match=r"leases\.ttls"):
        read(tmp_path, "[leases]\nttls = []")
    for toml in ("ttls = ['5 minutes']", "ttls = ['0s']", "default_ttl = '1d'"):
        with pytest.raises(ConfigError, match="is no duration; one is written like 90s, 30m or 12h"):
            read(tmp_path, f"[leases]\n{toml}")


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        read(tmp_path).server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("toml", "environ", "flags", "parts"),
    [
        ("[server]\nprot = 1", {}, {}, ["server.prot", "kvasir.toml", "no such setting"]),
        ("[severs]\nport = 1", {}, {}, ["severs", "no such setting"]),
        ("[server]\nport = 'x'", {}, {}, ["server.port", "kvasir.toml", "integer", "'x'"]),
        ("[server]\nport = 70000", {}, {}, ["server.port", "65535", "70000"]),
        ("server = 1", {}, {}, ["server"]),
        ("[server", {}, {}, ["kvasir.toml", "TOML"]),
        ("", {"KVASIR_ENGINE_DTYPE": "int3"}, {}, ["engine.dtype", "KVASIR_ENGINE_DTYPE", "'bfloat16'"]),
        ("", {"KVASIR_NOTHING": "1"}, {}, ["KVASIR_NOTHING", "no such setting"]),
        ("", {}, {"queue.max_wait_s": "nan"}, ["queue.max_wait_s", "--queue-max-wait-s"]),
        ("", {}, {"server.port": "-1"}, ["server.port", "--port", "greater than or equal to 0"]),
        ("", {"KVASIR_REDIS_URL": "http://cache:6379"}, {}, ["redis.url", "KVASIR_REDIS_URL", "redis://"]),
        ("", {}, {"redis.url": "redis://cache:x"}, ["redis.url", "--redis-url"]),
        ("[[tenants]]\nname = 'a'\nkeys = []", {}, {}, ["tenants.0.keys"]),
        ("[[tenants]]\nname = 'a b'\nkeys = ['long-enough']", {}, {}, ["tenants.0.name"]),
    ],
)
def test_a_bad_setting_says_which_where_and_what_would_be_right(
    tmp_path: Path, toml: str, environ: dict[str, str], flags: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, toml, environ, flags)
    for part in parts:
        assert part in str(caught.value)


def test_one_key_cannot_belong_to_two_tenants(tmp_path: Path) -> None:
    toml = "[[tenants]]\nname='a'\nkeys=['the-same-key']\n[[tenants]]\nname='b'\nkeys=['the-same-key']"
    with pytest.raises(ConfigError, match="a key of 'b' is also in tenant 'a'") as caught:
        read(tmp_path, toml)
    assert "the-same-key" not in str(caught.value)


def test_a_key_that_is_too_short_is_refused_without_showing_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "[[tenants]]\nname = 'a'\nkeys = ['abc']")
    assert "tenants.0.keys.0" in str(caught.value)
    assert "abc" not in str(caught.value)


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ('[tenants]\nname = "a"\n', "tenants ({}): write [[tenants]] for each of them, not [tenants]"),
        ("[upstreams]\n", "upstreams ({}): write [[upstreams]] for each of them, not [upstreams]"),
        ("[[server]]\nport = 1\n", "server ({}): write [server] once, not [[server]]"),
        (
            '[[tenants]]\nname = "a"\nkeys = ["short"]\n',
            "tenants.0.keys.0 ({}): string should have at least 8 characters",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_told_once_and_as_it_has_to_be_written(
    tmp_path: Path, toml: str, said: str
) -> None:
    file = tmp_path / "kvasir.toml"
    file.write_text(toml, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load(Settings, file=file, environ={}, flags={})
    assert str(refused.value) == said.format(file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(Settings, file=tmp_path / "nowhere.toml", environ={}, flags={})


def test_every_setting_has_its_own_flag_and_variable() -> None:
    assert len({flag_name(path) for path in PATHS}) == len(PATHS)
    assert len({variable_name(path) for path in PATHS}) == len(PATHS)


def test_prices_come_from_the_file_with_every_digit(tmp_path: Path) -> None:
    toml = """
    [[prices]]
    model = "a*"
    input = 0.1
    cached_read = 0.000000001
    cache_write_of = { 1h = 30 }
    """
    (price,) = read(tmp_path, toml).prices
    assert (price.input, price.cached_read, price.cache_write) == (Decimal("0.1"), Decimal("1e-9"), None)
    assert (price.currency, price.output, price.cache_write_of) == ("USD", 0, {"1h": 30})


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("model = 'a'", "prices.0.input"),
        ("model = 'a'\ninput = -1", "prices.0.input"),
        ("model = 'a'\ninput = nan", "prices.0.input"),
        ("model = 'a'\ninput = 0.0000000001", "prices.0.input"),
        ("model = 'a'\ninput = 1\ncurrency = 'dollars'", "prices.0.currency"),
        ("model = 'a'\ninput = 1\ncache_write_of = { tomorrow = 3 }", "is no duration"),
        ("model = 'a'\ninput = 1\n[[prices]]\nmodel = 'a'\ninput = 2", "prices: the name 'a' is there twice"),
    ],
)
def test_a_price_that_cannot_be_is_refused(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, f"[[prices]]\n{toml}")


TWO = "[[tenants]]\nname = 'a'\nkeys = ['the-key-of-a']\n[[tenants]]\nname = 'b'\nkeys = ['the-key-of-b']\n"


def test_namespaces_come_from_the_file(tmp_path: Path) -> None:
    toml = TWO + "[[namespaces]]\nname = 'public'\ntenants = ['*']\n"
    toml += "[[namespaces]]\nname = 'n'\ntenants = ['a']\ndefault = true"
    public, other = read(tmp_path, toml).namespaces
    assert (public.name, public.tenants, public.default) == ("public", ("*",), False)
    assert (other.name, other.tenants, other.default) == ("n", ("a",), True)
    assert read(tmp_path, "[[namespaces]]\nname = 'n'\ntenants = ['anonymous']").namespaces


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[namespaces]]\nname = 'n'\ntenants = ['c']", "'n' is for 'c', which is no tenant"),
        ("[[namespaces]]\nname = 'n'\ntenants = []", "namespaces.0.tenants"),
        ("[[namespaces]]\nname = 'n m'\ntenants = ['a']", "namespaces.0.name"),
        ("[[namespaces]]\nname = 'private'\ntenants = ['a']", "'private' is there twice, or reserved"),
        ("[[namespaces]]\nname = 'n'\ntenants = ['a']\n" * 2, "'n' is there twice"),
        (
            "[[namespaces]]\nname = 'n'\ntenants = ['*']\ndefault = true\n"
            "[[namespaces]]\nname = 'm'\ntenants = ['b']\ndefault = true",
            "'n' and 'm' are both the default of 'b'",
        ),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, TWO + toml)


A = "[[upstreams]]\nname = 'a'\nurl = 'https://api.test/v1/'\nmodels = ['m', 'fast = m-mini', 'x/* = *']\n"


def test_upstreams_come_from_the_file_and_hide_their_secrets(tmp_path: Path) -> None:
    (upstream,) = read(tmp_path, A + "key = 'sk-secret'\nheaders = { X-Team = 'secret-too' }").upstreams
    assert (upstream.url, upstream.tenants) == ("https://api.test/v1", ("*",))
    assert [item.upstream for item in upstream.served] == [None, "m-mini", "*"]
    assert upstream.key is not None
    assert upstream.key.get_secret_value() == "sk-secret"
    assert "secret" not in repr(upstream).replace("SecretStr", "")


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (A + A, "the name 'a' is there twice"),
        (A + "tenants = ['b']", "'a' is for 'b', which is no tenant"),
        (A + "tenants = []", "upstreams.0.tenants"),
        (A + "key = 'sk-secret'\nkey_env = 'KEY'", "one of them is enough"),
        (A + "key_env = 'KVASIR_KEY'", "are settings of Kvasir's own"),
        (A + 'key = "sk-secret\\n"', "characters that no header has"),
        (A + "headers = { 'sk secret' = 'x' }", "no header that can be set"),
        (A + "headers = { Host = 'sk-secret' }", "no header that can be set"),
        (A.replace("https://", "ftp://sk-secret@"), "begins with http:// or https://"),
        (A.replace("https://", "https://u:sk-secret@"), "has no user, query or fragment"),
        (A.replace("'m'", "'* = m'"), "one `\\*` on both sides"),
        (A.replace("'m'", "'m ='"), "names no model"),
        (A.replace("name = 'a'", "name = 'a b'"), "upstreams.0.name"),
        (A + "dialect = 'cohere'", "'openai', 'anthropic' or 'gemini'"),
    ],
)
def test_an_upstream_that_cannot_be_is_refused_without_showing_a_secret(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, toml)
    assert "sk-secret" not in str(caught.value)


R = "[[replicas]]\nname = 'r'\nkind = 'vllm'\nurl = 'http://vllm.test:8000/v1/'\n"


def test_replicas_come_from_the_file_and_hide_their_key(tmp_path: Path) -> None:
    toml = R + "key = 'sk-secret'\nmodel = 'llama = /models/llama'\nkv_events = 'tcp://[::1]:5557'"
    (replica,) = read(tmp_path, toml).replicas
    assert (replica.url, replica.kv_events, replica.kv_replay) == ("http://vllm.test:8000", "tcp://[::1]:5557", "auto")
    assert replica.served == ("llama", "/models/llama")
    assert "secret" not in repr(replica).replace("SecretStr", "")
    assert read(tmp_path, R).replicas[0].served is None


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        (R + R, "replicas: the name 'r' is there twice"),
        (A.replace("'a'", "'r'", 1) + R, "replicas: the name 'r' is there twice"),
        (R.replace("'vllm'", "'tgi'"), "'vllm', 'sglang' or 'tensorrt-llm'"),
        (R.replace("http://", "http://u:sk-secret@"), "key belongs into key or api_key_env"),
        (R.replace("8000", "80000"), "replicas.0.url"),
        (R + "key = 'sk-secret'\napi_key_env = 'KEY'", "both a key and api_key_env"),
        (R + "model = 'llama-*'", "has a name of its own"),
        (R + "kv_events = 'tcp://*:5557'", r"tcp://\*:port is for a Service"),
        (R + "kv_events = 'host:5557'", "an endpoint is `auto`, `off` or tcp://host:port"),
        (R.replace("http://vllm.test:8000/v1/", "k8s://vllm:http"), "a Service is k8s://namespace/service:port"),
        (R + "[kubernetes]\nurl = 'http://10.0.0.1'", "an API server's URL begins with https://"),
        (R + "kv_replay = 'tcp://host:70000'", "replicas.0.kv_replay"),
        (R + "kv_events = 'off'\nkv_replay = 'tcp://host:5558'", "of no use without kv_events"),
        (R + "tokenizer = ''", "replicas.0.tokenizer"),
        (R.replace("url", "link"), "replicas.0.link"),
    ],
)
def test_a_replica_that_cannot_be_is_refused_without_showing_a_secret(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, toml)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_an_example_can_be_used_as_it_is(name: str) -> None:
    load(Settings, file=EXAMPLES / name, environ={}, flags={})
