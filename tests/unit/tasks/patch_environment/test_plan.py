"""Machines are plain facts, so plans for machines that are not here are tested like any other."""

import math

import pytest

from infini_llama.configs.errors import ConfigError, PipelineError
from infini_llama.configs.optimizers import OPTIMIZERS
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import PipelineConfig
from infini_llama.configs.secrets import masked
from infini_llama.model.config import parameters
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.patch_environment import stage
from infini_llama.tasks.patch_environment.footprint import (
    bytes_needed,
    checkpoint_bytes,
    model_of,
)
from infini_llama.tasks.patch_environment.plan import plan_environment
from infini_llama.tasks.patch_environment.probe import probe
from infini_llama.tasks.patch_environment.stage import differences
from infini_llama.tasks.patch_environment.worker_variables import GLIBC_TUNABLES
from support.machines import H100, T4, in_home, reason_of, settings


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    facts = probe(tmp_path_factory.mktemp("home"))
    plain = {"cpu": {"model": "old"}, "glibc": "2.36", "load": 0.0, "cores": 8}
    return changed(facts, **(plain | {"gpus": [], "nccl": False}))


def with_gpus(facts, gpus: list[dict]):
    return changed(facts, gpus=gpus, nccl=True)


def test_a_machine_without_gpu_trains_on_all_its_cores(laptop):
    plan = plan_environment(settings(), laptop)
    assert (plan.device, plan.nproc_per_node, plan.threads) == ("cpu", 1, 8)
    assert (plan.precision, plan.distributed_backend, plan.micro_batch_size) == (
        "fp32",
        "gloo",
        8,
    )


def test_layers_are_compiled_on_gpus_that_can(laptop):
    gpus = changed(
        laptop, gpus=[H100], nccl=True, versions=laptop.versions | {"triton": "3.7"}
    )
    gpus = changed(gpus, compilers={"cc": "/usr/bin/gcc", "cxx": "/usr/bin/g++"})
    assert (
        plan_environment(settings(), gpus).compile,
        plan_environment(settings(), laptop).compile,
    ) == (
        "block",
        "off",
    )
    assert (
        plan_environment(settings(train={"parallel": "deepspeed"}), gpus).compile
        == "off"
    )
    without = plan_environment(
        settings(), changed(gpus, compilers={"cc": None, "cxx": None})
    )
    assert without.compile == "off" and "C compiler" in reason_of(without, "compile")


@pytest.mark.parametrize(
    ("pinned", "parallel", "chosen"),
    [
        ("block", "deepspeed", "off"),
        ("whole", "deepspeed", "off"),
        ("whole", "fsdp", "off"),
        ("block", "fsdp", "block"),
    ],
)
def test_a_run_that_goes_to_another_strategy_keeps_no_compilation_that_this_refuses(
    laptop, caplog, pinned, parallel, chosen
):
    machine = changed(laptop, compilers={"cc": None, "cxx": "/usr/bin/g++"})
    first = plan_environment(settings(train={"compile": pinned}), machine)
    plan = plan_environment(
        settings(train={"parallel": parallel}), machine, first.pinned()
    )
    assert plan.compile == chosen
    refused = f"compile={pinned} cannot be combined with parallel={parallel}"
    assert (refused in caplog.text) == (chosen == "off")


def test_layers_are_compiled_on_a_processor_with_amx_if_the_run_is_long(laptop):
    amx = changed(
        laptop,
        cpu={"model": "new", "bf16": True, "amx": True},
        compilers={"cc": None, "cxx": "/usr/bin/g++"},
    )

    def chosen(facts, **train) -> str:
        return plan_environment(
            settings(train={"max_steps": 1_000_000} | train), facts
        ).compile

    assert (
        chosen(amx),
        chosen(amx, max_steps=200),
        chosen(changed(amx, cores=10_000_000)),
    ) == (
        "block",
        "off",
        "off",
    )
    assert (
        chosen(changed(amx, cpu={"model": "new", "bf16": True}))
        == chosen(laptop)
        == "off"
    )
    assert (
        chosen(changed(amx, compilers={"cc": None, "cxx": None}))
        == chosen(amx, compile="off")
        == "off"
    )
    requested = settings({"precision": "fp32"}, train={"max_steps": 1_000_000})
    assert plan_environment(requested, amx).compile == "off"


