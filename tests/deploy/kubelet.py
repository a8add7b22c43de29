"""Rendered pods as processes of this machine: their commands, environments, volumes, probes and hooks, as a kubelet would run them.

Each pod has an address of its own in 127.0.0.0/8, so the rendered ports stay as they are. Only what stands for a place is replaced: the
name of a pod or of all addresses by an address, a path in a container by a folder.
"""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from headwater.ops.nats.server import binary
from headwater.ops.start.children import child_environment
from headwater.ops.start.signals import die_with_parent
from tests.deploy.rendered import Object, of_kind
from tests.support.processes import zygote
from tests.support.processes.commands import kill_all

STARTED_S = 200.0
POLL_S = 0.05
NEWS_S = 0.5
"""How long a pod that ends still gets connections: shorter than `edge.withdrawSeconds` of any test."""

_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")

Secrets = Mapping[str, Mapping[str, str]]
"""Data by the Secret's name."""

NO_VARIABLES: Mapping[str, str] = {}


class Pod:
    """One pod with one container. `folder` has its volumes and what it prints."""

    def __init__(
        self,
        node: "Node",
        template: Object,
        name: str,
        address: str,
        *,
        claims: Sequence[Object] = (),
        group: Mapping[str, str] = NO_VARIABLES,
    ) -> None:
        """`group`: the variables that a LeaderWorkerSet gives to the containers of a group."""
        self.name = name
        self.address = address
        labels = template["metadata"]["labels"]
        self.component: str = labels["app.kubernetes.io/component"]
        self.model: str = labels.get("headwater-model", "")
        self._terminating_at: float | None = None
        self._node = node
        self._spec: Object = template["spec"]
        (self._container,) = self._spec["containers"]
        self._claims = claims
        self._group = group
        self._folder = node.folder / name
        self._mounts = {
            one["mountPath"]: self._volume(one["name"]) for one in self._container["volumeMounts"]
        }
        longest_first = sorted(self._mounts, key=len, reverse=True)
        self._paths = re.compile(rf"(?<![\w/.-])(?:{'|'.join(map(re.escape, longest_first))})(?=[/\"'\s]|$)")
        self._process: zygote.Process | asyncio.subprocess.Process | None = None

    def __repr__(self) -> str:
        return self.name

    @property
    def scheme(self) -> str:
        """Of the URL of what it serves to clients."""
        return "https" if "tls" in {one["name"] for one in self._container["volumeMounts"]} else "http"

    @property
    def log(self) -> Path:
        """What it printed, over all its lives."""
        return self._folder / "log"

    @property
    def environment(self) -> dict[str, str]:
        """Its container's variables."""
        found = dict(self._group)
        for source in self._container.get("envFrom", ()):
            found |= self._node.secrets[source["secretRef"]["name"]]
        for one in self._container["env"]:
            found[one["name"]] = self._placed(self._expanded(self._value(one), found))
        return found

    def _value(self, one: Object) -> str:
        if "value" in one:
            return str(one["value"])
        source = one["valueFrom"]
        if "secretKeyRef" in source:
            return self._node.secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
        return {"metadata.name": self.name, "status.podIP": self.address}[source["fieldRef"]["fieldPath"]]

    def _expanded(self, text: str, environment: Mapping[str, str]) -> str:
        return _REFERENCE.sub(lambda found: environment.get(found[1], found[0]), text)

    def _placed(self, text: str) -> str:
        """The same with addresses and folders of this machine."""
        for name, address in self._node.addresses.items():
            text = text.replace(name, address)
        text = text.replace("0.0.0.0", self.address)
        return self._paths.sub(lambda found: str(self._mounts[found[0]]), text)

    def _volume(self, name: str) -> Path:
        return self._folder / "volumes" / name

    def _mount(self) -> None:
        claims = [{"name": one["metadata"]["name"], "emptyDir": {}} for one in self._claims]
        for volume in [*self._spec["volumes"], *claims]:
            folder = self._volume(volume["name"])
            folder.mkdir(parents=True, exist_ok=True)
            for source in volume["projected"]["sources"] if "projected" in volume else [volume]:
                for name, text in self._files(source).items():
                    (folder / name).write_text(self._placed(text))

    def _files(self, source: Object) -> dict[str, str]:
        if "configMap" in source:
            texts: dict[str, str] = self._node.config_maps[source["configMap"]["name"]]
            return texts
        if "secret" not in source:
            return {}
        secret = source["secret"]
        data = self._node.secrets[secret.get("secretName") or secret["name"]]
        items = secret.get("items") or [{"key": key, "path": key} for key in data]
        return {one["path"]: data[one["key"]] for one in items}

    async def start(self) -> None:
        """Start its container; like a kubelet, without waiting for anything in it."""
        self._terminating_at = None
        self._mount()
        environment = self.environment
        words = [self._placed(self._expanded(word, environment)) for word in self._container["args"]]
        with self.log.open("ab") as output:
            self._process = await self._run(words, environment, output)

    async def _run(
        self, words: Sequence[str], environment: Mapping[str, str], output: Any
    ) -> zygote.Process | asyncio.subprocess.Process:
        if words[0] == "headwater":
            return await zygote.start(
                *words[1:],
                stdout=output,
                stderr=zygote.STDOUT,
                environ=child_environment() | dict(environment),
                vllm=words[1:3] == ["engine", "vllm"],
            )
        program = binary() if words[0] == "nats-server" else words[0]
        if program == "sh":
            # What it executes is where this interpreter is, as in the image.
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            environment = child_environment() | dict(environment) | {"PATH": path}
        return await asyncio.create_subprocess_exec(
            program,
            *words[1:],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            preexec_fn=die_with_parent,
        )

    async def execute(self, *words: str) -> str:
        """What a command prints that runs in the container, as by `kubectl exec`. Fails if it does."""
        process = await zygote.start(
            *words, stdout=zygote.PIPE, stderr=zygote.STDOUT, environ=child_environment() | self.environment
        )
        output, _ = await process.communicate()
        await process.close_outputs()
        assert process.returncode == 0, output.decode()
        return output.decode()

    async def probe(self, kind: str) -> bool:
        """Does its startupProbe, livenessProbe or readinessProbe succeed?"""
        get = self._container[kind]["httpGet"]
        port = next(one["containerPort"] for one in self._container["ports"] if one["name"] == get["port"])
        try:
            async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
                answer = await client.get(f"http://{self.address}:{port}{get['path']}")
        except httpx.TransportError:
            return False
        return 200 <= answer.status_code < 400

    async def until(self, kind: str) -> None:
        """Return once a probe succeeds, if it has this one. Fails if its process ends before, or after what the startup probe allows."""
        if kind not in self._container:
            return
        startup = self._container["startupProbe"]
        allowed_s = min(STARTED_S, startup["periodSeconds"] * startup["failureThreshold"])
        try:
            async with asyncio.timeout(allowed_s):
                while not await self.probe(kind):
                    assert self.running, f"{self} ended: {self.tail()}"
                    await asyncio.sleep(POLL_S)
        except TimeoutError as error:
            raise AssertionError(f"{self}: {kind} fails for {allowed_s:g} s: {self.tail()}") from error

    @property
    def terminating(self) -> bool:
        """Whether everybody knows by now that it ends: proxies hear of it `NEWS_S` later."""
        since = self._terminating_at
        return since is not None and asyncio.get_running_loop().time() > since + NEWS_S

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    def tail(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-3000:]

    async def stop(self) -> int:
        """Run its hook, send SIGTERM, and wait for its end within its grace period; returns the exit code. Fails beyond it."""
        process = self._process
        assert process is not None
        self._terminating_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._spec.get("terminationGracePeriodSeconds", 30)):
                hook = self._container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
                if hook:
                    words = [self._placed(word) for word in hook]
                    done = await self._run(words, {"PATH": "/usr/bin:/bin"}, subprocess.DEVNULL)
                    assert await done.wait() == 0, f"{self}: its hook {words} failed"
                process.send_signal(signal.SIGTERM)
                return await process.wait()
        except TimeoutError as error:
            raise AssertionError(f"{self} does not end within its grace period: {self.tail()}") from error

    async def kill(self) -> None:
        """End whatever is left of it."""
        if isinstance(self._process, zygote.Process):
            await kill_all(self._process)
        elif self.running and self._process is not None:
            self._process.kill()
            await self._process.wait()


