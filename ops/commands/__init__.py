"""The commands of the `headwater` command line: their functions and options are in this package, by group.

A module is imported only when a command of it runs: `headwater --help` reads this table.
"""

from typing import Final

COMMANDS: Final = {
    "serve": (
        "Serve",
        {
            "up": "start a whole fleet on this machine",
            "demo": "start a fleet, ask three questions, show where they were routed and why",
            "edge": "run one edge (HTTP endpoint)",
            "router": "run one router",
            "engine": "run engine workers",
            "admin": "run the admin port: control of workers over HTTP",
            "console": "run the console: a page that shows the fleet at any position of its log",
            "tracer": "send traces of requests to an OpenTelemetry receiver",
            "picker": "run an endpoint picker: gateways ask it which endpoint serves a request",
            "shadow": "run another routing policy in the shadow of a pool's routers, and record its choices",
        },
    ),
    "deploy": (
        "Deploy",
        {
            "launch": "run the fleet that a file describes, on this machine or several",
            "slurm": "write a fleet's file as a job for Slurm",
            "systemd": "write a fleet's file as units of systemd",
            "compose": "write a fleet's file for Docker Compose",
            "kubernetes": "write a fleet's file as values of the Helm chart",
        },
    ),
    "operate": (
        "Operate",
        {
            "ctl": "control workers: drain, sleep, wake, role, adapters, …",
            "keys": "create, list, update, rotate and revoke API keys of clients",
            "doctor": "find what is wrong with a fleet, its server and this machine",
            "monitoring": "write Grafana's boards, alert rules and a configuration of Prometheus for a fleet",
            "switch": "move requests to another revision of workers, or another policy, step by step",
            "rollback": "undo a switch",
            "backup": "copy the namespace's streams to a folder",
            "restore": "make the streams of a backup on another server",
            "streams": "list all streams: size, health, differences from their wanted configuration",
            "pools": "create the namespace's streams and the logs of its pools, and list them",
            "mirror": "keep copies of a site's streams at a hub",
            "nats-config": "write a nats.conf that grants each kind of process only the permissions it needs",
            "config": "show settings and their origins",
            "completion": "print a shell completion script",
            "warm": "precompile kernels and imports",
        },
    ),
    "inspect": (
        "Inspect",
        {
            "open": "show a capture in the console",
            "explain": "explain the routing decisions of a request",
            "log": "summarise a pool's log",
            "tree": "show the blocks cached by a pool's workers, as a tree of prefixes",
            "replay": "fold a pool's log again, and verify every decision",
            "snapshots": "list a pool's snapshots, or bookmark one",
            "trace": "show a request as a trace, or send that to an OpenTelemetry receiver",
            "capture": "write what the logs have around a request or a time into one file",
            "engines": "list the engines that can be chosen, with versions and capabilities",
            "check-engine": "check an engine against the contract of engines",
            "models": "show what is detected in a model's folder",
        },
    ),
    "debug": (
        "Debug",
        {
            "tail": "show the events of a pool's log and of the request log, in the order of time",
            "top": "show a pool's workers, every second",
            "diff": "show what differs between two places of a pool's log",
            "bisect": "find the first position of a pool's log where a condition holds",
            "why-not": "explain why a request did not go to a worker",
            "stuck": "list open requests that make no progress, and what each waits for",
            "export": "export a part of the logs as a trace for Perfetto",
        },
    ),
    "analyse": (
        "Analyse",
        {
            "whatif": "simulate a trace or a recorded log with other settings, in columns",
            "advise": "recommend a layout of workers for a model, GPUs and a trace, by simulation",
            "compare": "send the same prompts to two engines of a model, and show how their answers diverge",
            "tune": "search for routing weights on a trace or a recorded log",
            "sim": "run a simulated fleet under faults from a seed, on virtual time",
            "bench": "measure a server under load, or this machine",
        },
    ),
}
"""The title of each group in help, and a line per command."""

_OF_THEIR_OWN: Final = {
    "keys": "keys",
    "switch": "upgrade",
    "rollback": "upgrade",
    "backup": "upgrade",
    "restore": "upgrade",
    "config": "config",
    "bench": "bench",
}


def place_of(group: str, command: str) -> tuple[str, str]:
    """The module of a command of a group, and its name there."""
    module = _OF_THEIR_OWN.get(command, group)
    return f"headwater.ops.commands.{module}", command.replace("-", "_")
