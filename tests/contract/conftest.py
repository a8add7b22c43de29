"""What all contract tests share: real servers, one per process of the test run and format of ack subjects."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from functools import cache, partial
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
import uvloop
from nats.aio.client import Client

from headwater.engines.engine import Engine, LoraAdapter
from headwater.engines.sim import ZERO, StepTime
from headwater.events.jetstream import connect
from tests.support.engines import peft, tiny_model
from tests.support.ports.buses import BusCase, memory_bus, nats_bus
from tests.support.ports.engines import (
    EngineCase,
    MakeEngine,
    MakeRealEngine,
    full_sglang_engine,
    full_vllm_engine,
    nixl_engine,
    pooling_sglang_engine,
    pooling_vllm_engine,
    sglang_engine,
    sim_engine,
    started,
    vllm_engine,
)
from tests.support.ports.guarded import Guarded, guarded_server
from tests.support.ports.logs import LogCase, jetstream_case, memory_case
from tests.support.processes import zygote, zygotes
from tests.support.servers.nats import NatsServer
from tests.support.sglang import environment

_numbers = count(1)

VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.xdist_group("vllm"),
        # Its own libraries' are not ours to fail on.
        pytest.mark.filterwarnings("ignore"),
    ],
)
"""Of fixtures with several engines: the real vLLM."""

SGLANG = pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.filterwarnings("ignore")])
"""The real SGLang, alone in its own environment: tests/sglang/test_contract.py runs these tests there."""

collect_ignore = [] if environment.HERE else ["engine/sglang"]
"""What only the real SGLang has."""

SIM_OR_REAL = [SGLANG] if environment.HERE else ["sim", VLLM]

Pair = tuple[EngineCase, EngineCase]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of every Headwater process."""
    return {"uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of servers, one with the usual format of ack subjects; with the mark `ack_formats` one with each format."""
    formats = ["ack1", "ack2"] if metafunc.definition.get_closest_marker("ack_formats") else ["ack1"]
    for name, kinds in (("server", formats), ("own_server", formats), ("backend", ["memory", *formats])):
        if name in metafunc.fixturenames:
            # Killing a server takes seconds: with the other format in `make soak`.
            soak = pytest.mark.soak if name == "own_server" else ()
            marked = [pytest.param(kind, marks=soak if kind == "ack2" else ()) for kind in kinds]
            metafunc.parametrize(name, marked, indirect=True)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bool], NatsServer]]:
    """The shared server of an ack format, started on first use. Tests keep apart by unique names."""
    started: dict[bool, NatsServer] = {}
    with ExitStack() as stack:

        def server(ack_v2: bool) -> NatsServer:
            if ack_v2 not in started:
                made = NatsServer(tmp_path_factory.mktemp("nats"), ack_v2=ack_v2)
                started[ack_v2] = stack.enter_context(made)
            return started[ack_v2]

        yield server


@pytest.fixture
def unique() -> str:
    """A name that no other test uses, for namespaces and subjects."""
    return f"t{next(_numbers)}"


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Callable[[bool], NatsServer]) -> NatsServer:
    """A shared server, for each format of ack subjects. Nobody may stop it."""
    return servers(request.param == "ack2")


@pytest.fixture
async def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that the test may kill."""
    server = NatsServer(tmp_path, ack_v2=request.param == "ack2")
    await server.start()
    yield server
    server.stop()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A server of the test's own with least permissions."""
    async with guarded_server(tmp_path) as made:
        yield made


@pytest.fixture
def backend(request: pytest.FixtureRequest, servers: Callable[[bool], NatsServer]) -> NatsServer | None:
    """Where a port is implemented: None for memory, else a shared server."""
    return None if request.param == "memory" else servers(request.param == "ack2")


@pytest.fixture
async def log_case(backend: NatsServer | None, unique: str) -> AsyncIterator[LogCase]:
    """An empty log."""
    async with memory_case() if backend is None else jetstream_case(backend, unique) as case:
        yield case


@pytest.fixture(params=["memory", "nats"])
def bus_server(request: pytest.FixtureRequest, servers: Callable[[bool], NatsServer]) -> NatsServer | None:
    """Where a bus is: None for memory. The format of ack subjects does not concern it."""
    return None if request.param == "memory" else servers(False)


