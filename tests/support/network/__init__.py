"""Hosts with addresses of their own on one machine, and a network between them with latency, loss and partitions."""
