"""One fleet for the tests of this folder whose requests need no flags of their own."""

from tests.faults.clients.requests import BODY_S, HEADER_S
from tests.support.processes.fleet import shared_fleet

up = shared_fleet(
    "--engine",
    "sim",
    "--http-limits",
    f"header_timeout_s={HEADER_S},body_timeout_s={BODY_S}",
    scope="package",
)
"""Two simulated workers behind an edge with short timeouts."""
