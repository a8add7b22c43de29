"""Grafana's boards, made from their queries and the table of metrics: `python -m docs._boards` writes `ops/monitoring/boards`."""
