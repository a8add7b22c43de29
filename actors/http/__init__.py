"""An ASGI server with bounds: connections, header and body sizes, JSON shape, timeouts."""
