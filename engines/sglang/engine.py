"""SGLang's Engine as an `Engine`: tokens in, tokens out, and KV hand-off to or from another SGLang.

In a hand-off both legs run at once and meet in a room, over NIXL.
The prefill leg opens a room on the bootstrap server of its own engine. The decode leg enters it, names its free
blocks to the prefill engine, and that engine writes the prompt's KV there, with the first token and the number of tokens it
had cached. An SGLang in prefill or decode mode serves no whole request.

SGLang does not check that both legs have the same prompt: of two prompts of equal length the answer would begin with the
other one's first token, with HTTP 200. Nor is a room used twice without harm: in 0.5.23 one of four legs then
hangs. So rooms never repeat, parameters are sealed to their prompt, and a decode engine enters each room once.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import structlog

from headwater.engines import kv_socket
from headwater.engines import process as engine_process
from headwater.engines.engine import (
    Emit,
    EncodedImage,
    EngineDied,
    EngineInfo,
    EngineUnavailable,
    Pinned,
    RequestRejected,
    SplitOnly,
    Step,
    Transfer,
    Unusable,
    UsedHandoffs,
    check_length,
    check_processors,
    seal,
    unseal,
)
from headwater.engines.kv_events import MediaSentinels
from headwater.engines.logs import failure_place
from headwater.engines.model_files import model_digest
from headwater.engines.native_arguments import number
from headwater.engines.process import freeze_heap, interruptible
from headwater.engines.ranked import default_sampling
from headwater.engines.sglang import (
    config as sglang_config,
)
from headwater.engines.sglang import process as sglang_process
from headwater.engines.sglang import sampling, signatures
from headwater.engines.sglang.config import POSSIBLE, Mode, SglangSettings, capabilities, keyword_arguments
from headwater.engines.sglang.control import SglangControl, SglangLoras
from headwater.engines.sglang.embedding_input import GivenEmbedding, SglangEmbeddings
from headwater.engines.sglang.media import SglangMedia, learn_media, media_settings
from headwater.engines.sglang.process import STOPPED, SglangProcess, import_sglang, of_engine
from headwater.engines.sglang.sampling import (
    TEXT_MAX,
    SglangSpeech,
    Stream,
    check_mode,
    is_whisper,
    pooling_of,
    speech_settings,
)
from headwater.schemas import hashing
from headwater.schemas.inference import Choreography, GenerateRequest
from headwater.schemas.media import PromptMedia
from headwater.schemas.names import host_port
from headwater.schemas.tables import Capability, MediaSupport

ROOMS: Final = 1 << 63
"""Rooms are numbered below this: SGLang stores them as signed 64-bit integers, and 0 as "none"."""

LEASE_S: Final = 60.0
"""How long a room waits for its decode leg: as long as an edge searches for a decode worker."""

NOWHERE: Final = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST: a leg of this host has no partner and transfers nothing. For probes only."""


class Room(msgspec.Struct, frozen=True):
    """What a decode leg needs to meet its prefill leg."""

    host: str
    port: int
    room: int


class Rooms:
    """Numbers of rooms: drawn at random, and none twice in the lifetime of an engine.

    An arithmetic sequence modulo 2^63 with an odd step meets every number once before it repeats. Start and step are
    random, so that two engines, or two lives of one, meet only by chance: 1 in 10^9 after 10^5 rooms of each.
    """

    def __init__(self) -> None:
        self._next = secrets.randbelow(ROOMS)
        self._step = secrets.randbelow(ROOMS) | 1

    def open(self) -> int:
        """A room that was never open before."""
        room = self._next
        self._next = (room + self._step) % ROOMS
        return room or self.open()


