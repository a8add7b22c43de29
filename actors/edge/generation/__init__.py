"""Generation, whatever the API: one internal request, one stream of typed events, one result."""
