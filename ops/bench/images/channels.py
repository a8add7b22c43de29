"""`python -m headwater.ops.bench.images.channels`: embeddings of images from one process to another, over NIXL and over vLLM's own connector.

Over NIXL as encode workers hand them over: offered from host memory with a checksum, read in place and verified. vLLM's channel is its
`ECExampleConnector`, the one that runs without a GPU and another program: the producer writes a safetensors file, the consumer reads it. Each step is
timed by itself, so neither waits for messages; a file on a memory file system is the faster variant of the rival.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.ops.bench.nixl import REPEATS, TransferRun, between_two
from headwater.ops.bench.report import Measure, machine
from headwater.ops.process.text_table import table

TOKENS: Final = (144, 576, 1_225, 4_900)
"""Tokens of images: 336 x 336 to 1,960 x 1,960 pixels of Qwen2-VL."""

TOKEN_BYTES: Final = 3_584 * 2
"""One token of an 8B-class model in bfloat16."""

MEMORY_FOLDER: Final = Path("/dev/shm")


class ChannelRow(NamedTuple):
    """One size over one channel: medians of giving an embedding away and of getting it."""

    channel: str
    tokens: int
    give_s: float
    get_s: float
    copies: int

    @property
    def nbytes(self) -> int:
        """Bytes of the embedding."""
        return self.tokens * TOKEN_BYTES

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes of embedding a second, for both steps in turn."""
        return self.nbytes / (self.give_s + self.get_s) / 1e9


async def over_nixl() -> list[ChannelRow]:
    """Two processes. The owner copies the embedding into its slab, and NIXL into the reader's, where it is used in place."""
    rows: list[ChannelRow] = []

    async def work(run: TransferRun) -> list[Measure]:
        await run.once(TOKENS[0] * TOKEN_BYTES, borrow=True)
        for tokens in TOKENS:
            give_s, get_s = await run.many(tokens * TOKEN_BYTES, borrow=True)
            rows.append(ChannelRow("NIXL, verified", tokens, give_s, get_s, 2))
        return []

    await between_two(True, work)
    return rows


def over_connector(folder: Path, name: str) -> list[ChannelRow]:
    """The methods of vLLM's connector that its workers call, without the engine around them. Needs vLLM."""
    import torch
    from vllm.distributed.ec_transfer.ec_connector.example_connector import (
        ECExampleConnector,
        ECExampleConnectorMetadata,
        MMMeta,
    )

    connector: Any = ECExampleConnector.__new__(ECExampleConnector)
    connector._storage_path = str(folder)
    connector._is_producer = connector._is_consumer = True
    rows = []
    for tokens in TOKENS:
        embedding = torch.randn(tokens, TOKEN_BYTES // 2).to(torch.bfloat16)
        gives, gets = [], []
        for repeat in range(REPEATS):
            key = f"{tokens}-{repeat}"
            began = time.perf_counter()
            connector.save_caches({key: embedding}, key)
            gives.append(time.perf_counter() - began)
            metadata = ECExampleConnectorMetadata()
            metadata.add_mm_data(MMMeta.make_meta(key, tokens))
            connector._connector_metadata = metadata
            cache: dict[str, Any] = {}
            began = time.perf_counter()
            connector.start_load_caches(cache)
            # The file is mapped: this reads it, as copying it into the prompt's embeddings does.
            loaded = cache[key].clone()
            gets.append(time.perf_counter() - began)
            assert torch.equal(loaded, embedding)
        # To the file's pages, and from there to the engine's tensor.
        rows.append(ChannelRow(name, tokens, statistics.median(gives), statistics.median(gets), 2))
    return rows


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = asyncio.run(over_nixl())
    for where, name in (
        (MEMORY_FOLDER, "vLLM's connector, memory file system"),
        (None, "vLLM's connector, disk"),
    ):
        with tempfile.TemporaryDirectory(dir=where) as folder:
            rows += over_connector(Path(folder), name)
    print(f"embeddings of {TOKEN_BYTES:,} bytes a token, medians of {REPEATS}; machine {machine()}")
    heads = ("channel", "tokens", "MB", "give ms", "get ms", "GB/s", "MB copied")
    print(
        table(
            heads,
            [
                (
                    row.channel,
                    f"{row.tokens:,}",
                    f"{row.nbytes / 1e6:.1f}",
                    f"{row.give_s * 1000:.2f}",
                    f"{row.get_s * 1000:.2f}",
                    f"{row.gb_per_s:.2f}",
                    f"{row.copies * row.nbytes / 1e6:.1f}",
                )
                for row in rows
            ],
        )
    )


if __name__ == "__main__":
    main()
