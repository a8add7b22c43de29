"""An engine and the model that it serves, from settings."""

import os
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from headwater.actors.worker.model_card import Served
from headwater.engines import registry
from headwater.engines.diffusers.engine import pipeline_folder, tokenizer_of
from headwater.engines.diffusers.pipelines import read_options
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.model_files import ModelFiles, content_digest, read_model_files
from headwater.engines.sglang import config as sglang_arguments
from headwater.engines.sglang.config import SglangSettings
from headwater.engines.sim import SimOptions
from headwater.engines.sim.defaults import BLOCK_SIZE, EMBEDDING_WIDTH
from headwater.engines.sim.encoder import SimEncoder
from headwater.engines.sim.engine import SimEngine, SimSettings
from headwater.engines.sim.model import media_support, script, sim_model_files
from headwater.engines.vllm import TRAITS, config
from headwater.engines.vllm import config as vllm_config
from headwater.engines.vllm.config import VllmSettings
from headwater.ops.config.processes import EngineProcess
from headwater.ops.config.trace import engine_traces
from headwater.ops.config.worker import WorkerSettings
from headwater.ops.model_download.source import DEMO_NAME
from headwater.ops.start import (
    model as start_model,
)
from headwater.ops.start import (
    plan,
    tensorrt_llm,
)
from headwater.schemas.clock import SystemClock
from headwater.schemas.tables import MediaSupport


