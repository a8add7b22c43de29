"""Fleets across several hosts, whose network and processes are hurt."""
