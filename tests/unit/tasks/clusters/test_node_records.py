"""What the nodes of an attempt tell each other."""

import json
import os

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.clusters import node_records as records


def place_of_another(folder, node: int, **words) -> None:
    record = {"node": node, "host": "other", "machine": "another kernel", "pid": os.getpid(), "state": "here"}
    records.node_path(folder, node).write_text(json.dumps(record | words))


def test_those_that_join_get_the_free_places_behind_the_first(tmp_path):
    assert records.claim(tmp_path, None, 3) == 1
    place_of_another(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"all 3 nodes of .* have already joined"):
        records.claim(tmp_path, None, 3)


def test_a_place_is_given_once_and_the_holder_is_named(tmp_path):
    place_of_another(tmp_path, 1)
    with pytest.raises(ConfigError, match=rf"node 1 of .* is process {os.getpid()} on other already"):
        records.claim(tmp_path, 1, 2)


def test_the_place_of_a_process_of_this_machine_that_has_died_is_free(tmp_path):
    assert records.claim(tmp_path, 1, 2) == 1
    record = records.read(records.node_path(tmp_path, 1))
    records.node_path(tmp_path, 1).write_text(json.dumps(record | {"pid": 2**22 + 1}))
    assert records.has_ended(records.node_path(tmp_path, 1))
    assert records.claim(tmp_path, 1, 2) == 1
    assert not records.has_ended(records.node_path(tmp_path, 1))


def test_what_is_over_or_refused_stays_so(tmp_path):
    records.say(tmp_path, "open", port=1)
    records.say(tmp_path, "go")
    assert records.word(tmp_path) == {"state": "go", "port": 1}
    records.say(tmp_path, "over")
    records.say(tmp_path, "go")
    assert records.word(tmp_path)["state"] == "over"
