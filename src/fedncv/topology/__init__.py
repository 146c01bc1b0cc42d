"""Federations without a server: graphs between clients, their mixing matrices, and one rule for all methods."""