def test_one_old_gpu_in_use_means_fp32(laptop):
    facts = with_gpus(laptop, [H100, T4])
    assert plan_environment(settings(), facts).precision == "fp32"
    assert plan_environment(settings({"nproc_per_node": 1}), facts).precision == "bf16"


def test_the_loss_is_cut_where_the_logits_are_large(laptop):
    """8 rows of 256 tokens: 32 MiB at 4k of vocabulary, which is not more than it may be; parts take 128. On a H100 a GiB may be."""
    for vocab_size, expected in (
        (8192, 4096),
        (32_000, 1024),
        (128_256, 256),
        (4096, 0),
    ):
        requested = settings().with_vocab_size(vocab_size)
        plan = plan_environment(requested, laptop)
        assert (plan.micro_batch_size, requested.data.sequence_length) == (8, 256)
        assert plan.loss_chunk == expected
    gpu = with_gpus(laptop, [H100])
    assert plan_environment(settings().with_vocab_size(128_256), gpu).loss_chunk == 0
    assert plan_environment(settings().with_vocab_size(256_000), gpu).loss_chunk == 4096
    assert (
        plan_environment(
            settings(train={"loss_chunk": 0}).with_vocab_size(128_256), laptop
        ).loss_chunk
        == 0
    )


def largest_micro_batch(laptop, free, requested):
    """The micro-batch of two GPUs of 80 GiB, of which one has `free` bytes left."""
    gpus = [H100, H100 | {"free": free}]
    return plan_environment(
        requested, changed(laptop, gpus=gpus, nccl=True)
    ).micro_batch_size


GQA = {"num_attention_heads": 8, "num_key_value_heads": 4}
BF16 = {"model": "new", "bf16": True}


@pytest.mark.parametrize(
    ("cpu", "length", "sections", "expected"),
    [
        ({}, 128, {}, ("sdpa", False)),
        ({}, 256, {}, ("blocked", True)),
        ({}, 256, {"environment": {"threads": 1}}, ("sdpa", False)),
        ({}, 512, {}, ("blocked", True)),
        ({}, 512, {"environment": {"threads": 8}}, ("sdpa", False)),
        ({}, 4096, {}, ("sdpa", False)),
        (
            {},
            4096,
            {"model": {"attention": "infini", "segment_length": 512}},
            ("blocked", True),
        ),
        (
            {},
            4096,
            {"model": {"attention": "infini", "segment_length": 64}},
            ("sdpa", False),
        ),
        ({}, 512, {"model": {"attention_dropout": 0.1}}, ("sdpa", False)),
        ({}, 1024, {}, ("blocked", True)),
        ({}, 1025, {}, ("sdpa", False)),
        ({}, 512, {"train": {"document_masking": True}}, ("sdpa", False)),
        (
            {},
            512,
            {"train": {"activation_checkpointing": "selective"}},
            ("blocked", False),
        ),
        (
            {},
            1024,
            {"train": {"activation_checkpointing": "selective"}},
            ("sdpa", False),
        ),
        ({}, 128, {"environment": {"precision": "bf16"}}, ("blocked", True)),
        ({}, 512, {"environment": {"attention_backend": "sdpa"}}, ("sdpa", False)),
        ({}, 64, {"environment": {"attention_backend": "blocked"}}, ("blocked", True)),
        (BF16, 64, {}, ("blocked", True)),
        (BF16, 2048, {}, ("sdpa", False)),
        (BF16, 2048, {"environment": {"threads": 1}}, ("blocked", True)),
        (
            BF16,
            1024,
            {"train": {"activation_checkpointing": "selective"}},
            ("sdpa", False),
        ),
        (BF16, 256, {"train": {"document_masking": True}}, ("sdpa", False)),
        (BF16, 512, {"train": {"document_masking": True}}, ("blocked", True)),
        (
            BF16,
            512,
            {
                "train": {"activation_checkpointing": "selective"},
                "environment": {"attention_backend": "blocked"},
            },
            ("blocked", False),
        ),
    ],
)
def test_attention_on_a_cpu_is_the_faster_function(
    laptop, cpu, length, sections, expected
):
    data = {"source": "python-stdlib", "sequence_length": length}
    sections = sections | {
        "model": {"hidden_size": 256} | GQA | sections.get("model", {})
    }
    plan = plan_environment(
        PipelineConfig.model_validate({"data": data} | sections),
        changed(laptop, cpu={"model": "old"} | cpu, cores=2),
    )
    assert (plan.attention_backend, plan.keep_attention_weights) == expected
    assert bool(reason_of(plan, "attention_backend")) == (
        "attention_backend" not in sections.get("environment", {})
    )


