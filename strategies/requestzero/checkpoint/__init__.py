"""``python -m requestzero.checkpoint``: says what a checkpoint holds, converts it, and makes one file of it."""
