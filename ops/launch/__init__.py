"""A fleet of one or several hosts that one file describes: read, planned by host, run here or over SSH, or rendered for other supervisors."""
