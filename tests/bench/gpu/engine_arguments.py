"""How each engine is started on both sides of a comparison: alone, and behind Headwater."""

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from headwater.engines.sglang import config as sglang
from tests.bench.gpu.bare import BareSglang, BareVllm
from tests.bench.gpu.model import LOAD_FORMAT, SGLANG_MODELS, WEIGHTS_EXTENSION, kv_bytes_per_token
from tests.tidy.source import ROOT

CPU_KV_GB: Final = 0.5
"""At most, where the device is a check only."""

CONTEXT_MARGIN: Final = 64

VLLM_DEFAULTS: Final[Mapping[str, Mapping[str, int]]] = {
    "api": {"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
    "engine-context": {"max_num_batched_tokens": 2048, "max_num_seqs": 128},
    "small-steps": {"max_num_batched_tokens": 2048, "max_num_seqs": 256},
}
"""vLLM's defaults on an H200 for its API server, and for AsyncLLM as a library; and small steps, in which prompts delay
other requests' tokens least."""

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}
"""No downloads; and the engines' processes import the weights of this package by name."""


class BenchEngine(NamedTuple):
    """An engine under test.

    `model` names the argument for the model's folder. `arguments` are its own, by name, on both sides; `alone` are those that it gets in addition as a library, which
    `bare` calls. `server` is the module of its own HTTP server, with the arguments that only that gets. `environ` are its environment variables.
    `observed` are the arguments by which a worker has it publish KV events at an address, and count its metrics.
    """

    model: str
    arguments: Callable[[argparse.Namespace], dict[str, Any]]
    alone: Mapping[str, Any]
    environ: Callable[[argparse.Namespace], dict[str, str]]
    bare: type[BareVllm | BareSglang]
    server: tuple[str, ...]
    observed: Callable[[str], dict[str, Any]]


def _context(options: argparse.Namespace) -> int:
    return int(options.prompt_tokens + options.tokens + CONTEXT_MARGIN)


def _vllm(options: argparse.Namespace) -> dict[str, Any]:
    """AsyncEngineArgs."""
    given: dict[str, Any] = {
        "load_format": "dummy",
        "max_model_len": _context(options),
        "kv_cache_memory_bytes": int(options.kv_gb * 1e9),
        **VLLM_DEFAULTS[options.engine_defaults],
    }
    if options.weights == "scaled":
        given |= {"load_format": LOAD_FORMAT, "worker_extension_cls": WEIGHTS_EXTENSION}
    if options.device == "cpu":
        given["kv_cache_memory_bytes"] = int(min(options.kv_gb, CPU_KV_GB) * 1e9)
        return given | {"enforce_eager": True, "block_size": 32, "dtype": "float32"}
    # A check at the start only: the size of the cache is given.
    return given | {"gpu_memory_utilization": 0.1}


def _vllm_environ(options: argparse.Namespace) -> dict[str, str]:
    environ = {"VLLM_NO_USAGE_STATS": "1", **ENVIRONMENT}
    if options.device == "cpu":
        return environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    # FlashInfer's sampler compiles when first used.
    return environ | {"CUDA_VISIBLE_DEVICES": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _sglang(options: argparse.Namespace) -> dict[str, Any]:
    """ServerArgs. Steps are as large as SGLang chooses them for the GPU."""
    given: dict[str, Any] = {"load_format": "dummy", "context_length": _context(options)}
    if options.device == "cpu":
        return given | dict(sglang.CPU)
    return given | {
        # The adapter's default, so that it is the same alone.
        "page_size": sglang.PAGE_SIZE,
        "max_total_tokens": int(options.kv_gb * 1e9) // kv_bytes_per_token(options.shape),
        # An upper bound only: the size of the cache is given.
        "mem_fraction_static": 0.9,
        "attention_backend": "fa3",
        # FlashInfer's sampler compiles when first used.
        "sampling_backend": "pytorch",
        # Capturing them takes 9 to 77 s of the start; figures with and without them are the same.
        "disable_prefill_cuda_graph": True,
    }


def _sglang_environ(options: argparse.Namespace) -> dict[str, str]:
    environ = dict(ENVIRONMENT)
    if options.weights == "scaled":
        environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = SGLANG_MODELS
    if options.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = "0"
    return environ


def _vllm_observed(endpoint: str) -> dict[str, Any]:
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    return {"kv_events_config": json.dumps(config)}


def _sglang_observed(endpoint: str) -> dict[str, Any]:
    return {
        "kv_events_config": json.dumps({"publisher": "zmq", "endpoint": endpoint}),
        "enable_metrics": True,
    }


ENGINES: Final[Mapping[str, BenchEngine]] = {
    "vllm": BenchEngine(
        "model",
        _vllm,
        {"enable_prefix_caching": True, "disable_log_stats": True},
        _vllm_environ,
        BareVllm,
        ("vllm.entrypoints.openai.api_server", "--disable-log-stats", "--disable-uvicorn-access-log"),
        _vllm_observed,
    ),
    "sglang": BenchEngine(
        "model_path",
        _sglang,
        # New tokens only: otherwise each chunk has all tokens of its request so far.
        {"log_level": "warning", "incremental_streaming_output": True, "skip_server_warmup": True},
        _sglang_environ,
        BareSglang,
        ("sglang.launch_server", "--log-level", "warning", "--skip-server-warmup"),
        _sglang_observed,
    ),
}
"""By the name that `headwater up --engine` takes."""


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line."""
    words: list[str] = []
    for name, value in arguments.items():
        words += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return words
