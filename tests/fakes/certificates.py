"""Certificates that a test makes for a server of its own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

_PLAIN = serialization.NoEncryption()


class Authority:
    """A CA. What it issues is of 127.0.0.1, and lies as Kubernetes mounts it."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        ca = x509.BasicConstraints(ca=True, path_length=None)
        self._own = _builder("kvasir CA", "kvasir CA", self._key).add_extension(ca, critical=True)
        self._signed = self._own.sign(self._key, hashes.SHA256())

    def issue(
        self,
        folder: Path,
        *,
        days: int = 1,
        password: bytes | None = None,
        use: x509.ObjectIdentifier | None = x509.ExtendedKeyUsageOID.SERVER_AUTH,
        by_rsa: bool = False,
    ) -> Path:
        """tls.crt, tls.key and ca.crt, all new files; returns the folder. Less than no `days` is expired."""
        key = rsa.generate_private_key(65537, 2048) if by_rsa else ec.generate_private_key(ec.SECP256R1())
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = _builder("kvasir test", "kvasir CA", key, days).add_extension(address, critical=False)
        if use is not None:
            made = made.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        lock = serialization.BestAvailableEncryption(password) if password else _PLAIN
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)
        folder.mkdir(exist_ok=True)
        for name, data in (("tls.crt", _pem(signed)), ("tls.key", pem), ("ca.crt", _pem(self._signed))):
            (folder / f"{name}.new").write_bytes(data)
            (folder / f"{name}.new").rename(folder / name)
        return folder


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, days: int = 1) -> Any:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in (issuer, subject)]
    number = x509.random_serial_number()
    return x509.CertificateBuilder(*names, key.public_key(), number, now - 9 * day, now + days * day)


def _pem(signed: x509.Certificate) -> bytes:
    return signed.public_bytes(serialization.Encoding.PEM)


def certificate(folder: Path) -> Path:
    """Of 127.0.0.1, signed by itself, with its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvasir test")])
    day, address = datetime.timedelta(days=1), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path = folder / "certificate.pem"
    path.write_bytes(pem + signed.public_bytes(serialization.Encoding.PEM))
    return path
