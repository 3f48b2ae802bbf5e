"""Options and configurations. Importing any module of this package loads the standard library only.

- ``settings``: every option, with its type, default, meaning, allowed values, DeepSpeed key and front ends. ``option``
  is the record of one, ``validation`` has the rules for values, ``rules`` those for overflow options together.
- ``files``: reads a DeepSpeed config; ``merge`` puts several places together; ``nested`` looks keys up.
- ``translation``: options as keys of a DeepSpeed config, and back; ``overflow`` and ``engine_options`` use it.
- ``keys``, ``values``, ``own_keys``, ``supported``: checks of a DeepSpeed config; ``suggestion`` finds near names.
- ``reference_table``: the reference's table of options.
"""
