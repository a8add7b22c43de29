"""Admission queue (flow control): saturation, fairness between tenants, order of bursts."""
