"""The location of a model, from what `--model` says, and its folder on this machine."""

import json
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from headwater.engines import logs, native_arguments, registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.process import interruptible
from headwater.ops.config.processes import EngineProcess, engine_options
from headwater.ops.config.setting import cache_folder
from headwater.ops.config.sources import NATIVE

STORES: Final = ("s3", "gs", "az", "http", "https")
"""Schemes of buckets and web servers."""

DEMO_NAME: Final = "smollm2-135m-instruct"
"""The default model, which is made on first use."""

STOP_S: Final = 5.0

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")


class DownloadFailed(Exception):
    """A model cannot be had; the text says why, and what to do."""


class ModelSource(NamedTuple):
    """One model. `name` is what clients call it; `at` is a folder, a repository of a hub, or a URL; `revision` is of a hub."""

    kind: Literal["folder", "hub", "store"]
    name: str
    at: str
    revision: str = ""


def with_folder(settings: EngineProcess, *, weights: bool = True) -> EngineProcess:
    """The same settings with the model's folder on this machine in place of its name, which clients still use.

    Without `weights`, or if the engine loads none, only configuration and tokenizer are fetched.

    Raises `EngineUnavailable`, and `EngineInterrupted` after a signal.
    """
    worker_settings = settings.worker
    source = (
        parse_source(worker_settings.model, worker_settings.model_revision)
        if worker_settings.model not in ("", DEMO_NAME)
        else None
    )
    if source is None or source.kind == "folder":
        if worker_settings.model_revision:
            raise EngineUnavailable(
                f"--model-revision {worker_settings.model_revision} is for models of a hub: leave it out for "
                f"{worker_settings.model or 'the default model'}"
            )
        return settings
    words = getattr(engine_options(settings, worker_settings.engine), NATIVE, ())
    # An engine may load none, or make them up.
    made_up = native_arguments.value(words, "load_format") == "dummy"
    loads = weights and registry.traits_of(worker_settings.engine).loads != "nothing" and not made_up
    folder = fetch(source, weights=loads, cache=cache_folder(settings.cache_dir))
    worker = worker_settings._replace(
        model=str(folder),
        model_revision="",
        served_model_name=worker_settings.served_model_name or source.name,
    )
    return settings._replace(worker=worker)


def parse_source(model: str, revision: str = "") -> ModelSource:
    """Read `--model`: a folder, which comes first, ORG/NAME or hf://NAME of a hub with @REVISION if need be, or a URL.

    Raises `EngineUnavailable` for what is none of these.
    """
    scheme, separator, rest = model.partition("://")
    if not separator and Path(model).expanduser().is_dir():
        return ModelSource("folder", Path(model).expanduser().name, model)
    if separator and scheme in STORES:
        return _stored(model)
    if separator and scheme != "hf":
        raise EngineUnavailable(
            f"--model {model}: choose a scheme from hf, {', '.join(STORES)}, or give a folder"
        )
    repository, _, own_revision = (rest if separator else model).partition("@")
    if not _REPOSITORY.match(repository) and not (separator and repository):
        raise EngineUnavailable(
            f"--model {model}: no such folder. Give a folder in Hugging Face's layout, ORG/NAME of a hub, a URL (s3://, https://), "
            f"or leave --model out for {DEMO_NAME}"
        )
    if own_revision and revision and own_revision != revision:
        raise EngineUnavailable(f"--model {model} contradicts --model-revision {revision}: give one")
    return ModelSource("hub", repository, repository, own_revision or revision)


def _stored(url: str) -> ModelSource:
    parts = urlsplit(url)
    name = parts.path.strip("/").rpartition("/")[2] or parts.netloc
    if not parts.netloc or parts.query or parts.fragment:
        raise EngineUnavailable(f"--model {url}: expected SCHEME://HOST/PATH of a folder, without a query")
    return ModelSource("store", name, url.rstrip("/"))


def fetch(source: ModelSource, *, weights: bool, cache: Path | None) -> Path:
    """The folder of a model on this machine; what is missing of it is downloaded first, with progress on standard error.

    `weights`: an engine is to load them; without, only configuration and tokenizer are fetched. `cache` is for models of
    buckets and web servers; those of a hub lie in its library's own cache, which engines and other programs share.
    The download is a process of its own: what it imports and its threads end with it, and a signal ends it at once.
    Raises `EngineUnavailable` for every failure, `EngineInterrupted` after a signal.
    """
    if source.kind == "folder":
        return Path(source.at).expanduser()
    request = {
        **source._asdict(),
        "weights": weights,
        "cache": str(cache) if cache else "",
        "log_json": logs.is_json(),
    }
    program = [sys.executable, "-m", "headwater.ops.start.model_download"]
    with interruptible(), subprocess.Popen(program, stdin=PIPE, stdout=PIPE, text=True) as process:
        try:
            output, _ = process.communicate(json.dumps(request))
        except BaseException:
            # It removes what it has of files, and ends.
            process.terminate()
            process.wait(STOP_S)
            raise
    try:
        answer = json.loads(output)
    except ValueError:
        raise EngineUnavailable(
            f"--model {source.at}: the download ended with code {process.returncode}"
        ) from None
    if "error" in answer:
        raise EngineUnavailable(f"--model {source.at}: {answer['error']}")
    return Path(answer["folder"])
