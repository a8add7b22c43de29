"""kill -9, or SIGSTOP, of each party of a real SGLang's hand-off, in each state of its request: the answer stays the same.

A state is held by SIGSTOP of what would end it: of the prefill worker while the prompt is dispatched to it, of the decode
worker while the room is open, of the prefill engine's own processes while the decode leg waits in the room. It is reached when the message that
begins it passes the NATS server.
"""

import asyncio
import contextlib
import os
import signal
from itertools import product
from typing import Any, Final

from headwater.actors.runtime.lease import TTL_S
from tests.support.processes.disaggregated import Tokens, answer
from tests.support.processes.encode_leg import PassingMessages, has_tokens, is_for, passing_messages
from tests.support.processes.fleet import FleetProcess, descendants

STATES: Final = ("dispatch", "handoff", "room", "decode")
VICTIMS: Final = ("prefill-0", "decode-0", " router ")
LONG: Final = 300
"""Tokens of an answer that takes some seconds."""

PAUSED_S: Final = 2.0 * TTL_S
"""How long a worker is stopped: its lease expires, and its requests move."""

Row = tuple[str, str, str]
"""State, victim, what is wrong."""


async def hurt_in_state(
    up: FleetProcess, state: str, victim: str, number: int, expected: Tokens, *, paused_s: float = 0.0
) -> str:
    """Ask, kill the victim or stop it for `paused_s`, and compare; what is wrong, "" for nothing.

    Returns once both workers are back and have nothing left of the request.
    """
    both = await asyncio.gather(*(up.worker_pid(name) for name in ("prefill-0", "decode-0")))
    pids = dict(zip(("prefill-0", "decode-0"), both, strict=True))
    stopped = _stop(state, pids)
    paused: list[int] = []
    async with up.client() as client, passing_messages(up) as messages:
        asked = asyncio.ensure_future(answer(client, number, LONG))
        try:
            await _reached(up, state, messages)
            if asked.done():
                return f"it ended before it could be hurt: {asked}"
            if paused_s:
                paused = [pids[victim], *descendants(pids[victim])]
                _signal(paused, signal.SIGSTOP)
            elif victim in pids:
                os.kill(pids[victim], signal.SIGKILL)
            else:
                up.kill(victim)
        finally:
            _signal([pid for pid in stopped if pid not in paused], signal.SIGCONT)
        try:
            await asyncio.sleep(paused_s)
        finally:
            _signal(paused, signal.SIGCONT)
        try:
            async with asyncio.timeout(120):
                got = await asked
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    await up.until("both workers are back", _both_ready, within_s=120)
    await up.until("nothing is left of it", _idle, within_s=60)
    return "" if got == expected else f"{len(got)} tokens, which differ"


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _both_ready(stats: list[dict[str, Any]]) -> bool:
    return {"prefill-0", "decode-0", "router-0"} <= {
        one["id"] for one in stats if one.get("state") != "starting"
    }


def _idle(stats: list[dict[str, Any]]) -> bool:
    return not any(one.get("running") or one.get("waiting") or one.get("handoffs_held") for one in stats)


def _stop(state: str, pids: dict[str, int]) -> list[int]:
    """What holds a state; these processes stand still from now on."""
    found = {
        "dispatch": [pids["prefill-0"]],
        "handoff": [pids["decode-0"]],
        "room": descendants(pids["prefill-0"]),
        "decode": [],
    }[state]
    _signal(found, signal.SIGSTOP)
    return found


async def _reached(up: FleetProcess, state: str, messages: PassingMessages) -> None:
    signs = {
        "dispatch": is_for("prefill-0"),
        "handoff": is_for("decode-0"),
        "room": is_for("prefill-0", "claim"),
        "decode": has_tokens,
    }
    await messages.until(signs[state])
    if state == "room":
        # After its claim was granted it is in the engine, which waits for the KV.
        await up.until(state, _decodes, within_s=60)


def _decodes(stats: list[dict[str, Any]]) -> bool:
    return any(one["id"] == "decode-0" and (one.get("running") or one.get("waiting")) for one in stats)


async def kill_in_every_state(up: FleetProcess, first: int) -> list[Row]:
    """Kill each party in each state. Prompts are numbered from `first`."""
    return await _in_every_state(up, STATES, VICTIMS, first)


async def pause_during_handoff(up: FleetProcess, first: int) -> list[Row]:
    """Stop each worker, with all its processes, for longer than its lease: before and during the hand-off."""
    return await _in_every_state(up, ("dispatch", "handoff"), ("prefill-0", "decode-0"), first, PAUSED_S)


async def _in_every_state(
    up: FleetProcess, states: tuple[str, ...], victims: tuple[str, ...], first: int, paused_s: float = 0.0
) -> list[Row]:
    rows = []
    for number, (state, victim) in enumerate(product(states, victims), first):
        async with up.client() as client:
            expected = await answer(client, number, LONG)
        wrong = await hurt_in_state(up, state, victim, number, expected, paused_s=paused_s)
        rows.append((state, victim.strip(), wrong))
        print(*rows[-1], flush=True)
    return rows
