"""Helpers of the tests, one concept a module; a module that runs on ranks is imported by name in their processes."""
