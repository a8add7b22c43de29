"""The LoRA adapters that a worker had loaded before a restart: a file in its machine's cache, used as a hint only."""

import os
from pathlib import Path

import msgspec
import structlog

_log = structlog.get_logger("headwater.lora")


class RestartList:
    """Names of adapters in the file `path`; None: nothing is kept. An unusable file costs a warning."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def read_names(self) -> tuple[str, ...]:
        """The names written last."""
        if self._path is None:
            return ()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[str, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("lora_restart_list_unreadable", file=str(self._path), reason=str(error))
            return ()

    def write_names(self, names: tuple[str, ...]) -> None:
        """Replace the list, atomically."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(names))
            os.replace(temporary, self._path)
        except OSError as error:
            _log.warning("lora_restart_list_not_written", file=str(self._path), reason=str(error))
