"""Which adapters a worker held before it was started again: a file in its machine's cache, a hint and no more."""

import os
from pathlib import Path

import msgspec
import structlog

_log = structlog.get_logger("headwater.adapters")


class AdapterMemory:
    """Names of adapters in `path`, None for no memory. A file that can not be used costs a warning."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def recall(self) -> tuple[str, ...]:
        """The names kept last."""
        if self._path is None:
            return ()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[str, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("adapters_not_recalled", file=str(self._path), reason=str(error))
            return ()

    def keep(self, names: tuple[str, ...]) -> None:
        """Keep these instead."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside = self._path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(msgspec.json.encode(names))
            os.replace(beside, self._path)
        except OSError as error:
            _log.warning("adapters_not_kept", file=str(self._path), reason=str(error))
