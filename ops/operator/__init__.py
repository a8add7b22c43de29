"""Commands that an operator runs against a deployment: they read logs and streams, and control workers."""
