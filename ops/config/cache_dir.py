"""The folder of caches: routers' newest snapshots and workers' adapters."""

import os
from collections.abc import Mapping
from pathlib import Path

NOWHERE = "none"


def cache_folder(setting: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that `--cache-dir` names, or the one of the XDG base directories. None for nowhere."""
    if setting:
        return None if setting == NOWHERE else Path(setting)
    base = environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path there is invalid and ignored.
    if os.path.isabs(base):
        return Path(base) / "headwater"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "headwater" if os.path.isabs(home) else None
