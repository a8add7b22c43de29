"""The output parsers judged from outside: texts written as models write them, and what other servers' parsers make of the same texts."""
