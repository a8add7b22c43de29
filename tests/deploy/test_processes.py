"""The rendered pods of a whole release as real processes: a fleet that serves, and whose pods are replaced without a failed request."""

import asyncio
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import pytest
import yaml

from headwater.events.ports import AccessDenied
from headwater.ops.config.sections import NatsSettings
from headwater.ops.nats.config import Wanted, kubernetes_secret
from headwater.ops.nats.connect import open_connection
from tests.deploy.kubelet import Node, Pod, installed
from tests.deploy.rendered import LAYOUTS, Object, template

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

KEYS = "headwater-nats"
TLS = "headwater-nats-tls"
ENDED = (0, 1, 143)
"""Exit codes of pods that end in order: a NATS server's in lame-duck mode is 1."""

NOT_SIMULATED = ("multinode-vllm", "multinode-sglang", "external-nats")
"""Layouts whose pods need an engine that computes on several nodes, or servers that are not theirs."""

CHAT = {"messages": [{"role": "user", "content": "Where does a river begin? " * 20}], "max_tokens": 24}
CLIENTS = 4


def keys(ns: str = "default") -> dict[str, str]:
    """The data of the Secret that `headwater nats-config --kubernetes` makes."""
    manifest = msgspec.json.decode(kubernetes_secret(Wanted(ns), KEYS, {})["secret.yaml"])
    data: dict[str, str] = manifest["stringData"]
    return data


class Clients:
    """Requests through the pods that are endpoints, over new connections, until stopped; `failures` are their reasons."""

    def __init__(self, node: Node, key: str, model: str) -> None:
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self._node = node
        self._key = key
        self._body = CHAT | {"model": model}
        self._stopped = False

    async def _one(self, number: int) -> None:
        turn = number
        while not self._stopped:
            edges = await self._node.endpoints("edge")
            if not edges:
                self.failures.append("no edge is ready")
                await asyncio.sleep(0.1)
                continue
            turn += 1
            edge = edges[turn % len(edges)]
            try:
                # The certificate is for addresses that only these pods have, and signs itself.
                async with httpx.AsyncClient(timeout=30.0, trust_env=False, verify=False) as client:
                    answer = await client.post(
                        f"{edge.scheme}://{edge.address}:8000/v1/chat/completions",
                        json=self._body,
                        headers={"authorization": f"Bearer {self._key}"},
                    )
                if answer.status_code == 200:
                    self.served[edge.name] += 1
                else:
                    self.failures.append(f"{edge}: {answer.status_code} {answer.text}")
            except httpx.TransportError as error:
                self.failures.append(f"{edge}: {error!r}")

    async def run(self) -> None:
        """Send until stopped."""
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._one(number))

    def stop(self) -> None:
        """Let each request end."""
        self._stopped = True

    async def until_served(self, more: int) -> None:
        """Return after so many further answers."""
        wanted = self.served.total() + more
        async with asyncio.timeout(60):
            while self.served.total() < wanted:
                assert not self.failures, self.failures
                await asyncio.sleep(0.02)


async def key_of(node: Node, *options: str) -> str:
    """A client's key, made as the chart's notes say."""
    (operator,) = node.of("operator")
    printed = await operator.execute("keys", "create", "--tenant", "acme", *options)
    found = re.search(r"hw-[0-9a-f]{12}-[0-9a-f]{64}", printed)
    assert found, printed
    return found[0]


async def ended_under_load(
    node: Node, pods: Sequence[Pod], answers: int, model: str = "sim", *, replace: bool = True
) -> None:
    """Each pod ends, one after the other, while clients send; with `replace` it is started again. Fails if a request does, or if anybody was
    denied a right.
    """
    clients = Clients(node, await key_of(node), model)
    async with asyncio.TaskGroup() as group:
        group.create_task(clients.run())
        await clients.until_served(answers)
        for pod in pods:
            assert await pod.stop() in ENDED, f"{pod}: {pod.tail()}"
            if replace:
                await pod.start()
                for probe in ("startupProbe", "readinessProbe"):
                    await pod.until(probe)
            await clients.until_served(answers)
        clients.stop()
    assert not clients.failures
    assert clients.served.keys() == {edge.name for edge in node.of("edge")}
    denied = [pod for pod in node.pods if re.search("Violation|denied", pod.log.read_text())]
    assert not denied, denied


