"""Control of one worker: what an operator asks of it, and what it answers. Core NATS, audited in the pool log."""

from typing import Any, Literal

import msgspec

Command = Literal[
    "status",
    "sleep",
    "wake",
    "clear-kv",
    "pause",
    "resume",
    "drain",
    "profile-start",
    "profile-stop",
    "role",
    "load-lora",
    "unload-lora",
    "list-loras",
    "taint",
    "untaint",
    "stop",
]

COMMANDS: dict[Command, str] = {
    "status": "what it is doing",
    "sleep": "give its memory back: level 1 keeps the weights in host memory, level 2 drops them",
    "wake": "take its memory again and serve",
    "clear-kv": "forget every cached block that no request uses",
    "pause": "stop generating where it is; mode abort, wait or keep says what becomes of running requests",
    "resume": "go on after a pause or a drain",
    "drain": "take nothing new and finish what runs; the worker stays in the fleet",
    "profile-start": "begin to write a profile of the engine",
    "profile-stop": "end it",
    "role": "serve as both, prefill or decode from now on; only of a drained worker",
    "load-lora": "load an adapter: its name, and where it is",
    "unload-lora": "drop an adapter",
    "list-loras": "which adapters it holds",
    "taint": "keep away requests that do not tolerate this; what runs goes on",
    "untaint": "let them come again",
    "stop": "drain, leave the fleet and end",
}
"""Every command in a line, for the help text and the admin page."""


class ControlRequest(msgspec.Struct, frozen=True, array_like=True):
    """`arguments` are plain JSON types; `by` says who asks, for the audit."""

    command: Command
    arguments: dict[str, Any] = {}
    by: str = ""


class ControlReply(msgspec.Struct, frozen=True, array_like=True):
    """`detail` says what was done, or why not; `data` is the command's own answer, plain JSON types.

    `status` follows HTTP: 200 done, 202 under way (`data` has a ticket, and the status command tells what became of
    it), 400 wrong arguments, 404 no such thing, 409 not in this state, 500 the worker failed, 501 this engine can
    not, 502 the engine failed, 504 it took too long.
    """

    status: int
    detail: str
    data: dict[str, Any] = {}
