"""What every actor runs on: ports, leases, typed tables, discovery, supervision."""
