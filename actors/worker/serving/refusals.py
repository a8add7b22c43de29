"""What a worker replies where its engine fails on a request that has no stream of tokens."""

from typing import Final

import structlog

from headwater.actors.worker.serving.status import WorkerStatus
from headwater.engines.engine import EngineDied, EngineError, RequestRejected
from headwater.schemas.failure import failure_place
from headwater.schemas.messages.inference import Refused

ABORTED: Final = Refused("the worker aborted it", True)

_log = structlog.get_logger("headwater.worker")


def refusal_of(error: Exception, request: str, status: WorkerStatus, *, fatal: bool = False) -> Refused:
    """The reply to a request whose call of the engine raised `error`; a bug counts as its death if `fatal`.

    A bug in an engine's integration costs this request, not the worker with all others. The death of the engine is noted in
    `status`: the worker refuses what comes next.
    """
    if isinstance(error, RequestRejected):
        return Refused(str(error), error.retryable, param=error.param)
    if isinstance(error, EngineDied):
        status.note_engine_death(str(error))
        return Refused(str(error), True, fatal=True, gone=True)
    if isinstance(error, EngineError):
        return Refused(str(error), True)
    _log.error("engine_call_failed", request=request, failure=failure_place(error))
    _log.debug("engine_call_failure", exc_info=error)
    return Refused(f"the engine failed: {type(error).__name__}; see the worker's log", True, fatal=fatal)
