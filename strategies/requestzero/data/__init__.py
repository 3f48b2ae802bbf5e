"""Micro-batches, the loaders that yield them, and collation. Nothing here needs DeepSpeed."""
