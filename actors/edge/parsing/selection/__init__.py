"""Which parser an answer gets: by the names of formats, by other servers' names for them, by a model's folder."""
