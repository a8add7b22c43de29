"""`headwater shadow`: another policy, in the shadow of a pool's routers."""

from typing import Annotated

from msgspec import Meta

from headwater.ops.config.command import command
from headwater.ops.config.processes import ShadowProcess
from headwater.router.decision.names import PolicyName


@command
def shadow(
    settings: ShadowProcess,
    *,
    policy: Annotated[PolicyName, Meta(description="policy whose choices are recorded")],
    judge: Annotated[PolicyName, Meta(description="policy whose costs rate the choices")] = "kv",
) -> int:
    """Run another routing policy in the shadow of a pool's routers, and record what it would have chosen."""
    from headwater.ops.process import routers, signals

    return signals.run(lambda stop: routers.run_shadow(settings, policy, judge, stop))
