"""Every layout: its schemas, its overlay, and what must hold for each of its pods."""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest
import yaml
from docs._manifests.__main__ import KUSTOMIZE, all_files

from headwater.ops.commands.application import parse
from headwater.ops.nats.server import MAX_PAYLOAD
from headwater.schemas.permissions import KINDS
from tests.deploy.definitions import known
from tests.deploy.rendered import CHART as CHART_FOLDER
from tests.deploy.rendered import LAYOUTS, Object, helm, of_kind, pod_templates, template, tool
from tests.deploy.schemas import NEWEST, OLDEST, check


@cache
def rendered(layout: str) -> list[Object]:
    """The objects of a layout, which no test changes."""
    return template(LAYOUTS[layout])


LAYOUTS_OF = {
    "LeaderWorkerSet": "multinode-vllm",
    "DisaggregatedSet": "disaggregated-set",
    "PodMonitor": "monitoring",
    "PrometheusRule": "monitoring",
}
"""A layout with each custom kind."""

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def containers(layout: str) -> Iterator[tuple[Object, Object, Object]]:
    """Each owner, with each of its pods' specs and their only container."""
    for owner, pod in pod_templates(rendered(layout)):
        (container,) = pod["spec"]["containers"]
        yield owner, pod["spec"], container


def is_follower(owner: Object, container: Object) -> bool:
    """Is it a further node of a worker elsewhere, by its place in a group?"""
    group = owner["spec"].get("leaderWorkerTemplate", {})
    return "leaderTemplate" in group and container is group["workerTemplate"]["spec"]["containers"][0]


def test_helm_finds_nothing_wrong() -> None:
    done = helm("lint", str(CHART_FOLDER), "--strict")
    assert done.returncode == 0, done.stdout


def test_a_packaged_chart_is_whole(tmp_path: Path) -> None:
    """What it has from elsewhere in the repository is in the archive; and its notes name what there is, and a command that exists."""
    assert helm("package", str(CHART_FOLDER), "--destination", str(tmp_path)).returncode == 0
    (archive,) = tmp_path.iterdir()
    values = ("--values", str(LAYOUTS["monitoring"]))
    done = helm("template", "headwater", str(archive), *values)
    assert [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one] == rendered("monitoring")
    done = helm("install", "headwater", str(archive), *values, "--dry-run=client", "--namespace", "llm")
    notes = done.stdout.partition("NOTES:")[2]
    names = {identity(one) for one in rendered("monitoring")}
    command = re.search(r"exec deploy/(\S+) -- headwater (.*)", notes)
    assert command
    assert ("Deployment", command[1]) in names
    parse(command[2].split())
    service = re.search(r"port-forward svc/(\S+) (\d+) &", notes)
    assert service
    assert ("Service", service[1]) in names


@pytest.mark.parametrize("version", [NEWEST, pytest.param(OLDEST, marks=pytest.mark.soak)])
@every_layout
def test_schemas_accept_it(layout: str, version: str) -> None:
    check(rendered(layout), version)


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (("Deployment", "replicas", "two"), "replicas"),
        (("Deployment", "replica", 2), "replica"),
        (("StatefulSet", "volumeClaimTemplate", []), "volumeClaimTemplate"),
        (("LeaderWorkerSet", "size", 2), "size"),
        (("LeaderWorkerSet", "leaderWorkerTemplate.subGroupPolicies", {}), "subGroupPolicies"),
        (("LeaderWorkerSet", "leaderWorkerTemplate.restartPolicy", "Never"), "restartPolicy"),
        (("LeaderWorkerSet", "leaderWorkerTemplate.workerTemplate.spec.hostNetworks", True), "hostNetworks"),
        (("LeaderWorkerSet", "rolloutStrategy.rollingUpdateConfiguration.maxSurge", 0.5), "maxSurge"),
        (("DisaggregatedSet", "roles.0.spec.replica", 1), "replica"),
        (("DisaggregatedSet", "roles.1.name", "decode"), "same name"),
        (("PodMonitor", "podMetricsEndpoints", "metrics"), "podMetricsEndpoints"),
        (("PodMonitor", "podMetricsEndpoints.0.intervals", "15s"), "intervals"),
        (("PodMonitor", "podMetricsEndpoints.0.interval", "15 seconds"), "interval"),
        (("PrometheusRule", "groups.0.rules.0.label", {}), "label"),
    ],
)
def test_schemas_refuse_what_is_wrong(broken: tuple[str, str, object], field: str) -> None:
    kind, place, value = broken
    one = msgspec.json.decode(
        msgspec.json.encode(of_kind(rendered(LAYOUTS_OF.get(kind, "aggregated")), kind)[0])
    )
    within = one["spec"]
    *path, name = place.split(".")
    for word in path:
        within = within[int(word) if word.isdigit() else word]
    within[name] = value
    with pytest.raises(Exception, match=field):
        check([one], NEWEST)


