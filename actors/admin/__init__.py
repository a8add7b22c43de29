"""The HTTP endpoint for operators' control commands."""
