"""Messages over core NATS."""
