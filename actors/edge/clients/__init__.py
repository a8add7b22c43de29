"""An edge's clients of the other processes: of the routers, and of the workers."""