class SglangHandoffs:
    """Opens rooms on this engine's bootstrap server, or enters those of others, according to its mode."""

    def __init__(self, mode: Mode, host: str = "", port: int = 0) -> None:
        self.mode: Mode = mode
        self._host = host
        self._port = port
        self._rooms = Rooms()
        self._entered = UsedHandoffs()

    def open(self, request: GenerateRequest) -> tuple[dict[str, Any], Pinned]:
        """Fields of a prefill leg, and what its decode leg needs."""
        room = Room(self._host, self._port, self._rooms.open())
        return _fields(room), Pinned(
            seal(msgspec.msgpack.encode(room), request), LEASE_S, place=host_port(self._host, self._port)
        )

    def enter(self, request: GenerateRequest, params: bytes) -> dict[str, Any]:
        """Fields of a decode leg. Raises `Unusable`: damaged, another prompt's, or entered before."""
        try:
            room = msgspec.msgpack.decode(unseal(params, request), type=Room)
        except msgspec.DecodeError as error:
            raise Unusable(f"it names no room: {error}") from error
        if not room.host or room.host == NOWHERE or not room.port or not 0 < room.room < ROOMS:
            raise Unusable("it names no room")
        self._entered.use((room.host, room.port, room.room))
        return _fields(room)

    def rehearse(self) -> dict[str, Any]:
        """Fields of a leg without a partner. A decode leg answers from blocks that were never written: only for probes."""
        return _fields(Room(NOWHERE, 0, self._rooms.open()))


def _fields(room: Room) -> dict[str, Any]:
    """The fields of SGLang's GenerateReqInput."""
    return {
        "bootstrap_host": room.host,
        "bootstrap_port": room.port or None,
        "bootstrap_room": room.room,
    }


def pairs_with(mode: Mode | None, version: str, name: str, config: Mapping[str, Any]) -> str:
    """See `EngineInfo.pairs_with`. Empty without a mode. `config` are SGLang's resolved arguments."""
    if mode is None:
        return ""
    layout = f"{config.get('kv_cache_dtype', 'auto')}/page{config['page_size']}"
    return f"sglang/{version}/{name}-{model_digest(str(config['model_path']))}/{config['dtype']}/{layout}"


INPUT_MARGIN: Final = 4
"""Tokens of a request beyond SGLang's longest prompt: prompt and answer together may be this much longer."""

_log = structlog.get_logger("headwater.sglang")