def make(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    """An engine (not started) and its model. Raises `EngineUnavailable`."""
    own = settings.worker
    takes = registry.traits_of(own.engine).takes_embeddings and own.role not in ("prefill", "decode")
    if own.accept_image_embeds and not takes:
        able = sorted(name for name, traits in registry.all_traits().items() if traits.takes_embeddings)
        raise EngineUnavailable(
            f"--accept-image-embeds: {own.engine} workers of role {own.role} cannot take embeddings from clients; those of "
            f"{' and '.join(able)} that serve whole requests can"
        )
    make_own = FACTORIES.get(settings.worker.engine, _custom)
    return make_own(settings, worker)


def model_folder(model: str) -> Path:
    """The folder that `--model` names; the small default model is created on first use."""
    if not model or model == DEMO_NAME:
        return start_model.ensure()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise EngineUnavailable(f"--model {model}: no such folder")
    return folder


def on_cpu() -> bool:
    """Is vLLM's CPU build installed?"""
    try:
        metadata.version(TRAITS.cpu_build)
    except metadata.PackageNotFoundError:
        return False
    return True


def vllm_settings(settings: EngineProcess, worker: str, *, folder: Path, name: str) -> VllmSettings:
    """The settings of vLLM's adapter. Raises `EngineUnavailable`."""
    own, vllm = settings.worker, settings.engines.vllm
    return VllmSettings(
        model=str(folder),
        name=name,
        worker=worker,
        block_size=own.block_size,
        max_model_len=own.max_model_len,
        dtype=vllm.dtype,
        kv_cache_mib=vllm.kv_cache_mib,
        role=own.role,
        native=vllm.native,
        connectors=config.role(own.role, vllm.connector, vllm.native),
        # An encode worker has no connectors, whatever the others of its fleet have.
        connector_options=vllm.connector_options if own.role != "encode" else {},
        nixl_host=vllm.nixl_host,
        nixl_port=vllm.nixl_port,
        metrics=bool(settings.metrics.port),
        ranks=vllm_config.number(vllm.native, "data_parallel_size", 1),
        processors=vllm.logits_processors,
        embeddings_mib=own.embeddings_mib,
        reads_embeddings=own.reads_embeddings and own.role in ("both", "prefill"),
        accepts_embeddings=own.accept_image_embeds and own.role == "both",
        traces=engine_traces(settings.trace),
    )


def sglang_settings(settings: EngineProcess, worker: str, *, folder: Path, name: str) -> SglangSettings:
    """The settings of SGLang's adapter."""
    own, sglang = settings.worker, settings.engines.sglang
    return SglangSettings(
        model=str(folder),
        name=name,
        worker=worker,
        block_size=own.block_size,
        max_model_len=own.max_model_len,
        role=own.role,
        native=sglang.native,
        metrics=bool(settings.metrics.port),
        ranks=sglang_arguments.number(sglang.native, "dp_size", 1),
        host=sglang.host,
        bootstrap_port=sglang.bootstrap_port,
        processors=sglang.logits_processors,
        embeddings_mib=own.embeddings_mib,
        reads_embeddings=own.reads_embeddings and own.role in ("both", "prefill"),
        traces=engine_traces(settings.trace),
    )


def check_model(worker: WorkerSettings, native: Sequence[str]) -> None:
    """Check the model's folder before anything is started. Raises `EngineUnavailable`. `native`: the engine's arguments."""
    loads = registry.traits_of(worker.engine).loads
    if loads == "pipeline":
        pipeline_folder(worker.model)
        return
    if loads == "nothing":
        if worker.model:
            start_model.check(model_folder(worker.model), sim_files(worker), weights=False)
        return
    folder = model_folder(worker.model)
    # Other formats of weights, or none at all, are checked by the engine.
    weights = not vllm_config.has(native, "load_format")
    start_model.check(folder, _files(folder, worker), weights=weights)


def sim_files(worker: WorkerSettings) -> ModelFiles:
    """The files of `--model` for an engine that needs none; else of a model with a token per byte.

    Raises `EngineUnavailable`.
    """
    if not worker.model:
        name = worker.served_model_name or registry.find(worker.engine).name
        return _with_template(sim_model_files(name), worker)
    return _files(model_folder(worker.model), worker)


def _files(folder: Path, worker: WorkerSettings) -> ModelFiles:
    return _with_template(read_model_files(folder), worker)


def _with_template(files: ModelFiles, worker: WorkerSettings) -> ModelFiles:
    if worker.chat_template:
        return files._replace(chat_template=config.template(worker.chat_template))
    return files


def sim_settings(worker: WorkerSettings, options: SimOptions, files: ModelFiles) -> SimSettings:
    """The settings of the simulated engine. Its own model takes images; one of a folder has its tokenizer, and takes text."""
    return SimSettings(
        model=files.name,
        block_size=worker.block_size or BLOCK_SIZE,
        total_blocks=options.blocks,
        context_length=worker.max_model_len or files.context_length,
        step_time=options.step_time,
        script=script(files),
        eos_token_id=files.eos_token_ids[0] if files.eos_token_ids else -1,
        media=MediaSupport() if worker.model else media_support(),
        reads_embeddings=worker.reads_embeddings and worker.role in ("both", "prefill"),
        accepts_embeddings=worker.accept_image_embeds and worker.role == "both",
        embedding_tokens=(worker.embeddings_mib << 20) // (4 * EMBEDDING_WIDTH),
    )


def served(worker: WorkerSettings, files: ModelFiles) -> Served:
    """The model under the names that clients use."""
    found = start_model.find(worker.tool_parser, worker.reasoning_parser, files)
    return Served(
        worker.served_model_name or files.name,
        files,
        worker.model_aliases,
        tool_parser=found.tool_format,
        reasoning_parser=found.reasoning_format,
        migrations_max=worker.migration_limit,
    )


def _sim(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    files = sim_files(settings.worker)
    wanted = sim_settings(settings.worker, settings.engines.sim, files)
    if settings.worker.role == "encode":
        return SimEncoder(wanted, SystemClock()), served(settings.worker, files)
    return SimEngine(wanted, SystemClock()), served(settings.worker, files)


def _vllm(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.vllm.engine import VllmEngine

    folder = model_folder(settings.worker.model)
    files = _files(folder, settings.worker)
    wanted = vllm_settings(settings, worker, folder=folder, name=files.name)
    if settings.worker.role == "encode":
        from headwater.engines.vllm.encoder import VllmEncoder

        return VllmEncoder(wanted), served(settings.worker, files)
    return VllmEngine(wanted), served(settings.worker, files)


def _custom(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    """An engine of a file, a class path or another package."""
    from headwater.engines.custom import CustomEngine, EngineSetup

    own = settings.worker
    entry = registry.find(own.engine)
    kind = registry.load(entry)
    files = sim_files(own)
    setup = EngineSetup(
        worker,
        own.role,
        model_folder(own.model) if own.model else None,
        files,
        own.block_size or BLOCK_SIZE,
        own.max_model_len,
        own.engine_options,
    )
    try:
        made = kind()
    except TypeError as error:
        raise EngineUnavailable(
            f"{entry.name}: {kind.__name__} is created without arguments: {error}; "
            "what it needs comes with `start`, as setup.options"
        ) from error
    return CustomEngine(entry.name, made, setup), served(own, files)


def _sglang(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.sglang.engine import SglangEngine

    folder = model_folder(settings.worker.model)
    files = _files(folder, settings.worker)
    wanted = sglang_settings(settings, worker, folder=folder, name=files.name)
    if settings.worker.role == "encode":
        from headwater.engines.sglang.encoder import SglangEncoder

        return SglangEncoder(wanted), served(settings.worker, files)
    return SglangEngine(wanted), served(settings.worker, files)


def _tensorrt_llm(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.tensorrt_llm.engine import TensorRtEngine

    folder = model_folder(settings.worker.model)
    files = _files(folder, settings.worker)
    own = tensorrt_llm.settings_of(settings, worker)._replace(
        model=str(folder),
        name=files.name,
        context_length=files.context_length,
        eos_token_ids=files.eos_token_ids,
        vocabulary=files.vocabulary,
        tokenizer=files.tokenizer,
    )
    engine = TensorRtEngine(own, SystemClock(), gpus=len(plan.visible_gpus(os.environ)))
    return engine, served(settings.worker, files)


def _diffusers(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.diffusers.engine import DiffusersEngine

    folder, files = _pipeline_files(settings.worker)
    options = read_options(settings.worker.engine_options)
    engine = DiffusersEngine(folder, files.name, files.context_length, options)
    return engine, served(settings.worker, files)


def _sglang_diffusion(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.sglang_diffusion import engine as sglang_diffusion_engine
    from headwater.engines.sglang_diffusion.engine import SglangDiffusionEngine

    folder, files = _pipeline_files(settings.worker)
    given = sglang_diffusion_engine.read_options(settings.worker.engine_options)
    engine = SglangDiffusionEngine(str(folder), files.name, files.context_length, given)
    return engine, served(settings.worker, files)


def _pipeline_files(own: WorkerSettings) -> tuple[Path, ModelFiles]:
    """The folder of a pipeline in diffusers' layout, and what an edge needs of it."""
    folder = pipeline_folder(own.model)
    # It counts prompts only: the pipeline encodes them itself. Without a fast one, by bytes.
    files = sim_model_files(own.served_model_name or folder.name)
    files = files._replace(
        chat_template="", special_tokens={}, eos_token_ids=(), identity=content_digest(folder)
    )
    return folder, files._replace(tokenizer=tokenizer_of(folder) or files.tokenizer)


EngineFactory = Callable[[EngineProcess, str], tuple[Engine, Served]]

FACTORIES: Final[dict[str, EngineFactory]] = {
    "sim": _sim,
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
    "diffusers": _diffusers,
    "sglang_diffusion": _sglang_diffusion,
}
"""Headwater's own engines: each is made of a process's settings and a worker's name. All others: `_custom`."""
