"""Follow two values through the code of one source tree. Run by `tests.tidy.trace_files`, in a process of its own.

A simulated fleet (one edge, one router, one worker) runs on a virtual event loop; `sys.setprofile` sees each call.

request       Control flow: files with a function that runs for a chat request, from the first HTTP byte at the parser
              of the edge to the route query on the bus. Background tasks are left out by a context variable.
prompt        Data flow on the same way: files with a function that takes or returns the prompt, as bytes, text, tokens
              or block hashes.
kv-event      Data flow: files with a function that takes or returns an event with the hash of a block, as a struct, as
              bytes or as an array, from the engine that creates it to the router's index. The hash is of generated
              tokens, so no other process can compute it.
vllm-event    The same for an event in vLLM's format, from its ZMQ socket to the events that the engine port yields.

The simulation's ports (`ops/sim`) stand for the bus and the network, and `events/memory` for JetStream. Prints JSON.
Numba is to be disabled (NUMBA_DISABLE_JIT=1), as compiled functions make no profile events.
"""

import asyncio
import dataclasses
import importlib
import json
import os
import random
import sys
import tempfile
import traceback
from collections import deque
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import headwater

HOME = str(Path(headwater.__file__).resolve().parent)
TRACED: ContextVar[bool] = ContextVar("traced", default=False)
SETTLE_S = 5.0
BLOCK = 16
PROMPT_TOKENS = list(range(1, 9))
SEED = 7
QUESTION = "Where does the stream begin?"
SCAN_DEPTH, SCAN_ITEMS = 6, 256

OLD_NAMES = {
    "actors.edge.server": "actors.http.server",
    "actors.edge.connection": "actors.http.connection",
    "actors.edge.limits": "actors.http.limits",
    "engines.vllm.kv_events": "engines.kv_events.translator",
    "engines.vllm.kv_socket": "engines.kv_events.socket",
    "engines.sim_model": "engines.sim.model",
}
"""Where modules stood before they got packages of their own: old name, new name."""


def load(name: str) -> Any:
    """Module of this name, or of its older one."""
    older = [old for old, new in OLD_NAMES.items() if new == name]
    for candidate in (name, *older):
        try:
            return importlib.import_module(f"headwater.{candidate}")
        except ModuleNotFoundError as error:
            if error.name is None or not f"headwater.{candidate}".startswith(error.name):
                raise
    raise ModuleNotFoundError(name)


class Trace:
    """Files in the order in which they were first touched, each with the function that did."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.started = True
        self.finished = False

    def note(self, frame: FrameType) -> None:
        """Add the frame's file."""
        name = file_of(frame)
        if name and not name.startswith(("ops/sim/", "tests/")) and name not in self.files:
            self.files[name] = frame.f_code.co_qualname


def file_of(frame: FrameType) -> str:
    """Path of the frame's file within the package, empty for other code."""
    # Symbolic links: the package's folders are linked into src.
    path = _resolved(frame.f_code.co_filename)
    if "/site-packages/" in path:
        # An environment inside the tree.
        return ""
    for root in (HOME, str(Path(HOME).parents[1])):
        if path.startswith(root + "/"):
            return path[len(root) + 1 :]
    return ""


_paths: dict[str, str] = {}


def _resolved(path: str) -> str:
    if path not in _paths:
        _paths[path] = str(Path(path).resolve()) if path.endswith(".py") else path
    return _paths[path]


