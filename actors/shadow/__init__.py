"""Another routing policy, evaluated live on the log of the router in use."""
