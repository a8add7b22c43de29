"""The ports on NATS JetStream. Only this package and `headwater.actors.runtime.core_nats` use nats-py.

Three parts of nats-py are avoided: its ordered consumer silently loses messages at its pending limit, and fails with the
server's ack format 2; `publish_async` futures may never complete; KV watches and object-store reads use that same
ordered consumer. So reads are overlapped raw pulls with a cursor of this package, and every request has a deadline.
"""

from headwater.events.jetstream.buckets import JetStreamBlobs, JetStreamTable
from headwater.events.jetstream.connection import Connection, Credentials, connect, without_secret
from headwater.events.jetstream.log import JetStreamLog

__all__ = [
    "Connection",
    "Credentials",
    "JetStreamBlobs",
    "JetStreamLog",
    "JetStreamTable",
    "connect",
    "without_secret",
]
