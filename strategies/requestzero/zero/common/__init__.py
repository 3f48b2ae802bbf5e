"""Parts of the optimizer that do not depend on the ZeRO stage and have no base class of DeepSpeed."""
