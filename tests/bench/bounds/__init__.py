"""What no policy can beat on a trace, and what a shared cache would give: figures to measure policies against."""
