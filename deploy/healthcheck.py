"""HEALTHCHECK of the images: exit status 0 if the gateway of this container, or the engine, is alive, else 1.

Asks $KVASIR_SERVER_PORT over TLS, as [tls] may be on, then in plain text; arguments are another port and path. It runs
every few seconds: with the standard library alone it takes 60 ms. Readiness is not asked for: starting a container
again repairs neither engines nor Redis.
"""

import http.client
import os
import ssl
import sys

TIMEOUT_S = 3.0  # of each of the two; Docker's own limit is above both


def alive(port: int, path: str) -> bool:
    # The certificate is for the gateway's name, and this is the loopback: what it says is not verified.
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    for connection in (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=trusting),
        http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S),
    ):
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    return False


if __name__ == "__main__":
    port, path = int(os.environ.get("KVASIR_SERVER_PORT", "8080")), "/health/liveness"
    if len(sys.argv) == 3:
        port, path = int(sys.argv[1]), sys.argv[2]
    sys.exit(0 if alive(port, path) else 1)
