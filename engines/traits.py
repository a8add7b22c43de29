"""What must be known of an engine before it is imported: each engine's package says it, as `TRAITS`. Light to import."""

from collections.abc import Mapping
from typing import Literal, NamedTuple


class EngineEnvironment(NamedTuple):
    """The environment that an engine runs in where it is not installed: the extras of Headwater that bring it, and their `size`.

    `module` is what the engine is imported as. `cpu`: with the CPU build of torch. `warm`: kernels and imports are compiled when the
    environment is made.
    """

    title: str
    module: str
    extras: str
    size: str
    cpu: bool = False
    warm: bool = False


class EngineTraits(NamedTuple):
    """The traits of an engine; the defaults are those of an engine in one file.

    `loads`: the weights of a model's folder, a pipeline in diffusers' layout, or nothing; a process of an engine that loads something is not
    forked, and uses GPUs where there are any, unless the package `cpu_build` is installed, whose engine computes on CPUs. `has_encoder`: it has
    an encoder of media that runs apart from the model. `takes_embeddings`: clients may send embeddings in place of images.
    `writes_metric_files`: its own processes write Prometheus metrics to a folder.

    `options` is the section of its settings; an engine without one gets `worker.engine_options`. `shared_arguments` are its names for settings
    of workers that are arguments of the engine too. `kept_back` are arguments that the engine does not get: its HTTP server would use them,
    or Headwater acts on them. `environment` is None for an engine that is to be installed beside Headwater.
    """

    loads: Literal["weights", "pipeline", "nothing"] = "nothing"
    cpu_build: str = ""
    has_encoder: bool = False
    takes_embeddings: bool = False
    writes_metric_files: bool = False
    options: str = ""
    shared_arguments: Mapping[str, tuple[str, ...]] = {}
    kept_back: tuple[str, ...] = ()
    environment: EngineEnvironment | None = None
