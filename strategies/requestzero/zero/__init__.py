"""The request-safe ZeRO-1/2 optimizer and its engine, as subclasses of DeepSpeed's."""
