"""kill -9 of each party of a real SGLang's hand-off, in each state of its request: the answer stays the same.

A state is held by SIGSTOP of what would end it: of the prefill worker while the prompt is dispatched to it, of the decode
worker while the room is open, of the prefill engine's own processes while the decode leg waits in the room.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from itertools import product
from typing import Any, Final

from tests.support.processes.disaggregated import Tokens, answer
from tests.support.processes.fleet import FleetProcess, descendants

STATES: Final = ("dispatch", "handoff", "room", "decode")
VICTIMS: Final = ("prefill-0", "decode-0", " router ")
LONG: Final = 300
"""Tokens of an answer that takes some seconds."""

HELD_S: Final = 0.5
"""How long a state without a sign of its own is given to be reached."""


async def kill_in_state(up: FleetProcess, state: str, victim: str, number: int, expected: Tokens) -> str:
    """Ask, kill, and compare; what is wrong, "" for nothing. Returns once both workers are back."""
    both = await asyncio.gather(*(up.worker_pid(name) for name in ("prefill-0", "decode-0")))
    pids = dict(zip(("prefill-0", "decode-0"), both, strict=True))
    stopped = _stop(state, pids)
    async with up.client() as client:
        asked = asyncio.ensure_future(answer(client, number, LONG))
        try:
            await _reached(up, state)
            if asked.done():
                return f"it ended before it could be killed: {asked}"
            if victim in pids:
                os.kill(pids[victim], signal.SIGKILL)
            else:
                up.kill(victim)
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        try:
            async with asyncio.timeout(120):
                got = await asked
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    await up.until("both workers are back", _both_ready, within_s=120)
    return "" if got == expected else f"{len(got)} tokens, which differ"


def _both_ready(stats: list[dict[str, Any]]) -> bool:
    return {"prefill-0", "decode-0", "router-0"} <= {
        one["id"] for one in stats if one.get("state") != "starting"
    }


def _stop(state: str, pids: dict[str, int]) -> list[int]:
    """What holds a state; these processes stand still from now on."""
    found = {
        "dispatch": [pids["prefill-0"]],
        "handoff": [pids["decode-0"]],
        "room": descendants(pids["prefill-0"]),
        "decode": [],
    }[state]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    return list(found)


async def _reached(up: FleetProcess, state: str) -> None:
    signs: dict[str, Callable[[list[dict[str, Any]]], bool]] = {
        "handoff": lambda stats: any(one.get("handoffs_held") for one in stats),
        "room": lambda stats: any(one.get("handoffs_held") for one in stats),
        "decode": lambda stats: any(one["id"] == "decode-0" and one.get("running") for one in stats),
    }
    if state in signs:
        await up.until(state, signs[state], within_s=60)
    await asyncio.sleep(HELD_S)


async def kill_in_every_state(up: FleetProcess, first: int) -> list[tuple[str, str, str]]:
    """(state, victim, what is wrong) for each case. Prompts are numbered from `first`."""
    rows = []
    for number, (state, victim) in enumerate(product(STATES, VICTIMS), first):
        async with up.client() as client:
            expected = await answer(client, number, LONG)
        rows.append((state, victim.strip(), await kill_in_state(up, state, victim, number, expected)))
        print(*rows[-1], flush=True)
    return rows
