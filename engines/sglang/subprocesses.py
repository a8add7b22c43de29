"""What SGLang's own processes run: SGLang's functions, which write down why they fail.

Imports nothing of SGLang before it runs: the process that starts these is not the one that needs it.
"""

import os
import sys
import threading
from typing import Any, Final

from headwater.engines.process import first_failure
from headwater.engines.sglang.embeddings import counter

FATAL: Final = ("hit an exception",)
"""What SGLang logs before a process ends."""


def run_scheduler(*arguments: Any, **named: Any) -> None:
    """A scheduler with its part of the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    first_failure.keep("sglang", FATAL)
    counter.install()
    run_scheduler_process(*arguments, **named)
    # It was asked to end, and has freed its memory. A prefill scheduler's transfer threads, which wait for transfers, would keep its process.
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def run_detokenizer(*arguments: Any, **named: Any) -> None:
    """The process that turns tokens into text, through which all answers pass."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    first_failure.keep("sglang", FATAL)
    run_detokenizer_process(*arguments, **named)
