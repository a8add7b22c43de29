"""What every actor runs on: the bus, ports, leases, supervision, typed tables, discovery."""
