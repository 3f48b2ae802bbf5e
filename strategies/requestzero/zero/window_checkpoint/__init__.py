"""The open update window in a checkpoint: files of our own beside DeepSpeed's, which ignores them.

- ``record``: what is saved of a window beside its sums, as one JSON file.
- ``sums``: the sums, one safetensors file per data-parallel rank, read by name and slice. Both need no engine.
- ``saving``, ``loading``: what an engine's optimizer puts into these files, and gets back from them.
- ``other_ranks``: what a rank has of a window that another number of ranks has begun.
- ``replacing``: a folder that is written beside its place and moved there as a whole; ``together``: all ranks fail
  where one does.
"""
