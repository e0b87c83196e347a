"""Certificates in files that may change while the process runs: of the gateway's port, and of both ends of the stream
between gateways and engines.

Each handshake looks at the files, at most every LOOK_S, and uses what they are then. Files that cannot be used are
logged once, and the last good ones go on. Nothing runs in between, and workers need to tell each other nothing.
"""

from __future__ import annotations

import logging
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.config import ConfigError

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0


class Certificate:
    """A certificate with its key, for TLS 1.2 and later. With a CA both sides verify the other one by it, whatever its
    name: an address of a pod says nothing. Then it is TLS 1.3 without tickets, so that no
    session is resumed that was signed by an earlier CA."""

    def __init__(self, setting: str, cert: Path, key: Path, ca: Path | None = None, *, serves: bool = True) -> None:
        """`setting` has named them. `serves` is the end that listens. Raises ConfigError for what cannot be used."""
        self._setting, self._serves = setting, serves
        self._files = (cert, key) if ca is None else (cert, key, ca)
        self._stamps, self._looked_s = self._look(), time.monotonic()
        self._newest = _load(setting, *self._files, serves=serves)

    def context(self) -> ssl.SSLContext:
        """For one connection that begins now."""
        if time.monotonic() - self._looked_s >= LOOK_S and (stamps := self._look()) != self._stamps:
            self._stamps = stamps
            try:
                self._newest = _load(self._setting, *self._files, serves=self._serves)
                log.info("%s: the changed certificate is used from now on", self._setting)
            except ConfigError as error:
                log.error("%s; the one from before goes on", error)
        return self._newest

    def listening(self) -> ssl.SSLContext:
        """For a port that is open all the time: each of its handshakes takes context()."""
        front = self._newest

        def turn_to_newest(handshake: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            handshake.context = self.context()

        front.sni_callback = turn_to_newest
        return front

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        self._looked_s = time.monotonic()
        return tuple(map(_stamp, self._files))


def between(folder: Path | None, *, serves: bool) -> Certificate | None:
    """Of an engine, or of a gateway at engines. The names are those that Kubernetes and cert-manager mount."""
    if folder is None:
        return None
    names = ("tls.crt", "tls.key", "ca.crt")
    return Certificate("engine.tls_dir", *(folder / name for name in names), serves=serves)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    with suppress(OSError):
        status = file.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


class _Handshake(ssl.SSLObject):
    """asyncio reports no handshake that fails."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            log.warning("a connection was refused that has no certificate of the CA in engine.tls_dir: %s", _why(error))
            raise


class _Mutual(ssl.SSLContext):
    sslobject_class = _Handshake


def _load(setting: str, cert: Path, key: Path, ca: Path | None = None, *, serves: bool) -> ssl.SSLContext:
    """Raises ConfigError, also for a certificate whose time is over, or that the other end would not trust."""
    server = (_Mutual if ca else ssl.SSLContext)(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    own, other = (server, client) if serves else (client, server)
    try:
        for file in (cert, key, ca):
            if file is not None:
                file.read_bytes()  # ssl does not say which one is missing
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3 if ca else ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(cert, key, password="")  # else OpenSSL asks at the terminal for one
        _trust(other, ca or cert)
        _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        by = f", by {ca}" if ca else ""
        raise ConfigError(f"{setting}: {cert} cannot be used: {_why(error)}{by}") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{setting}: {key} is not the key of {cert}") from None
        named = ", ".join(str(file) for file in (cert, key, ca) if file)
        raise ConfigError(f"{setting}: PEM without a password is expected in {named}: {_why(error)}") from None
    except OSError as error:
        raise ConfigError(f"{setting}: {error.filename} cannot be read: {error.strerror}") from None
    if ca is not None:
        _trust(own, ca)
        if serves:
            own.num_tickets = 0
    return own


def _trust(context: ssl.SSLContext, ca: Path) -> None:
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(ca)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """In memory. Raises ssl.SSLError."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for end in ends * 3:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()


def _why(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", "") or (error.reason or "it is none").replace("_", " ").lower()
