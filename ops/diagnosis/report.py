"""Findings in the log of a process that starts."""

from collections.abc import Iterable

import structlog

from headwater.ops.diagnosis.finding import Finding

_log = structlog.get_logger("headwater.diagnosis")


def report(found: Iterable[Finding]) -> None:
    """Log each finding, with its remedy: as `headwater doctor` names it, too."""
    for one in found:
        log = _log.error if one.severity == "error" else _log.warning
        log("fault_found", finding=one.id, about=one.about, reason=one.text, remedy=one.remedy)
