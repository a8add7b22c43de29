"""Core NATS as a port: publish, subscribe, request; over nats-py and in memory."""
