"""The manifests for Kubernetes: judged by the published schema of InferencePool, and by our own command line."""

from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from headwater.ops.commands.application import parse

HERE = Path(__file__).parent
DOCUMENTS: list[dict[str, Any]] = list(
    yaml.safe_load_all((HERE.parents[1] / "examples" / "gateway" / "kubernetes.yaml").read_text())
)
VALUES = {"$(NATS_URL)": "nats://nats:4222", "$(POD_IP):8000": "10.0.0.7:8000"}


def test_the_pool_is_valid_and_selects_what_is_there() -> None:
    """And names the service and the port of the pickers."""
    schema = msgspec.json.decode((HERE / "data" / "inferencepool-v1.json").read_bytes())
    kinds = {one["kind"]: one for one in DOCUMENTS}
    pool, service = kinds["InferencePool"]["spec"], kinds["Service"]
    jsonschema.validate(pool, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**pool, "targetPortNumber": 8000}, schema)
    deployments = {
        one["metadata"]["name"]: one["spec"]["template"] for one in DOCUMENTS if one["kind"] == "Deployment"
    }
    assert pool["selector"]["matchLabels"] == deployments["headwater-engine"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployments["headwater-picker"]["metadata"]["labels"]
    picker = pool["endpointPickerRef"]
    assert (picker["name"], picker["port"]["number"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )


@pytest.mark.parametrize(
    "container",
    [
        one
        for document in DOCUMENTS
        if document["kind"] == "Deployment"
        for one in document["spec"]["template"]["spec"]["containers"]
    ],
    ids=lambda one: one["name"],
)
def test_what_the_containers_run_is_a_command(container: dict[str, Any]) -> None:
    """With flags that it takes, and the ports that are probed."""
    bound, _ = parse([VALUES.get(word, word) for word in container["args"]])
    settings = bound.arguments["settings"]
    assert settings.nats.url == "nats://nats:4222"
    ports = {one["name"]: one["containerPort"] for one in container.get("ports", [])}
    match container["name"]:
        case "picker":
            assert (settings.picker.port, settings.picker.health_port) == (ports["grpc"], ports["health"])
        case "edge":
            assert settings.http.port == ports["http"] == 8000
            assert settings.metrics.port == container["readinessProbe"]["httpGet"]["port"]
        case "worker":
            assert settings.worker.profile.endpoint == "10.0.0.7:8000"
