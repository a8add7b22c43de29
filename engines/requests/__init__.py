"""What requests ask of an engine, read in one way for all adapters."""
