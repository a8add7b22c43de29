"""Captures: a part of the logs of a fleet in one file, which is read in place of NATS."""
