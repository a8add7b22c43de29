"""vLLM's own arguments through the command line to the real engine: read by its own parser, and in effect."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from headwater.engines import traits
from headwater.engines.vllm import preload
from headwater.ops.start.sockets import free_port
from tests.support.engines import tiny_model
from tests.support.processes import zygote
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(600)]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]

CASES: dict[str, list[str]] = {
    "spelling": ["--tensor_parallel_size", "2", "-pp", "3", "--model", "a folder/with blanks"],
    "booleans": ["--no-enable-prefix-caching", "--trust-remote-code", "--no-disable-log-stats"],
    "json": ["--override-generation-config", '{"temperature": 0.5, "stop": "a b"}'],
    "dotted": ["--kv-transfer-config.kv_connector", "NixlConnector", "--kv-transfer-config.kv_role=kv_both"],
    "lists": ["--served-model-name", "one", "two words"],
    "sizes": ["--max-model-len", "32k"],
    "unknown": ["--seed", "1", "--tensor-paralel-size", "2"],
    "front": ["--api-key", "x"],
    "wrong": ["--seed", "many"],
    "abbreviated": ["--tensor-parallel", "2"],
    "ours differ": ["--block-size", "64"],
    "ours same": ["--block-size", "16", "--dtype", "float"],
    "no events": ["--kv-events-config", '{"enable_kv_cache_events": false}'],
    "own events": ["--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'],
    "connectors": [],
}

PROGRAM = """
import dataclasses, json, sys
from headwater.engines.engine import EngineError
from headwater.engines.vllm import config as cli_arguments
from headwater.engines.vllm import preload
from headwater.engines.launcher import EngineSettings, WorkerSpec
from headwater.engines.vllm import VllmOptions
from headwater.engines.vllm.config import keyword_arguments
preload.preload()
found = {}
for name, words in json.loads(sys.argv[1]).items():
    options = VllmOptions(native=tuple(words))
    if name == "connectors":
        example = {"example": {"shared_storage_path": "/kv"}}
        options = options._replace(connector="nixl,example", connector_options=example)
    settings = EngineSettings(WorkerSpec("w", model="m", block_size=16), options)
    try:
        whole = name.startswith("ours") or name in ("no events", "own events", "connectors")
        given = keyword_arguments(settings, "e", "r", cpu=True) if whole else cli_arguments.parse(words)
        found[name] = {
            key: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            for key, value in given.items()
        }
    except EngineError as error:
        found[name] = str(error)

import asyncio
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from headwater.engines.vllm.engine import VllmEngine

def limits(args, usage):
    scheduler = args.create_engine_config(usage).scheduler_config
    return [scheduler.max_num_batched_tokens, scheduler.max_num_seqs]

def from_engine_args(args, usage_context, **_):
    found["limits"] = limits(args, usage_context)
    raise RuntimeError("captured")

from nixl._api import nixlBind
config = nixlBind.nixlAgentConfig()
config.pthrDelay, config.lthrDelay = 0, 5
found["transfers"] = [config.pthrDelay, config.lthrDelay]

model = sys.argv[2]
for name, usage in (("server", UsageContext.OPENAI_API_SERVER), ("library", UsageContext.LLM_CLASS)):
    found[name] = limits(AsyncEngineArgs(model=model, enforce_eager=True), usage)
AsyncLLM.from_engine_args = from_engine_args
try:
    asyncio.run(VllmEngine(EngineSettings(WorkerSpec("w", model=model), VllmOptions())).start())
except EngineError as error:
    assert "captured" in str(error), error
print("FOUND " + json.dumps(found))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found() -> dict[str, Any]:
    """What vLLM's parser makes of the cases. In a process of its own: vLLM changes the one it is imported into."""
    process = await zygote.start(
        "-c",
        PROGRAM,
        json.dumps(CASES),
        str(tiny_model.ensure()),
        stdout=zygote.PIPE,
        stderr=zygote.PIPE,
        vllm=True,
    )
    async with asyncio.timeout(240):
        output, errors = await process.communicate()
    lines = [line for line in output.decode().splitlines() if line.startswith("FOUND ")]
    assert lines, errors.decode()[-3000:]
    answers: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return answers


def test_only_what_was_given_is_there(found: dict[str, Any]) -> None:
    """Every spelling, and no default of vLLM's beside it."""
    assert found["spelling"] == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "model": "a folder/with blanks",
    }
    # A file's `disable-log-stats: false`: the flag has no opposite, and is off anyway.
    assert found["booleans"] == {"enable_prefix_caching": False, "trust_remote_code": True}
    assert found["json"] == {"override_generation_config": {"temperature": 0.5, "stop": "a b"}}
    assert found["dotted"]["kv_transfer_config"]["kv_connector"] == "NixlConnector"
    assert found["lists"] == {"served_model_name": ["one", "two words"]}
    assert found["sizes"] == {"max_model_len": 32_000}


