"""The edge's application on memory ports: one model, one router, one worker that answers at once."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Self

import httpx
import msgspec

from headwater.actors.edge.admit.control import AccessServices, key_text
from headwater.actors.edge.apis.app import DEFAULTS, App
from headwater.actors.edge.catalog import ModelCatalog
from headwater.actors.edge.saga.record import OpenRequests
from headwater.actors.edge.saga.workers import WorkerRegistry
from headwater.actors.edge.settings import AccessSettings
from headwater.actors.media.intake import MediaIntake
from headwater.actors.runtime.ports import Message, Ports, Subscription
from headwater.actors.runtime.tables import ApiKeyTable
from headwater.actors.worker.model_card import CardKeeper, Served
from headwater.engines.engine import EngineInfo
from headwater.engines.model_files import ModelFiles, byte_model_files, byte_tokenizer
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.events.ports import Record
from headwater.events.writer import DELAY_S
from headwater.ops.operator.keys import WantedKey, new_key
from headwater.ops.start.actor import compile_kernels
from headwater.schemas import subjects
from headwater.schemas.events import PayloadKind
from headwater.schemas.hashing import unpack_tokens
from headwater.schemas.inference import (
    Accepted,
    Cancel,
    EmbedReply,
    EmbedRequest,
    FrameEntry,
    GenerateRequest,
    Refused,
    TokenFrame,
    TokenLogprob,
)
from headwater.schemas.routing import Decision, RouteQuery, RouteRefused
from headwater.schemas.tables import Capability
from tests.support.data.examples import joined, record
from tests.support.data.queries import changed
from tests.support.data.story import decided, fold
from tests.support.worlds.clock import ManualClock, running
from tests.support.worlds.leases import put_leases
from tests.support.worlds.memory import memory_world

CONTEXT = 4096
EVERYTHING: frozenset[Capability] = frozenset(
    {
        "generate",
        "seed",
        "logprobs",
        "prompt_logprobs",
        "logit_bias",
        "allowed_tokens",
        "bad_words",
        "guide",
        "processors",
        "priority",
        "cache_salt",
        "kv_events",
    }
)
PROCESSORS = ("hush", "shout")
ANSWER = "The headwater is where the stream begins."

_encode = msgspec.msgpack.Encoder().encode


class Response(NamedTuple):
    """What a client got."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return msgspec.json.decode(self.body)


