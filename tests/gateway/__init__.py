"""Gateways and proxies in front of a fleet: Envoy with the endpoint picker; nginx, HAProxy, Caddy and Traefik."""
