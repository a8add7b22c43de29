"""Tensors from one actor to another: registered memory, leases on it, and checksums of what was read.

NIXL moves the bytes and promises little: a read ends `DONE` although its buffer was overwritten meanwhile, or is
not even registered any more, and a read that was given up can still land. So everything that makes a transfer safe
is here: a lease has one reader, a buffer whose reading nobody saw the end of rests in quarantine, and a reader
returns only what has the checksum of the offer.
"""
