"""Starting things: a fleet on this machine, its processes, and workers with their engines."""