def test_the_micro_batch_is_that_of_the_chosen_backend(laptop):
    """Its estimate has the softmax weights, unless not even those of one sequence fit."""
    train = {"micro_batch_size": "auto", "global_batch_size": 16}
    model = {"hidden_size": 256, "num_hidden_layers": 8} | GQA

    def plan_with(available: int, **environment: str):
        data = {"source": "python-stdlib", "sequence_length": 512}
        sections = {
            "data": data,
            "model": model,
            "train": train,
            "environment": environment,
        }
        config = PipelineConfig.model_validate(sections)
        memory = changed(laptop.memory, available=available)
        return config, plan_environment(config, changed(laptop, memory=memory, cores=2))

    config, roomy = plan_with(64 * 1024**3)
    assert (
        roomy.attention_backend,
        roomy.keep_attention_weights,
        roomy.micro_batch_size,
    ) == (
        "blocked",
        True,
        16,
    )
    need = {
        (micro, keeps): sum(
            bytes_needed(
                config, micro, "fp32", "cpu", 1, keeps_attention_weights=keeps
            ).values()
        )
        for micro in (1, 8, 16)
        for keeps in (True, False)
    }
    available = math.ceil((need[16, False] + 1024**3) / 0.8)
    assert need[8, True] < need[16, False] < need[16, True]
    assert [
        plan_with(available, **given)[1].micro_batch_size
        for given in ({}, {"attention_backend": "sdpa"})
    ] == [
        8,
        16,
    ]
    without = math.ceil((need[1, False] + 1024**3) / 0.8)
    for given in ({}, {"attention_backend": "blocked"}):
        tight = plan_with(without, **given)[1]
        assert (tight.attention_backend, tight.keep_attention_weights) == (
            "blocked",
            False,
        )
        assert tight.micro_batch_size == 1


def test_the_micro_batch_is_the_largest_that_fits_the_fullest_gpu(laptop):
    """The estimate and 1 GiB have to fit into 80 % of what is free there, however large the H100 is."""
    requested = settings(
        {"gpus": [0, 1]}, {"micro_batch_size": "auto", "global_batch_size": 64}
    )
    for micro in (2, 4, 16):
        need = sum(bytes_needed(requested, micro, "bf16", "cuda", 2).values())
        enough = math.ceil((need + 1024**3) / 0.8)
        assert (
            largest_micro_batch(laptop, enough, requested),
            largest_micro_batch(laptop, enough - 2, requested),
        ) == (
            micro,
            micro // 2,
        )
    assert largest_micro_batch(laptop, 79 * 1024**3, requested) == 32, (
        "all of a worker's share"
    )
    assert largest_micro_batch(laptop, 0, requested) == 1, (
        "the doctor says that it does not fit"
    )
    long = requested.model_copy(
        update={"data": requested.data.model_copy(update={"sequence_length": 16384})}
    )
    assert largest_micro_batch(laptop, 79 * 1024**3, long) == 4, (
        "more than 65,536 tokens help no GPU"
    )


def test_disk_space_for_the_kept_checkpoints(laptop):
    """3 newest, the best, one being written, and of 1000 steps every 250th: nine of 12 bytes a parameter."""
    requested = settings(train={"max_steps": 1000, "save_permanent_every": 250})
    each = 12 * parameters(model_of(requested))
    for free, required, fits in (
        (9 * each, 0, True),
        (9 * each - 1, 0, False),
        (5 * each, 4 * each, True),
        (None, 0, True),
    ):
        facts = changed(
            laptop, disk=changed(laptop.disk, free=free, run_bytes=required)
        )
        found = [
            one
            for one in plan_environment(requested, facts).findings
            if one.name == "disk space for checkpoints"
        ]
        assert bool(found) != fits
        if found:
            assert (
                "for 9 checkpoints of" in found[0].value
                and "save_total_limit" in found[0].sentence
            )
            assert found[0].severity == "warning"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_disk_without_space_for_a_checkpoint_is_refused(
    laptop, tmp_path, monkeypatch, optimizer
):
    requested = settings(train={"optimizer": optimizer})
    least = checkpoint_bytes(model_of(requested), requested.train)
    for free, severity in ((least, "warning"), (least - 12, "error")):
        facts = changed(laptop, disk=changed(laptop.disk, free=free, run_bytes=0))
        (found,) = [
            one
            for one in plan_environment(requested, facts).findings
            if one.name == "disk space for checkpoints"
        ]
        assert found.severity == severity
        monkeypatch.setattr(stage, "probe", lambda *_, facts=facts: facts)
        if severity == "error":
            with pytest.raises(PipelineError, match="checkpoint"):
                stage.patch_environment(in_home(requested, tmp_path / severity))
        else:
            stage.patch_environment(in_home(requested, tmp_path / severity))


