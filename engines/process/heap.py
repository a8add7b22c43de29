"""Excludes objects that live as long as the process from garbage collection."""

import gc


def freeze_heap() -> None:
    """Collect once, then exclude all existing objects from later collections.

    Call it once a process has loaded its modules and models. A full collection over the objects created by importing vLLM
    takes about 0.4 s, during which no token is sent; over those of the compiled kernels, 0.1 s.
    """
    gc.collect()
    gc.freeze()
