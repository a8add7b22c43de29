"""Synthetic traffic: classes of requests from seeds, and the rate that uses a share of a fleet."""
