"""The process that downloads one model: the request comes as JSON on standard input, the folder or the error goes to standard output."""

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from headwater.engines import logs
from headwater.ops.start import signals
from headwater.ops.start.model_source import DownloadFailed

HANDLES_MAX = 65_536
"""File descriptors that are looked at when the process is stopped."""

MISSING = "models by name need {name}: pip install 'headwater[models]'"


def main() -> int:
    """Download, and print the answer as one line."""
    signals.die_with_parent()
    signals.replace_handlers(_stop)
    # Read by the hub's library when it is imported: progress is ours.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    request = json.loads(sys.stdin.read())
    if request["log_json"]:
        logs.configure(fmt="json", kind="download")
    try:
        answer = {"folder": str(_download(request))}
    except ImportError as error:
        answer = {"error": MISSING.format(name=error.name)}
    except DownloadFailed as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))
    return 0 if "folder" in answer else 1


def _download(request: dict[str, Any]) -> Path:
    if request["kind"] == "hub":
        from headwater.ops.start import model_hub

        return model_hub.download(request["at"], request["revision"], weights=request["weights"])
    if not request["cache"]:
        raise DownloadFailed("models of buckets and web servers need a cache folder: give --cache-dir")
    from headwater.ops.start import model_store

    return model_store.download(request["at"], Path(request["cache"]), weights=request["weights"])


def _stop(number: int, _: FrameType | None) -> None:
    """Remove what this process has open of files that the hub's library does not continue, and end: its threads would continue."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Its threads open no further file meanwhile: one that had just asked for a file's size would.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    for handle in range(min(soft, HANDLES_MAX) if soft > 0 else HANDLES_MAX):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{handle}")
            if path.endswith(".incomplete"):
                os.unlink(path)
    os._exit(signals.exit_code(signal.Signals(number)))


if __name__ == "__main__":
    sys.exit(main())
