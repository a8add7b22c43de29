"""The fleets of the zoo: equal workers for most classes of traffic, and for three classes workers that are not all alike."""

from typing import Final

import msgspec

from headwater.engines.sim import StepTime
from headwater.ops.config.setting import ConfigError
from headwater.ops.whatif.command import without_queue
from headwater.ops.whatif.setup import Setup, Slowdown, write_speeds
from headwater.schemas.routing import Weights
from tests.bench.zoo.compare import REFERENCE
from tests.bench.zoo.load import Demand, decodes_per_s, prefills_per_s, requests_per_s

SLOW_FACTOR: Final = 4.0
SLOW_FROM: Final = 1 / 3
"""In `slow_worker` one worker's steps take this many times as long after this share of the run."""

SPEEDS: Final = (1.0, 0.5)
"""In `two_speeds` every second worker has half the speed."""

ONE_SPEED: Final = "all engines of its replay have one speed, which does not change"
"""Why a peer does not replay a cell."""


class ZooFleet(msgspec.Struct, frozen=True):
    """The workers of a cell: fields of `Setup`. `workers` serve whole requests."""

    workers: int
    prefill_workers: int = 0
    decode_workers: int = 0
    worker_speeds: tuple[float, ...] = (1.0,)
    slowdowns: tuple[Slowdown, ...] = ()

    @property
    def not_replayed(self) -> str:
        """Why a peer's replay cannot have this fleet; empty if it can."""
        return ONE_SPEED if self.slowdowns or self.worker_speeds != (1.0,) else ""

    @property
    def description(self) -> str:
        """How the workers differ; empty for equal ones."""
        if self.prefill_workers:
            return f"{self.prefill_workers} of them for prefill, {self.decode_workers} for decode"
        speeds = f"speeds {write_speeds(self.worker_speeds)} in turn" if len(self.worker_speeds) > 1 else ""
        slow = [f"{one.worker} {one.factor:g} times slower from {one.at_s:.1f} s" for one in self.slowdowns]
        return ", ".join(filter(None, [speeds, *slow]))

    def setup(self, policy: str, blocks: int, weights: Weights) -> Setup:
        """The setting of our replay. With pools round robin stands for a fleet that hands every prompt over, as the peer's."""
        if self.prefill_workers and policy == REFERENCE:
            weights = msgspec.structs.replace(weights, apart=True)
        return without_queue(
            Setup(policy=policy, blocks=blocks, weights=weights, **msgspec.structs.asdict(self))
        )


class ZooTraffic(msgspec.Struct, frozen=True):
    """A fleet, and the rate in requests per second at which a share of it is used."""

    fleet: ZooFleet
    rate: float


def plan_traffic(
    name: str, workers: int, demand: Demand, blocks: int, share: float, requests: int
) -> ZooTraffic:
    """The fleet of a class and the rate for `share` of it. Raises `ConfigError` if it is too small for two pools."""
    step_time = StepTime()
    rate = requests_per_s(demand, blocks, share, step_time)
    if name == "prefill_decode":
        return _two_pools(workers, demand, blocks, share)
    if name == "two_speeds":
        speeds = [SPEEDS[number % len(SPEEDS)] for number in range(workers)]
        return ZooTraffic(ZooFleet(workers, worker_speeds=SPEEDS), rate * sum(speeds))
    rate *= workers
    if name == "slow_worker":
        slowdown = Slowdown("w000", round(SLOW_FROM * requests / rate, 3), SLOW_FACTOR)
        return ZooTraffic(ZooFleet(workers, slowdowns=(slowdown,)), rate)
    return ZooTraffic(ZooFleet(workers), rate)


def _two_pools(workers: int, demand: Demand, blocks: int, share: float) -> ZooTraffic:
    """The division into pools that bears the highest rate."""
    if workers < 2:
        raise ConfigError("--workers 1: the class prefill_decode needs at least 2 workers")
    step_time = StepTime()
    prefills, decodes = (prefills_per_s(demand, share), decodes_per_s(demand, blocks, share, step_time))
    rate, prefill_workers = max(
        (min(count * prefills, (workers - count) * decodes), count) for count in range(1, workers)
    )
    fleet = ZooFleet(0, prefill_workers=prefill_workers, decode_workers=workers - prefill_workers)
    return ZooTraffic(fleet, rate)
