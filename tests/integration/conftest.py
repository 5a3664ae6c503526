"""One home folder for the session, and the runs that nobody disturbs, each made once."""

import pytest
import yaml

from support.laboratory import CONFIG, Laboratory, exact_metrics


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Laboratory:
    home = tmp_path_factory.mktemp("home")
    config = home / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    return Laboratory(home, config)


@pytest.fixture(scope="session")
def uninterrupted(lab):
    """Summary and metrics of the run that nobody disturbs, by attention and number of workers; each is made once."""
    made = {}

    def make(attention: str, workers: int) -> tuple[dict, list[dict]]:
        if (attention, workers) not in made:
            name = f"calm-{attention}-{workers}"
            summary = lab.finish(name, f"model.attention={attention}", f"environment.nproc_per_node={workers}")
            made[attention, workers] = (summary, exact_metrics(lab.run_dir(name)))
        return made[attention, workers]

    return make
