"""One thing that was found out about a machine or a plan."""

from typing import Any

GIB = 1024**3
SEVERITIES = ("error", "warning", "note", "ok")


def finding(name: str, value: Any, severity: str = "ok", sentence: str = "") -> dict[str, Any]:
    """{"name", "value", "severity": ok | note | warning | error, "sentence" with the cure}."""
    return {"name": name, "value": value, "severity": severity, "sentence": sentence}
