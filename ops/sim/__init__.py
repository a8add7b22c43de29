"""The whole system in one process on virtual time: production actors, memory ports, faults from a seed."""
