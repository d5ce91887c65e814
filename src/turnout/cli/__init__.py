"""The turnout command. Thin."""
