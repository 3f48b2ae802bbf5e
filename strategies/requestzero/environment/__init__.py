"""Installed versions and the machine."""
