"""Videos: jobs that outlive their client's connection and the edge that accepted them."""
