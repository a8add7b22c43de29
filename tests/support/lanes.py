"""Which tests never run next to one another: those that start processes, in two lanes that a worker of pytest-xdist runs one by one.

Most of them wait, for another process or until a time has passed. Beside others of their kind they wait for the processor, too, and
what they say of time is said of the machine. Those that only compute fill what the two leave.
"""

from pathlib import PurePosixPath

from tests.support.crashes import WithoutCrashed

ENGINES, PROCESSES = "lane of engines", "lane of processes"

LANES = {"vllm": ENGINES, "sglang": ENGINES, "clients": ENGINES, "docs": ENGINES}
"""By the group that tests are marked with: those with vLLM and SGLang, whose processes compute, and those with a simulated fleet. Other
projects' clients, the docs' commands and the console's pages are with the former: without them that lane is the shorter one."""

FOLDERS = {
    **dict.fromkeys(("console", "engines", "sglang", "vllm"), ENGINES),
    **dict.fromkeys(
        ("agents", "buckets", "clients", "deploy", "durability", "faults", "gateway", "system"), PROCESSES
    ),
}
"""The lane of a folder's tests if their group is in none."""


def lane(nodeid: str, scope: str) -> str:
    """What runs in one worker with a test, given its group, or its module if it has none."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    if scope in LANES:
        return LANES[scope]
    return FOLDERS.get(parts[1], scope) if len(parts) > 1 and parts[0] == "tests" else scope


class Lanes(WithoutCrashed):
    """Groups of tests, some of which are joined."""

    def _split_scope(self, nodeid: str) -> str:
        return lane(nodeid, str(super()._split_scope(nodeid)))
