"""The load of a rank: what vLLM reports, and what it has not reported yet."""

from pathlib import Path

from headwater.engines.engine import EngineLoad
from headwater.engines.kv_events import KvTranslator
from headwater.engines.vllm.launch import VllmRank


async def test_requests_that_are_in_no_report_yet_count_as_running(tmp_path: Path) -> None:
    """Without requests the load is zero, whatever the last report said."""
    rank = VllmRank(0, (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"), KvTranslator(16), 100)
    try:
        rank.last = EngineLoad(1, 1, 5, 100)
        assert rank.load() == (0, 0, 0, 100)
        rank.running = {"a", "b", "c"}
        assert rank.load() == (2, 1, 5, 100)
        rank.last = EngineLoad(4, 0, 9, 100)
        assert rank.load() == (4, 0, 9, 100)
    finally:
        rank.socket.close()
