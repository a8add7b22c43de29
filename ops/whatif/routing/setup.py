"""What a run's routers are made from."""

from typing import NamedTuple

from headwater.router.queue.limits import QueueSettings
from headwater.schemas.events.route import Weights


class RoutersSetup(NamedTuple):
    """Settings of all routers of a run. Events of workers reach the log after `event_delay_ns`, and router i reads it after
    `delays_ns[i]`.

    `credit`: count blocks of routed prompts before workers report them. `agreement`: compare each decision with that of a
    single router. `kill_ns`: when the first router is killed, to return later; 0: never.
    """

    policy: str
    weights: Weights
    temperature: float
    queue: QueueSettings
    credit: bool = True
    event_delay_ns: int = 0
    delays_ns: tuple[int, ...] = (0,)
    agreement: bool = False
    kill_ns: int = 0
