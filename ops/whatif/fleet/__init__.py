"""What a fleet of simulated workers has beyond their number: the speed of each, and how it changes."""
