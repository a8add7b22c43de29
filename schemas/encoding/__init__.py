"""The wire format: envelopes, batches, compression, upcasting of older versions."""
