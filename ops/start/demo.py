"""`headwater demo`: start a fleet, ask three questions, and show where they went and why."""

import asyncio
import sys
import time
from typing import Any

import msgspec

from headwater.ops.config.nats import NatsSettings
from headwater.ops.config.processes import LocalFleetSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.history.explanation import describe
from headwater.ops.nats.connect import operator_ports
from headwater.ops.nats.pool_choice import choose_pool
from headwater.ops.operator import explain, log
from headwater.ops.start.machine import Machine
from headwater.ops.start.up import plan_of
from headwater.schemas.addresses import split_host_port

SYSTEM = (
    "You are the guide of a small museum about rivers. You answer visitors in one or two short sentences, in plain "
    "words, and you never make up facts. If you do not know something, say so. Be friendly and calm. The museum is "
    "open from nine to five, tickets are free for children, and the café is on the second floor, next to the "
    "aquarium with the trout. Visitors may take photographs without flash. Dogs have to wait outside."
)
QUESTIONS = (
    "What is the capital of France?",
    "Where does a river begin?",
    "Name one animal that lives in a river.",
)


async def demo(settings: LocalFleetSettings, stop: asyncio.Event) -> int:
    """Run the demonstration; 0 if all questions were answered and can be explained."""
    if settings.auth.mode != "none":
        raise ConfigError(
            f"--auth {settings.auth.mode}: the demo asks its questions without a key; use `headwater up`"
        )
    if settings.http.tls_cert or settings.http.tls_key:
        raise ConfigError("demo serves plain HTTP on this machine: use `headwater up` for TLS")
    began = time.monotonic()
    fleet = Machine(plan_of(settings))
    try:
        print(f"starting {len(fleet.workers)} {settings.worker.engine} workers …", flush=True)
        await fleet.start()
        ready = asyncio.ensure_future(fleet.ready())
        waiting = asyncio.ensure_future(stop.wait())
        ends: set[asyncio.Future[Any]] = {ready, waiting, fleet.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ready.done():
            ready.cancel()
            print(fleet.failure.result() if fleet.failure.done() else "stopped", file=sys.stderr)
            return 1
        ready.result()
        model = (await fleet.model()).name
        print(f"ready at {fleet.url}/v1 after {time.monotonic() - began:.1f} s, model {model}\n", flush=True)
        requests = [await _ask(fleet.url, model, question) for question in QUESTIONS]
        return await _explain(fleet.nats, requests)
    finally:
        await fleet.stop()


async def _ask(url: str, model: str, question: str) -> str:
    """Ask over HTTP, printing the answer as it comes; returns the request's id."""
    address = url.removeprefix("http://")
    body = msgspec.json.encode(
        {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 48,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": question},
            ],
        }
    )
    reader, writer = await asyncio.open_connection(*split_host_port(address))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    print(f"> {question}\n  ", end="", flush=True)
    began = time.monotonic()
    first_s = 0.0
    request = ""
    usage: dict[str, Any] = {}
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                raise RuntimeError(f"the edge answered {line.decode().strip()}")
            continue
        document: dict[str, Any] = msgspec.json.decode(line[6:])
        if "error" in document:
            raise RuntimeError(document["error"]["message"])
        request = document["id"]
        usage = document.get("usage") or usage
        for choice in document["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not first_s:
                first_s = time.monotonic() - began
            print(text, end="", flush=True)
    writer.close()
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    print(
        f"\n  [{usage.get('prompt_tokens')} prompt tokens, {cached} of them cached by the engine; "
        f"first token after {first_s * 1000:.0f} ms, all after {time.monotonic() - began:.1f} s]\n",
        flush=True,
    )
    return request


async def _explain(nats: NatsSettings, requests: list[str]) -> int:
    """Why each went where it went, from the log, and what the log holds."""
    async with operator_ports(nats, "demo") as ports:
        pool = await choose_pool(ports, "")
        pool_log = await ports.pool_log(pool)
        found: list[str] = []
        for request in requests:
            # Decisions are stored a few milliseconds after they were answered.
            for _ in range(100):
                decisions = await explain.decisions_for(pool_log, request)
                if decisions:
                    break
                await asyncio.sleep(0.05)
            found += [describe(one.decision, one.position, one.after, one.engines) for one in decisions]
        print("why each went where it went:\n")
        print("\n\n".join(found))
        print()
        print(await log.summary(ports, pool))
    return 0 if len(found) >= len(requests) else 1
