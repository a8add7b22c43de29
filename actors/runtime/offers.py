"""The messages about offered tensors over the bus: claims and releases to the actor that made the offer."""

from typing import Final

import msgspec

from headwater.actors.bus.port import Bus, BusError, Message
from headwater.engines.transfer.port import PeerGone, TensorTransfer, TransferFailed
from headwater.schemas.messages.transfer import ClaimRefused, ClaimReply, Offer, OfferClaim, OfferReleased

CLAIM_TIMEOUT_S: Final = 2.0

_encode = msgspec.msgpack.Encoder().encode
_message: msgspec.msgpack.Decoder[OfferClaim | OfferReleased] = msgspec.msgpack.Decoder(
    OfferClaim | OfferReleased
)
_reply: msgspec.msgpack.Decoder[ClaimReply] = msgspec.msgpack.Decoder(ClaimReply)


class OwnerChannel:
    """A reader's channel to the owner of an offer: see `headwater.engines.transfer.port.Control`. `subject` is where the owner answers."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject

    async def claim(self, offer: Offer, claim: OfferClaim) -> ClaimReply:
        """See `Control.claim`."""
        try:
            reply = await self._bus.request(self._subject, _encode(claim), timeout_s=CLAIM_TIMEOUT_S)
            return _reply.decode(reply)
        except BusError as error:
            raise PeerGone(f"{offer.owner} did not answer: {error}") from error
        except msgspec.DecodeError as error:
            raise TransferFailed(f"{offer.owner} sent an invalid reply: {error}") from error

    async def release(self, offer: Offer, released: OfferReleased) -> None:
        """See `Control.release`."""
        await self._bus.publish(self._subject, _encode(released))


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
