"""Prefect's stored results, as far as they can be trusted.

A stored result names, inside its own file, the code that opens it (`metadata.serializer`: pickle, or any function by its path), and
Prefect's JSON may name classes to make. So whoever can write that file could run anything; what we store is JSON without either, and
a file that is anything else is not opened.
"""

import json
import logging
from pathlib import Path

log = logging.getLogger("infini_llama.preprocess")
# The settings of Prefect's JSONSerializer with which a result is values of JSON and nothing more.
PLAIN = {
    "type": "json",
    "jsonlib": "json",
    "object_encoder": None,
    "object_decoder": None,
    "dumps_kwargs": {},
    "loads_kwargs": {},
}


def trusted(path: Path) -> bool:
    """Whether the stored result, where there is one, can be opened without running what it names; if not, a line says so."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        record = None
    match record:
        case {"metadata": {"serializer": serializer}, "result": str()} if serializer == PLAIN:
            return True
    log.warning(
        "the stored result %s is not plain JSON written by infini-llama; it is not opened, and the result is "
        "computed again",
        path,
    )
    return False
