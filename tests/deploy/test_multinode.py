"""Real vLLM: what it says to the arguments of each layout, and a group of a LeaderWorkerSet on a CPU, as the chart starts it."""

import re
from pathlib import Path

import httpx
import pytest
import yaml

from headwater.engines.engine import EngineUnavailable
from tests.deploy.kubelet import Node, installed
from tests.deploy.rendered import LAYOUTS, pod_templates, template
from tests.deploy.test_processes import key_of
from tests.deploy.test_values import merged
from tests.support.engines.multimodal import tiny_vision_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(400),
    # Two engines are loaded at once.
    pytest.mark.soak,
]

VALUES = """
accelerator: {type: cpu}
edge: {replicas: 1, args: ["--client-policies=kv,direct"]}
modelDefaults: {router: {replicas: 1}}
models:
  dense: null
  experts:
    maxModelLen: 1024
    modelArtifacts: {name: tiny, uri: pvc://models/tiny}
    decode:
      parallelism: {tensor: 1, data: 2, dataLocal: 1, workers: 2}
      headwaterArgs: [--native=--kv-cache-memory-bytes=67108864]
      args: []
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllm_accepts_its_arguments(layout: str) -> None:
    """By its own parser: what `parallelism` and `args` of a layout become."""
    from headwater.engines.vllm import config

    for _, pod in pod_templates(template(LAYOUTS[layout])):
        words = pod["spec"]["containers"][0]["args"]
        if "vllm" in words and "--" in words:
            native = [re.sub(r"\$\(LWS_\w+\)", "1", word) for word in words[words.index("--") + 1 :]]
            config.parse(native)
    with pytest.raises(EngineUnavailable):
        config.parse(["--tensor-parallel=2x"])


async def test_the_ranks_of_both_nodes_answer(tmp_path: Path) -> None:
    """Each is a worker, named after the leader's pod; the follower computes at the rank that its place in the group gives it."""
    layout = yaml.safe_load(LAYOUTS["multinode-vllm"].read_text())
    node = Node(tmp_path, template(text=yaml.safe_dump(merged(layout, yaml.safe_load(VALUES)))), {})
    leader, follower = node.of("decode")
    for pod in (leader, follower):
        weights = tmp_path / pod.name / "volumes" / "weights"
        weights.mkdir(parents=True)
        (weights / "tiny").symlink_to(tiny_vision_model.ensure())
    async with installed(node):
        (edge,) = node.of("edge")
        headers = {
            "authorization": f"Bearer {await key_of(node, '--allow', 'policy,worker')}",
            "x-headwater-policy": "direct",
        }
        body = {"model": "tiny", "prompt": "One, two,", "max_tokens": 8, "temperature": 0}
        texts = set()
        async with httpx.AsyncClient(
            base_url=f"http://{edge.address}:8000", timeout=60, trust_env=False
        ) as client:
            for worker in (f"{leader.name}-dp0", f"{leader.name}-dp1"):
                answer = await client.post(
                    "/v1/completions", json=body, headers=headers | {"x-headwater-worker": worker}
                )
                assert answer.status_code == 200, answer.text
                assert answer.headers["x-headwater-worker"] == worker
                texts.add(answer.json()["choices"][0]["text"])
        assert len(texts) == 1
        assert follower.running
        assert await leader.stop() == 143
