"""`headwater warm`: compile the kernels and cache bytecode, so that the first start is as fast as the next."""

import os
import subprocess
import sys
import time

import numpy as np

from headwater.ops.children import child_environment


def warm() -> int:
    """Do it in a process that may write bytecode."""
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        command = [sys.executable, "-m", "headwater.ops.cli", "warm"]
        return subprocess.run(command, env=child_environment(), check=False).returncode
    began = time.monotonic()
    compile_kernels()
    # Imports are the rest of a start; importing writes their bytecode (hence modules that nothing here uses).
    import headwater.ops.run_actor
    import headwater.ops.up  # noqa: F401

    print(f"compiled the kernels in {time.monotonic() - began:.1f} s")
    return 0


def compile_kernels() -> None:
    """Call every kernel with the types it is used with."""
    from headwater.actors.edge import json_shape
    from headwater.router.index import PrefixIndex
    from headwater.schemas import hashing

    tokens = np.arange(64, dtype=np.uint32)
    for given in (tokens, hashing.unpack_tokens(hashing.pack_tokens(tokens))):
        hashes = hashing.sequence_hashes(given, 16)
    index = PrefixIndex()
    index.add_worker("a")
    for view in (hashes, hashing.unpack_hashes(hashing.pack_hashes(hashes))):
        index.store("a", 2, 0, view)
        index.find(view)
        index.path(int(view[-1]), len(view))
        index.remove("a", 2, view)
    index.store("a", 0, 0, hashes)
    index.digest()
    index.reserve(2 * index.capacity)
    index.adopt(index.packed(), index.rows, index.words, index.tiers)
    index.clear("a")
    json_shape.count(np.frombuffer(b'{"prompt": [1, "a"]}', np.uint8))
