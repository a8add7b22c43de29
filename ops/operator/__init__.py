"""What an operator runs against a deployment: reading logs and streams, controlling workers."""