def test_the_users_variables_win_over_the_plans(laptop):
    mine = {"TOKENIZERS_PARALLELISM": "true", "OMP_NUM_THREADS": "8", "MINE": "x"}
    plan = plan_environment(settings({"env": mine}), laptop)
    assert plan.env["TOKENIZERS_PARALLELISM"] == "true" and plan.env["MINE"] == "x"
    assert findings(plan).keys() == {"environment.env.TOKENIZERS_PARALLELISM"}, (
        "that it replaces the plan's is noted"
    )


@pytest.mark.parametrize(
    ("environment", "gpus", "words"),
    [
        ({"device": "cuda"}, [], "environment.device=cuda"),
        ({"distributed_backend": "nccl"}, [], "environment.distributed_backend=nccl"),
        ({"precision": "bf16"}, [T4], "environment.precision=bf16"),
        ({"nproc_per_node": 4, "device": "cuda"}, [H100], "there are 1 GPU"),
        ({"nproc_per_node": 4}, [H100], "there are 1 GPU"),
        ({"env": {"WORLD_SIZE": "2"}}, [], "environment.env.WORLD_SIZE=2"),
        ({"env": {"OMP_NUM_THREADS": "3"}}, [], "8 threads by environment.threads"),
        (
            {"env": {"MKL_NUM_THREADS": "8"}, "threads": 4},
            [],
            "4 threads by environment.threads",
        ),
        ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, [H100] * 2, "use environment.gpus"),
        ({"env": {"CUDA_VISIBLE_DEVICES": ""}}, [H100], "environment.device=cpu"),
    ],
)
def test_forced_and_impossible_is_an_error(laptop, environment, gpus, words):
    with pytest.raises(ConfigError, match="environment") as raised:
        plan_environment(
            settings(environment), changed(laptop, gpus=gpus, nccl=bool(gpus))
        )
    assert words in str(raised.value)


def test_gpus_may_be_hidden_from_workers_on_the_cpu(laptop):
    hidden = settings({"device": "cpu", "env": {"CUDA_VISIBLE_DEVICES": ""}})
    assert (
        plan_environment(hidden, with_gpus(laptop, [H100])).env["CUDA_VISIBLE_DEVICES"]
        == ""
    )


def test_every_impossible_setting_is_named_at_once(laptop):
    with pytest.raises(ConfigError) as raised:
        plan_environment(
            settings({"device": "cuda", "distributed_backend": "nccl"}), laptop
        )
    assert len(str(raised.value).splitlines()) == 3


def test_workers_that_cannot_be_divided_into_copies_of_the_model_are_refused(laptop):
    sharded = {"parallel": "hsdp", "shard_size": 3}
    with pytest.raises(ConfigError, match=r"2 worker.* into groups of 3"):
        plan_environment(settings({"nproc_per_node": 2}, sharded), laptop)
    assert plan_environment(settings(train=sharded), laptop).nproc_per_node == 1, (
        "one worker has the whole model"
    )


def test_a_pinned_number_of_workers_that_the_batch_does_not_allow_is_left(
    laptop, caplog
):
    requested = settings(train={"global_batch_size": 8, "micro_batch_size": 8})
    pinned = plan_environment(settings({"nproc_per_node": 2}), laptop).pinned()
    assert plan_environment(requested, laptop, pinned).nproc_per_node == 1
    assert "global_batch_size=8" in caplog.text


def findings(plan):
    return {found.name: found for found in plan.findings}


