"""Tensor transfer between actors: registered memory, leases on it, and checksums of what was read.

NIXL moves the bytes with few guarantees: a read ends `DONE` although its buffer was overwritten during it, or is no longer
registered, and an abandoned read can still write its bytes. So this package makes transfers safe: a lease has one reader, a
buffer whose read did not end observably is quarantined, and a reader returns only data with the checksum of the offer.
"""
