"""One data-parallel rank of a vLLM: its events, what it holds, its load. An engine without such ranks has one."""

from pathlib import Path
from typing import Any

from headwater.engines.engine import EngineLoad
from headwater.engines.vllm.kv_events import KvTranslator
from headwater.engines.vllm.kv_socket import KvSocket

EVENTS = "inproc-events"
REPLAY = "inproc-replay"
"""Names of the sockets in the engine's own folder. vLLM makes an endpoint for each rank of the one that it is given, but
knows how to for tcp and inproc only, by looking for these words: with this name it gives Unix sockets a suffix."""


class Rank:
    """What the adapter keeps for one rank. `running` are the requests that it has there."""

    def __init__(self, number: int, endpoint: str, replay: str, block_size: int, total_blocks: int) -> None:
        self.number = number
        self.translator = KvTranslator(block_size)
        self.socket = KvSocket(endpoint, replay, self.translator)
        self.idle = EngineLoad(0, 0, 0, total_blocks)
        self.last = self.idle
        self.running: set[str] = set()

    def load(self) -> EngineLoad:
        """Present load. Idle engines do not report, so nothing running means no load."""
        return self.last if self.running else self.idle


def endpoints(folder: str) -> tuple[str, str]:
    """What to give vLLM as endpoints of its events and their replay. Unix sockets: no port to clash, nobody listens."""
    events, replay = (f"ipc://{Path(folder, name)}" for name in (EVENTS, REPLAY))
    return events, replay


def of_engine(engine: Any, count: int) -> list[Rank]:
    """The ranks of a started AsyncLLM, by its own numbers."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    config = engine.vllm_config
    # The sum over all ranks.
    total = int(config.cache_config.num_gpu_blocks) // count
    block_size = int(config.cache_config.block_size)
    numbers = getattr(engine.engine_core, "engine_ranks_managed", None) or list(range(count))
    # Where newer releases really listen: a port may have been 0.
    sources = engine.get_kv_event_sources() if hasattr(engine, "get_kv_event_sources") else {}
    made: list[Rank] = []
    for number in numbers:
        source = sources.get(number)
        if source is not None:
            at, replay = source.endpoint, source.replay_endpoint
        else:
            told = config.kv_events_config
            at = ZmqEventPublisher.offset_endpoint_port(told.endpoint, number)
            replay = ZmqEventPublisher.offset_endpoint_port(told.replay_endpoint, number)
        made.append(Rank(number, _reachable(at), _reachable(replay), block_size, total))
    return made


def _reachable(endpoint: str) -> str:
    """Where to connect to what is bound to `endpoint` on this machine."""
    for everywhere in ("tcp://*:", "tcp://0.0.0.0:"):
        if endpoint.startswith(everywhere):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(everywhere)
    return endpoint
