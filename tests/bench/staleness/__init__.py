"""What it costs that routers decide on the past: delayed events of workers, and decisions of other routers that are on their way."""
