"""Engines run one round of any method. They know no method by name."""
