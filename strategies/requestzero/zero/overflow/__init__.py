"""Gradients that are not finite: their history, the policy of the run, their origin, and the rollback of a request."""
