"""Engines behind one protocol. An adapter translates one engine's API into ours and contains no policy."""
