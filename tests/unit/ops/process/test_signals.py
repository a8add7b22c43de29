"""What every process does before its work begins."""

import asyncio
import gc

from headwater.ops.process import signals


def test_a_process_excludes_its_modules_from_collections() -> None:
    """A full collection over them takes a tenth of a second and more, in which no token is sent."""

    async def frozen(_: asyncio.Event) -> int:
        return gc.get_freeze_count()

    # What another test of this process froze.
    gc.unfreeze()
    try:
        assert signals.run(frozen) > 10_000
    finally:
        gc.unfreeze()
