"""What a run is: the schema of a configuration, and how a file becomes one."""
