"""Traces of requests for OpenTelemetry's receivers: afterwards from the log, and while a fleet runs."""
