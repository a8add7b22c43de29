"""Values: each has an effect, and wrong ones are refused with words that say what to do."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
import yaml

from tests.deploy.rendered import CHART, LAYOUTS, Object, refusal, template

DEFAULTS: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Object = msgspec.json.decode((CHART / "values.schema.json").read_bytes())

EVERYTHING = """
nats: {replicas: 3, keysSecretName: keys, tlsSecretName: tls, storage: {size: 50Gi}}
edge:
  auth: keys,oidc
  oidc: {issuer: "https://id.example", audience: [a], jwksUrl: "https://id.example/keys", defaultScopes: ["models:*"]}
  tlsSecretName: edge-tls
console: {enabled: true, tokensSecretName: tokens}
admin: {enabled: true, tokensSecretName: tokens}
tracer: {otlp: "http://collector:4317"}
monitoring: {podmonitor: {enabled: true}, prometheusRule: {enabled: true}, dashboards: {enabled: true}}
models:
  a: {modelArtifacts: {name: a, uri: "hf://org/a"}, prefill: {replicas: 1}, encode: {replicas: 1}}
  b: {engine: sglang, modelArtifacts: {name: b, uri: "pvc://claim/b"}}
  c: {engine: tensorrt_llm, modelArtifacts: {name: c, uri: "hf://org/c"}}
  d: {engine: sim}
"""
"""Values with which everything is rendered that any value has an effect on."""

ALONE: dict[str, Object] = {
    # What is in the way of a value, and what gives its effect.
    "nats.enabled": {"nats": {"enabled": False, "url": "nats://elsewhere:4222"}},
    "nats.url": {"nats": {"enabled": False, "url": "nats://elsewhere:4222"}},
    "nats.replicas": {"nats": {"replicas": 1}},
    "nats.streamReplicas": {"nats": {"streamReplicas": 1}},
    "nats.storage.size": {"nats": {"storage": {"size": "99Gi"}}},
    "edge.auth": {"edge": {"auth": "oidc"}},
    "image.pullPolicy": {"image": {"pullPolicy": "Always"}},
    "models": {"models": {"e": {"engine": "sim", "modelArtifacts": {"name": "e"}}}},
    # Of those models the third's engine has no such workers.
    "modelDefaults.prefill.replicas": {"modelDefaults": {"prefill": {"replicas": 1}}, "models": {"c": None}},
    "modelDefaults.encode.replicas": {"modelDefaults": {"encode": {"replicas": 1}}, "models": {"c": None}},
    "modelDefaults.engine": {"modelDefaults": {"engine": "sglang"}},
    "modelDefaults.modelArtifacts.name": {"models": {"d": {"modelArtifacts": {"name": "x"}}}},
    "modelDefaults.modelArtifacts.uri": {"models": {"d": {"modelArtifacts": {"uri": "pvc://claim/d"}}}},
    "modelDefaults.modelArtifacts.revision": {"models": {"a": {"modelArtifacts": {"revision": "main"}}}},
    "modelDefaults.disaggregatedSet": {"models": {"a": {"disaggregatedSet": True}}},
    "modelDefaults.multinode": {"models": {"a": {"multinode": True}}},
    "workerDefaults.args": {"models": {"a": {"decode": {"args": ["--x"]}}}},
    "workerDefaults.parallelism.tensor": {"models": {"a": {"decode": {"parallelism": {"tensor": 2}}}}},
    "workerDefaults.parallelism.pipeline": {"models": {"b": {"decode": {"parallelism": {"pipeline": 2}}}}},
    "workerDefaults.parallelism.data": {
        "models": {"a": {"decode": {"parallelism": {"data": 2, "dataLocal": 2}}}}
    },
    "workerDefaults.parallelism.dataLocal": {
        "models": {"b": {"decode": {"parallelism": {"data": 3, "dataLocal": 3}}}}
    },
    "workerDefaults.parallelism.workers": {
        "models": {"a": {"multinode": True, "decode": {"parallelism": {"tensor": 2, "workers": 2}}}}
    },
}
"""By its path: the values that change it, where those of its type do not."""

OF_TYPE: dict[str, Any] = {
    "args": ["--log-level=debug"],
    "headwaterArgs": ["--log-level=debug"],
    "env": [{"name": "X", "value": "y"}],
    "audience": ["other"],
    "defaultScopes": ["endpoints:*"],
    "imagePullSecrets": [{"name": "pull"}],
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "clientsFrom": [{"podSelector": {}}],
    "metricsFrom": [{"podSelector": {}}],
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
    ],
    "affinity": {"nodeAffinity": {}},
    "uri": "hf://org/x",
    "otlp": "http://other:4317",
    "jwksUrl": "https://other.example",
    "mountPath": "/other",
    "interval": "7s",
    "size": "7Gi",
    "shmSize": "7Gi",
    "streamReplicas": 1,
    "maxSurge": 7,
}
"""By the last part of its path: another value."""


def leaves(values: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all values; of tables of Kubernetes' own types only the table's."""
    for name, value in values.items():
        at = (*path, name)
        free = name in ("requests", "limits") or (
            len(at) > 0 and ("ecurityContext" in name or name in ("labels", "annotations", "nodeSelector"))
        )
        if isinstance(value, dict) and value and not free:
            yield from leaves(value, at)
        else:
            yield at


