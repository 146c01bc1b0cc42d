"""Federated learning in which gradient variance is measured, not assumed."""
