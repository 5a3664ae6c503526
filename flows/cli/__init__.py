"""The `infini-llama` command: arguments in, exit code out."""
