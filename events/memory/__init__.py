"""Log, table and blob store in memory, with the behaviour of the JetStream ones."""