async def serve_model(
    world: Ports,
    name: str,
    files: ModelFiles | None = None,
    *,
    capabilities: frozenset[Capability] = EVERYTHING,
    context: int = CONTEXT,
    tool_parser: str = "",
    reasoning_parser: str = "",
    **more: Any,
) -> str:
    """Publish a model as its worker would, with `more` of what its engine reports; returns its pool."""
    engine = SimEngine(SimSettings(), world.clock)
    engine.capabilities = capabilities
    files = files or byte_model_files(name)
    served = Served(name, files, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    info = EngineInfo(name, 16, 1000, 256, context, processors=PROCESSORS, **more)
    return (await CardKeeper(world, served, engine, info).publish()).pool


class NoTasks:
    """An actor that does not run."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `headwater.actors.runtime.actor.Actor.spawn`."""
        work.close()
        raise RuntimeError(f"{name}: the actor does not run")


class LoopTasks:
    """Plain tasks in the place of an actor's."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `headwater.actors.runtime.actor.Actor.spawn`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they ended."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class EdgeWorld:
    """Use as a context manager, from synchronous code: `ask` sends one request and brings the whole answer.

    `record_payloads` is what the edge records of requests, `settings` are further ones of the edge's. The worker sends `frame_tokens` at a time, 0: in two halves; it
    gives the next requests up after so many tokens as `breaks_after` says, and vectors as `pool` does. The router
    answers the next queries with `refuses`. A `silent` worker sends one token and no end. `probes` are those of the application.
    """

    def __init__(
        self,
        record_payloads: PayloadKind = "off",
        *,
        frame_tokens: int = 0,
        access: AccessSettings | None = None,
        probes: bool = True,
        context: int = CONTEXT,
        intake: MediaIntake | None = None,
        **settings: Any,
    ) -> None:
        self.settings = DEFAULTS._replace(record_payloads=record_payloads, **settings)
        self.intake = intake
        self.frame_tokens = frame_tokens
        self.access = access or AccessSettings()
        self.probes = probes
        self.context = context
        self.cancelled: list[Cancel] = []
        self.silent = False
        self.stopping = False
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.given: list[GenerateRequest] = []
        self.queries: list[RouteQuery] = []
        self.embedded: list[EmbedRequest] = []
        self.pool: Callable[[EmbedRequest], EmbedReply] = lambda request: Refused("it has no vectors", False)
        self.breaks_after: list[int] = []
        self.refuses: list[RouteRefused] = []
        self.answer = tuple(byte_tokenizer().encode(ANSWER).ids)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._subscriptions: list[Subscription] = []
        self._state = fold([record(1, joined("w1"))])

    def __enter__(self) -> Self:
        self.runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self._stop())
        self.runner.close()

    def ask(
        self, path: str, body: Any, *, method: str = "POST", headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> Response:
        """One request; `body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.runner.run(self._ask(path, method, data, list(headers)))

    def ask_form(self, path: str, **parts: Any) -> Response:
        """One request with a form, of the parts that httpx takes: `data` and `files`."""
        request = httpx.Request("POST", "http://x", **parts)
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        return self.ask(path, request.read(), headers=headers)

    def refused(self, path: str, body: Any) -> dict[str, Any]:
        """The error object of a request that is refused with 400."""
        response = self.ask(path, body)
        assert response.status == 400, response.body
        error: dict[str, Any] = response.document["error"]
        return error

    def serve(self, name: str, files: ModelFiles | None = None, **card: Any) -> None:
        """Serve one more model by the same worker; `card` as in `serve_model`."""
        self.runner.run(
            self._serve(name, serve_model(self.world, name, files, **{"context": self.context, **card}))
        )

    async def _serve(self, name: str, publishing: Coroutine[Any, Any, str]) -> None:
        await put_leases(self.world, pool := await publishing)
        subject = subjects.route_query("ns", pool)
        self._subscriptions.append(await self.world.bus.subscribe(subject, self._on_route))
        async with asyncio.timeout(20):
            while name not in [card.name for card in self.models.cards()]:
                await asyncio.sleep(0)

    def create_key(self, wanted: WantedKey) -> str:
        """A key as its owner uses it, known to the edge."""
        key, secret = new_key(wanted, self.clock.wall_ns() // 1_000_000_000)
        self.runner.run(self._change_keys(ApiKeyTable(self.world.api_keys).create(key)))
        return key_text(key.id, secret)

    def revoke_key(self, text: str) -> None:
        """Revoke a key; the edge knows."""
        self.runner.run(self._change_keys(ApiKeyTable(self.world.api_keys).delete(text.split("-")[1])))

    async def _change_keys(self, change: Coroutine[Any, Any, object]) -> None:
        await change
        # The table's watcher runs in between.
        for _ in range(3):
            await asyncio.sleep(0)

    def says(self, text: str) -> None:
        """What the worker answers from now on. Control tokens in it are such."""
        self.answer = tuple(byte_tokenizer().encode(text).ids)

    def prompt(self) -> str:
        """The prompt of the last request, with its control tokens."""
        ids = unpack_tokens(self.given[-1].tokens).tolist()
        return str(byte_tokenizer().decode(ids, skip_special_tokens=False))

    def recorded(self) -> list[Record]:
        """The request log, once everything so far is in it."""
        return self.runner.run(self._recorded())

    async def _recorded(self) -> list[Record]:
        async with running(self.ledger.writer.run()), running(self.ledger.writer.flush()) as flushed:
            while not flushed.done():
                await self.clock.advance(DELAY_S)
        return [one async for piece in self.world.requests.read(0, follow=False) for one in piece.records]

    async def _start(self) -> None:
        # As every process does before it serves: compiled within a request, they take longer than a query may.
        compile_kernels()
        self.clock = ManualClock()
        self.world = memory_world(self.clock)
        self.models = models = ModelCatalog(self.world)
        self.spawn(models.run(), "models")
        await self._serve("m", serve_model(self.world, "m", context=self.context))
        fleet = WorkerRegistry(self.world, "e1", self.spawn)
        self.spawn(fleet.watch_leases(), "leases")
        self.ledger = OpenRequests(self.world.requests, "ns", "e1", 1, self.world.clock)
        services = AccessServices(self.access, self.world)
        for loop, name in services.loops():
            self.spawn(loop, name)
        await services.prepare()
        self.app = App(
            fleet,
            models,
            self.ledger,
            self,
            self.settings,
            probes=self.probes,
            access=services.control,
            intake=self.intake,
        )
        for subject, handler in (
            (subjects.edge_frames("ns", "e1"), fleet.on_frame),
            (subjects.engine("ns", "w1", 1, "generate"), self._on_generate),
            (subjects.engine("ns", "w1", 1, "cancel"), self._on_cancel),
            (subjects.engine("ns", "w1", 1, "embed"), self._on_embed),
        ):
            self._subscriptions.append(await self.world.bus.subscribe(subject, handler))

    async def _stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.intake is not None:
            await self.intake.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `headwater.actors.runtime.actor.Actor.spawn`."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _on_route(self, message: Message) -> None:
        query = msgspec.msgpack.decode(message.data, type=RouteQuery)
        self.queries.append(query)
        if self.refuses:
            await self.world.bus.publish(message.reply, _encode(self.refuses.pop(0)))
            return
        # The only worker takes every request, whatever its hints.
        anybody = changed(query, tier="", policy="", temperature=-1.0)
        decision = decided(self._state, anybody, 1, 0)
        assert isinstance(decision, Decision)
        await self.world.bus.publish(message.reply, _encode(decision))

    async def _on_generate(self, message: Message) -> None:
        request = msgspec.msgpack.decode(message.data, type=GenerateRequest)
        self.given.append(request)
        await self.world.bus.publish(message.reply, _encode(Accepted()))
        tokens = self.answer[request.emitted :][: request.sampling.max_tokens]
        if self.breaks_after:
            tokens = tokens[: self.breaks_after.pop(0)]
            entry = FrameEntry(request.handle, 0, tokens, "abort", detail="it was killed")
            frame = TokenFrame("w1", 1, (entry,))
            await self.world.bus.publish(subjects.edge_frames("ns", request.edge), _encode(frame))
            return
        wanted = request.sampling.logprobs
        logprobs = (
            tuple(TokenLogprob(-0.5, ((token, -0.5),)) for token in tokens) if wanted is not None else ()
        )
        prompt = unpack_tokens(request.tokens).tolist()
        scored = request.sampling.prompt_logprobs is not None
        scores = (None, *(TokenLogprob(-1.0, ((token, -1.0),)) for token in prompt[1:])) if scored else ()
        finish = "stop" if request.emitted + len(tokens) == len(self.answer) else "length"
        step = self.frame_tokens or -(-len(tokens) // 2)
        if self.silent:
            # It has begun, and goes on for ever.
            finish, tokens = "", tokens[:1]
        entries = tuple(
            FrameEntry(
                request.handle,
                at,
                tokens[at : at + step],
                finish if at + step >= len(tokens) else "",
                -1 if at else 0,
                logprobs[at : at + step],
                prompt_logprobs=() if at else scores,
            )
            for at in range(0, len(tokens), step)
        )
        frame = TokenFrame("w1", 1, entries)
        await self.world.bus.publish(subjects.edge_frames("ns", request.edge), _encode(frame))

    async def _on_cancel(self, message: Message) -> None:
        self.cancelled.append(msgspec.msgpack.decode(message.data, type=Cancel))

    async def _on_embed(self, message: Message) -> None:
        request = msgspec.msgpack.decode(message.data, type=EmbedRequest)
        self.embedded.append(request)
        if self.silent:
            return
        await self.world.bus.publish(message.reply, _encode(self.pool(request)))

    async def _ask(self, path: str, method: str, data: bytes, headers: list[tuple[bytes, bytes]]) -> Response:
        sent: list[dict[str, Any]] = []
        hung_up = asyncio.get_running_loop().create_future()
        received = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await hung_up
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        path, _, query = path.partition("?")
        where = {"path": path, "query_string": query.encode()}
        scope = {"type": "http", "method": method, "headers": headers, **where}
        async with asyncio.timeout(20):
            await self.app(scope, receive, send)
        start, *parts = sent
        return Response(start["status"], dict(start["headers"]), b"".join(part["body"] for part in parts))
