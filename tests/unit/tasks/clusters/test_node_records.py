"""The files by which the nodes of an attempt know of each other."""

import os

import pytest

from infini_llama.configs.errors import ConfigError
from infini_llama.tasks.clusters.node_records import claim, end_attempt, is_over, node_path, read_node, update_node
from infini_llama.tasks.records.cluster import NodeRecord


def place_of_another(folder, node: int) -> None:
    record = NodeRecord(node=node, host="other", machine="another kernel", pid=os.getpid())
    node_path(folder, node).write_text(record.model_dump_json())


def test_joining_nodes_get_the_free_ranks_after_the_first(tmp_path):
    assert claim(tmp_path, None, 3) == 1
    place_of_another(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"all 3 nodes of .* have already joined"):
        claim(tmp_path, None, 3)


def test_a_rank_is_assigned_once_and_its_owner_is_named(tmp_path):
    place_of_another(tmp_path, 1)
    with pytest.raises(ConfigError, match=rf"node 1 of .* is process {os.getpid()} on other already"):
        claim(tmp_path, 1, 2)


def test_the_place_of_a_process_of_this_machine_that_has_died_is_free(tmp_path):
    assert claim(tmp_path, 1, 2) == 1
    update_node(tmp_path, 1, pid=2**22 + 1, fault="cut off")
    assert claim(tmp_path, 1, 2) == 1
    record = read_node(tmp_path, 1)
    assert record is not None and record.pid == os.getpid() and record.fault == ""


def test_a_missing_record_stays_missing(tmp_path):
    update_node(tmp_path, 0, port=7)
    assert read_node(tmp_path, 0) is None
    node_path(tmp_path, 0).write_text("")  # claimed, and not written yet
    assert read_node(tmp_path, 0) is None


def test_an_attempt_is_over_once_it_was_ended(tmp_path):
    assert not is_over(tmp_path)
    end_attempt(tmp_path)
    end_attempt(tmp_path)
    assert is_over(tmp_path)
