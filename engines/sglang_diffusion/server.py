"""Runs SGLang's diffusion server, after it has written the model's own sizes and steps into a file.

    python server.py DEFAULTS_FILE [arguments of SGLang's server]

This is a script: the interpreter that runs it has SGLang, and need not have Headwater. The process ends with the one that started it;
SGLang's own processes end with it.
"""

import ctypes
import json
import shutil
import signal
import sys
from pathlib import Path

FIELDS = ("width", "height", "num_frames", "fps", "num_inference_steps")
"""SGLang's sampling parameters whose defaults, which a request that leaves them out gets, are written to the file."""


def main(path: str, arguments: list[str]) -> None:
    """Run the server until it is stopped."""
    from sglang.multimodal_gen.runtime.entrypoints.openai.utils import resolve_sampling_params_cls
    from sglang.multimodal_gen.runtime.launch_server import dispatch_launch
    from sglang.multimodal_gen.runtime.server_args import prepare_server_args

    settings = prepare_server_args(arguments)
    defaults = resolve_sampling_params_cls(settings)()
    values = {name: getattr(defaults, name, None) for name in FIELDS}
    with open(path, "w") as written:
        json.dump({name: value if isinstance(value, int) else 0 for name, value in values.items()}, written)
    try:
        dispatch_launch(settings)
    finally:
        # Also where the worker was killed, and cannot do it.
        shutil.rmtree(Path(path).parent, ignore_errors=True)


# SGLang's processes import this module under another name.
if __name__ == "__main__":
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    main(sys.argv[1], sys.argv[2:])
