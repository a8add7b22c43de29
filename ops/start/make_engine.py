"""An engine and the model that it serves, from settings."""

from pathlib import Path

from headwater.actors.worker.model_card import Served
from headwater.engines import native_arguments, registry
from headwater.engines.engine import Engine, EngineUnavailable
from headwater.engines.launcher import EngineLauncher, WorkerSpec
from headwater.engines.model_files import ModelFiles, read_chat_template
from headwater.ops.config.processes import EngineProcess
from headwater.ops.model_download.source import DEMO_NAME
from headwater.ops.start import model as start_model
from headwater.ops.start.plan import launcher_for, native_words, spec_of


def make(settings: EngineProcess, worker: str) -> tuple[Engine, Served]:
    """An engine (not started) and its model. Raises `EngineUnavailable`."""
    own = settings.worker
    takes = registry.traits_of(own.engine).takes_embeddings and own.profile.role not in ("prefill", "decode")
    if own.accept_image_embeds and not takes:
        able = sorted(name for name, traits in registry.all_traits().items() if traits.takes_embeddings)
        raise EngineUnavailable(
            f"--accept-image-embeds: {own.engine} workers of role {own.profile.role} cannot take embeddings from clients; those of "
            f"{' and '.join(able)} that serve whole requests can"
        )
    launcher, spec = launcher_for(settings), with_model(settings, spec_of(settings, worker))
    files = _read_files(launcher, spec, own.chat_template)
    found = start_model.find(own.tool_parser, own.reasoning_parser, files)
    served = Served(
        own.served_model_name or files.name,
        files,
        own.model_aliases,
        tool_parser=found.tool_format,
        reasoning_parser=found.reasoning_format,
        migrations_max=own.migration_limit,
    )
    return launcher.make(spec, files), served


def with_model(settings: EngineProcess, spec: WorkerSpec) -> WorkerSpec:
    """The worker with the folder of its model, if the engine loads one or one is named. Raises `EngineUnavailable`."""
    loads = registry.traits_of(settings.worker.engine).loads
    if loads == "weights" or (loads == "nothing" and spec.model):
        return spec._replace(model=str(model_folder(spec.model)))
    return spec


def model_folder(model: str) -> Path:
    """The folder that `--model` names; the small default model is created on first use."""
    if not model or model == DEMO_NAME:
        return start_model.ensure()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise EngineUnavailable(f"--model {model}: no such folder")
    return folder


def check_model(settings: EngineProcess) -> None:
    """Check the model's folder before anything is started. Raises `EngineUnavailable`."""
    loads = registry.traits_of(settings.worker.engine).loads
    spec = with_model(settings, spec_of(settings, ""))
    if loads == "nothing" and not spec.model:
        return
    files = _read_files(launcher_for(settings), spec, settings.worker.chat_template)
    if loads == "pipeline":
        return
    # Other formats of weights, or none at all, are checked by the engine.
    weights = loads == "weights" and not native_arguments.has(native_words(settings), "load_format")
    start_model.check(Path(spec.model), files, weights=weights)


def _read_files(launcher: EngineLauncher[object], spec: WorkerSpec, chat_template: str) -> ModelFiles:
    files = launcher.read_files(spec)
    return files._replace(chat_template=read_chat_template(chat_template)) if chat_template else files
