"""`headwater bench route`: how long a routing decision takes, alone and over NATS."""