@pytest.fixture
async def bus_case(bus_server: NatsServer | None) -> AsyncIterator[BusCase]:
    """A bus with nobody on it."""
    async with memory_bus() if bus_server is None else nats_bus(bus_server) as case:
        yield case


@pytest.fixture(scope="session")
def vllm_model() -> str:
    """Folder of a model that costs 2 ms a token, with vLLM imported into this process: 10 to 30 s, once."""
    from headwater.engines.vllm import preload

    folder = str(tiny_model.ensure())
    preload.preload()
    zygote.prepare_vllm()
    # In a whole run the engines' fleets come next in this worker.
    zygotes.begin("vllm", "sglang")
    return folder


@pytest.fixture(scope="session")
def sglang_model() -> Iterator[str]:
    """Folder of the same model, with SGLang imported into this process unless it was forked from one that has.

    A process of SGLang's that does not end when it is asked to fails the test that stops its engine.
    """
    from headwater.engines.sglang import process
    from tests.support.sglang import forks

    wait = process._gone

    async def all_gone(pids: list[int], within_s: float) -> None:
        await wait(pids, within_s)
        assert not any(map(process._runs, pids)), f"{pids} did not end within {within_s} s"

    forks.preload()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_gone", all_gone)
        yield str(tiny_model.ensure())


@pytest.fixture(scope="session", params=[SGLANG] if environment.HERE else ["sim-zero", "sim-timed", VLLM])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """Makes an engine that is not started, of each kind."""
    if request.param == "vllm":
        return partial(vllm_engine, request.getfixturevalue("vllm_model"))
    if request.param == "sglang":
        return partial(sglang_engine, request.getfixturevalue("sglang_model"))
    return partial(sim_engine, ZERO if request.param == "sim-zero" else StepTime())


@pytest.fixture(params=[SGLANG if environment.HERE else VLLM])
def make_real_engine(request: pytest.FixtureRequest) -> MakeRealEngine:
    """Makes the real engine that is installed here."""
    if request.param == "sglang":
        return partial(sglang_engine, request.getfixturevalue("sglang_model"))
    return partial(vllm_engine, request.getfixturevalue("vllm_model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["sim", VLLM])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two running engines that can hand over to each other, shared by all tests of a run."""
    make = (
        partial(nixl_engine, request.getfixturevalue("vllm_model"))
        if request.param == "vllm"
        else partial(sim_engine, ZERO)
    )
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(started(make()))
        if "handoff" not in first.engine.capabilities:
            pytest.skip("the engine does not hand over")
        yield first, await stack.enter_async_context(started(make()))


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=SIM_OR_REAL)
async def full_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineCase]:
    """A running engine with everything that it can have, shared by all tests of a run."""
    if request.param == "sglang":
        make: Callable[[], Engine] = partial(full_sglang_engine, request.getfixturevalue("sglang_model"))
    elif request.param == "vllm":
        make = partial(full_vllm_engine, request.getfixturevalue("vllm_model"))
    else:
        make = partial(sim_engine, StepTime())
    folder = tmp_path_factory.mktemp("adapters")

    @cache
    def make_adapter(name: str, variant: int, rank: int) -> LoraAdapter:
        made = peft.make(folder / f"{name}-{variant}-{rank}", tiny_model.ensure(), variant, rank)
        return LoraAdapter(name, str(made), rank)

    async with started(make(), make_adapter) as case:
        yield case


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=SIM_OR_REAL)
async def pooling_case(request: pytest.FixtureRequest) -> AsyncIterator[EngineCase]:
    """A running engine that makes vectors, shared by all tests of a run."""
    if request.param == "sglang":
        make: Callable[[], Engine] = partial(pooling_sglang_engine, request.getfixturevalue("sglang_model"))
    elif request.param == "vllm":
        make = partial(pooling_vllm_engine, request.getfixturevalue("vllm_model"))
    else:
        make = partial(sim_engine, ZERO)
    async with started(make()) as case:
        yield case


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine_case(make_engine: MakeEngine) -> AsyncIterator[EngineCase]:
    """A running engine, shared by all tests of a run."""
    async with started(make_engine()) as case:
        yield case


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    """A connection to `server`."""
    connection = await connect(server.url, "test")
    yield connection
    await connection.close()
