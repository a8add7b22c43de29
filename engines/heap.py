"""Keeping the garbage collector away from what lives as long as the process."""

import gc


def freeze_heap() -> None:
    """Collect once, then let no later collection look at what exists now.

    Call it once a process has loaded what it works with. A full collection over the objects that importing vLLM makes
    takes about 0.4 s, in which no token is passed on; over those of the compiled kernels, 0.1 s.
    """
    gc.collect()
    gc.freeze()
