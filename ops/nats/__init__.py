"""The NATS server and connections to it: configuration, keys, credentials, ports opened over it."""
