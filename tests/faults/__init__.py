"""Faults on real processes under long answers, each compared byte for byte with an undisturbed run.

Each test has a short form in pytest. These have a long form too, a command that prints a table and ends with 1 on
a violation:

    python -m tests.faults.kills.random_kills --seconds 300
    python -m tests.faults.kills.random_kills --seconds 1200 --edges 3 --routers 3
    python -m tests.faults.kills.random_kills --seconds 300 --prefill-workers 2 --decode-workers 2
    python -m tests.faults.store.quorum_loss --seconds 20
    python -m tests.faults.kills.pauses --seconds 20
    python -m tests.faults.kills.rolling_restart --requests 10000
    python -m tests.faults.kills.worker_signals --requests 10000
"""
