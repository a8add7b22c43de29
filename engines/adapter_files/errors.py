"""What goes wrong with an adapter, with the status that a control command answers."""

from headwater.engines.engine import EngineError


class AdapterError(EngineError):
    """An adapter can not be had or not be loaded. `status` follows HTTP, as in `schemas.control`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class SourceMissing(AdapterError):
    """There is no such file at the source."""

    def __init__(self, what: str) -> None:
        super().__init__(404, f"there is no {what}")
