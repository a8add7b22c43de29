"""Findings of `headwater doctor`: the table in its guide."""

import re
from pathlib import Path

from docs._reference.markdown import code, table
from headwater.ops.diagnosis import KINDS, ORDER

GUIDE = Path(__file__).resolve().parent.parent / "guides" / "doctor.md"
_BLOCK = re.compile(r"(<!-- findings: generated.*?-->\n)(.*?)(<!-- end of findings -->)", re.DOTALL)


def page() -> str:
    """The guide, with the table as the code has it."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_table()}\n{match[3]}", GUIDE.read_text())


def _table() -> str:
    rows = [
        (code(name), kind.severity, kind.checks, kind.source, kind.remedy, kind.start)
        for name, kind in sorted(KINDS.items(), key=lambda pair: ORDER.index(pair[1].severity))
    ]
    heads = ("finding", "severity", "what should be so", "known from", "remedy", "said at start by")
    return table(heads, rows)
