"""The hand-off benchmark's part without an engine: runs `gpu.raw` with several settings and prints a table."""

import argparse
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.ops.bench.gpu import raw as gpu_raw
from headwater.ops.bench.gpu.handoff.settings import UCX_SAYS, HandoffSetting, chosen
from headwater.ops.bench.gpu.process import BenchChild, ChildFailed, ucx_choices
from headwater.ops.process.text_table import table

READY_S = 120.0
MOVE_S = 300.0
KIB = 1024
PIECES = (32 * KIB, 256 * KIB, 2304 * KIB, 16384 * KIB)
"""A block of 16 tokens of one layer's keys in Qwen3-8B's shape, one of 128, all layers of 16 tokens, and more."""
THREADS = (0, 4, 16)


def raw(options: argparse.Namespace) -> None:
    """Measure and print. A failing setting is reported and does not end the others."""
    size = options.raw_mb << 20
    if options.device == "cuda":
        _copy(options, size)
    rows: list[list[Any]] = []
    for setting in chosen(options.raw, "16"):
        try:
            moved, lines = _pair(options, setting, size)
        except ChildFailed as error:
            print(f"raw {setting.name}: {error}", flush=True)
            continue
        print(f"raw {setting.name}:", *lines, sep="\n    ", flush=True)
        rows += [_row(setting.name, item) for item in moved]
        (options.out / "raw.json").write_bytes(msgspec.json.encode(rows))
    heads = ("raw setting", "operation", "threads", "KiB", "pieces", "ms", "post ms", "GB/s", "right")
    print(table(heads, rows), flush=True)


def _row(name: str, moved: gpu_raw.Moved) -> list[Any]:
    return [
        name,
        moved.operation,
        moved.threads,
        moved.piece // KIB,
        moved.size // moved.piece,
        round(moved.seconds * 1e3, 2),
        round(moved.post_s * 1e3, 2),
        round(moved.size / moved.seconds / 1e9, 1),
        "yes" if moved.right else "NO",
    ]


def _copy(options: argparse.Namespace, size: int) -> None:
    child = BenchChild(gpu_raw.copy, (size,), {"CUDA_VISIBLE_DEVICES": "0,1"}, options.out / "raw-copy.log")
    try:
        seconds = child.receive(READY_S)
        print(f"CUDA's own copy between the GPUs: {size / seconds / 1e9:.0f} GB/s", flush=True)
    finally:
        child.stop()


def _pair(
    options: argparse.Namespace, setting: HandoffSetting, size: int
) -> tuple[list[gpu_raw.Moved], list[str]]:
    threads = THREADS if setting.name == "default" else (setting.threads,)
    plan = gpu_raw.CopyPlan(size, PIECES, threads, ("READ", "WRITE"))
    bodies: tuple[tuple[Callable[..., None], tuple[Any, ...]], ...] = (
        (gpu_raw.target, (options.device, size)),
        (gpu_raw.reader, (options.device, plan)),
    )
    children = []
    try:
        for rank, (body, arguments) in enumerate(bodies):
            environ = {**UCX_SAYS, **setting.environ}
            if options.device == "cuda":
                order = str(rank) if setting.visible == "own" else f"{rank},{1 - rank}"
                environ = {"CUDA_VISIBLE_DEVICES": order} | environ
            log = options.out / f"raw-{setting.name}-{rank}.log"
            children.append(BenchChild(body, arguments, environ, log))
        target, reader = children
        reader.send(target.receive(READY_S))
        moved = reader.receive(MOVE_S)
        return moved, ucx_choices(reader.log)
    finally:
        for child in children:
            child.stop()
