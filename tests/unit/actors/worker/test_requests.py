"""Generation requests at a worker: one that is delivered more than once runs once."""

from typing import Any

import msgspec

from headwater.engines.sim.engine import SimEngine
from headwater.ops.sim.fleet import NAMESPACE
from headwater.schemas import subjects
from headwater.schemas.hashing import pack_tokens
from headwater.schemas.inference import Accepted, GenerateReply, GenerateRequest, Sampling
from tests.support.worlds.virtual import Stage, staged, until

_reply: msgspec.msgpack.Decoder[GenerateReply] = msgspec.msgpack.Decoder(GenerateReply)


class CountingEngine(SimEngine):
    """Notes what it is given."""

    given: list[str]

    def submit(self, request: GenerateRequest, *arguments: Any, **named: Any) -> None:
        """See `Engine.submit`."""
        self.given = [*getattr(self, "given", []), request.request]
        super().submit(request, *arguments, **named)


@staged
async def test_a_request_that_is_delivered_again_runs_once(stage: Stage) -> None:
    """While it runs and after it ended: the sender did not get the first reply, and gets the same one again."""
    worker = await stage.engine("w1", CountingEngine)
    _, world = stage.world("edge")
    request = GenerateRequest("r-0-1", "e1", 1, pack_tokens([7] * 64), Sampling(20, ignore_eos=True))
    subject = subjects.engine(NAMESPACE, "w1", worker.intake.frames.epoch, "generate")
    engine = worker.engine
    assert isinstance(engine, CountingEngine)

    async def send() -> GenerateReply:
        return _reply.decode(await world.bus.request(subject, msgspec.msgpack.encode(request), timeout_s=2.0))

    replies = [await send(), await send()]
    await until(lambda: engine.load()[:2] == (0, 0))
    replies.append(await send())
    assert replies == [Accepted()] * 3
    assert [one for one in engine.given if one == "r-0-1"] == ["r-0-1"]
