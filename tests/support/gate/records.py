"""What a run of pytest came to, read from what the plugin `outcomes` wrote."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

FAILING = {"failed", "error", "subtests failed"}
"""Names of the outcomes that make a run fail."""

ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "error")
"""As pytest's final line has them."""


@dataclass
class Run:
    """`exit` and `collected` are None in a run that did not come to its end."""

    tests: dict[str, list[str]] = field(default_factory=dict)
    uncollected: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    paths: list[str] = field(default_factory=list)
    seed: int | None = None
    collected: int | None = None
    exit: int | None = None

    @staticmethod
    def plain(nodeid: str) -> str:
        """A test's id without the group that pytest-xdist appends; an argument in brackets may contain the same character."""
        return nodeid[: nodeid.rfind("@")] if nodeid.rfind("@") > nodeid.rfind("]") else nodeid

    @classmethod
    def read(cls, path: Path) -> Self:
        """From the plugin's file, which may end in the middle of a line or be missing."""
        run = cls()
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                run._add(json.loads(line))
            except json.JSONDecodeError:
                break
        return run

    def _add(self, record: dict[str, object]) -> None:
        match record:
            case {"test": str(test), "kind": str(kind)}:
                self.tests.setdefault(test, []).append(kind)
            case {"uncollected": str(where)}:
                self.uncollected.append(where)
            case {"other": str(name), "count": int(count)}:
                self.others[name] += count
            case {"paths": list(paths), "seed": seed}:
                self.paths = [str(one) for one in paths]
                self.seed = seed if isinstance(seed, int) else None
            case {"collected": int(collected), "exit": int(status)}:
                self.collected, self.exit = collected, status
            case _:
                raise ValueError(f"no record of a test run: {record}")

    @property
    def failed(self) -> list[str]:
        """Tests that failed, in any phase, or whose worker crashed."""
        return [test for test, kinds in self.tests.items() if FAILING & set(kinds)]

    @property
    def passed(self) -> bool:
        """Something passed, and nothing else happened."""
        return self.exit == 0 and not self.failed and any("passed" in kinds for kinds in self.tests.values())

    @property
    def unreported(self) -> int:
        """Tests that were collected and of which nothing is known."""
        return max(0, (self.collected or 0) - len(self.tests))

    def line(self, seconds: float) -> str:
        """A last line as pytest prints it."""
        counts = Counter(kind for kinds in self.tests.values() for kind in kinds) + self.others
        counts["error"] += len(self.uncollected)
        rest = [kind for kind in counts if kind not in ORDER]
        told = [f"{counts[kind]} {_plural(kind, counts[kind])}" for kind in (*ORDER, *rest) if counts[kind]]
        minutes, rounded = divmod(int(seconds), 60)
        took = f"{seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rounded:02})"
        return f"==== {', '.join(told) or 'no tests ran'} in {took} ===="


def _plural(kind: str, count: int) -> str:
    if kind == "error" and count > 1:
        return "errors"
    return "warning" if kind == "warnings" and count == 1 else kind
