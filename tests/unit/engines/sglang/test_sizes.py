"""What an engine tells of its own size."""

from types import SimpleNamespace
from typing import Any

from headwater.engines.sglang import SglangOptions
from headwater.engines.sglang.engine import SglangEngine
from tests.support.engines.settings import engine_settings


async def test_the_scheduler_knows_how_many_requests_may_run() -> None:
    """The arguments of 0.5.17 do not on a GPU; the contract suite asks the real one."""

    async def get_internal_state() -> list[dict[str, Any]]:
        return [{"max_running_requests": None, "effective_max_running_requests_per_dp": 2048}]

    async def call(awaitable: Any) -> Any:
        return await awaitable

    engine = SglangEngine(engine_settings(SglangOptions()))
    engine._manager = SimpleNamespace(get_internal_state=get_internal_state)
    engine._process = SimpleNamespace(call=call)  # type: ignore[assignment]
    assert await engine._running_max() == 2048