def test_errors_name_the_argument(found: dict[str, Any]) -> None:
    """And what to write instead."""
    assert found["unknown"].startswith(
        "vLLM has no engine argument --tensor-paralel-size: did you mean --tensor-par"
    )
    assert found["front"].startswith(
        "vLLM has no engine argument --api-key: it belongs to vLLM's HTTP server"
    )
    assert "--seed" in found["wrong"]
    assert "many" in found["wrong"]
    assert "--tensor-parallel" in found["abbreviated"]


def test_ours_and_theirs_agree_or_are_refused(found: dict[str, Any]) -> None:
    """The same thing said twice must be the same."""
    assert found["ours differ"].startswith("--block-size 16 and, among vLLM's own arguments, --block-size 64")
    assert (found["ours same"]["block_size"], found["ours same"]["dtype"]) == (16, "float")


def test_kv_events_stay_on(found: dict[str, Any]) -> None:
    """Routing lives from them; another socket than ours is fine."""
    assert "--kv-events-config disables KV events" in found["no events"]
    config = found["own events"]["kv_events_config"]
    assert (config["endpoint"], config["replay_endpoint"], config["publisher"]) == (
        "tcp://*:5557",
        "r",
        "zmq",
    )


def test_connectors_are_what_vllm_reads(found: dict[str, Any]) -> None:
    """Its own class takes our fields."""
    config = found["connectors"]["kv_transfer_config"]
    assert (config["kv_connector"], config["kv_role"], config["kv_buffer_device"]) == (
        "MultiConnector",
        "kv_both",
        "cpu",
    )
    names = [entry["kv_connector"] for entry in config["kv_connector_extra_config"]["connectors"]]
    assert names == ["NixlConnector", "ExampleConnector"]


def test_the_scheduler_has_the_limits_of_vllms_server(found: dict[str, Any]) -> None:
    """Those of vLLM as a library are others, and made for less."""
    assert found["limits"] == found["server"]
    assert found["limits"] != found["library"]


def test_transfers_wait_for_events(found: dict[str, Any]) -> None:
    """Whatever NIXL's Python API sets; everything else that it sets is kept."""
    assert found["transfers"] == [preload.PROGRESS_POLL_US, 5]


@pytest.mark.soak
async def test_a_prefill_and_a_decode_worker_with_arguments_of_vllms(tmp_path: Path) -> None:
    """From a file's section and from the command line; metrics of each worker with its labels, and no folder left.

    With a real model: template, tokens, engine and text fit together, so that its answers are right. Its engine host is
    executed and not forked: the metrics library chooses at its import whether several processes share a folder.
    """
    metrics = free_port(0)
    config = tmp_path / "fleet.yaml"
    config.write_text(
        "engines:\n  small:\n    max-num-seqs: 3\n    served_model_name: [small one]\n    seed: 7\n"
    )
    shared = tmp_path / "kv"
    options = json.dumps({"example": {"shared_storage_path": str(shared)}})
    async with fleet(
        tmp_path,
        *("--engine", "vllm", "--prefill-workers", "1", "--decode-workers", "1"),
        *("--metrics-port", str(metrics), "--config", str(config), "--config-key", "engines.small"),
        *("--connector", "nixl,example", "--connector-options", options),
        *("--", "--max-model-len", "512", "--kv-cache-memory-bytes", "128M", "--no-enable-log-requests"),
        ready_s=240,
    ) as up:
        async with up.client() as client:
            chat = {"model": "small one", "messages": FRANCE, "temperature": 0}
            [choice] = (right := (await client.post("/v1/chat/completions", json=chat)).json())["choices"]
            assert choice["message"]["content"] == "The capital of France is Paris."
            assert choice["finish_reason"] == "stop"
            assert (right["usage"]["prompt_tokens"], right["usage"]["completion_tokens"]) == (37, 8)
            body = {"model": "small one", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == " four, five,"
        texts = {}
        async with httpx.AsyncClient() as client:
            for number, worker in enumerate(("prefill-0", "decode-0")):
                page = await client.get(f"http://127.0.0.1:{metrics + number}/metrics")
                texts[worker] = page.text
        for worker, text in texts.items():
            role = worker.removesuffix("-0")
            mine = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
            for label in (f'worker="{worker}"', f'role="{role}"', 'rank="0"', 'pool="small-one-'):
                assert all(label in line for line in mine)
            assert "process_resident_memory_bytes{" in text
            for one in traits.COMMON_METRICS:
                assert f"# HELP {traits.PREFIX}{one.name}" in text
        counted = [
            float(line.rpartition(" ")[2])
            for text in texts.values()
            for line in text.splitlines()
            if line.startswith("vllm:generation_tokens_total{")
        ]
        assert sum(counted) >= 4
        folders = _folders(up.pids(" engine "))
        assert len(folders) == 3
    assert not [folder for folder in folders if folder.exists()]


def _folders(pids: list[int]) -> list[Path]:
    """Metrics folders of these processes."""
    from headwater.ops.start import metrics_folder

    own = {str(pid) for pid in pids}
    return [entry for entry in metrics_folder.base().iterdir() if entry.name.partition("-")[0] in own]
