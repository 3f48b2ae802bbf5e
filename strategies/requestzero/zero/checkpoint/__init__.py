"""Checkpoint files, and what another number of ranks makes of them."""
