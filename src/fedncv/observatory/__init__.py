"""Gradient variance, measured on a live run: at the model (``at_model``) and of the update (``update``)."""
