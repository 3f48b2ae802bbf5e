from . import adam as adam

__compatible_ops__: dict[str, bool]
