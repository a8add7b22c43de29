"""Commands that run processes of a fleet."""
