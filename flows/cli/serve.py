"""The commands serve and deploy."""

import logging
import os
from argparse import Namespace

from infini_llama.flows.cli.console import Answer
from infini_llama.flows.naming import home_folder


def serve(arguments: Namespace) -> Answer:
    from infini_llama.flows.server import lasting_api, log_into, prepare_client

    home = home_folder()
    log_into(home, arguments.verbose)
    prepare_client(home)
    from infini_llama.flows.deployments import read_offers

    offers = read_offers(arguments.configs)  # what is wrong with them is reported before a server starts
    with lasting_api(home, arguments.host, arguments.port, arguments.allow_host) as own:
        from infini_llama.flows.serving import serve

        log = logging.getLogger("infini_llama.serve")
        api = os.environ["PREFECT_API_URL"] if own else "that of PREFECT_API_URL"
        log.info("UI: %s", api.removesuffix("/api"))
        if own:
            log.info("from another shell: PREFECT_API_URL=%s prefect deployment run NAME --watch", api)
        serve(offers, home, arguments.limit, arguments.gpus, own)
    return {}, ""


def deploy(arguments: Namespace) -> Answer:
    from infini_llama.flows.cli.tables import as_text
    from infini_llama.flows.server import given_api, log_into

    with given_api(home_folder()):
        log_into(home_folder(), arguments.verbose)
        from infini_llama.flows.deployments import deploy, read_offers

        record = deploy(read_offers(arguments.configs), arguments.gpus)
    return record, as_text(record)
