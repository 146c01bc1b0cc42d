"""The connection to a Ray cluster, and work that survives the loss of its workers. Ray is imported only when used."""
