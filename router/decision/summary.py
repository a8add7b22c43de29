"""What a decision's record keeps of its candidates, so that it has the same size in any fleet.

A few candidates that explain the choice, and a digest over the costs of all: who recomputes the decision can compare them. Workers
left out by name, of which a saturated fleet has many, are kept as bits, in order of their names.
"""

from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headwater.router.decision import work
from headwater.router.decision.candidates import Candidates
from headwater.router.fold.columns import F64, WorkerColumns
from headwater.schemas.events.route import Candidate

ALL_MAX: Final = 8
"""Up to so many candidates are all kept."""

BEST: Final = 5
"""Of more, those of the lowest cost …"""

BEST_OFFERED: Final = 2
"""… and of the lowest cost among those that the policy could pick."""

NAMED_MAX: Final = 8
"""Up to so many workers that are left out are kept by name."""

DIGEST_BYTES: Final = 8


class Summary(NamedTuple):
    """`candidates` that are kept of the `scored` ones, and the `digest` of all."""

    candidates: tuple[Candidate, ...]
    scored: int
    digest: bytes


def summarize(
    candidates: Candidates, offered: Candidates, chosen: Candidate, columns: WorkerColumns
) -> Summary:
    """Summarize the candidates, of which the policy chose one of those `offered`.

    Besides the cheapest, it keeps the fastest to the first token, with its queue and without, and the one that holds most of
    the prompt: who asks for these of all candidates finds them in the record.
    """
    if len(candidates) <= ALL_MAX:
        kept = list(candidates)
    else:
        rows = candidates.rows
        places = set(find_lowest(candidates.scores, BEST))
        wanted = [columns.rows[chosen.worker]]
        if offered is not candidates:
            wanted += offered.rows[find_lowest(offered.scores, BEST_OFFERED)].tolist()
        places.update(np.searchsorted(rows, wanted).tolist())
        served = candidates.times(work.PREFILL_MS) + candidates.times(work.TRANSFER_MS)
        places.add(int(served.argmin()))
        places.add(int((served + candidates.times(work.QUEUE_MS)).argmin()))
        held = candidates.quantity(work.CACHED) + candidates.quantity(work.LOWER)
        places.add(int((held * columns.table["block_size"][rows]).argmax()))
        kept = candidates.at(sorted(places))
    return Summary(tuple(kept), len(candidates), digest_of(candidates, columns))


def find_lowest(values: F64, count: int) -> list[int]:
    """Where the `count` lowest values are; of equal ones the first."""
    if len(values) <= count:
        return list(range(len(values)))
    limit = np.partition(values, count - 1)[count - 1]
    below: list[int] = (values < limit).nonzero()[0].tolist()
    equal: list[int] = (values == limit).nonzero()[0].tolist()
    return below + equal[: count - len(below)]


def digest_of(candidates: Candidates, columns: WorkerColumns) -> bytes:
    """A digest of who the candidates are, which leg each would do, and what it would cost, to the last bit."""
    digest = blake2b(columns.keys[candidates.rows].tobytes(), digest_size=DIGEST_BYTES)
    digest.update(candidates.quantity(work.LEG).tobytes())
    digest.update(candidates.scores.tobytes())
    return digest.digest()


def pack_rows(rows: list[int], count: int) -> bytes:
    """Rows of a fleet of `count` workers as bits."""
    bits: NDArray[np.bool_] = np.zeros(count, np.bool_)
    bits[rows] = True
    return np.packbits(bits).tobytes()


def unpack_rows(packed: bytes, count: int) -> list[int] | None:
    """The rows; None if they are of a fleet of another size."""
    if len(packed) != (count + 7) // 8:
        return None
    rows: list[int] = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).nonzero()[0].tolist()
    return rows
