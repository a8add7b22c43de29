"""The start of a fleet on this machine, of its processes, and of workers with their engines."""
