"""The commands init, config, gc, completion and help."""

import logging
import sys
from argparse import Namespace
from pathlib import Path

from infini_llama.configs.errors import ConfigError
from infini_llama.flows.cli.paths import Answer, home_folder

log = logging.getLogger("infini_llama.init")


def init(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.init import Wishes, write_beginning
    from infini_llama.flows.cli.tables import as_text

    files, attention = arguments.files, arguments.attention
    if not files:
        if not sys.stdin.isatty():
            raise ConfigError("init needs your text; name it with --files PATH.")
        files = [_ask("Where is your text (a folder, file or glob)?", "texts")]
    output = Path(arguments.output)
    wishes = Wishes(arguments.tokens, arguments.parameters, arguments.hours)
    record = write_beginning(output, files, output.stem, attention or "softmax", home_folder(), wishes)
    if record.warning:
        log.warning(record.warning)
    text = as_text(record.model_dump(mode="json", exclude={"warning"}))
    return record.to_json(), f"{text}\n\nread it, then: infini-llama run {output}"


def _ask(question: str, default: str) -> str:
    print(f"{question} [{default}] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or default


def gc(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import leftovers_text
    from infini_llama.tasks.runs.gc import Rules, collect

    rules = Rules(arguments.older_than * 86400, arguments.keep_checkpoints, arguments.unused_datasets)
    record = collect(home_folder(), rules, arguments.yes)
    return record.to_json(), leftovers_text(record)


def completion(arguments: Namespace) -> Answer:
    import shtab

    script = shtab.complete(arguments.parser, arguments.shell)
    return {"shell": arguments.shell, "script": script}, script


def config(arguments: Namespace) -> Answer:
    """The configuration with all defaults, as YAML that can be run; values of environment.env are masked."""
    import yaml

    from infini_llama.configs.loading import load_config
    from infini_llama.configs.secrets import without_secrets

    record = without_secrets(load_config(arguments.config, arguments.overrides)).model_dump(mode="json")
    return record, yaml.safe_dump(record, sort_keys=False, allow_unicode=True).rstrip()


def help_text(arguments: Namespace) -> Answer:
    """The top-level help, or that of one command."""
    from infini_llama.flows.cli.arguments import subcommands, unknown_command

    commands = subcommands(arguments.parser)
    if arguments.topic is not None and arguments.topic not in commands:
        raise ConfigError(unknown_command(arguments.topic, list(commands)))
    text = (commands[arguments.topic] if arguments.topic else arguments.parser).format_help().rstrip()
    return {"help": text}, text