def test_every_definition_judges_what_is_rendered() -> None:
    seen = {(one["apiVersion"], one["kind"]) for layout in LAYOUTS for one in rendered(layout)}
    assert known().keys() <= seen


def test_the_overlays_are_what_helm_renders() -> None:
    """`make manifests` writes them."""
    present = {str(path.relative_to(KUSTOMIZE)): path.read_text() for path in KUSTOMIZE.rglob("*.yaml")}
    assert present == all_files()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.soak if at % 8 else ()) for at, name in enumerate(LAYOUTS)],
)
def test_kustomize_builds_what_helm_renders(layout: str) -> None:
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(KUSTOMIZE / layout)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = {identity(one): one for one in yaml.load_all(done.stdout, yaml.CSafeLoader)}
    wanted = {identity(one): one for one in rendered(layout)}
    assert built.keys() == wanted.keys()
    for key, one in built.items():
        assert without_owner(one) == without_owner(wanted[key])


def identity(one: Object) -> tuple[str, str]:
    """Kind and name."""
    return one["kind"], one["metadata"]["name"]


def without_owner(one: Object) -> Object:
    """The same without the labels that say by what it was applied."""
    labels = {
        name: value
        for name, value in one["metadata"]["labels"].items()
        if name not in ("app.kubernetes.io/managed-by", "helm.sh/chart")
    }
    return one | {"metadata": one["metadata"] | {"labels": labels}}


@every_layout
def test_pods_have_least_privileges(layout: str) -> None:
    for _, pod, container in containers(layout):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


@every_layout
def test_a_pod_has_the_keys_of_its_own_kind_only(layout: str) -> None:
    for owner, pod, _ in containers(layout):
        component = owner["metadata"]["labels"]["app.kubernetes.io/component"]
        kinds = {
            "decode": {"worker"},
            "prefill": {"worker"},
            "encode": {"worker"},
            "workers": {"worker"},
            # It controls workers with the rights of an admin.
            "console": {"console", "admin"},
        }.get(component, {component} & set(KINDS))
        mounted = {
            item["key"].removesuffix(".nk")
            for volume in pod["volumes"]
            if volume["name"] == "keys"
            for item in volume["secret"]["items"]
        }
        has_keys = any("HEADWATER_NATS_KEYS_DIR" in str(one) for one in pod["containers"])
        assert mounted == (kinds if has_keys else set()), identity(owner)


