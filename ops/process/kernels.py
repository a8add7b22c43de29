"""Compiled kernels: loaded, or compiled once, before the first request needs them."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from headwater.router.index.prefix_index import PrefixIndex
    from headwater.schemas.hashing import U64


def compile_kernels() -> None:
    """Call every kernel with each of its argument types: numba loads it from its cache, or compiles it."""
    from headwater.actors.edge.model.control_tokens import SHORT_CHARACTERS, ControlTokens
    from headwater.actors.http import json_shape, long_strings
    from headwater.router.index.prefix_index import PrefixIndex
    from headwater.schemas import hashing

    hashes = hashing.sequence_hashes(np.arange(64, dtype=np.uint32), 16)
    index = PrefixIndex()
    index.add_worker("a")
    index.store("a", 2, 0, hashes)
    index.find(hashes)
    index.path(int(hashes[-1]), len(hashes))
    index.remove("a", 2, hashes)
    index.store("a", 0, 0, hashes)
    index.digest()
    index.reserve(2 * index.capacity)
    index.adopt(index.packed(), index.rows, index.words, index.tiers)
    index.clear("a")
    _compile_scoring(index, hashes)
    ControlTokens(["<|a|>"]).split("<|a|>" * SHORT_CHARACTERS, 2)
    body = np.frombuffer(b'{"prompt": [1, "a"]}', np.uint8)
    json_shape.count(body)
    long_strings.find_long_strings(body, 1, np.zeros(2, np.int64), np.zeros(2, np.int64))


def _compile_scoring(index: "PrefixIndex", hashes: "U64") -> None:
    """A decision without workers."""
    from headwater.router.decision.context import DecisionContext
    from headwater.router.decision.decide import Prompt, decide
    from headwater.router.fold.load import Loads
    from headwater.schemas.events.route import RouteQuery, Weights

    query, context = RouteQuery("", 1, 1, b""), DecisionContext(1, 0, 0, 0, Weights(), False)
    decide(index, Loads(), set(), Prompt(len(hashes), hashes, 0), query, context)
