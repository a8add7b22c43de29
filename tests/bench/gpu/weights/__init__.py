"""Weights with which answers depend on the whole prompt, for each engine.

Engines' own dummy weights are within ±0.001, norms included. With them the next token depends only on the last one, and two
engines generate the same answer with any KV cache, which would not test a transfer. Here weights are normally distributed
and norms are 1, with seeds derived from the parameters' names: the same in every process.
"""
