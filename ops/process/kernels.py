"""Compiled kernels: loaded, or compiled once, before the first request needs them."""

import numpy as np


def compile_kernels() -> None:
    """Call every kernel with each of its argument types: numba loads it from its cache, or compiles it."""
    from headwater.actors.edge.model.control_tokens import SHORT_CHARACTERS, ControlTokens
    from headwater.actors.http import json_shape
    from headwater.router.index.prefix_index import PrefixIndex
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
    ControlTokens(["<|a|>"]).split("<|a|>" * SHORT_CHARACTERS, 2)
    json_shape.count(np.frombuffer(b'{"prompt": [1, "a"]}', np.uint8))
