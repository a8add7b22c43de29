"""Routing, pure: the state that the log folds into, and the decision made on it. No IO, no clock."""