def contains(value: Any, markers: "Markers", depth: int = SCAN_DEPTH) -> bool:
    """Is one of the hashes in this value, or in what it is made of?"""
    if value is None or isinstance(value, bool | float | type):
        return False
    if isinstance(value, str):
        return any(one in value for one in markers.words)
    if isinstance(value, int):
        return value in markers.numbers
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return any(one in data for one in markers.texts)
    if isinstance(value, np.integer):
        return int(value) in markers.array_numbers
    if isinstance(value, np.ndarray):
        data = value.tobytes()
        return any(one in data for one in markers.texts)
    if not depth:
        return False
    if markers.words and isinstance(value, list) and value and isinstance(value[0], int):
        return contains(np.array(value, np.uint64).astype(np.uint32), markers)
    if isinstance(value, list | tuple | deque | set | frozenset):
        return any(contains(one, markers, depth - 1) for one in list(value)[:SCAN_ITEMS])
    if isinstance(value, dict):
        return any(contains(one, markers, depth - 1) for one in list(value.values())[:SCAN_ITEMS]) or any(
            contains(one, markers, 0) for one in list(value)[:SCAN_ITEMS]
        )
    fields = getattr(type(value), "__struct_fields__", None) or (
        [one.name for one in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
    )
    return any(contains(getattr(value, name, None), markers, depth - 1) for name in fields)


def has_event(value: Any) -> bool:
    """Is it a stored-blocks event, or a list of events with one?"""
    if isinstance(value, list | tuple):
        return any(has_event(one) for one in value)
    return type(value).__name__ == "BlocksStored"


class Markers:
    """What to follow: block hashes, as numbers and as they stand in bytes; a text, and its token ids."""

    def __init__(
        self, hashes: list[int], text: str = "", tokens: list[int] | None = None, *, packed: bool = False
    ) -> None:
        self.array_numbers = set(hashes)
        # A packed value is followed as bytes and arrays only: engines have the same hashes as integers.
        self.numbers = set() if packed else self.array_numbers
        self.words = [text] if text else []
        self.texts = [one.to_bytes(8, "little") for one in hashes] + [
            one.to_bytes(8, "big") for one in hashes
        ]
        if tokens:
            self.texts += [text.encode(), np.array(tokens, np.uint32).tobytes()]


def follow_value(trace: Trace, markers: Markers) -> Any:
    """A profile function that notes functions which take or return one of the hashes."""

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or trace.finished or not file_of(frame):
            return
        code = frame.f_code
        if event == "return":
            values = [argument]
        else:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4)]
            values = [frame.f_locals.get(name) for name in names if name != "self"]
        try:
            if any(contains(value, markers) for value in values):
                trace.started = trace.started or any(has_event(value) for value in values)
                if trace.started:
                    trace.note(frame)
        except Exception:
            # Raised into the traced program it would change what that does.
            traceback.print_exc()
            os._exit(1)

    return profile


class Transport(asyncio.Transport):
    """What a connection writes to: nowhere."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return False

    def write(self, data: Any) -> None:
        self.written = getattr(self, "written", b"") + data

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def started_fleet(clock: Any) -> Any:
    """One edge, one router, one worker of a model for text, all ready."""
    module = load("ops.sim.fleet")
    # Before media were known there was no such field.
    settings = module.SETTINGS
    text = (
        {"settings": settings._replace(media=type(settings.media)())} if "media" in settings._fields else {}
    )
    processes = (["engine-0"], ["router-0"], ["edge-0"])
    fleet = module.SimFleet(clock, random.Random(0), lambda *_, **__: None, *processes, **text)
    for name in fleet.names:
        fleet.start(name)
    await asyncio.sleep(SETTLE_S)
    return fleet


def http_request(path: str, body: Any) -> bytes:
    """An HTTP/1.1 request as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: edge\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(fleet: Any, clock: Any) -> tuple[Any, Any, Transport]:
    """A connection of the edge's HTTP server, the context in which the edge runs, and its transport."""
    import uvicorn
    from uvicorn.server import ServerState

    server = fleet.servers["edge-0"]
    protocol_of = load("actors.http.connection").protocol_of
    limits = load("actors.http.limits").ConnectionLimits()
    config = uvicorn.Config(server._app, http=protocol_of(limits), lifespan="off", log_config=None, ws="none")
    config.load()
    context = server._context.copy()
    transport = Transport()
    make: Any = config.http_protocol_class
    protocol = context.run(lambda: make(config=config, server_state=ServerState(), app_state={}, _loop=clock))
    context.run(protocol.connection_made, transport)
    return protocol, context, transport


