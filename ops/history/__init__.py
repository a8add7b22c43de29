"""What a pool's log and the request log say of any moment: requests, fleets and decisions at a position, for the console and for commands."""
