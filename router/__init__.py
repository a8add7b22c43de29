"""Routing, pure: the state that the log folds into, and the decision made on it. It has no I/O and no clock."""