class SglangEngine(SglangControl):
    """See `headwater.engines.engine.Engine` and, for data-parallel ranks, `headwater.engines.ranked`."""

    choreography: Choreography = "room"
    # Until it is started; then set from SGLang's configuration.
    capabilities: frozenset[Capability] = frozenset()
    possible = POSSIBLE
    packages = ("sglang",)
    remark = "runs in an environment of its own (--sglang-python)"

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__()
        self._settings = settings
        self.ranks = number(settings.options.native, "data_parallel_size", 1)
        self._folder: Path | None = None
        self._context_length = 0
        self._deterministic = False
        self._processors: dict[str, str] = {}
        self._handoffs: SglangHandoffs | None = None
        self._embeddings: SglangEmbeddings | None = None
        self._speech: SglangSpeech | None = None

    async def start(self) -> EngineInfo:
        """See `Engine.start`. Loads for seconds to minutes on this thread, on which nothing else runs yet."""
        version = sglang_config.installed()
        check_mode(Path(self._settings.worker.model))
        with interruptible():
            cpu = import_sglang()
        self._signatures = signatures.of_release(version)
        # No other user can listen in it.
        folder = self._folder = engine_process.take("engine")
        native_options = sglang_config.parse(self._settings.options.native)
        worker_settings = self._settings.worker
        context_max, transcribes = worker_settings.max_model_len, is_whisper(worker_settings.model)
        if transcribes:
            self._settings, native_options = speech_settings(self._settings, native_options)
        mode = sglang_config.mode_of(worker_settings.role, native_options)
        if mode is not None:
            self._meet(mode, cpu=cpu)
        arguments = keyword_arguments(self._settings, native_options, *kv_socket.in_folder(folder), cpu=cpu)
        process = self._start_process(arguments, folder)
        self._manager = process.manager
        config = _resolved(process.engine.server_args)
        scheduler_info = process.engine._scheduler_init_result.scheduler_infos[0]
        page_size, tokens = int(config["page_size"]), int(scheduler_info["max_total_num_tokens"])
        self._model = worker_settings.model
        self._input_max = int(scheduler_info["max_req_input_len"])
        self._context_length = min(int(self._manager.context_len), self._input_max + INPUT_MARGIN)
        self._deterministic = bool(config.get("enable_deterministic_inference"))
        self._traces = worker_settings.traces if config.get("enable_trace") else None
        self._keeps_weights = bool(config.get("enable_weights_cpu_backup"))
        events = json.loads(arguments["kv_events_config"])
        reader = getattr(self._manager, "load_snapshot_reader", None)
        sentinels = MediaSentinels()
        self._ranks = of_engine(events, self.ranks, page_size, tokens, reader, sentinels)
        generates = bool(self._manager.is_generation)
        self._pooling = pooling_of(self._manager.model_config.hf_config)
        self.capabilities = capabilities(
            config, generates=generates, processors=self._processors, signatures=self._signatures
        )
        if transcribes:
            speech = self._speech = SglangSpeech(self._manager, context_max)
            self.capabilities = speech.capabilities(self.capabilities)
            self._context_length = speech.context_length
        else:
            self._media = await learn_media(self._manager, config, self._signatures, sentinels)
        if self._media is not None:
            self.capabilities |= self._media.support.capabilities
            if generates:
                await self._verify_embeddings(self._media)
        slots = rank_max = 0
        if "lora" in self.capabilities:
            slots = int(config.get("max_loaded_loras") or config.get("max_loras_per_batch") or 0)
            rank_max = int(config.get("max_lora_rank") or 0)
        self._loras = SglangLoras(self._manager, self._call, slots, rank_max)
        freeze_heap()
        return await self._info(config, mode, version)

    def _start_process(self, arguments: dict[str, Any], folder: Path) -> SglangProcess:
        """Start SGLang, with the processors of the settings, and the folder of its embeddings if it is to read any."""
        self._processors = _pickled(self._settings.options.logits_processors)
        if self._settings.worker.reads_embeddings:
            self._embeddings = SglangEmbeddings(self._settings.worker.embeddings_mib)
        announced = sglang_process.announced(
            self._embeddings.folder if self._embeddings is not None else None
        )
        failure_file = engine_process.prepare(folder)
        with announced, interruptible():
            engine = sglang_process.launch(arguments, failure_file)
            process = self._process = SglangProcess(engine, self._on_failure, failure_file)
        return process

    async def _info(
        self, config: dict[str, Any], mode: sglang_config.Mode | None, version: str
    ) -> EngineInfo:
        """What the worker is told of the engine, once it is started."""
        return EngineInfo(
            self._settings.files.name,
            int(config["page_size"]),
            self._ranks[0].idle.total_blocks,
            await self._running_max(),
            self._context_length,
            version=version,
            dtype=str(self._manager.model_config.dtype).removeprefix("torch."),
            pairs_with=pairs_with(mode, version, self._settings.files.name, config),
            lora_slots=self._loras.slots,
            lora_rank_max=self._loras.rank_max,
            tasks=() if self._manager.is_generation else self._pooling.tasks,
            processors=tuple(sorted(self._processors)) if "processors" in self.capabilities else (),
            vocabulary=int(self._manager.model_config.vocab_size),
            media=self._media.support if self._media is not None else MediaSupport(),
            speech=self._speech.support if self._speech is not None else None,
            media_settings=media_settings(config),
            default_sampling=default_sampling(self._manager.model_config.get_default_sampling_params()),
        )

    def submit(
        self, request: GenerateRequest, emit: Emit, transfer: Transfer | None = None, *, rank: int = 0
    ) -> None:
        """See `Engine.submit`."""
        self._require("generate" if self._speech is None else "transcription")
        if self._process is not None and self._process.failure:
            raise EngineDied(f"SGLang died: {self._process.failure}")
        self._check_supported(request)
        tokens = hashing.unpack_tokens(request.tokens).tolist()
        request_sampling = request.sampling
        check_length(len(tokens), request_sampling.max_tokens, self._context_length)
        if len(tokens) >= self._input_max:
            raise RequestRejected(f"{len(tokens)} prompt tokens; at most {self._input_max - 1} are possible")
        check_processors(request_sampling.processors, self._settings.options.logits_processors)
        self._loras.check(request.lora_name)
        if self._speech is not None:
            self._speech.check(request.media)
        elif self._media is not None:
            self._media.check(tokens, request.media)
        embeddings = self._embeddings.given(request.media) if self._embeddings is not None else None
        # SGLang aborts by prefix: of ids of one length none is a prefix of another.
        stream = Stream(request, uuid4().hex, emit)
        try:
            meeting, pinned = self._meeting(request, transfer)
        except Unusable as error:
            asyncio.get_running_loop().call_soon(
                emit, Step((), "error", detail=f"the hand-off is invalid: {error}")
            )
            return
        generate_request = self._made(request, stream.rid, tokens, rank, meeting)
        task = asyncio.get_running_loop().create_task(
            self._generate(generate_request, stream, embeddings), name=f"generate {request.request}"
        )
        self._tasks[request.request] = task
        self._streams[request.request] = stream
        self._ranks[rank].running.add(request.request)
        task.add_done_callback(partial(self._ended, request.request, rank, stream))
        if pinned is not None:
            asyncio.get_running_loop().call_soon(stream.send, Step((), pinned=pinned))

    async def _verify_embeddings(self, media: SglangMedia) -> None:
        """Prove that embeddings are used, if the settings want any. Raises `EngineUnavailable`."""
        if self._embeddings is None or media.support.images is None:
            return
        meeting = self._handoffs.rehearse if self._handoffs is not None else dict
        probing = self._embeddings.verify(
            self._manager, media.probe_prompt, media.probe_image(), media.prepare, meeting
        )
        await self._call(probing)
        self.capabilities |= {"image_embeddings"}

    def holds_embedding(self, item: PromptMedia) -> bool:
        """See `Engine.holds_embedding`."""
        return self._embeddings is not None and self._embeddings.holds(item)

    async def put_embedding(self, item: PromptMedia, image: EncodedImage) -> None:
        """See `Engine.put_embedding`."""
        if self._embeddings is None or "image_embeddings" not in self.capabilities:
            self._reject("image_embeddings")
        await self._embeddings.put(item, image)

    async def _running_max(self) -> int:
        """Return how many requests of a rank may run at once. On a GPU the scheduler chooses it, and reports it on request only."""
        states = await self._call(self._manager.get_internal_state())
        return int(states[0]["effective_max_running_requests_per_dp"])

    def _meet(self, mode: sglang_config.Mode, *, cpu: bool) -> None:
        """Prepare to meet engines of the other mode."""
        host, options = sglang_config.host_of(self._settings), self._settings.options
        for name, value in sglang_config.environment(host, cpu=cpu).items():
            os.environ.setdefault(name, value)
        port = options.handoff_port or sglang_config.free_port(host)
        self._settings = self._settings._replace(options=options._replace(handoff_port=port))
        self._handoffs = SglangHandoffs(mode, host, port)

    def _meeting(
        self, request: GenerateRequest, transfer: Transfer | None
    ) -> tuple[dict[str, Any], Pinned | None]:
        """Return where a leg meets the other one, and what that one needs. Raises `RequestRejected` and `Unusable`."""
        handoffs = self._handoffs
        if handoffs is None:
            return {}, None
        if request.leg != handoffs.mode:
            raise SplitOnly(self.name)
        if not request.edge:
            return handoffs.rehearse(), None
        if request.leg == "prefill":
            return handoffs.open(request)
        if transfer is None:
            raise SplitOnly(self.name)
        return handoffs.enter(request, transfer.params), None

    async def release(self, request: str, params: bytes) -> None:
        """See `Engine.release`. A prefill leg that no other meets would wait for minutes."""
        self._require("handoff")
        self.abort(request)

    def _made(
        self, request: GenerateRequest, rid: str, tokens: list[int], rank: int, meeting: dict[str, Any]
    ) -> Any:
        """SGLang's GenerateReqInput. Raises `RequestRejected`."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request_sampling = request.sampling
        if request.leg == "prefill":
            # SGLang hands this token over as the answer's first, so it is sampled as all others are.
            request_sampling = msgspec.structs.replace(
                request_sampling, max_tokens=1, min_tokens=min(1, request_sampling.min_tokens)
            )
        fields: dict[str, Any] = {
            "sampling_params": sampling.answer(
                request_sampling, random_seed=_seed if self._deterministic else None
            ),
            **sampling.scores(request_sampling),
            **meeting,
        }
        for name in request_sampling.processors:
            fields["custom_logit_processor"] = self._processors[name]
        if request.cache_salt:
            fields["cache_salt"] = request.cache_salt
        if request.lora_name:
            fields["lora_path"] = request.lora_name
        # Other scheduling policies reject priorities.
        if "priority" in self.capabilities:
            fields["priority"] = request.priority
        if request_sampling.thinking_budget is not None:
            fields["max_thinking_tokens"] = request_sampling.thinking_budget
        if self.ranks > 1:
            fields["routed_dp_rank"] = rank
        fields |= self._trace_fields(request)
        supported_fields = self._signatures.keep("GenerateReqInput", fields)
        return GenerateReqInput(rid=rid, input_ids=tokens, stream=True, **supported_fields)

    async def _generate(
        self, generate_request: Any, stream: Stream, embeddings: Sequence[GivenEmbedding] | None = None
    ) -> None:
        media = stream.request.media
        try:
            fields: dict[str, Any] = {}
            if self._speech is not None:
                fields = await self._speech.prepare(media)
            elif media and self._media is not None:
                fields = await self._media.prepare(media, embeddings)
            for name, value in fields.items():
                setattr(generate_request, name, value)
            async with aclosing(self._manager.generate_request(generate_request, None)) as chunks:
                async for chunk in chunks:
                    stream.take(chunk)
                    if stream.ended:
                        break
        except (ValueError, RequestRejected) as error:
            # The first is the only exception by which SGLang rejects an invalid request.
            _log.info("request_rejected", attempt=stream.request.request, param="")
            stream.send(Step((), "rejected", detail=str(error)[:TEXT_MAX]))
        except Exception as error:  # the boundary to SGLang: any exception ends this request
            _log.error("generate_failed", attempt=stream.request.request, failure=failure_place(error))
            _log.debug("generate_failure", attempt=stream.request.request, exc_info=True)
            stream.send(Step((), "error", detail=f"{type(error).__name__}; see the worker's log"))
        finally:
            self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        """Stop a request in the scheduler, unless it has ended there. The scheduler ignores what it does not know yet."""
        if self._process is None or self._process.failure:
            return
        state = self._manager.rid_to_state.get(stream.rid)
        if state is None:
            return
        if self._is_begun(stream):
            self._manager.abort_request(rid=stream.rid)
        else:
            self._manager.rid_to_state.pop(stream.rid, None)

    def _ended(self, request: str, rank: int, stream: Stream, task: asyncio.Task[None]) -> None:
        """Emit exactly one final step, whatever happened, also before the task's first step."""
        self._tasks.pop(request, None)
        self._streams.pop(request, None)
        self._ranks[rank].running.discard(request)
        if stream.ended:
            return
        failure = self._process.failure if self._process is not None else ""
        if failure and failure != STOPPED:
            stream.send(Step((), "died", detail=f"SGLang died: {failure}"))
        elif task.cancelled():
            stream.send(Step((), "abort"))
        else:
            stream.send(Step((), "error", detail="SGLang ended the request without a finish reason"))

    def _on_failure(self, reason: str) -> None:
        """Its requests will not be answered: they end now, and `check` says why."""
        if reason == STOPPED:
            return
        _log.error("sglang_died", reason=reason)
        for task in list(self._tasks.values()):
            task.cancel()

    async def check(self) -> None:
        """See `Engine.check`."""
        if self._process is not None:
            self._process.check()

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await self._cancel_requests()
        if self._process is not None:
            process, self._process = self._process, None
            await process.stop()
        for rank in self._ranks:
            rank.socket.close()
        for part in (self._media, self._speech):
            if part is not None:
                part.close()
        if self._embeddings is not None:
            self._embeddings.close()
        if self._folder is not None:
            engine_process.give_up(self._folder)


def _resolved(arguments: Any) -> dict[str, Any]:
    """SGLang's arguments as it uses them; before 0.5.18 they are the attributes themselves."""
    resolved: dict[str, Any] = (
        arguments.resolved_dict() if hasattr(arguments, "resolved_dict") else vars(arguments)
    )
    return resolved


def _pickled(processors: Any) -> dict[str, str]:
    """SGLang's form of each logits processor. Raises `EngineUnavailable` naming the one at fault."""
    pickles: dict[str, str] = {}
    for name, place in processors.items():
        try:
            pickles[name] = sampling.pickled(place)
        except (ImportError, AttributeError) as error:
            raise EngineUnavailable(f"--logits-processors {name}={place}: {error}") from error
    return pickles


def _seed() -> int:
    return secrets.randbits(63)
