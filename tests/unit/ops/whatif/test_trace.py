"""Trace files: what is read, how prompts become hashes, and errors that name file and line."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from headwater.ops.bench.trace import (
    TraceRequest,
    all_hashes,
    check_block_size,
    hashes_of,
    mix,
    own_hash,
    read,
)
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.run import run
from headwater.ops.whatif.setup import Setup
from tests.support.data.whatif_traces import conversations, written

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


def test_plain_and_gzipped_files_are_read_alike(tmp_path: Path) -> None:
    """By what they hold, not by their name."""
    trace = conversations(1, 30)
    plain = written(trace, tmp_path / "t.jsonl")
    zipped = tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(plain).requests == trace.requests
    assert read(zipped).requests == trace.requests


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"hash_ids": [0, 1, 2]},
            "3 hash_ids for 600 tokens; 2 are required, one for each 512 tokens or part of them",
        ),
        ({"timestamp": 4}, "timestamp 4 is less than 5 before it; sort the lines by timestamp"),
        (
            {"input_length": 0, "hash_ids": []},
            "input_length 0, output_length 3: at least 1 and 0 are required",
        ),
        ({"hash_ids": [0, -1]}, "hash id -1 is negative"),
        ({"output_length": "three"}, "Expected `int`, got `str` - at `$.output_length`"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    """File, line, what is wrong and what would be right."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value) == f"{path}, line 3: {reason}"


def test_a_last_partial_block_may_have_no_id(tmp_path: Path) -> None:
    """It is nobody else's then, at any block size."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        json.dumps(GOOD | {"hash_ids": [0]}) + "\n" + json.dumps(GOOD | {"input_length": 9, "hash_ids": []})
    )
    trace = read(path)
    assert [len(hashes_of(request, 512)) for request in trace.requests] == [1, 0]
    for block_size in (128, 512):
        assert len(run(trace, Setup(block_size=block_size, workers=1)).served) == 2


@pytest.mark.parametrize("content", [b"", b"\n", b"\x1f\x8bnot gzip at all", b"{]"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    """Naming it."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "nowhere")


def test_equal_ids_are_equal_prefixes_at_every_block_size() -> None:
    """Smaller and larger blocks than the trace's: shared as far as whole blocks reach, and never further."""
    first = TraceRequest("a", 0, 5 * 512 + 100, 1, (0, 1, 2, 3, 4, 5))
    second = TraceRequest("b", 0, 4 * 512 + 100, 1, (0, 1, 2, 3, 9))
    for size, shared in ((512, 4), (128, 16), (1024, 2), (2048, 1)):
        ours, theirs = hashes_of(first, size), hashes_of(second, size)
        assert len(ours) == first.prompt_tokens // size
        assert len(theirs) == second.prompt_tokens // size
        both = min(len(ours), len(theirs))
        assert (ours[:both] == theirs[:both]).tolist() == [n < shared for n in range(both)]
        assert len(set(ours.tolist())) == len(ours)


def test_block_sizes_that_cut_the_traces_blocks_are_refused() -> None:
    """An id says nothing about 384 tokens."""
    requests = conversations(1, 3).requests
    check_block_size(requests, 64)
    with pytest.raises(ConfigError, match="384"):
        check_block_size(requests, 384)


def test_no_hash_is_0_and_none_of_a_million_is_twice() -> None:
    """Block 0 begins every prompt of a trace; 0 is no block. What a request generates is its own."""
    hashes = mix(np.arange(1_000_000, dtype=np.uint64))
    assert hashes.all()
    assert len(np.unique(hashes)) == len(hashes)
    # The one value that the mixing would turn into 0.
    assert mix(np.array([(1 << 64) - 0x9E3779B97F4A7C15], np.uint64)).tolist() == [1]
    own = {own_hash(number, block) for number in range(30) for block in range(30)}
    assert len(own) == 900
    assert not np.isin(hashes, list(own)).any()


@pytest.mark.parametrize("size", [128, 512, 1_024])
def test_all_prompts_at_once_have_the_hashes_of_each(size: int) -> None:
    """At blocks smaller than, equal to and larger than the trace's."""
    requests = conversations(2, 40).requests
    together = all_hashes(requests, size)
    assert [one.tolist() for one in together] == [hashes_of(one, size).tolist() for one in requests]
    assert all_hashes((), size) == []


def test_the_hash_of_one_value_is_that_of_an_array() -> None:
    """Also for the largest request number that is used."""
    for number, block in ((0, 0), (3, 5), ((1 << 40) + 7, 123)):
        first = mix(np.array([(1 << 63) + number], np.uint64))
        assert own_hash(number, block) == int(mix(first + np.uint64(block))[0])