def test_a_micro_batch_that_is_left_out_divides_the_share_of_a_worker(laptop):
    def planned(batch, pinned=None, **environment):
        requested = settings(environment, {"global_batch_size": batch})
        return plan_environment(requested, laptop, pinned)

    sizes = {4: 4, 7: 7, 8: 8, 12: 6, 13: 1, 16: 8, 18: 6, 32: 8}
    assert {batch: planned(batch).micro_batch_size for batch in sizes} == sizes
    two = planned(12, nproc_per_node=2)
    assert two.micro_batch_size == 6 and "a worker's 6" in reason_of(
        two, "micro_batch_size"
    )
    assert (
        planned(12, pinned=planned(12, nproc_per_node=4).pinned()).micro_batch_size == 3
    )


def test_gpus_that_cannot_share_the_batch_stay_unused_and_that_is_said(laptop):
    plan = plan_environment(
        settings(train={"global_batch_size": 16, "micro_batch_size": 8}),
        with_gpus(laptop, [H100] * 3),
    )
    assert (plan.nproc_per_node, plan.micro_batch_size) == (2, 8)
    assert "global_batch_size=16" in reason_of(plan, "nproc_per_node")
    found = findings(plan)["workers"]
    assert found.severity == "warning" and "24 uses all of them" in found.sentence
    whole = plan_environment(
        settings(train={"global_batch_size": 24, "micro_batch_size": 8}),
        with_gpus(laptop, [H100] * 3),
    )
    assert whole.nproc_per_node == 3 and "workers" not in findings(whole)
    fewer = plan_environment(
        settings({"nproc_per_node": 2}), with_gpus(laptop, [H100] * 3)
    )
    assert findings(fewer)["workers"].severity == "note", "as it was requested"
    kept = plan_environment(
        settings(train={"global_batch_size": 12, "micro_batch_size": 2}),
        with_gpus(laptop, [H100] * 3),
        fewer.pinned(),
    )
    assert kept.nproc_per_node == 2
    assert findings(kept)["workers"].severity == "note", "3 can divide the batch"


def test_a_gpu_without_others_to_share_sequences_with_is_not_for_want_of_batch(laptop):
    infini = {"attention": "infini", "segment_length": 64}
    shared = {"context_parallel": 2, "global_batch_size": 8, "micro_batch_size": 4}
    plan = plan_environment(
        settings(train=shared, model=infini), with_gpus(laptop, [H100] * 5)
    )
    assert (plan.nproc_per_node, findings(plan)["workers"].severity) == (4, "note"), (
        "of 5, groups of 2 are 4"
    )
    shared |= {"global_batch_size": 12}
    plan = plan_environment(
        settings(train=shared, model=infini), with_gpus(laptop, [H100] * 5)
    )
    assert (
        plan.nproc_per_node == 2
        and "among 4; 8 or 16 uses all of them" in findings(plan)["workers"].sentence
    )


def test_a_processor_that_multiplies_bf16_trains_in_it(laptop):
    new = changed(laptop, cpu={"model": "new", "bf16": True, "amx": True})
    assert (
        plan_environment(settings(), laptop).precision,
        plan_environment(settings(), new).precision,
    ) == (
        "fp32",
        "bf16",
    )
    assert "AMX" in reason_of(plan_environment(settings(), new), "precision")
    assert plan_environment(settings({"precision": "fp32"}), new).precision == "fp32"


def test_compiled_code_is_kept_where_the_user_says(laptop, monkeypatch):
    config = settings(train={"compile": "block"})
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    in_home = plan_environment(config, laptop).env["TORCHINDUCTOR_CACHE_DIR"]
    assert in_home == str(config.runtime.home.absolute() / "compile-cache")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/fast")
    assert plan_environment(config, laptop).env["TORCHINDUCTOR_CACHE_DIR"] == "/fast"


def test_freed_memory_is_kept_where_the_c_library_can(laptop):
    musl = changed(laptop, glibc="")
    assert [
        plan_environment(settings(), facts).allocator for facts in (laptop, musl)
    ] == [
        "glibc",
        "system",
    ]
    assert (
        "trim_threshold" in plan_environment(settings(), laptop).env["GLIBC_TUNABLES"]
    )
    assert (
        "GLIBC_TUNABLES"
        not in plan_environment(settings({"allocator": "system"}), laptop).env
    )
    assert (
        plan_environment(settings(), changed(laptop, gpus=[H100])).allocator == "system"
    )
    with pytest.raises(ConfigError, match=r"environment\.allocator=glibc"):
        plan_environment(settings({"allocator": "glibc"}), musl)


