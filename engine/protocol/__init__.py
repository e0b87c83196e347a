"""The contract between gateways and engines: block identity, messages, their bytes, Redis key names.

Both sides import this package and nothing else of each other. Standard library and xxhash only, so that a gateway
without torch, a test or a benchmark can speak to an engine.

Knows nothing about models, HTTP or Redis clients. Its neighbours are engine/server.py and gateway/engines/bundled.py,
the two ends of the stream.
"""

from engine.protocol.schema_limits import *  # noqa: F403
from engine.protocol.values import *  # noqa: F403
from engine.protocol.wire import *  # noqa: F403