LEAVES = [".".join(path) for path in leaves(DEFAULTS)]


def schema_at(path: tuple[str, ...]) -> Object:
    """The part of the schema for a value."""
    found = SCHEMA
    for name in path:
        if "$ref" in found:
            found = SCHEMA["$defs"][found["$ref"].rpartition("/")[2]]
        found = found["properties"][name]
    return SCHEMA["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def another(path: str, value: Any) -> Object:
    """Values in which this one differs from its default."""
    if path in ALONE:
        return ALONE[path]
    parts = tuple(path.split("."))
    made: Any = OF_TYPE.get(parts[-1])
    if made is None:
        choices = schema_at(parts).get("enum")
        match value:
            case _ if choices:
                made = next(one for one in choices if one != value)
            case bool():
                made = not value
            case int() | float():
                made = value + 1 if value >= 1 else 0.5 if isinstance(value, float) else 1
            case str():
                made = f"{value}x"
            case dict():
                made = {"memory": "77Gi"} if parts[-1] in ("requests", "limits") else {"added": "yes"}
            case _:
                raise AssertionError(f"{path}: say in OF_TYPE or ALONE what another value is")
    for name in reversed(parts):
        made = {name: made}
    found: Object = made
    return found


def merged(base: Object, more: Object) -> Object:
    """As Helm merges files of values; None removes one."""
    found = base | {
        name: merged(base[name], value)
        if isinstance(value, dict) and isinstance(base.get(name), dict)
        else value
        for name, value in more.items()
    }
    return {name: value for name, value in found.items() if value is not None}


@cache
def everything() -> list[Object]:
    """The rendering that the others are compared with."""
    return template(text=EVERYTHING)


PART = 16
"""Of so many values every run takes one, and `make soak` all."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.soak if at % PART else ()) for at, path in enumerate(LEAVES)],
)
def test_each_value_has_an_effect(path: str) -> None:
    given = yaml.safe_load(EVERYTHING)
    value: Any = merged(DEFAULTS, given)
    for name in path.split("."):
        value = value[name]
    more = another(path, value)
    without = {name: None for name, model in more.get("models", {}).items() if model is None}
    before = template(text=yaml.safe_dump(merged(given, {"models": without}))) if without else everything()
    assert template(text=yaml.safe_dump(merged(given, more))) != before


def test_the_schema_has_exactly_the_values() -> None:
    """So none can be mistyped, and none is forgotten."""

    def names(schema: Object, path: tuple[str, ...] = ()) -> Iterator[str]:
        if "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        properties = schema.get("properties")
        if not properties:
            yield ".".join(path)
            return
        assert schema["additionalProperties"] is False, path
        for name, one in properties.items():
            yield from names(one, (*path, name))

    roles = ("modelDefaults.decode", "modelDefaults.prefill", "modelDefaults.encode")
    known = {
        one
        for one in names(SCHEMA)
        # What a role of a model may say is what `workerDefaults` says; `claims` are for clusters that have them.
        if not one.startswith(roles)
        and not one.endswith(".claims")
        and one not in ("global", "modelDefaults.router.resources")
    }
    wanted = {one for one in LEAVES if not one.startswith(roles)}
    assert known == wanted, known ^ wanted


REFUSED = [
    ("edge: {replica: 2}", "replica"),
    ("edge: {replicas: two}", "edge/replicas"),
    ("nats: {replicas: 2}", "nats/replicas"),
    ("nats: {enabled: false}", "nats.url: give the URLs"),
    ("nats: {url: 'nats://x:1'}", "set nats.enabled to false"),
    ("nats: {streamReplicas: 3}", "1 servers cannot keep more copies"),
    ("nats: {storage: {size: 5Gi}}", "nats.storage.size: 5Gi"),
    ("edge: {auth: none}", "edge/auth"),
    ("edge: {auth: oidc}", "edge.oidc.issuer: edge.auth has oidc"),
    ("edge: {oidc: {issuer: 'https://x'}}", "need `oidc` in edge.auth"),
    ("console: {enabled: true}", "console.tokensSecretName"),
    ("admin: {enabled: true}", "admin.tokensSecretName"),
    ("models: {M: {}}", "M"),
    ("models: {m: {}}", "models.m.modelArtifacts.uri: say where the weights are"),
    ("models: {m: {modelArtifacts: {uri: 'ftp://x', name: m}}}", "uri"),
    ("models: {m: {modelArtifacts: {uri: 'hf://x/y'}}}", "models.m.modelArtifacts.name"),
    ("models: {m: {modelArtifacts: {uri: 'pvc://x', name: m}}}", "give pvc://CLAIM/"),
    ("models: {m: {modelArtifacts: {uri: 'pvc://x/y', name: m, revision: z}}}", "modelArtifacts.revision"),
    ("models: {m: {engine: sim, decode: {args: [--x]}}}", "no arguments of its own"),
    ("models: {m: {engine: sim, decode: {replicas: 0}, prefill: {replicas: 1}}}", "need decode workers"),
    ("models: {m: {engine: sim, disaggregatedSet: true}}", "needs prefill workers"),
    ("models: {a: {engine: sim}, b: {engine: sim}}", "have the same modelArtifacts.name"),
    ("models: {a-name-of-more-than-16: {engine: sim}}", "more than 16 characters"),
    ("models: {m: {modelArtifacts: {name: m, uri: 'hf://m/m'}, decode: {parallelism: {tensor: 2, workers: 2}}}}", "need `multinode: true`"),
    ("models: {m: {modelArtifacts: {name: m, uri: 'hf://m/m'}, multinode: true, decode: {parallelism: {tensor: 3, workers: 2}}}}", "cannot be divided"),
    ("models: {m: {modelArtifacts: {name: m, uri: 'hf://m/m'}, decode: {parallelism: {data: 2}}}}", "dataLocal must be data / workers"),
    ("models: {m: {engine: sglang, modelArtifacts: {name: m, uri: 'hf://m/m'}, multinode: true, decode: {parallelism: {data: 2, workers: 2}}}}", "vLLM's only"),
    ("models: {m: {engine: sglang, modelArtifacts: {name: m, uri: 'hf://m/m'}, multinode: true, prefill: {replicas: 1}, decode: {parallelism: {tensor: 2, workers: 2}}}}", "have one node each"),
    ("models: {m: {engine: tensorrt_llm, modelArtifacts: {name: m, uri: 'hf://m/m'}, prefill: {replicas: 1}}}", "tensorrt_llm is deployed without roles"),
    ("fullnameOverride: a-prefix-of-more-than-thirty-characters", "more than 30 characters"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "words"),
    [pytest.param(*one, marks=pytest.mark.soak if at % 3 else ()) for at, one in enumerate(REFUSED)],
)
def test_a_wrong_value_is_named_with_its_remedy(values: str, words: str) -> None:
    assert words in refusal(values)


def test_a_value_of_a_model_wins_over_the_defaults() -> None:
    text = "workerDefaults: {drainSeconds: 7}\nmodels: {a: {engine: sim, decode: {drainSeconds: 9}}}"
    assert "--drain-timeout=9" in str(template(text=text))
    assert "--drain-timeout=9" not in str(template(LAYOUTS["simulated"]))
