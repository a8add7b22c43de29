"""Routers on virtual time: the production fold, decisions and admission queue, over one log with delays."""
