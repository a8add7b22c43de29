"""Admission of requests: credentials, their scopes, cache salts and limits."""
