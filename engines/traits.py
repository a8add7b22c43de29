"""What must be known of an engine before it is imported: traits, default limits, names of metrics, and where its spans go.

An engine's package says its traits as `TRAITS`. This module is light to import: the command line reads it.

An engine with options has them in a `NamedTuple` that its traits name. Each field with a description is a setting: a flag, a variable,
a key of the configuration file, and a row of the reference. Several engines may use one setting of workers (`COMMON`): those do whose options
have a field of its name, which has no description and gets its value.

Metrics of engines are shown under one set of names (`COMMON_METRICS`), next to their own: `TRAITS.metrics` says which of an engine's metrics is
which of these. A process of a worker shows both (`headwater.ops.start.metrics`). An engine of another package exports these names itself.
"""

import os
import shlex
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headwater.schemas.names import TraceContext


class Text(NamedTuple):
    """Annotation of a setting with a notation of its own: how text is read, and how a value is written.

    `kind`: the type of what `read` returns, if it is not the setting's.
    """

    read: Callable[[str], Any]
    write: Callable[[Any], str]
    metavar: str = ""
    kind: Any = None


# Notations of options that several engines have.


def _read_pairs(text: str) -> dict[str, str]:
    return dict(_pair(word.strip()) for word in text.split(",") if word.strip())


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and ":" in value):
        raise ValueError(f"{word!r} is not NAME=MODULE:CLASS")
    return name, value


def _write_pairs(pairs: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in pairs.items())


def _write_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


JSON = Text(msgspec.json.decode, _write_json, "JSON")
PAIRS = Text(_read_pairs, _write_pairs, "NAME=MODULE:CLASS,…")

Words = Annotated[tuple[str, ...], Text(_read_words, shlex.join, "TEXT")]
Table = Annotated[dict[str, Any], JSON]
Processors = Annotated[dict[str, str], PAIRS]


COMMON: Final = ("gpus_per_worker", "handoff_host", "handoff_port", "logits_processors", "allow")
"""Settings of workers that several engines use."""


class EngineEnvironment(NamedTuple):
    """The environment that an engine runs in where it is not installed: the extras of Headwater that bring it, and their `size`.

    `module` is what the engine is imported as. `cpu`: with the CPU build of torch. `warm`: kernels and imports are compiled when the
    environment is made. `per_worker`: only the processes of workers continue in it, and one of another path may be named by the option
    `python`; otherwise the whole `headwater up` does.
    """

    module: str
    extras: str
    size: str
    cpu: bool = False
    warm: bool = False
    per_worker: bool = False


class EngineTraits(NamedTuple):
    """The traits of an engine; the defaults are those of an engine in one file. `title` is its name in texts.

    `options` is the type of its options, whose defaults it has; an engine without one gets `worker.engine_options`. Words after `--` on a
    command line are the option `native`, if there is one. `launcher` is the place of its `EngineLauncher`.

    `loads`: the weights of a model's folder, a pipeline in diffusers' layout, or nothing; a process of an engine that loads something is not
    forked, and uses GPUs where there are any. `encoder`: how help calls an engine that has an encoder of media that runs apart from the model. `takes_embeddings`: how it calls
    one to which clients may send embeddings in place of images. `refusals` are what it refuses to start unless `allow` has them. `joins_others`: its workers may be added to those of another engine.
    `writes_metric_files`: its own processes write Prometheus metrics to a folder. `metrics`: which of its metrics is which of the common ones
    (`headwater.engines.traits`), both without `_total`. `rank_label` is its label of a data-parallel rank in them. `transport` moves the
    embeddings of its media.

    `shared_arguments` are its names for settings of workers that are arguments of the engine too. `kept_back` are arguments that the engine
    does not get: its HTTP server would use them, or Headwater acts on them. `environment` is None for an engine that is to be installed
    beside Headwater.
    """

    title: str = ""
    options: Any = None
    launcher: str = "headwater.engines.custom.engine:CustomLauncher"
    loads: Literal["weights", "pipeline", "nothing"] = "nothing"
    encoder: str = ""
    takes_embeddings: str = ""
    refusals: tuple[str, ...] = ()
    joins_others: bool = False
    writes_metric_files: bool = False
    metrics: Mapping[str, str] = {}
    rank_label: str = ""
    transport: Literal["nixl", "shared"] = "nixl"
    shared_arguments: Mapping[str, tuple[str, ...]] = {}
    kept_back: tuple[str, ...] = ()
    environment: EngineEnvironment | None = None


