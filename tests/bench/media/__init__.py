"""`python -m tests.bench media`: what large images in flight do to the event loop of an edge, and to the streams of other clients."""
