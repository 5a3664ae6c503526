"""pyproject.toml, constraints.txt, the Dockerfiles and the pages name versions that go together."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
# Fmt: skip.
MACHINES = [
    {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_machine": machine,
    }
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]
FLASH = re.compile(r"flash-attn(?!-4)|\[flash\]")
DOCKERFILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


def pins(machine: dict[str, str]) -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [
        Requirement(text) for line in lines if (text := line.split("#")[0].strip())
    ]
    return {
        canonicalize_name(one.name): one
        for one in found
        if not one.marker or one.marker.evaluate(machine)
    }


def version(pin: Requirement) -> str:
    (exact,) = pin.specifier
    assert exact.operator == "==", pin
    return exact.version


def installs(dockerfile: Path) -> list[list[str]]:
    """The words of every `pip install` and `pip wheel` of a Dockerfile."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [
        command
        for line in text.splitlines()
        if line.startswith("RUN ")
        for command in line[4:].split("&&")
    ]
    return [
        command.split()
        for command in commands
        if re.search(r"\bpip (install|wheel)\b", command)
    ]


@pytest.mark.parametrize(
    "machine",
    MACHINES,
    ids=lambda machine: f"{machine['python_version']}-{machine['platform_machine']}",
)
def test_every_dependency_and_extra_has_a_pin_that_it_allows(machine):
    known = pins(machine)
    wanted = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.marker and not requirement.marker.evaluate(machine):
            continue
        pin = known.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement} has no pin"
        assert requirement.specifier.contains(version(pin), prereleases=True), (
            f"{requirement} refuses {pin}"
        )


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_installs_is_what_the_constraints_pin(dockerfile):
    known = pins(MACHINES[2])
    for words in installs(dockerfile):
        assert any(word.endswith("constraints.txt") for word in words), words
        plain = [word.strip('"') for word in words]
        for requirement in [
            Requirement(word)
            for word in plain
            if re.fullmatch(r"[A-Za-z][\w.-]*(==[\w.]+)?", word)
        ]:
            if (
                requirement.name in ("pip", "install", "wheel")
                and not requirement.specifier
            ):
                continue
            pin = known.get(canonicalize_name(requirement.name))
            if pin is not None:
                assert requirement.specifier.contains(version(pin)), (
                    f"{requirement}, but constraints.txt has {pin}"
                )


def test_flash_attn_is_built_against_the_torch_that_is_installed():
    """Its sdist imports torch, which an isolated build does not have."""
    builds = [
        " ".join(words)
        for words in installs(ROOT / "deploy/Dockerfile.gpu")
        if FLASH.search(" ".join(words))
    ]
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = [
        line
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if "pip install" in line
    ]
    builds += [line for line in named if FLASH.search(line)]
    assert len(builds) >= 2 and all("--no-build-isolation" in one for one in builds), (
        builds
    )
