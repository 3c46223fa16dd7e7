"""Tasks: folders in the Harbor format, read and checked before anything starts, and generators of such folders."""
