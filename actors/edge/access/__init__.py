"""Who a client is and what it may do: API keys, OIDC tokens, scopes, and the isolation of tenants' cached prompts."""
