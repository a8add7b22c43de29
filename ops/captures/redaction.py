"""Removes recorded prompts and answers from the messages of a request log.

A message with contents is encoded again without them. Its digest is then another one, so the messages after it on its subject are
encoded again with the digest of their new predecessor: what remains is a valid chain. Messages that cannot be read are left out.
"""

import msgspec

from headwater.events.ports import StoredMessage
from headwater.schemas.encoding import DIGEST_BYTES, LogEvent, UnreadableBatch, decode_batch, encode_batch
from headwater.schemas.events.request import RequestAccepted, RequestCheckpoint, RequestEnded


class Redaction:
    """Of one request log, message by message. `removed` counts events with contents, `unreadable` messages that were left out."""

    def __init__(self) -> None:
        self.removed = 0
        self.unreadable = 0
        self._digests: dict[str, bytes] = {}

    def without_contents(self, message: StoredMessage) -> StoredMessage | None:
        """The message without contents; None if it is unreadable."""
        try:
            batch = decode_batch(message.data)
        except UnreadableBatch:
            self.unreadable += 1
            return None
        events = tuple([_bare(event) for event in batch.events])
        removed = sum(new is not old for new, old in zip(events, batch.events, strict=True))
        previous = self._digests.get(message.subject)
        if not removed and previous is None:
            return message
        self.removed += removed
        changed = msgspec.structs.replace(batch, events=events, previous=previous or batch.previous)
        data = encode_batch(changed)
        self._digests[message.subject] = data[-DIGEST_BYTES:]
        return message._replace(data=data)


def _bare(event: LogEvent) -> LogEvent:
    """The event without contents. Digests of contents stay."""
    if isinstance(event, RequestAccepted) and event.payload == "full":
        return msgspec.structs.replace(event, payload="off", body=b"")
    if isinstance(event, RequestEnded) and event.payload == "full":
        return msgspec.structs.replace(event, payload="off", answers=())
    if isinstance(event, RequestCheckpoint) and event.tokens:
        return msgspec.structs.replace(event, tokens=b"")
    return event
