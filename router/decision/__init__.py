"""One routing decision: filters, scorer, picker."""
