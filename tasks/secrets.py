"""Keys and passwords that a user puts into environment variables stay out of every file."""

import re

SECRET = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASS[A-Z]*|CREDENTIALS?)(_|$)", re.IGNORECASE)


def masked(variables: dict[str, str]) -> dict[str, str]:
    """The variables, with *** for the value of each whose name speaks of a secret."""
    return {name: "***" if SECRET.search(name) else value for name, value in variables.items()}


def without_secrets(config: dict) -> dict:
    """The configuration as it may be written down: `environment.env` masked."""
    environment = config["environment"]
    return config | {"environment": environment | {"env": masked(environment["env"])}}
