"""A fleet of local processes: plan, start, supervise, stop."""
