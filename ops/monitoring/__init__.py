"""What other people's tools need to watch a fleet: Grafana's boards, alert rules, and a scrape configuration of Prometheus."""
