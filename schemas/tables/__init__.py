"""Values of the key-value buckets: leases and model cards."""
