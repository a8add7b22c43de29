"""The messages about offered tensors over the bus: claims and releases to the worker that made the offer."""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from headwater.actors.bus.port import Bus, BusError, Message
from headwater.engines.transfer.port import PeerGone, TensorTransfer, TransferFailed
from headwater.schemas import subjects
from headwater.schemas.messages.transfer import ClaimRefused, ClaimReply, Offer, OfferClaim, OfferReleased

CLAIM_TIMEOUT_S: Final = 2.0

OpenTransfer = Callable[[], Awaitable[TensorTransfer]]
"""Makes this process's slab. Raises `TransferUnavailable`."""

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[OfferClaim | OfferReleased] = msgspec.msgpack.Decoder(
    OfferClaim | OfferReleased
)
_reply: msgspec.msgpack.Decoder[ClaimReply] = msgspec.msgpack.Decoder(ClaimReply)


class OwnerChannel:
    """A reader's channel to the worker that owns an offer: see `headwater.engines.transfer.port.Control`.

    `epoch` is the worker's incarnation: of a later one there is nothing under this subject.
    """

    def __init__(self, bus: Bus, ns: str, epoch: int) -> None:
        self._bus = bus
        self._ns = ns
        self._epoch = epoch

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        subject = subjects.engine(self._ns, offer.owner, self._epoch, "offer")
        try:
            return _reply.decode(await self._bus.request(subject, _encode(claim), timeout_s=CLAIM_TIMEOUT_S))
        except BusError as error:
            raise PeerGone(f"worker {offer.owner} did not answer: {error}") from error
        except msgspec.DecodeError as error:
            raise TransferFailed(f"worker {offer.owner} sent an invalid reply: {error}") from error

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        await self._bus.publish(
            subjects.engine(self._ns, offer.owner, self._epoch, "offer"), _encode(released)
        )


class OfferAnswers:
    """The owner's side."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.transfer: TensorTransfer | None = None

    async def on_offer(self, message: Message) -> None:
        """Grant or reject a claim, or note that a reader is done."""
        received = _message.decode(message.data)
        if isinstance(received, OfferReleased):
            if self.transfer is not None:
                self.transfer.released(received)
            return
        reply: ClaimReply = ClaimRefused(received.lease, "unknown")
        if self.transfer is not None:
            reply = self.transfer.answer(received)
        await self._bus.publish(message.reply, _encode(reply))
