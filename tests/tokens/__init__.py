"""Token ids, decoded text and log probabilities, compared with those of other libraries."""
