"""The inputs of one decision besides the prompt: what the router adds, and what all candidates are scored with."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.load import Loads
from headwater.schemas.hashing import U64
from headwater.schemas.routing import DEFAULT_POLICY, Constraints, Preferences, RouteQuery, Weights

ALGORITHM: Final = 2
"""Version of everything that a decision depends on besides its record and the state: filters, costs, policies. Increase it with any
change by which a recorded decision would come out otherwise. Version 1 knew neither revisions nor traffic splits."""

RECOMPUTABLE: Final = frozenset({1, ALGORITHM})
"""The versions whose decisions this release can make again."""


class DecisionContext(NamedTuple):
    """What the deciding router contributes. `policy` and `temperature` apply to queries that state none.

    `tenant` is the digest of the tenant of a recorded query, which names none, and `algorithm` the version of the algorithm to use.
    """

    number: int
    position: int
    seen: int
    wall_ns: int
    weights: Weights
    degraded: bool
    policy: str = DEFAULT_POLICY
    temperature: float = 0.0
    waited_ms: int = 0
    tenant: int = 0
    algorithm: int = ALGORITHM


class ScoringContext(NamedTuple):
    """What all candidates of one decision are scored with.

    `depths[tier, slot]` is the number of leading blocks of the prompt that a worker holds on that tier or a faster one;
    `credited[worker]` the number it is expected to hold by now.
    """

    prefixes: PrefixIndex
    depths: U64
    cold: set[str]
    query: RouteQuery
    context: DecisionContext
    loads: Loads
    credited: Mapping[str, int]
    preferences: Preferences

    @property
    def constraints(self) -> Constraints:
        """The constraints of the query."""
        return self.query.constraints

    @property
    def weights(self) -> Weights:
        """The weights of the router."""
        return self.context.weights
