"""What one Headwater process does: signals, logging, metrics, sockets, and its actor."""
