"""Output parsers: the text a model writes, as events of text, reasoning and tool calls.

`selection` makes a parser (`make_parser`) from the names of a tool format and a reasoning format, maps the names that vLLM and
SGLang use to them, and detects them from a model's folder. `formats` holds them, as data. The grammars that they are made of are
in the modules named for them (`json_calls`, `markup_calls`, `rewritten_calls`). `grammar` has the events, which are all that the
rest of the edge sees of an answer. Everything here is pure: no I/O, no clock, no engine.
"""
