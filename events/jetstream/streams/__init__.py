"""The streams of a namespace: specification, status, difference, reconciliation, append probe."""