async def trace_prompt(clock: Any) -> tuple[Trace, Trace]:
    """Files that one chat request touches until the route query is published, and those that its prompt passes."""
    fleet = await started_fleet(clock)
    control, data = Trace(), Trace()
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 8,
        "stream": True,
    }
    hashes: list[int] = []

    def learn(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and frame.f_code.co_name == "sequence_hashes" and argument is not None:
            hashes.extend(argument.tolist())

    def follow_control(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and TRACED.get():
            control.note(frame)

    def until_published(follow: Any, trace: Trace) -> Any:
        def profile(frame: FrameType, event: str, argument: Any) -> None:
            if trace.finished:
                return
            if event == "call" and file_of(frame) == "ops/sim/network.py":
                trace.finished = ".route." in str(frame.f_locals.get("subject", ""))
            elif not trace.finished:
                follow(frame, event, argument)

        return profile

    # The first request loads what later ones share, such as the tokenizer.
    tokens = load("engines.sim.model").tokenizer().encode(QUESTION).ids
    for make in (
        lambda: learn,
        lambda: until_published(follow_control, control),
        lambda: until_published(follow_value(data, Markers(hashes, QUESTION, tokens)), data),
    ):
        protocol, context, transport = connect(fleet, clock)
        context.run(TRACED.set, True)
        sys.setprofile(make())
        try:
            context.run(protocol.data_received, http_request("/v1/chat/completions", body))
            await asyncio.sleep(SETTLE_S)
        finally:
            sys.setprofile(None)
        assert b"200 OK" in transport.written, transport.written
    assert control.finished, "no route query was published"
    assert data.finished, "no route query was published"
    return control, data


async def trace_kv_event(clock: Any) -> Trace:
    """Files that the hash of a generated block passes, from the engine to the router's index."""
    fleet_module, hashing = load("ops.sim.fleet"), load("schemas.hashing")
    fleet = await started_fleet(clock)
    script = fleet_module.SCRIPT
    generated = [script[(SEED + number) % len(script)] for number in range(BLOCK)]
    tokens = np.array((PROMPT_TOKENS + generated)[:BLOCK], np.uint32)
    [wanted] = hashing.sequence_hashes(tokens, BLOCK).tolist()
    body = {"model": "sim", "prompt": PROMPT_TOKENS, "max_tokens": 24, "seed": SEED, "ignore_eos": True}
    trace = Trace()
    trace.started = False
    protocol, context, transport = connect(fleet, clock)
    sys.setprofile(follow_value(trace, Markers([wanted], packed=True)))
    try:
        context.run(protocol.data_received, http_request("/v1/completions", body))
        await asyncio.sleep(SETTLE_S)
    finally:
        sys.setprofile(None)
    assert b"200 OK" in transport.written, transport.written
    assert any(name.startswith("router/") for name in trace.files), trace.files
    return trace


async def trace_vllm_event() -> Trace:
    """Files that an event of vLLM passes, from its ZMQ socket to the events of the engine port."""
    import msgspec
    import zmq
    import zmq.asyncio

    hashing = load("schemas.hashing")
    kv_socket, kv_events = load("engines.kv_events.socket"), load("engines.kv_events.translator")
    engine_hash = 0x1122334455667788
    tokens = list(range(1, BLOCK + 1))
    [wanted] = hashing.chain_plain(tokens, BLOCK, 0)
    event = {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.asyncio.Context()
        publisher = context.socket(zmq.XPUB)
        publisher.bind(f"ipc://{folder}/events")
        socket = kv_socket.KvSocket(
            f"ipc://{folder}/events", f"ipc://{folder}/replay", kv_events.KvTranslator(BLOCK)
        )
        sys.setprofile(follow_value(trace, Markers([engine_hash, wanted])))
        try:
            events = socket.events()
            first = asyncio.ensure_future(anext(events))
            await publisher.recv()
            await publisher.send_multipart([b"", bytes(8), msgspec.msgpack.encode([0.0, [event], 0])])
            async with asyncio.timeout(10):
                await first
        finally:
            sys.setprofile(None)
            await events.aclose()
            socket.close()
            context.destroy(linger=0)
    return trace


def main() -> None:
    """Run every trace and print them."""
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    run = load("ops.sim.loop").run
    status = 0
    try:
        request, prompt = run(trace_prompt)
        found = {
            "request": request.files,
            "prompt": prompt.files,
            "kv-event": run(trace_kv_event).files,
            "vllm-event": asyncio.run(trace_vllm_event()).files,
        }
        print(json.dumps(found), flush=True)
    except Exception:
        traceback.print_exc()
        status = 1
    # The simulated processes still run: leave them.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
