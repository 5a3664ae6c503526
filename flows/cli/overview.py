"""The commands by group, their descriptions and documentation pages, and the top-level help."""

# Heading, an example, the page of the documentation, and the commands with a description.
GROUPS = (
    (
        "Pipeline",
        "infini-llama run configs/tiny.yaml train.max_steps=500",
        "docs/quickstart.md",
        {
            "init": "write a commented configuration for your text and this machine",
            "run": "run the whole pipeline; run it again to resume",
            "preprocess": "build the dataset of a configuration",
            "verify": "verify a dataset",
            "train": "train on a dataset that is already built",
            "join": "join a multi-node run with this machine",
        },
    ),
    (
        "Results",
        'infini-llama generate tiny --prompt "import os"',
        "docs/evaluation.md",
        {
            "runs": "list all runs with state, step, losses and size",
            "inspect": "describe a dataset or a run",
            "report": "write report.html of a run (also during training)",
            "compare": "compare runs: settings, results and curves",
            "generate": "generate text from prompts",
            "evaluate": "measure perplexity, with and without memory",
            "passkey": "measure passkey retrieval by length and depth",
            "export": "export a trained model to a Hugging Face folder",
            "import": "write a configuration that starts from a Hugging Face Llama",
        },
    ),
    (
        "Prefect",
        "infini-llama serve configs/tiny.yaml",
        "docs/prefect.md",
        {
            "serve": "start a Prefect server with UI, deployments and a worker",
            "deploy": "create or update deployments on the server PREFECT_API_URL",
        },
    ),
    (
        "Tools",
        "infini-llama doctor configs/tiny.yaml",
        "docs/environment.md",
        {
            "doctor": "check this machine and print a fix for each problem",
            "estimate": "estimate parameters, FLOPs and memory of a run",
            "config": "print a configuration with all defaults",
            "gc": "list old and unused files; --yes deletes them",
            "completion": "print a shell completion script",
            "help": "print this help, or the help of a command",
        },
    ),
)
# Commands whose documentation is not the page of their group.
PAGES = {
    "join": "docs/clusters.md",
    "preprocess": "docs/data.md",
    "verify": "docs/data.md",
    "train": "docs/resume.md",
    "runs": "docs/pages.md",
    "inspect": "docs/pages.md",
    "report": "docs/pages.md",
    "compare": "docs/pages.md",
    "gc": "docs/pages.md",
    "generate": "docs/model.md",
    "export": "docs/huggingface.md",
    "import": "docs/continued-pretraining.md",
    "estimate": "docs/estimate.md",
    "config": "docs/configuration.md",
    "completion": "docs/faq.md",
    "help": "docs/quickstart.md",
}
EXIT_CODES = """Exit codes:
    0  success
    1  success with warnings (doctor)
   64  invalid configuration or arguments
   65  invalid data
   70  unexpected or repeated failure
   75  training was stopped; run the command again to resume
  130, 143  stopped before or after training"""
EVERY = """Set any key of the configuration with section.key=value, for example
train.max_steps=500. Every command has --json (one JSON object on stdout),
--quiet and --verbose."""


def overview() -> str:
    """The top-level help: commands by group, each group with an example and its page."""
    lines = [
        "usage: infini-llama COMMAND [CONFIG] [key=value …] [options]",
        "",
        "Raw text to a trained Llama or Infini-Llama.",
    ]
    for heading, example, page, commands in GROUPS:
        lines += ["", f"{heading} ({page})", *(f"  {name:<11} {words}" for name, words in commands.items())]
        lines += [f"  Example: {example}"]
    lines += [
        "",
        EVERY,
        "'infini-llama help COMMAND' prints the options of a command.",
        "",
        EXIT_CODES,
    ]
    return "\n".join(lines) + "\n"
