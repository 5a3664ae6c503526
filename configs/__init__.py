"""The configuration of a run: its schema, and how a file becomes one."""