async def test_a_release_serves_while_a_worker_and_an_edge_end(tmp_path: Path) -> None:
    """And its server knows strangers from its pods, by the Secret's keys."""
    values = f"""
nats: {{keysSecretName: {KEYS}}}
edge: {{withdrawSeconds: 1}}
modelDefaults: {{router: {{replicas: 1}}}}
"""
    node = Node(tmp_path, template(LAYOUTS["simulated"], text=values), {KEYS: keys()})
    async with installed(node):
        (server,) = node.of("nats")
        await ended_under_load(node, (node.of("decode")[0], node.of("edge")[0]), 4, replace=False)
        with pytest.raises(AccessDenied):
            await open_connection(NatsSettings(f"nats://{server.address}:4222"), "observer", "stranger")


@pytest.mark.soak
async def test_every_pod_of_a_release_with_three_servers_is_replaced(tmp_path: Path) -> None:
    """Prefill and decode apart, streams of three copies, keys and TLS: first the servers, as a rollout of each set would."""
    values = """
edge: {withdrawSeconds: 2}
nats: {storage: {size: 20Gi}}
models: {qwen: {engine: sim, modelArtifacts: {uri: ""}, prefill: {replicas: 2}, decode: {replicas: 2}}}
"""
    secrets = {KEYS: keys()}
    node = Node(tmp_path, template(LAYOUTS["nats-three"], text=values), secrets)
    secrets[TLS] = certificate(tmp_path, [pod.address for pod in node.of("nats")])
    async with installed(node):
        await ended_under_load(node, node.pods, 8, "Qwen/Qwen3-8B")


@pytest.mark.soak
async def test_a_release_uses_servers_that_are_there_already(tmp_path: Path) -> None:
    """Those of another release, by the names that the layout has for them, in a namespace of NATS of its own."""
    values = yaml.safe_load(LAYOUTS["external-nats"].read_text())
    values["models"] = {name: simulated(model) for name, model in values["models"].items()}
    servers = template(LAYOUTS["nats-three"], text="nats: {tlsSecretName: ''}")
    named = [one for one in servers if one["metadata"]["labels"]["app.kubernetes.io/component"] == "nats"]
    node = Node(
        tmp_path, [*template(text=yaml.safe_dump(values)), *named], {KEYS: keys(values["fleetNamespace"])}
    )
    for number, pod in enumerate(node.of("nats")):
        node.addresses[f"nats-{number}.nats.messaging"] = pod.address
    async with installed(node):
        await ended_under_load(node, node.of("decode")[:1], 4, "Qwen/Qwen3-8B")


@pytest.mark.soak
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in NOT_SIMULATED])
async def test_the_pods_of_each_layout_serve(layout: str, tmp_path: Path) -> None:
    """With simulated engines in place of its own: each model answers through an edge, and each observer's probes succeed."""
    values = yaml.safe_load(LAYOUTS[layout].read_text())
    for name, model in values["models"].items():
        values["models"][name] = simulated(model)
    for part in ("console", "admin"):
        values.setdefault(part, {})["enabled"] = bool(values.get(part))
    objects = template(text=yaml.safe_dump(values))
    tokens = {"tokens": "me a-token-of-16-characters\n"}
    secrets = {KEYS: keys(), "headwater-console": tokens, "headwater-admin": tokens}
    node = Node(tmp_path, objects, secrets)
    for name, component in ((TLS, "nats"), ("headwater-edge-tls", "edge")):
        secrets[name] = certificate(tmp_path, [pod.address for pod in node.of(component)])
    async with installed(node):
        key = await key_of(node)
        for model in values["models"].values():
            clients = Clients(node, key, model["modelArtifacts"]["name"])
            async with asyncio.TaskGroup() as group:
                group.create_task(clients.run())
                await clients.until_served(4)
                clients.stop()
            assert not clients.failures
        for pod in node.pods:
            assert await pod.probe("livenessProbe"), pod
            assert pod.running, pod


def simulated(model: Object) -> Object:
    """A model of a layout as the simulated engine serves it: the same roles and numbers of pods, without devices."""
    roles: Object = {
        role: {"replicas": model[role]["replicas"]}
        for role in ("decode", "prefill", "encode")
        if role in model
    }
    artifacts = {"name": model.get("modelArtifacts", {"name": "sim"})["name"], "uri": ""}
    kept: Object = {name: model[name] for name in ("router", "disaggregatedSet") if name in model}
    return {"engine": "sim", "modelArtifacts": artifacts, **roles, **kept}


def certificate(folder: Path, addresses: Sequence[str]) -> dict[str, str]:
    """The data of a Secret with a certificate for these addresses, which signs itself."""
    names = ",".join(f"IP:{address}" for address in addresses)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=nats", "-days", "2"]
    command += ["-addext", f"subjectAltName={names}", "-keyout", "tls.key", "-out", "tls.crt"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    chain = (folder / "tls.crt").read_text()
    return {"tls.crt": chain, "ca.crt": chain, "tls.key": (folder / "tls.key").read_text()}