def test_two_workers_on_two_cores_are_fine_and_on_one_core_warned(laptop):
    fine = plan_environment(settings({"nproc_per_node": 2}), changed(laptop, cores=2))
    assert fine.threads == 1 and not fine.findings
    crowded = plan_environment(
        settings({"nproc_per_node": 2}), changed(laptop, cores=1)
    )
    warned = findings(crowded)["threads"]
    assert crowded.threads == 1 and warned.severity == "warning"
    assert "1 usable core" in warned.sentence


def test_bf16_on_a_processor_without_it_is_warned(laptop):
    requested = settings({"precision": "bf16"})
    assert not plan_environment(
        requested, changed(laptop, cpu={"model": "new", "bf16": True, "amx": False})
    ).findings
    assert "precision" in findings(
        plan_environment(
            requested,
            changed(laptop, cpu={"model": "old", "bf16": False, "amx": False}),
        )
    )


def test_each_kind_of_worker_gets_the_variables_it_needs(laptop):
    one = plan_environment(settings(), laptop).env
    threads = {
        "OMP_NUM_THREADS": "8",
        "MKL_NUM_THREADS": "8",
        "TOKENIZERS_PARALLELISM": "false",
    }
    threads |= {"GOMP_SPINCOUNT": "10000"}
    assert {
        name: value for name, value in one.items() if name != "GLIBC_TUNABLES"
    } == threads and len(one) == 5
    busy = changed(laptop, load=1.0)
    assert plan_environment(settings(), busy).env["OMP_WAIT_POLICY"] == "passive", (
        "neighbours need the cores that waiting threads spin on"
    )
    assert "GOMP_SPINCOUNT" not in plan_environment(settings(), busy).env
    single = plan_environment(settings({"threads": 1}), busy).env
    assert not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & single.keys()
    two_gpus = plan_environment(settings(), with_gpus(laptop, [H100] * 2)).env
    assert two_gpus["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert all(masked(variables) == variables for variables in (one, two_gpus)), (
        "no secret is in the plan"
    )


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
@pytest.mark.parametrize("load", [0.0, 1.0])
def test_how_threads_wait_is_the_users_where_they_say_it(laptop, tmp_path, name, load):
    waiting = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    mine = plan_environment(
        settings({"env": {name: "active"}}), changed(laptop, load=load)
    ).env
    assert {key: value for key, value in mine.items() if key in waiting} == {
        name: "active"
    }
    facts = exporting(changed(laptop, load=load), tmp_path, name, "active")
    assert not waiting & plan_environment(settings(), facts).env.keys()


def exporting(facts, tmp_path, name, value="mine"):
    machine = Machine(environ={name: value}, gpu_probe=("-c", "raise SystemExit(1)"))
    return changed(facts, exported=probe(tmp_path, machine=machine).exported)


