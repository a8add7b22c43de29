"""A fleet's file as values of the Helm chart `deploy/helm/headwater`: hosts are the cluster's to choose, so only their numbers count.

What the chart takes from Secrets, keys and certificates among it, is not in a fleet's file: see its guide.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.ops.config.processes import EdgeProcess, EngineProcess, RouterProcess, setting
from headwater.ops.config.setting import ConfigError
from headwater.ops.launch import hosts
from headwater.ops.launch.fleet_file import FleetFile, PoolOfModel, Processes, Workers, settings_in
from headwater.ops.launch.hosts import references_of

ROLES: Final = {"both": "decode", "decode": "decode", "prefill": "prefill", "encode": "encode"}
"""The chart's group of workers of each role: workers that do both are `decode` without `prefill`."""

NAME_MAX: Final = 16
"""Characters of a model's name in the chart, which is a part of longer names."""

PARALLELISM: Final = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
}
"""The engines' arguments that are values of the chart."""

URI_SCHEMES: Final = ("s3://", "gs://", "az://", "https://")


def render(fleet: FleetFile) -> str:
    """The values, as YAML. Raises `ConfigError` for what the chart does not have."""
    import yaml

    references = references_of(fleet)
    if references:
        raise ConfigError(
            f"kubernetes: {next(iter(references))} is a reference; in a cluster it comes from a Secret: leave it out, and name the Secret in "
            "the chart's values"
        )
    values: dict[str, Any] = {"fleetNamespace": fleet.namespace}
    shared = hosts.shared_settings(fleet)
    values["logLevel"] = shared.log.level
    if fleet.nats.url:
        values["nats"] = {"enabled": False, "url": fleet.nats.url}
    elif len(fleet.nats_hosts) > 1:
        values["nats"] = {"replicas": len(fleet.nats_hosts)}
    values["edge"] = _edge(fleet)
    values["models"] = {}
    for model, pool in fleet.pools.items():
        name = hosts.short_name(model).replace("_", "-")[:NAME_MAX].rstrip("-")
        if name in values["models"]:
            raise ConfigError(
                f"kubernetes: pools {model}: another one has its name in Kubernetes, {name}, too"
            )
        values["models"][name] = _model(fleet, model, pool)
    text: str = yaml.safe_dump(values, sort_keys=False, width=120)
    return f"# Written by `headwater kubernetes render`, for: helm install NAME deploy/helm/headwater -f FILE\n{text}"


def _number(fleet: FleetFile, spec: Processes | Workers) -> int:
    return spec.count * len(spec.hosts or fleet.host_names)


def _words(kind: Any, values: Mapping[str, Any], without: Sequence[str] = ()) -> list[str]:
    """Settings of the processes of a kind as words of their command lines."""
    return [
        word
        for key, value in values.items()
        if setting(key).path[0] in kind._fields and key not in without
        for word in setting(key).words(value)
    ]


def _edge(fleet: FleetFile) -> dict[str, Any]:
    edge_settings = settings_in(fleet.edges.settings, "edges.settings")
    hosts.refuse_foreign(EdgeProcess, edge_settings, "edges.settings")
    edge_values: dict[str, Any] = {"replicas": _number(fleet, fleet.edges)}
    if "http.port" in edge_settings:
        edge_values["service"] = {"port": edge_settings["http.port"]}
    shared = settings_in(fleet.settings, "settings")
    values = settings_in(fleet.edges.settings, "edges.settings", shared)
    # A pod has an address of its own, and the chart says how it logs and drains.
    words = _words(EdgeProcess, values, without=("http.port", "http.host", "log.level", "drain_timeout"))
    if words:
        edge_values["args"] = words
    if "drain_timeout" in shared:
        edge_values["drainSeconds"] = int(shared["drain_timeout"])
    return edge_values


def _model(fleet: FleetFile, model: str, pool: PoolOfModel) -> dict[str, Any]:
    engines = {group.engine for group in pool.workers}
    if len(engines) > 1:
        raise ConfigError(
            f"kubernetes: pools.{model}: workers of {' and '.join(sorted(engines))}; the chart gives a model one engine"
        )
    place = f"pools.{model}"
    shared = settings_in(fleet.settings, "settings")
    of_pool = settings_in(pool.settings, f"{place}.settings", shared)
    model_values: dict[str, Any] = {
        "engine": engines.pop(),
        "modelArtifacts": {"name": model, "uri": _uri(pool.model or model, place)},
        "router": {"replicas": _routers(fleet, pool)},
    }
    routers = settings_in(pool.routers.settings, f"{place}.routers.settings", of_pool)
    if "router.policy" in pool.routers.settings.get("router", {}):
        model_values["router"]["policy"] = routers["router.policy"]
    words = _words(RouterProcess, routers, without=("router.policy", "log.level"))
    if words:
        model_values["router"]["args"] = words
    for number, workers in enumerate(pool.workers):
        role = ROLES[workers.role]
        if role in model_values:
            raise ConfigError(
                f"kubernetes: {place}.workers[{number}]: the chart gives a model one group of {role} workers; a second one needs another pool"
            )
        settings = settings_in(workers.settings, f"{place}.workers[{number}].settings", of_pool)
        _move_to_model(model_values, settings, workers)
        model_values[role] = _workers(fleet, workers, settings)
    model_values.setdefault("decode", {"replicas": 0})
    return model_values


def _routers(fleet: FleetFile, pool: PoolOfModel) -> int:
    return pool.routers.count * len(pool.routers.hosts or fleet.nats_hosts or fleet.host_names)


def _move_to_model(model_values: dict[str, Any], settings: dict[str, Any], workers: Workers) -> None:
    """Move what the chart has as a model's values there."""
    for key, name in (("worker.block_size", "blockSize"), ("worker.max_model_len", "maxModelLen")):
        if key in settings:
            model_values[name] = settings.pop(key)
    if workers.nodes > 1:
        model_values["multinode"] = True


def _workers(fleet: FleetFile, workers: Workers, settings: dict[str, Any]) -> dict[str, Any]:
    words = list(workers.arguments)
    worker_values: dict[str, Any] = {"replicas": _number(fleet, workers) // workers.nodes}
    parallelism = {}
    for name, flags in PARALLELISM.items():
        for flag in flags:
            if flag in words[:-1]:
                at = words.index(flag)
                parallelism[name] = int(words[at + 1])
                del words[at : at + 2]
    if workers.nodes > 1:
        parallelism["workers"] = workers.nodes
    if parallelism:
        worker_values["parallelism"] = parallelism
    if words:
        worker_values["args"] = words
    headwater_words = _words(EngineProcess, settings, without=("log.level", "drain_timeout"))
    if headwater_words:
        worker_values["headwaterArgs"] = headwater_words
    if "drain_timeout" in settings:
        worker_values["drainSeconds"] = int(settings["drain_timeout"])
    return worker_values


def _uri(model: str, place: str) -> str:
    """The chart's address of a model. Raises `ConfigError` for a folder, which a cluster does not have."""
    if model.startswith(URI_SCHEMES):
        return model
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return f"hf://{model}"
    if "/" not in model:
        # A name only: of an engine that loads nothing, or to be completed.
        return ""
    raise ConfigError(
        f"kubernetes: {place}.model {model}: a folder of a machine; give ORG/NAME of a hub or a bucket, or put it into a volume (pvc://)"
    )
