"""The log: append, read, lease, snapshot. Ports, and their JetStream and memory implementations."""