@pytest.mark.parametrize("name", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_"])
def test_how_glibc_keeps_memory_is_the_users_where_they_say_it(laptop, tmp_path, name):
    mine = (
        "glibc.pthread.rseq=0:glibc.malloc.top_pad=4096"
        if name == "GLIBC_TUNABLES"
        else "4096"
    )
    exported = exporting(laptop, tmp_path, name, mine)
    for plan in (
        plan_environment(settings(), exported),
        plan_environment(settings({"env": {name: mine}}), laptop),
    ):
        assert (
            plan.allocator == "system" and plan.env.get("GLIBC_TUNABLES", mine) == mine
        )
        assert [
            choice.reason for choice in plan.choices if choice.setting == "allocator"
        ] == [f"{name} is set, and is not replaced"]


def test_a_variable_that_the_runs_allocator_overrules_is_warned(
    laptop, tmp_path, monkeypatch
):
    mine = "glibc.malloc.top_pad=4096:glibc.malloc.arena_max=2"
    monkeypatch.setenv("GLIBC_TUNABLES", mine)
    exported = exporting(laptop, tmp_path, "GLIBC_TUNABLES", mine)
    first = plan_environment(settings(), laptop)
    explicit = plan_environment(settings({"allocator": "glibc"}), exported)
    pinned = plan_environment(settings(), exported, first.pinned())
    for plan in (explicit, pinned):
        assert plan.env["GLIBC_TUNABLES"] == f"{mine}:{GLIBC_TUNABLES}"
        assert findings(plan)["GLIBC_TUNABLES"].severity == "warning"
    env = {"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}
    replaced = plan_environment(settings({"allocator": "glibc", "env": env}), exported)
    assert (
        findings(replaced).keys() == {"environment.env.GLIBC_TUNABLES"}
        and replaced.env["GLIBC_TUNABLES"] == env["GLIBC_TUNABLES"]
    )


@pytest.mark.parametrize(
    "mine", ["glibc.pthread.rseq=0", "glibc.malloc.arena_max=2", ""]
)
def test_exported_tunables_of_other_things_stand_beside_the_plans(
    laptop, tmp_path, monkeypatch, mine
):
    monkeypatch.setenv("GLIBC_TUNABLES", mine)
    plan = plan_environment(
        settings(), exporting(laptop, tmp_path, "GLIBC_TUNABLES", mine)
    )
    assert plan.allocator == "glibc" and not plan.findings
    assert plan.env["GLIBC_TUNABLES"] == f"{mine}:{GLIBC_TUNABLES}".removeprefix(":")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_how_torch_divides_a_gpus_memory_is_the_users_where_they_say_it(
    laptop, tmp_path, name
):
    gpus = with_gpus(laptop, [H100])
    exported = plan_environment(settings(), exporting(gpus, tmp_path, name))
    mine = plan_environment(settings({"env": {name: "mine"}}), gpus)
    assert (
        "PYTORCH_ALLOC_CONF" not in exported.env
        and mine.env.get("PYTORCH_ALLOC_CONF", "mine") == "mine"
    )
    assert all(findings(plan)[name].severity == "note" for plan in (exported, mine))


def test_a_driver_that_torch_cannot_use_is_named(laptop):
    facts = changed(laptop, gpu_fault="driver too old")
    assert plan_environment(settings(), facts).device == "cpu"
    with pytest.raises(ConfigError, match="driver too old"):
        plan_environment(settings({"device": "cuda"}), facts)


def test_gpus_without_nccl_use_gloo_and_are_warned_about(laptop):
    plan = plan_environment(settings(), changed(laptop, gpus=[H100] * 2, nccl=False))
    assert plan.distributed_backend == "gloo" and "distributed_backend" in findings(
        plan
    )


def test_the_same_ranks_on_other_machines_lose_nothing(laptop):
    def lost(then: dict, now: dict) -> list[str]:
        plans = [
            plan_environment(settings(environment), laptop)
            for environment in (then, now)
        ]
        return [
            change.name
            for change in differences(plans[0].pinned(), laptop, plans[1], laptop)
            if change.exactness == "lost"
        ]

    assert (
        lost(
            {"nproc_per_node": 4, "threads": 1},
            {"nnodes": 2, "nproc_per_node": 2, "threads": 1},
        )
        == []
    )
    assert lost(
        {"nproc_per_node": 2, "threads": 1},
        {"nnodes": 2, "nproc_per_node": 2, "threads": 1},
    ) == ["nnodes"]


@pytest.mark.parametrize(
    ("fault", "settings", "expected"),
    [
        ("", {}, "flash2"),
        ("it differs from plain mathematics by 2", {}, "sdpa"),
        ("No module", {"train": {"document_masking": True}}, "sdpa"),
        ("", {"environment": {"precision": "fp32"}}, "sdpa"),
        ("", {"environment": {"attention_backend": "sdpa"}}, "sdpa"),
        ("", {"model": {"hidden_size": 256, "num_attention_heads": 8}}, "sdpa"),
        (
            "",
            {"model": {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 64}},
            "flash2",
        ),
        ("", {"model": {"head_dim": 96}}, "sdpa"),
        (None, {}, "sdpa"),
        (
            "",
            {"model": {"attention": "local", "attend_previous_segment": True}},
            "sdpa",
        ),
    ],
)
def test_auto_uses_flash_attention_where_it_agreed_in_the_trial(
    laptop, fault, settings, expected
):
    facts = changed(laptop, gpus=[H100], nccl=True, flash_attention=fault)
    found = PipelineConfig.model_validate(
        {"data": {"source": "python-stdlib"}} | settings
    )
    plan = plan_environment(found, facts)
    assert plan.attention_backend == expected
    if fault:
        assert fault in reason_of(plan, "attention_backend")
