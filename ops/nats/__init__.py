"""NATS as the operator has it: the server, its configuration, connections to it, and captures, which are read in place of a server."""
