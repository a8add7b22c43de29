"""Who may send what: credentials, their scopes, cache salts and limits."""
