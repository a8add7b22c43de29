"""The index of a peer for comparison: NVIDIA Dynamo's radix tree in Rust through its Python binding.

It is not a dependency: `pip install ai-dynamo-runtime` to use it. Its inputs (events as JSON, prompts as lists) are prepared
before the measurement. It works in a thread of its own, so it may use a second core; each measure ends with a find, which
waits for all earlier operations.
"""

import importlib
import importlib.metadata
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from headwater.ops.bench import index
from headwater.ops.bench.index import Chain, IndexShape
from headwater.ops.bench.report import Measure, Report
from headwater.ops.config.setting import ConfigError
from headwater.schemas.hashing import U64

PACKAGE = "ai-dynamo-runtime"
AT_ONCE = 2_000
LONG_FINDS = 200


class DynamoIndex:
    """The peer's name and version. Raises `ConfigError` with a hint if it is not installed."""

    def __init__(self) -> None:
        try:
            self._tree: Any = importlib.import_module("dynamo._core").RadixTree
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"Dynamo's radix tree is not here ({error}); pip install {PACKAGE}") from error
        self.name = f"Dynamo RadixTree ({PACKAGE} {importlib.metadata.version(PACKAGE)})"

    def short(self, shape: IndexShape) -> dict[str, float]:
        """Figures with prompts of 64 blocks, named as those of Headwater's index."""
        tree = self._tree()
        insert_s = _apply(tree, (_stored(chain) for chain in shape.chains))
        found = {"inserts, growing from nothing": shape.blocks / insert_s / 1e6}
        for name, queries in (("drawn from all", shape.drawn), ("popular prompts", shape.popular)):
            found[f"finds of 64, {name}"] = len(queries) / _find(tree, queries) / 1e3
        remove_s = _apply(tree, (_removed(chain) for chain in shape.chains))
        return found | {"removals": shape.blocks / remove_s / 1e6}

    def long(self, shape: IndexShape) -> dict[str, float]:
        """Likewise with prompts of 8,192 blocks."""
        tree = self._tree()
        _apply(tree, (_stored(chain) for chain in shape.chains))
        found: dict[str, float] = {}
        for name, queries in (("drawn from all", shape.drawn), ("popular prompts", shape.popular)):
            some = queries[:LONG_FINDS]
            found[f"finds of 8192, {name}"] = len(some) / _find(tree, some) / 1e3
        return found


def bench() -> Report:
    """Headwater's figures, and below each the peer's for the same prompts and their ratio."""
    peer = DynamoIndex()
    ours = index.bench()
    theirs = peer.short(index.short_prompts(index.BLOCKS, index.SHORT_FINDS))
    theirs |= peer.long(index.long_prompts(index.BLOCKS, index.LONG_FINDS))
    measures: list[Measure] = []
    for measure in ours.measures:
        measures.append(measure)
        if measure.name in theirs:
            value = theirs[measure.name]
            measures.append(Measure(f"  {peer.name}", value, measure.unit))
            measures.append(Measure("  ratio", measure.value / value, "times"))
    return Report(ours.benchmark, ours.conditions | {"peer": peer.name}, measures)


def _stored(chain: Chain) -> dict[str, Any]:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in chain.blocks.tolist()]
    return {"stored": {"parent_hash": chain.parent or None, "blocks": blocks}, "worker": chain.worker}


def _removed(chain: Chain) -> dict[str, Any]:
    # Leaves first, as engines evict.
    return {"removed": {"block_hashes": chain.blocks[::-1].tolist()}, "worker": chain.worker}


def _apply(tree: Any, events: Iterable[dict[str, Any]]) -> float:
    """Seconds to apply the events, without their preparation."""
    seconds = 0.0
    for some in _some(events):
        began = time.perf_counter()
        for worker, data in some:
            tree.apply_event(worker, data)
        tree.find_matches([1])
        seconds += time.perf_counter() - began
    return seconds


def _some(events: Iterable[dict[str, Any]]) -> Iterator[list[tuple[int, bytes]]]:
    some: list[tuple[int, bytes]] = []
    for number, event in enumerate(events):
        worker = event.pop("worker")
        some.append((worker, json.dumps({"event_id": number, "data": event, "dp_rank": 0}).encode()))
        if len(some) == AT_ONCE:
            yield some
            some = []
    yield some


def _find(tree: Any, queries: list[U64]) -> float:
    lists = [query.tolist() for query in queries]
    if max(tree.find_matches(lists[0]).scores.values(), default=0) != len(lists[0]):
        raise RuntimeError("the peer does not find stored prompts: its figures would be meaningless")
    began = time.perf_counter()
    for query in lists:
        tree.find_matches(query)
    return time.perf_counter() - began
