"""Measure gradient variance during a run: at the model (``at_model``) and of the update (``update``)."""
