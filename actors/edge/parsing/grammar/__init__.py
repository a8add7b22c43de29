"""The grammars that formats are made of: how each kind of call is read from a stream of text.

A grammar is written as if the whole text were there: a generator that reads from a `Reader` and yields where the text
runs out. The parser resumes it with each piece, so nothing is read twice, and cuts cannot change what it does.
"""
