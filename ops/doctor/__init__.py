"""`headwater doctor`: facts of a whole fleet are collected once, and small pure checks find what is wrong with them."""
