"""The router process: follows the log, queues route queries, answers them."""
