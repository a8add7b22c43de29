"""What if: a trace or a recorded log through the production router and the simulated engines, on virtual time."""
