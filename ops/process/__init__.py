"""One Headwater process: signals, logging, metrics, sockets, and its actor."""
