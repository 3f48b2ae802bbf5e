installed_ops: dict[str, bool]