@every_layout
def test_what_a_pod_mounts_and_probes_is_there(layout: str) -> None:
    for owner, pod, container in containers(layout):
        volumes = {
            one["name"]
            for one in [*pod["volumes"], *owner["spec"].get("volumeClaimTemplates", ())]
            if "name" in one
        }
        volumes |= {one["metadata"]["name"] for one in owner["spec"].get("volumeClaimTemplates", ())}
        assert volumes == {one["name"] for one in container["volumeMounts"]}, identity(owner)
        ports = {one["name"] for one in container["ports"]}
        probes = [container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")]
        if is_follower(owner, container):
            # It serves nobody, and must outlive its leader.
            assert not any(probes)
            assert container["lifecycle"]["preStop"]
        else:
            assert all(probes), identity(owner)
        assert all(probe["httpGet"]["port"] in ports for probe in probes if probe)


@every_layout
def test_a_pod_ends_before_it_is_killed(layout: str) -> None:
    """Its hook and its drain fit into its grace period, and a NATS server's lame-duck mode."""
    for owner, pod, container in containers(layout):
        grace_s = pod.get("terminationGracePeriodSeconds", 30)
        drains = [int(word.rpartition("=")[2]) for word in container["args"] if "--drain-timeout=" in word]
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        waits_s = int(hook[1]) if hook[0] in ("", "sleep") else 0
        if is_follower(owner, container):
            # It waits for its leader's drain, and is itself nothing that drains.
            drains = [0]
        assert waits_s + sum(drains) < grace_s, identity(owner)
    for one in of_kind(rendered(layout), "StatefulSet"):
        (configuration,) = (
            each["data"]["nats.conf"]
            for each in of_kind(rendered(layout), "ConfigMap")
            if each["metadata"]["name"] == one["metadata"]["name"]
        )
        lame_duck = re.search(r'lame_duck_duration: "(\d+)s"', configuration)
        assert lame_duck
        assert int(lame_duck[1]) < one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert f"max_payload: {MAX_PAYLOAD}\n" in configuration


@every_layout
def test_everything_that_selects_pods_finds_some(layout: str) -> None:
    """Services with the ports that they name, disruption budgets and policies; and each group of pods has a budget."""
    objects = rendered(layout)
    pods = [(owner, pod, pod["metadata"]["labels"]) for owner, pod in pod_templates(objects)]

    def selected(labels: Object) -> list[tuple[Object, Object, Object]]:
        found = [one for one in pods if labels.items() <= one[2].items()]
        assert found, labels
        return found

    for service in of_kind(objects, "Service"):
        for _, pod, _ in selected(service["spec"]["selector"]):
            names = {one["name"] for one in pod["spec"]["containers"][0]["ports"]}
            assert {one["targetPort"] for one in service["spec"]["ports"]} <= names
    for policy in of_kind(objects, "NetworkPolicy"):
        selected(policy["spec"]["podSelector"]["matchLabels"])
    for monitor in of_kind(objects, "PodMonitor"):
        selected(monitor["spec"]["selector"]["matchLabels"])
    owners = [one for one in objects if one["kind"] in ("Deployment", "StatefulSet")]
    for owner in owners:
        assert {id(one) for one, *_ in selected(owner["spec"]["selector"]["matchLabels"])} == {id(owner)}
    budgeted = {
        id(pod)
        for budget in of_kind(objects, "PodDisruptionBudget")
        for _, pod, _ in selected(budget["spec"]["selector"]["matchLabels"])
    }
    single = {"operator", "console", "admin", "tracer"}
    for owner, pod, labels in pods:
        assert (id(pod) in budgeted) == (labels["app.kubernetes.io/component"] not in single), identity(owner)


accepted: set[bytes] = set()
"""Commands with their variables that were accepted already: many layouts have the same."""


@every_layout
def test_the_command_line_accepts_each_command(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pod's variables; each of them is a setting of its command."""
    monkeypatch.setattr("headwater.engines.logs.configure", lambda *_, **__: None)
    for owner, _, container in containers(layout):
        words = container["args"]
        if words[0] == "sh":
            # What it executes follows the name that the shell goes by.
            words = words[4:]
        if words[0] != "headwater":
            continue
        line = msgspec.json.encode([words, container["env"]])
        if line in accepted:
            continue
        accepted.add(line)
        with monkeypatch.context() as environment:
            for one in container["env"]:
                environment.setenv(one["name"], str(one.get("value", "x")))
            bound, sources = parse(words[1:])
        origins = {origin.where for origin in sources.origins.values()}
        given = {one["name"] for one in container["env"] if one["name"].startswith("HEADWATER_")}
        unused = given - origins
        assert unused <= {"HEADWATER_CACHE_DIR"}, (identity(owner), unused)
        assert bound.arguments


def test_every_kind_of_node_is_told_its_place() -> None:
    """Leaders are workers of the fleet and say so; followers only compute, at the rank that their group gives them."""
    seen = set()
    for layout in ("multinode-vllm", "multinode-sglang"):
        for owner, _, container in containers(layout):
            if owner["kind"] != "LeaderWorkerSet":
                continue
            text = " ".join(container["args"])
            seen.add(is_follower(owner, container))
            assert "$(LWS_LEADER_ADDRESS)" in text
            if "--data-parallel-size=16" in text:
                assert "--data-parallel-size-local=8" in text
                assert ("--data-parallel-start-rank=$((LWS_WORKER_INDEX * 8))" in text) == is_follower(
                    owner, container
                )
            else:
                assert f"--node-rank={'$(LWS_WORKER_INDEX)' if is_follower(owner, container) else 0}" in text
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert seen == {True, False}


def test_boards_and_rules_are_the_products() -> None:
    from headwater.ops.monitoring.files import FOLDER, RULES

    objects = rendered("monitoring")
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((FOLDER / RULES).read_text())
    boards = {
        name: msgspec.json.decode(text)
        for one in of_kind(objects, "ConfigMap")
        for name, text in one["data"].items()
        if name.endswith(".json")
    }
    assert boards == {
        path.name: msgspec.json.decode(path.read_bytes()) for path in (FOLDER / "boards").glob("*.json")
    }
