"""Classes of synthetic traffic from seeds, at rates for a share of a fleet, on our replay and on a peer's."""
