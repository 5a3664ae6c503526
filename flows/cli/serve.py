"""The commands serve and deploy."""

import logging
import os
from argparse import Namespace

from infini_llama.flows.cli.console import Answer
from infini_llama.flows.naming import home_folder


def serve(arguments: Namespace) -> Answer:
    from infini_llama.flows.server import api_for_serve, log_into, prepare_client
    from infini_llama.flows.settings import client_settings

    home = home_folder()
    log_into(home, arguments.verbose)
    prepare_client(home)
    client_settings()  # before the imports that need them
    from infini_llama.flows.deployments import read_deployments
    from infini_llama.flows.serving import serve as serve_deployments

    # Errors in the configurations are reported before a server starts.
    deployments = read_deployments(arguments.configs)
    with api_for_serve(
        home, arguments.host, arguments.port, arguments.allow_host
    ) as server:
        log = logging.getLogger("infini_llama.serve")
        api = os.environ["PREFECT_API_URL"] if server else "that of PREFECT_API_URL"
        log.info("UI: %s", api.removesuffix("/api"))
        if server:
            log.info(
                "from another shell: PREFECT_API_URL=%s prefect deployment run NAME --watch",
                api,
            )
        serve_deployments(deployments, home, arguments.limit, arguments.gpus, server)
    return {}, ""


def deploy(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.flows.server import api_for_deploy, log_into

    log_into(home_folder(), arguments.verbose)
    with api_for_deploy(home_folder()):
        from infini_llama.flows.deployments import deploy as deploy_all
        from infini_llama.flows.deployments import read_deployments

        record = deploy_all(read_deployments(arguments.configs), arguments.gpus)
    return record, as_text(record)
