"""One data-parallel rank of an SGLang: its events, cached blocks and load. Without data parallelism there is one rank."""

from typing import Any

import structlog

from headwater.engines.engine import EngineLoad
from headwater.engines.kv_events.endpoints import reachable
from headwater.engines.kv_events.sentinels import MediaSentinels
from headwater.engines.kv_events.socket import KvSocket
from headwater.engines.kv_events.translator import KvTranslator

_log = structlog.get_logger("headwater.sglang")


class SglangRank:
    """The state of one rank. `running` are its requests. `reader` reads the loads that the scheduler publishes."""

    def __init__(
        self,
        number: int,
        endpoint: str,
        replay: str,
        page_size: int,
        total_tokens: int,
        reader: Any,
        sentinels: MediaSentinels,
    ) -> None:
        self.number = number
        self.translator = KvTranslator(page_size, sentinels=sentinels)
        self.socket = KvSocket(endpoint, replay, self.translator)
        self.idle = EngineLoad(0, 0, 0, total_tokens // page_size)
        self.running: set[str] = set()
        self._page_size = page_size
        self._reader = reader
        self._unread = False

    def load(self) -> EngineLoad:
        """Current load. The scheduler publishes its last step's: without running requests the load is zero."""
        if not self.running:
            return self.idle
        try:
            found = self._reader.read(self.number) if self._reader is not None else None
        except Exception as error:  # its file is SGLang's own
            if not self._unread:
                self._unread = True
                _log.warning("sglang_load_unreadable", rank=self.number, reason=repr(error))
            found = None
        if found is None:
            return self.idle._replace(running=len(self.running))
        used = -(-int(found.num_used_tokens) // self._page_size)
        total = self.idle.total_blocks
        return EngineLoad(int(found.num_running_reqs), int(found.num_waiting_reqs), min(used, total), total)


def of_engine(
    config: dict[str, Any],
    count: int,
    page_size: int,
    total_tokens: int,
    reader: Any,
    sentinels: MediaSentinels,
) -> list[SglangRank]:
    """The ranks of a started engine. `config` is that of its KV events, `sentinels` are the media of its requests."""
    from sglang.srt.disaggregation.kv_events import ZmqEventPublisher

    return [
        SglangRank(
            number,
            reachable(ZmqEventPublisher.offset_endpoint_port(config["endpoint"], number)),
            reachable(ZmqEventPublisher.offset_endpoint_port(config["replay_endpoint"], number)),
            page_size,
            total_tokens,
            reader,
            sentinels,
        )
        for number in range(count)
    ]
