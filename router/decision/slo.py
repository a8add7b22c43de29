"""What a request would wait for on each candidate, against its limits: the time to the first token, and between two tokens.

Elementwise arithmetic only, so that a recomputed decision is the same to the last bit on every machine.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.router.decision import work
from headwater.router.decision.candidates import Candidates
from headwater.router.fold.columns import F64, I64
from headwater.schemas.events.route import Weights

Flags = NDArray[np.bool_]


def predict_ttft_ms(candidates: Candidates) -> F64:
    """Milliseconds to the first token: queue, prefill and KV transfer. All 0 until the step times of all candidates are known."""
    found: F64 = (
        candidates.times(work.QUEUE_MS)
        + candidates.times(work.PREFILL_MS)
        + candidates.times(work.TRANSFER_MS)
    )
    return found


def count_uncached(candidates: Candidates, table: NDArray[Any], prompt_tokens: int) -> I64:
    """Tokens of the prompt that each worker would compute; `table` has the candidates' rows."""
    held = candidates.quantity(work.CACHED) + candidates.quantity(work.LOWER)
    found: I64 = prompt_tokens - held * table["block_size"]
    return found


def predict_itl_ms(candidates: Candidates, table: NDArray[Any]) -> F64:
    """Milliseconds between two tokens with this request too; `table` has the candidates' rows.

    What the worker reported last grows with the number of its requests: (n + 1) / n. That is the most it can grow, as a part of each
    step does not depend on how many share it. A worker without requests has no step that this one could slow down.
    """
    requests = candidates.quantity(work.REQUESTS)
    grown: F64 = table["step_ms"] * (requests + 1) / np.maximum(requests, 1)
    return np.where(requests > 0, grown, 0.0)


def find_meeting(candidates: Candidates, table: NDArray[Any], prompt_tokens: int, limits: Weights) -> Flags:
    """Which candidates a request may be packed on; none where step times are unknown.

    They meet the limit of the time to the first token, compute no more of the prompt than any other that does, and meet the limit
    between two tokens. A worker that lacks the prefix never counts as better placed because it is less busy: what it would compute again
    delays all who decode there.
    """
    ttft_ms = predict_ttft_ms(candidates)
    in_time = ttft_ms <= limits.ttft_limit_ms
    if not ttft_ms.any() or not in_time.any():
        return np.zeros(len(candidates), np.bool_)
    uncached = count_uncached(candidates, table, prompt_tokens)
    least: Flags = uncached == uncached[in_time].min()
    return in_time & least & (predict_itl_ms(candidates, table) <= limits.itl_limit_ms)
