"""Encode legs on virtual time: which images of a request an encode worker takes, and when their embeddings are at its worker."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from headwater.engines.embeddings import EmbeddingCache
from headwater.engines.engine import EncodedImage, KvEvent
from headwater.ops.whatif.routing import Question, Routers, joined
from headwater.ops.whatif.setup import Setup
from headwater.ops.whatif.workers import SimulatedRequest, SimWorker
from headwater.router.decision.encode_leg import weigh_encoding
from headwater.schemas.events.fleet import LoadReported
from headwater.schemas.events.route import Decision
from headwater.schemas.messages.encode import embedding_blocks, embedding_hashes
from headwater.schemas.messages.media import PromptMedia
from headwater.schemas.tables import Capability

_NOTHING = EncodedImage(None, "float32")
"""Embeddings have no values here."""


class VirtualEncoder:
    """Keeps up to `blocks` blocks of embeddings. `encode_ns` is the time for an image of this many tokens.

    `computed` counts the images that it encoded, `found` those that it had, or was encoding, for another request.
    """

    def __init__(self, name: str, block_size: int, blocks: int, encode_ns: Callable[[int], int]) -> None:
        self.name = name
        self.blocks = blocks
        self.computed = self.found = 0
        self._encode_ns = encode_ns
        self._cache = EmbeddingCache(block_size, blocks)
        self._running: dict[str, tuple[int, int]] = {}
        """The images that are being encoded: when each will be, and its tokens."""
        self._accepted: list[str] = []
        self._ended: list[tuple[str, int]] = []
        self._measured: list[tuple[int, int]] = []

    def ahead(self, item: PromptMedia) -> int:
        """Tokens of images that are encoded before this one; 0 if it is at hand, or one of them."""
        if item.id in self._running or self._cache.find(item) is not None:
            return 0
        return sum(tokens for _, tokens in self._running.values())

    def accept(self, leg: str, item: PromptMedia, now_ns: int) -> int:
        """Encode an image for the decision `leg`; returns when its embedding is there."""
        self._accepted.append(leg)
        if item.id in self._running:
            self.found += 1
            return self._running[item.id][0]
        if self._cache.find(item) is not None:
            self.found += 1
            return now_ns
        self.computed += 1
        took_ns = self._encode_ns(item.tokens)
        end_ns = max([now_ns, *(end_ns for end_ns, _ in self._running.values())]) + took_ns
        self._running[item.id] = end_ns, item.tokens
        self._measured.append((item.tokens, took_ns // 1000))
        return end_ns

    def decline(self, leg: str) -> None:
        """The serving worker is the better one: what the router counted for the decision ends."""
        self._accepted.append(leg)
        self._ended.append((leg, -1))

    def finish(self, leg: str, item: PromptMedia, now_ns: int) -> None:
        """The embedding is there."""
        running = self._running.get(item.id)
        if running is not None and running[0] <= now_ns:
            del self._running[item.id]
            self._cache.keep(item, _NOTHING)
        self._ended.append((leg, 0))

    def take_events(self) -> list[KvEvent]:
        """Return what was kept and dropped since the last call."""
        events = self._cache.events
        return [events.get_nowait() for _ in range(events.qsize())]

    def report(self) -> LoadReported:
        """The load report of this worker."""
        prefilled = [leg for leg, cached in self._ended if cached >= 0]
        report = LoadReported(
            running=len(self._running),
            waiting=0,
            used_blocks=self._cache.used_blocks,
            total_blocks=self.blocks,
            accepted=tuple(self._accepted),
            prefilled=tuple(prefilled),
            finished=tuple([leg for leg, _ in self._ended]),
            cached=(0,) * len(prefilled),
            prefills=tuple(self._measured),
        )
        self._accepted, self._ended, self._measured = [], [], []
        return report


# The encode workers, and the requests that wait for their embeddings.

GIVEN = 0
"""Here embeddings show nothing."""


class WaitingRequest:
    """A request that waits for the embeddings of its images, on their way to `worker`."""

    __slots__ = ("began_ns", "job", "left", "question", "worker")

    def __init__(
        self,
        job: SimulatedRequest,
        worker: SimWorker,
        question: Question,
        now_ns: int,
    ) -> None:
        self.job = job
        self.worker = worker
        self.question = question
        self.began_ns = now_ns
        self.left = 0


class ActiveEncoding(NamedTuple):
    """An image at an encode worker until `ready_ns`, from where its embedding takes until `arrives_ns`."""

    leg: str
    item: PromptMedia
    encoder: VirtualEncoder
    waiting: WaitingRequest
    ready_ns: int
    arrives_ns: int


class EncodeFleet:
    """The encode workers of a run. `declined` counts images left to their serving workers, `legs` those that were not."""

    def __init__(self, setup: Setup, routers: Routers) -> None:
        self._setup = setup
        self._routers = routers
        self._size = setup.block_size
        blocks = max(1, setup.embedding_tokens // setup.block_size)
        self.encoders = {
            name: VirtualEncoder(name, setup.block_size, blocks, setup.encode_ns)
            for name in (f"e{number:03d}" for number in range(setup.encode_workers))
        }
        self.declined = self.legs = 0

    @property
    def serving(self) -> tuple[Capability, ...]:
        """What the other workers announce. They say so only where there are encode workers, from which they must be distinguished."""
        return ("generate", "handoff", "kv_events") if self.encoders else ()

    def join(self, now_ns: int) -> None:
        """Announce the encode workers."""
        for encoder in self.encoders.values():
            event = joined(
                encoder.name,
                "encode",
                self._size,
                encoder.blocks,
                self._setup.sequences,
                capabilities=("encode", "kv_events"),
            )
            self._routers.send(encoder.name, now_ns, event)

    def begin(self, waiting: WaitingRequest, decision: Decision, now_ns: int) -> Iterator[ActiveEncoding]:
        """The images of a request that encode workers take. `decision` is that of the request itself."""
        media = waiting.job.media
        if not self.encoders:
            return
        cached = decision.chosen.cached_blocks * self._size
        routed: list[tuple[str, PromptMedia, str]] = []
        answers: list[Decision] = []
        in_turn = self._setup.encode_routing == "round_robin"
        for number, image in enumerate(media):
            if image.start + image.tokens > cached:
                item = PromptMedia("image", image.id, image.start, image.tokens, ())
                leg = f"{waiting.job.name}-e{number}"
                if in_turn:
                    routed.append((leg, item, self._next_encoder(len(routed))))
                    continue
                answer = self._route(leg, item, decision.worker, now_ns)
                if answer is not None:
                    answers.append(answer)
                    routed.append((leg, item, answer.worker))
        if not routed:
            return
        tokens = [item.tokens for _, item, _ in routed]
        estimate = weigh_encoding(waiting.job.name, tokens, answers, decision)
        for (leg, item, name), ahead_max in zip(routed, estimate.ahead_max, strict=True):
            encoder = self.encoders[name]
            if encoder.ahead(item) > ahead_max:
                self.declined += 1
                encoder.decline(leg)
                self._publish(encoder, now_ns)
                continue
            self.legs += 1
            ready_ns = encoder.accept(leg, item, now_ns)
            self._publish(encoder, now_ns)
            waiting.left += 1
            yield ActiveEncoding(
                leg, item, encoder, waiting, ready_ns, ready_ns + self._setup.embedding_ns(item.tokens)
            )

    def _next_encoder(self, number: int) -> str:
        """Return the encode worker of image `number` of a request; they take turns."""
        names = list(self.encoders)
        return names[(self.legs + self.declined + number) % len(names)]

    def _route(self, leg: str, item: PromptMedia, reader: str, now_ns: int) -> Decision | None:
        """Return what the router decides for an image; None if it has no encode worker."""
        tokens = embedding_blocks(item, self._size) * self._size
        hashes = embedding_hashes(item, self._size)
        question = Question(leg, tokens, 0, hashes, needs=("encode",), reader=reader)
        answer = self._routers.offer(question, now_ns)
        return answer if isinstance(answer, Decision) else None

    def finish(self, active: ActiveEncoding, now_ns: int) -> None:
        """An embedding is there, and on its way."""
        active.encoder.finish(active.leg, active.item, now_ns)
        self._publish(active.encoder, now_ns)

    def deliver(self, active: ActiveEncoding) -> bool:
        """An embedding has arrived. True: it was the last that its request waited for."""
        worker, item = active.waiting.worker, active.item
        worker.images.keep(item.id, item.tokens, GIVEN)
        worker.add_read(item.tokens, active.arrives_ns - active.ready_ns)
        active.waiting.left -= 1
        return not active.waiting.left

    def _publish(self, encoder: VirtualEncoder, now_ns: int) -> None:
        events = encoder.take_events()
        if events:
            self._routers.send(encoder.name, now_ns, *events)
        if self._setup.encode_routing != "round_robin":
            self._routers.send(encoder.name, now_ns, encoder.report())
