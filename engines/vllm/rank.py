"""One data-parallel rank of a vLLM: its events, cached blocks and load. Without data parallelism there is one rank."""

from typing import Any

from headwater.engines.engine import EngineLoad
from headwater.engines.kv_events.endpoints import reachable
from headwater.engines.kv_events.socket import KvSocket
from headwater.engines.kv_events.translator import KvTranslator


class EngineRank:
    """The state of one rank. `running` are its requests."""

    def __init__(self, number: int, endpoint: str, replay: str, block_size: int, total_blocks: int) -> None:
        self.number = number
        self.translator = KvTranslator(block_size)
        self.socket = KvSocket(endpoint, replay, self.translator)
        self.idle = EngineLoad(0, 0, 0, total_blocks)
        self.last = self.idle
        self.running: set[str] = set()

    def load(self) -> EngineLoad:
        """Current load. Idle engines do not report, so without running requests the load is zero; and requests that are in no report yet count as running."""
        if not self.running:
            return self.idle
        unreported = len(self.running) - self.last.running - self.last.waiting
        return self.last._replace(running=self.last.running + max(0, unreported))


def of_engine(engine: Any, count: int) -> list[EngineRank]:
    """The ranks of a started AsyncLLM, by its own numbers."""
    from vllm.distributed.kv_events import ZmqEventPublisher

    config = engine.vllm_config
    # The sum over all ranks.
    total = int(config.cache_config.num_gpu_blocks) // count
    block_size = int(config.cache_config.block_size)
    numbers = getattr(engine.engine_core, "engine_ranks_managed", None) or list(range(count))
    # The actual endpoints in newer releases: a port may have been 0.
    sources = engine.get_kv_event_sources() if hasattr(engine, "get_kv_event_sources") else {}
    made: list[EngineRank] = []
    for number in numbers:
        source = sources.get(number)
        if source is not None:
            at, replay = source.endpoint, source.replay_endpoint
        else:
            native = config.kv_events_config
            at = ZmqEventPublisher.offset_endpoint_port(native.endpoint, number)
            replay = ZmqEventPublisher.offset_endpoint_port(native.replay_endpoint, number)
        made.append(EngineRank(number, reachable(at), reachable(replay), block_size, total))
    return made