class Node:
    """The pods of a rendering, with Secrets by name."""

    def __init__(self, folder: Path, objects: Sequence[Object], secrets: Secrets) -> None:
        self.folder = folder
        self.secrets = secrets
        self.config_maps = {one["metadata"]["name"]: one["data"] for one in of_kind(objects, "ConfigMap")}
        self.addresses: dict[str, str] = {}
        self._network = f"127.{random.randint(16, 250)}.{random.randint(1, 250)}"
        self.pods = [pod for one in objects for pod in self._pods(one)]

    def _pods(self, owner: Object) -> Iterator[Pod]:
        spec, prefix = owner.get("spec", {}), owner["metadata"]["name"]
        match owner["kind"]:
            case "Deployment" | "StatefulSet":
                claims = spec.get("volumeClaimTemplates", ())
                yield from self._replicas(
                    prefix, spec["replicas"], spec["template"], claims, spec.get("serviceName", "pod")
                )
            case "LeaderWorkerSet":
                yield from self._groups(prefix, spec)
            case "DisaggregatedSet":
                for role in spec["roles"]:
                    yield from self._groups(f"{prefix}-{role['name']}", role["spec"])

    def _address(self, name: str, service: str = "pod") -> str:
        address = f"{self._network}.{len(self.addresses) + 1}"
        self.addresses[f"{name}.{service}"] = address
        return address

    def _replicas(
        self, prefix: str, count: int, template: Object, claims: Sequence[Object], service: str
    ) -> Iterator[Pod]:
        for number in range(count):
            name = f"{prefix}-{number}"
            yield Pod(self, template, name, self._address(name, service), claims=claims)

    def _groups(self, prefix: str, spec: Object) -> Iterator[Pod]:
        template = spec["leaderWorkerTemplate"]
        for number in range(spec["replicas"]):
            leader = f"{prefix}-{number}"
            for index in range(template["size"]):
                name = f"{leader}-{index}" if index else leader
                address = self._address(name)
                kind = "workerTemplate" if index or "leaderTemplate" not in template else "leaderTemplate"
                group = {
                    "LWS_LEADER_ADDRESS": self.addresses[f"{leader}.pod"],
                    "LWS_GROUP_SIZE": str(template["size"]),
                    "LWS_WORKER_INDEX": str(index),
                }
                yield Pod(self, template[kind], name, address, group=group)

    def of(self, component: str) -> list[Pod]:
        """The pods of a component."""
        return [pod for pod in self.pods if pod.component == component]

    async def endpoints(self, component: str) -> list[Pod]:
        """Those that a Service sends connections to."""
        pods = [pod for pod in self.of(component) if pod.running and not pod.terminating]
        ready = await asyncio.gather(*(pod.probe("readinessProbe") for pod in pods))
        return [pod for pod, is_ready in zip(pods, ready, strict=True) if is_ready]


@asynccontextmanager
async def installed(node: Node) -> AsyncIterator[None]:
    """All pods at once, as after `helm install`, each ready. None outlives the block."""
    async with AsyncExitStack() as stack:
        for pod in node.pods:
            stack.push_async_callback(pod.kill)
            await pod.start()
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            await asyncio.gather(*(pod.until(kind) for pod in node.pods))
        yield
