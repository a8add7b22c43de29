"""The console: a page over a pool's history, on which one slider sets the log position that every view shows."""