# Default limits of adapters and embeddings.

LORA_MIB: Final = 4_096
"""Largest adapter."""

LORA_CACHE_MIB: Final = 65_536
"""Largest cache of adapters."""

LORA_FETCH_S: Final = 600.0
"""Longest fetch of an adapter."""


EMBEDDINGS_MIB: Final = 256
"""Room of one worker for embeddings of images, in MiB."""


# Metrics of engines under one set of names.

PREFIX: Final = "headwater_engine_"


class EngineMetric(NamedTuple):
    """One of the common metrics: its name without the prefix and without `_total`."""

    name: str
    kind: Literal["counter", "histogram"]
    help: str


COMMON_METRICS: Final = (
    EngineMetric("prompt_tokens", "counter", "Prompt tokens of requests, by the engine's own count"),
    EngineMetric("cached_prompt_tokens", "counter", "Those of them that it had cached"),
    EngineMetric("generated_tokens", "counter", "Tokens that it generated"),
    EngineMetric("preemptions", "counter", "Requests preempted for lack of KV blocks (SGLang: retracted)"),
    EngineMetric("queue_seconds", "histogram", "From a request's arrival in the engine until it first runs"),
    EngineMetric(
        "time_to_first_token_seconds",
        "histogram",
        "From a request's arrival in the engine to its first token",
    ),
    EngineMetric(
        "time_per_output_token_seconds",
        "histogram",
        "First token to end of a request, divided by the tokens after the first",
    ),
    EngineMetric("request_seconds", "histogram", "From a request's arrival in the engine to its end"),
)

FROM_LOAD: Final = {
    "running": (PREFIX + "running_requests", "Requests running in the engine"),
    "waiting": (PREFIX + "waiting_requests", "Requests waiting in the engine"),
    "used_blocks": (PREFIX + "used_blocks", "KV blocks in use"),
    "total_blocks": (PREFIX + "total_blocks", "KV blocks in total"),
}
"""(name, help) of what a worker reads of every engine (`Engine.load`), by its statistic."""


# Spans that engines make themselves.


class EngineTraces(NamedTuple):
    """The endpoint of a receiver, "" for none; its protocol as OpenTelemetry's variables name it; and the share of traces that is recorded."""

    endpoint: str = ""
    protocol: str = ""
    sample: float = 0.0

    def headers(self, attempt: str, context: TraceContext) -> dict[str, str]:
        """Return the headers that make an engine's spans children of those of an attempt, of the request in its name."""
        return context.headers_below(attempt.rsplit("-", 2)[0], attempt, self.sample)

    def announced(self, engine: str, worker: str) -> "EngineTraces":
        """Set what an engine reads from the environment only, and return what it is to be started with: no endpoint where OpenTelemetry is not
        installed.
        """
        if not self.endpoint:
            return self
        if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
            # Here, as the settings import this module: help is shown without it.
            import structlog

            _log = structlog.get_logger("headwater.engine")
            _log.warning(
                "engine_traces_off", engine=engine, reason="OpenTelemetry is not installed in its environment"
            )
            return self._replace(endpoint="")
        os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", self.protocol)
        os.environ.setdefault("OTEL_SERVICE_NAME", engine)
        os.environ.setdefault("OTEL_RESOURCE_ATTRIBUTES", f"service.instance.id={worker}")
        return self
