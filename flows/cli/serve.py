"""Runs offered on a Prefect server."""

import logging
import os
from argparse import Namespace
from pathlib import Path

from infini_llama.flows.cli.paths import Answer, home_folder, prefect_speaks_into


def serve(arguments: Namespace) -> Answer:
    from infini_llama.flows.server import lasting_api

    home = home_folder()
    prefect_speaks_into(home, arguments)
    with lasting_api(home, arguments.host, arguments.port) as own:
        from infini_llama.flows.serving import serve

        log = logging.getLogger("infini_llama.serve")
        api = os.environ["PREFECT_API_URL"] if own else "that of PREFECT_API_URL"
        log.info("UI: %s", api.removesuffix("/api"))
        if own:
            log.info("from another shell: PREFECT_API_URL=%s infini-llama submit %s", api, arguments.configs[0])
        serve(arguments.configs, home, arguments.limit, arguments.gpus)
    return {}, ""


def deploy(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.flows.server import given_api

    with given_api(home_folder()):
        prefect_speaks_into(home_folder(), arguments)
        from infini_llama.flows.deployments import deploy

        record = deploy(arguments.configs, arguments.gpus)
    return record, as_text(record)


def submit(arguments: Namespace) -> Answer:
    from infini_llama.configs.loading import load_config
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.flows.server import given_api

    config = load_config(arguments.config, arguments.overrides)
    name = arguments.deployment or config.deployment.name or Path(arguments.config).stem
    with given_api(home_folder()):
        prefect_speaks_into(home_folder(), arguments)
        from infini_llama.flows.submission import submit, watch

        record = submit(config, name, arguments.config)
        if arguments.watch:
            logging.getLogger("infini_llama.submit").info(
                "run %s is submitted: %s", record["name"], record["url"] or record["id"]
            )
            record |= watch(record["id"])
    return record, as_text(record)
