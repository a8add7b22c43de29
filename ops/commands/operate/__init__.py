"""Commands that operate a deployment."""
