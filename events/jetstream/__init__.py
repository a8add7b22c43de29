"""The ports on NATS JetStream. Only this package and `headwater.actors.bus` import `nats`.

Three habits of nats-py are avoided on purpose: its ordered consumer loses messages without a sign when its
pending limit is hit, and dies under the server's ack format 2; `publish_async` futures may never end; KV
watches and object-store reads sit on that same ordered consumer. So reads are overlapped raw pulls with our
own cursor, and every request has a deadline.
"""

from headwater.events.jetstream.blobs import JetStreamBlobs
from headwater.events.jetstream.connection import Connection, connect, without_secret
from headwater.events.jetstream.credentials import Credentials
from headwater.events.jetstream.log import JetStreamLog
from headwater.events.jetstream.streams import ensure_namespace, ensure_pool, stream_names
from headwater.events.jetstream.table import JetStreamTable

__all__ = [
    "Connection",
    "Credentials",
    "JetStreamBlobs",
    "JetStreamLog",
    "JetStreamTable",
    "connect",
    "ensure_namespace",
    "ensure_pool",
    "stream_names",
    "without_secret",
]
