"""What can be wrong with a fleet, in one table, and those checks that processes make when they start, too."""
