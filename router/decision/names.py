"""Names of the routing policies. Light to import: the command line lists them."""

from typing import Final, Literal

PolicyName = Literal[
    "kv", "slo", "lmetric", "round_robin", "random", "power_of_two", "least_loaded", "session", "direct"
]

DEFAULT_POLICY: Final[PolicyName] = "kv"
