"""The endpoint picker of gateways."""
