"""Run by a peer's interpreter, in its environment and without ours: NVIDIA Dynamo's offline replay of trace files.

Reads a task from standard input and writes the results to the file that the task names: the replay prints to standard output.
"""

import importlib
import importlib.metadata
import json
import sys
from typing import Any

TUNED_FROM = (1, 6)
"""The first release that has all three settings of `TUNED`."""

TUNED = {"overlap_score_credit": 2.0, "prefill_load_scale": 64, "router_predicted_ttl_secs": 30}


def main() -> None:
    """The task: {"out": file, "ttft_ms": limit, "itl_ms": limit, "kv_bytes_per_token", "transfer_gb_per_s", "runs": […]}.

    A run: {"file", "workers", "blocks", "block_size", "prefill_workers", "decode_workers"}.
    """
    task = json.load(sys.stdin)
    version = tuple(int(part) for part in importlib.metadata.version("ai-dynamo").split(".")[:2])
    tuned = {"tuned": {"router_mode": "kv_router"}} if version >= TUNED_FROM else {}
    modes = {"round_robin": {"router_mode": "round_robin"}, "default": {"router_mode": "kv_router"}, **tuned}
    found = [
        {
            name: replay(run, task, mode, new=version >= TUNED_FROM, tuned=name == "tuned")
            for name, mode in modes.items()
        }
        for run in task["runs"]
    ]
    with open(task["out"], "w") as file:
        json.dump(found, file)


def replay(run: dict[str, Any], task: dict[str, Any], mode: dict[str, Any], *, new: bool, tuned: bool) -> Any:
    """The summary of one replay, with the number of requests `within_limits` where single requests are reported."""
    llm = importlib.import_module("dynamo.llm")
    options: dict[str, Any] = {
        **mode,
        "trace_block_size": run["block_size"],
        **fleet(run, task, llm, new=new),
    }
    if new:
        options["capture_per_request"] = True
    if tuned:
        options["router_config"] = llm.KvRouterConfig(**TUNED)
    report = importlib.import_module("dynamo.replay.api").run_trace_replay(run["file"], **options)
    if isinstance(report, dict):
        return report
    within = sum(
        one["ttft_ms"] <= task["ttft_ms"] and (one["itl_ms"] or 0.0) <= task["itl_ms"]
        for one in report.per_request
    )
    return {**report.summary, "within_limits": within}


def fleet(run: dict[str, Any], task: dict[str, Any], llm: Any, *, new: bool) -> dict[str, Any]:
    """The engines of a replay: equal ones, or a pool for prompts and one for tokens."""
    engine: dict[str, Any] = {"num_gpu_blocks": run["blocks"], "block_size": run["block_size"]}

    def engines(**more: Any) -> Any:
        if new:
            return {"engine": {**engine, "emit_kv_events": True, **more}}
        return llm.MockEngineArgs(**engine, **more)

    if not run["prefill_workers"]:
        return {"num_workers": run["workers"], "extra_engine_args": engines()}
    link = {
        "kv_bytes_per_token": task["kv_bytes_per_token"],
        "kv_transfer_bandwidth": task["transfer_gb_per_s"],
    }
    return {
        "num_prefill_workers": run["prefill_workers"],
        "num_decode_workers": run["decode_workers"],
        "prefill_engine_args": engines(worker_type="prefill", **link),
        "decode_engine_args": engines(worker_type="decode", **link),
    }


if __name__ == "__main__":
    main()
