"""`headwater up --picker-port`: a picker beside the fleet, whose workers have the edge as their endpoint."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headwater.actors.picker import messages as ext_proc
from headwater.ops.start.sockets import free_port
from tests.support.processes.fleet import fleet

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(120)]


async def endpoint_of(port: int) -> str:
    """The endpoint that a picker names for a request without a body."""
    message = ext_proc.ProcessingRequest()
    message.request_headers.end_of_stream = True
    for key, value in ((":method", "GET"), (":path", "/v1/models")):
        message.request_headers.headers.headers.add(key=key, raw_value=value.encode())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = ext_proc.stub(channel)()
        await call.write(message)
        answer: Any = await call.read()
        await call.done_writing()
    lb = answer.dynamic_metadata.fields["envoy.lb"].struct_value
    return str(lb.fields["x-gateway-destination-endpoint"].string_value)


def metrics_of(folder: Path) -> str:
    """The picker's address of metrics."""
    targets = json.loads((folder / "data" / "prometheus-targets.json").read_text())
    (found,) = [one["targets"][0] for one in targets if one["labels"]["name"] == "picker-0"]
    return str(found)


async def test_up_starts_a_picker_and_keeps_it(tmp_path: Path) -> None:
    """It has metrics as other processes, and is started again when it dies."""
    port = free_port(0)
    async with fleet(tmp_path, "--engine", "sim", "--picker-port", str(port)) as up:
        edge = up.url.removeprefix("http://")
        assert "picker-0" in (tmp_path / "data" / "prometheus-targets.json").read_text()
        for life in range(2):
            async with asyncio.timeout(30):
                while True:
                    try:
                        if await endpoint_of(port) == edge:
                            break
                    except grpc.aio.AioRpcError:
                        pass
                    await asyncio.sleep(0.1)
            async with httpx.AsyncClient() as client:
                text = (await client.get(f"http://{metrics_of(tmp_path)}/metrics")).text
            # A request that it cannot decide goes to the next endpoint in turn, and is counted.
            assert 'headwater_picker_picks_total{outcome="undecided"}' in text
            assert "headwater_picker_pick_seconds" in text
            if not life:
                up.kill(" picker ")
