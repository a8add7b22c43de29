"""Fast-ingest batches (ADR-50, nats-server 2.14): many messages of one subject with few acknowledgements.

The protocol is encoded in the reply subject, `<inbox>.<batch>.<flow>.fail.<seq>.<op>.$FI`; the server replies with flow
acks (progress, and the number of messages until the next one), with an error that names its message, and finally with an
ordinary acknowledgement of what was stored: a prefix of the batch if a message was rejected.
"""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from headwater.events.errors import LogError, LogUnavailable
from headwater.events.jetstream.api import check_sizes, error_of
from headwater.events.jetstream.connection import watched

FLOW = 100
"""Requested number of messages per flow ack; the server may choose fewer."""

OUTSTANDING_ACKS = 2

START, APPEND, COMMIT = 0, 1, 2


class Ingested(NamedTuple):
    """The first `stored` messages are in the stream, the last of them at `position`; `error` stopped the rest."""

    stored: int
    position: int
    error: LogError | None = None


class _Batch:
    """One unfinished batch."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.flow = FLOW
        self.acked = 0
        self.error: LogError | None = None
        self.end: Ingested | None = None
        self.news = asyncio.Event()

    def on_answer(self, answer: dict[str, Any]) -> None:
        kind = answer.get("type")
        if kind == "ack":
            self.acked = max(self.acked, int(answer["seq"]))
            self.flow = max(1, int(answer.get("msgs", self.flow)))
        elif kind == "err" or (kind is None and answer.get("error")):
            self.error = self.error or error_of(self.subject, answer["error"])
            if kind is None and self.end is None:
                self.end = Ingested(0, 0, self.error)
        elif kind is None:
            self.end = Ingested(int(answer["count"]), int(answer["seq"]), self.error)
        self.news.set()


class Ingest:
    """Sends batches and receives the replies to all of them, by one subscription of the connection."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._batches: dict[str, _Batch] = {}
        self._numbers = count(1)
        self._subscription: Subscription | None = None
        self._subscribing = asyncio.Lock()

    async def send(
        self,
        subject: str,
        messages: Sequence[bytes],
        headers: Callable[[int], dict[str, str]],
        deadline_s: float,
    ) -> Ingested:
        """Send one batch; `headers(i)` are those of message i (from 0).

        Raises `LogUnavailable` without an answer, and `AccessDenied` when the server denies the subject.
        """
        check_sizes(self._client, subject, messages)
        await self._subscribe()
        name = f"b{next(self._numbers)}"
        batch = self._batches[name] = _Batch(subject)
        try:
            async with watched(self._client, subject), asyncio.timeout(deadline_s):
                for index, data in enumerate(messages):
                    while index - batch.acked >= OUTSTANDING_ACKS * batch.flow and batch.end is None:
                        batch.news.clear()
                        await batch.news.wait()
                    if batch.end is not None or batch.error is not None:
                        break
                    last = index == len(messages) - 1
                    op = COMMIT if last else APPEND if index else START
                    await self._client.publish(
                        subject,
                        data,
                        reply=f"{self._inbox}.{name}.{FLOW}.fail.{index + 1}.{op}.$FI",
                        headers=headers(index),
                    )
                while batch.end is None:
                    batch.news.clear()
                    await batch.news.wait()
            return batch.end
        except TimeoutError as error:
            raise LogUnavailable(f"no answer to a batch on {subject} within {deadline_s:.1f} s") from error
        except NatsError as error:
            raise LogUnavailable(f"{subject}: {error!r}") from error
        finally:
            del self._batches[name]

    async def _subscribe(self) -> None:
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self._client.subscribe(self._inbox + ".>", cb=self._on_message)

    async def _on_message(self, message: Msg) -> None:
        name = message.subject[len(self._inbox) + 1 :].partition(".")[0]
        batch = self._batches.get(name)
        if batch is None:
            return
        if message.headers and message.headers.get("Status") == "503":
            batch.end = Ingested(
                0, 0, LogUnavailable(f"no responders on {batch.subject}: no stream or no leader")
            )
            batch.news.set()
            return
        try:
            batch.on_answer(msgspec.json.decode(message.data))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            batch.end = Ingested(0, 0, LogUnavailable(f"{batch.subject}: unreadable answer: {error!r}"))
            batch.news.set()
