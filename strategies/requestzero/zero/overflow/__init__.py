"""Gradients that are not finite.

``skips`` records updates that were not applied, ``skip_messages`` has the log lines and the errors that end a run,
``origin`` finds the parameter, request and rank, ``loss_scale`` adjusts the scale;
``policy`` has an optimizer do so.
"""
