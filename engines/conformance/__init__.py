"""The contract of an engine as checks that ship with Headwater: `headwater check-engine` runs them over any engine."""
