"""What an edge takes of its clients: connections, headers and bodies. Defaults stand here and nowhere else."""

from typing import NamedTuple


class ConnectionLimits(NamedTuple):
    """Bounds of what connections may do. `per_address` 0: no bound but the total."""

    header_bytes: int = 64 * 1024
    headers: int = 128
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    connections: int = 8_192
    per_address: int = 0


class BodyLimits(NamedTuple):
    """`bytes_max`: of one body. `in_flight_bytes_max`: of all larger bodies whose requests are not answered yet."""

    bytes_max: int = 64 * 1024 * 1024
    in_flight_bytes_max: int = 256 * 1024 * 1024
