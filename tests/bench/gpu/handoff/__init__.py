"""KV hand-off between two GPU engines, compared with the raw transfer."""
