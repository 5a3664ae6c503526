"""Writes docs/configuration.md, the reference of every key, from the schema, and the tables of exit codes in docs/resume.md, of text
formats in docs/data.md and of metrics in docs/metrics.md.

`python docs/make_reference.py`; a test compares them.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from infini_llama.configs.errors import ENDINGS
from infini_llama.configs.keys import section_of, words
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.text_formats import DOCUMENT_ENDINGS, RECORD_ENDINGS
from infini_llama.tasks.records.metrics import (
    StepLine,
    TrainLine,
    ValidationLine,
    metrics_of,
)

TARGET = Path(__file__).with_name("configuration.md")
RESUME = Path(__file__).with_name("resume.md")
DATA = Path(__file__).with_name("data.md")
METRICS = Path(__file__).with_name("metrics.md")
TABLE = "(<!-- table: {} -->).*?(<!-- end -->)"
HEAD = """# Configuration

Every key of the configuration, with its type, default and effect. A run is described by one YAML or JSON file. Keys that
are left out have their default. Start from a [recipe](recipes.md), or let `infini-llama init` write a commented file.

```yaml
data:
  files: [texts/**/*.txt]
train:
  max_steps: 2000
```

On the command line, `section.key=value` overrides the file:

```bash
infini-llama run configs/tiny.yaml train.max_steps=500
```

The value is YAML. Where the key holds text, it is the text itself, with any characters. Where such a key can be null, an empty value,
`null` and `~` are null.

`infini-llama run CONFIG --dry-run` prints the configuration with all defaults, the plan for this machine, the number of
parameters, and which results are already on disk.

Paths can contain environment variables, such as `$SCRATCH/workspace` or `${SCRATCH}/workspace`, of the machine that executes the run. `$$` is
a dollar sign. A variable that does not exist ends the command with exit code 64. Variables in URLs are not replaced.

An unknown key or an invalid value ends the command with exit code 64 and one message per problem.

{legend}
"""
LEGEND = """The *resume* column states what changing a key means for a run that already has checkpoints:

- *fixed*: the change is refused. Use another `runtime.name`.
- *inexact*: the change is allowed. The run logs that it is no longer bitwise identical to an uninterrupted run.
- *free*: the change has no effect on the weights.

For keys of `data` and for `train.init_from`, content is compared, not paths. The same files at another path are accepted.
"""
FOOT = """
This page is generated from the schema (`configs/schema/`) by `python docs/make_reference.py`, and a test keeps it up to date.
"""


def reference() -> str:
    """The page, whatever home folder this machine has."""
    os.environ.pop("INFINI_LLAMA_HOME", None)
    sections = "".join(
        section(name, field.annotation)
        for name, field in PipelineConfig.model_fields.items()
    )
    legend = LEGEND if "| resume |" in sections else ""
    return (
        HEAD.replace("{legend}\n", legend and f"{legend}\n").rstrip("\n")
        + "\n"
        + sections
        + FOOT
    )


def with_exit_codes(page: str) -> str:
    """The page with the table of `ENDINGS` between its marks."""
    lines = [
        f"| {ending.cause} | {code:d} | {ending.action} |\n"
        for code, ending in ENDINGS.items()
    ]
    table = "| cause | exit code | action |\n|---|---|---|\n" + "".join(lines)
    table = table.replace("Rolled back", "[Rolled back](#non-finite-losses-and-spikes)")
    return with_table(page, "exit_codes", table)


def with_formats(page: str) -> str:
    """The page with the table of text formats between its marks."""
    table = (
        "| format | documents |\n|---|---|\n"
        f"| {', '.join(DOCUMENT_ENDINGS)} | one per file |\n"
        f"| {', '.join(RECORD_ENDINGS)} | one per record, from the field `data.text_column` |\n"
    )
    return with_table(page, "formats", table)


def with_metrics(page: str, name: str, line: type[StepLine]) -> str:
    """The page with the table of a line's metrics between its marks."""
    rows = [
        f"| `{name}` | {metric.meaning} |\n"
        for name, metric in metrics_of(line).items()
    ]
    return with_table(page, name, "| field | meaning |\n|---|---|\n" + "".join(rows))


def with_table(page: str, name: str, table: str) -> str:
    """The page with this table between the marks of its name."""
    marks = re.compile(TABLE.format(name), re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}\n\n{table}\n{found[2]}", page)


def section(path: str, holder: Any, parent: Any = None) -> str:
    """A heading, a table of the section's own keys, and the sections inside it.

    Args:
        parent: the section around it; keys that both inherit are described there.
    """
    shared = [
        name
        for name in holder.model_fields
        if parent and name in parent.model_fields.keys() - holder.__annotations__
    ]
    described_here = {
        name: field for name, field in holder.model_fields.items() if name not in shared
    }
    described = f"\n## {path}\n\n{plain(holder.__doc__)}"
    if shared:
        described += f" It also has these keys of `{path.rpartition('.')[0]}`: {', '.join(f'`{name}`' for name in shared)}."
    fields = {
        name: field
        for name, field in described_here.items()
        if section_of(field.annotation) is None
    }
    inner = {name: entry(field.annotation) for name, field in described_here.items()}
    sections = (
        section(f"{path}.{name}", below, holder)
        for name, below in inner.items()
        if below
    )
    return f"{described}\n{table(fields)}{''.join(sections)}"


def table(fields: dict[str, Any]) -> str:
    """Key, type, default and description of each key, and its resume policy where the schema states one."""
    if not fields:
        return ""
    names = ["key", "type", "default", "description"] + ["resume"] * any(
        resume(field) for field in fields.values()
    )
    rows = [
        [f"`{name}`", kind(field), default(field), plain(field.description)]
        for name, field in fields.items()
    ]
    if "resume" in names:
        rows = [
            [*row, resume(field)]
            for row, field in zip(rows, fields.values(), strict=True)
        ]
    lines = [names, ["---"] * len(names), *rows]
    written = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f'\n<div class="reference" markdown="1">\n\n{written}\n</div>\n'  # site.css lays it out for a phone


def entry(annotation: Any) -> type[BaseModel] | None:
    """The section that a key holds, or that the items of its list are, or that it may hold."""
    if below := section_of(annotation):
        return below
    return next(
        (below for argument in get_args(annotation) if (below := entry(argument))), None
    )


def kind(field: Any) -> str:
    """The values that a key accepts."""
    accepted = words(
        Annotated[field.annotation, field] if field.metadata else field.annotation
    )
    return plain(re.sub(r"(^| or )an? ", r"\1", accepted))


def resume(field: Any) -> str:
    """What changing the key means for an existing run: fixed, inexact or free; empty where the schema does not say."""
    extra = field.json_schema_extra
    return str(extra.get("resume", "")) if isinstance(extra, dict) else ""


def default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, bool | type(None)):
        return {True: "`true`", False: "`false`", None: "`null`"}[value]
    if isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    return f"`{value}`" if str(value) else "empty"


def plain(text: str) -> str:
    """Fit for a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    RESUME.write_text(
        with_exit_codes(RESUME.read_text(encoding="utf-8")), encoding="utf-8"
    )
    DATA.write_text(with_formats(DATA.read_text(encoding="utf-8")), encoding="utf-8")
    metrics_page = with_metrics(METRICS.read_text(encoding="utf-8"), "steps", TrainLine)
    metrics_page = with_metrics(metrics_page, "validations", ValidationLine)
    METRICS.write_text(metrics_page, encoding="utf-8")
