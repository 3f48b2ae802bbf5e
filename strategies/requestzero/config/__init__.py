"""Options and configurations. Importing this package loads the standard library only."""
