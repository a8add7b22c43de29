"""Durability on real servers: killed, paused, fenced and flooded, with a checker of histories behind.

Each test has a long form, a command that prints a table and ends with 1 on a violation, and a short form in
pytest. The long forms:

    python -m tests.durability.kill_rounds --rounds 200 --events 1000000
    python -m tests.durability.leader_kills --minutes 10 --rate 2000 --period 10
    python -m tests.durability.zombie --rounds 50
    python -m tests.durability.burst --events 500000
"""
