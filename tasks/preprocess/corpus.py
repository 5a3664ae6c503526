"""The text that a configuration names: its parts, and what is known of them."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from infini_llama.configs.errors import DataError
from infini_llama.configs.reading import changed
from infini_llama.configs.schema import DataConfig
from infini_llama.tasks.machine import Machine
from infini_llama.tasks.preprocess.sources.patterns import NotText
from infini_llama.tasks.preprocess.sources.source import TextInput
from infini_llama.tasks.preprocess.sources.sources import sections, source_of
from infini_llama.tasks.preprocess.tokens.parts import (
    NAMED,
    Documents,
    Filters,
    Part,
    PartReader,
    PartReport,
    PartReports,
    parts_of,
    without_damaged_files,
)
from infini_llama.tasks.preprocess.tokens.targets import targets_of
from infini_llama.tasks.preprocess.tokens.units import (
    Recipe,
    open_unit,
    verify_or_remove,
)
from infini_llama.tasks.preprocess.workers import (
    Job,
    Workers,
    choose_workers,
    prepare_parts,
)
from infini_llama.tasks.progress import megabytes
from infini_llama.tasks.records.decision import Decision
from infini_llama.tasks.records.manifest import Inexpressible, LeftOut
from infini_llama.tasks.storage.artifacts import FORMAT_VERSIONS, key_of
from infini_llama.tasks.tokenizers.expressed import FEW_BYTES, LARGEST_LOSS, keeps_text
from infini_llama.tasks.tokenizers.tokenizer import identity, load

log = logging.getLogger("infini_llama.preprocess")
T = TypeVar("T")


@dataclass(frozen=True)
class OfSource(Generic[T]):
    """Parts, or names of units, of one source, in order.

    Attributes:
        name: of the source in data.sources; "" for the section `data`.
        training: of training files or the training split; a share of their documents may be held
            out.
        validation: of validation files or the validation split, which are held out as a whole.
    """

    name: str
    training: Sequence[T]
    validation: Sequence[T]


def listed(data: DataConfig, not_text: NotText) -> list[OfSource[Part]]:
    """The parts of the text that the section `data` names.

    Args:
        not_text: counts the files that are left out.
    """
    by_name = sections(data)
    inputs_by_name = {
        name: source_of(section, name, data.validation_fraction).inputs(not_text)
        for name, section in by_name.items()
    }
    validation = [
        file for inputs in inputs_by_name.values() for file in inputs.validation
    ]
    sources: list[OfSource[Part]] = []
    for name, inputs in inputs_by_name.items():
        training = [
            text.without_validation_files(validation) for text in inputs.training
        ]
        share = 0.0 if inputs.validation else data.validation_fraction
        targets = targets_of(by_name[name])
        source = OfSource(
            name=name,
            training=parts_of(training, share, targets),
            validation=parts_of(inputs.validation, 1.0, targets),
        )
        sources.append(source)
    return sources


def tokens_key(data: DataConfig, sources: Sequence[OfSource[str]]) -> str:
    """64 hex digits for the token level: text, split and tokenizer; no path, device or time."""
    key: dict[str, object] = {
        "version": FORMAT_VERSIONS["dataset"],
        "tokenizer": identity(data.tokenizer),
        "deduplicate": data.deduplicate,
        "sources": [
            [source.name, list(source.training), list(source.validation)]
            for source in sources
        ],
    }
    split_special_tokens = data.tokenizer.split_special_tokens
    if data.tokenizer.path and not keeps_text(
        load(data.tokenizer), split_special_tokens
    ):
        key["has_document_bytes"] = True
        # Earlier datasets with answers may have a space that the text has not.
        if any(section.loss_on == "answer" for section in sections(data).values()):
            key["answers_begin_within_a_token"] = True
    return key_of(key)


def _too_much_lost(file: TextInput, loss: np.ndarray, data: DataConfig) -> DataError:
    unknown, lost, size = loss.tolist()
    return DataError(
        f"{file}: the tokenizer {data.tokenizer.path} has no token for "
        f"{100 * lost / max(1, size):.3g} % of its text ({lost:,} of {size:,} bytes, "
        f"{unknown:,} unknown tokens); "
        f"at most {LARGEST_LOSS:.0%} may be lost, of a file and of all text. "
        "Use a tokenizer over bytes (without data.tokenizer.path one is trained on the text), "
        f"or leave the file out of {file.key}."
    )


class Corpus:
    """All text of one configuration.

    It is listed at first, and read part by part when `read` or `prepare` needs it.

    Attributes:
        sources: in the order of their documents; where they are not given, those of `data`.
        not_text: files that are not read.

    Raises:
        DataError: nothing matches, or a folder cannot be read.
    """

    def __init__(
        self,
        data: DataConfig,
        home: Path,
        sources: Sequence[OfSource[Part]] | None = None,
    ) -> None:
        self.data = data
        self.home = home
        self.not_text = NotText(home, data.not_text)
        self.sources = listed(data, self.not_text) if sources is None else sources
        self.filters = Filters(data.min_length, data.on_bad_input == "skip")
        self.earlier_reports = PartReports(home / "units" / "parts", self.filters)
        self.reports: dict[Part, PartReport] = {}

    @property
    def parts(self) -> list[Part]:
        """All parts, held-out text first."""
        return [
            *chain.from_iterable(source.validation for source in self.sources),
            *chain.from_iterable(source.training for source in self.sources),
        ]

    def choose_workers(self) -> Workers:
        """The workers that would prepare all parts if no unit were in the store."""
        return choose_workers(self.data, self.parts, Machine())

    @property
    def size(self) -> int:
        """Bytes to read, as far as they are known."""
        return sum(part.size for part in self.parts)

    def listing_key(self) -> str:
        """A hash of the settings, and of the place and the stamp of every file.

        While it is the same, so is the text of files that have a stamp (`TextInput.stamp`).
        """
        files = [
            [[file.place for file in part.files], part.stamps, part.span]
            for part in self.parts
        ]
        return key_of([self.data.model_dump(mode="json"), files])

    def recall(self) -> bool:
        """Look up earlier reports of the parts; True if all parts have one. No text is read."""
        for part in self.parts:
            if part in self.reports:
                continue
            report = self.earlier_reports.get(part)
            if report is not None:
                self.reports[part] = report
        return len(self.reports) == len(self.parts)

    def read(self) -> None:
        """Read the parts without a report, to name their units."""
        self.recall()
        for part in self.parts:
            if part not in self.reports:
                for _ in self.units(part):
                    pass

    def units(self, part: Part) -> Iterator[Documents]:
        """Read the units of a part, and remember its report."""
        reader = PartReader(part, self.filters)
        yield from reader.units()
        self._remember(part, reader.report())

    def read_unreachable_again(self) -> None:
        """Read the parts again of which a file could not be opened or read at an earlier time."""
        self.recall()
        for part in self.parts:
            report = self.reports.get(part)
            if report is not None and report.unreachable:
                for _ in self.units(part):
                    pass

    def _remember(self, part: Part, report: PartReport) -> None:
        before = self.reports.get(part, report)
        # The words differ with the spelling of a path, and with versions of libraries.
        is_alike = changed(before, bad=()) == changed(report, bad=())
        if not is_alike and not before.unreachable:
            raise DataError(
                f"{part} changed while it was being prepared; run the same command again."
            )
        self.reports[part] = report
        self.earlier_reports.remember(part, report)

    def prepare(self, recipe: Recipe, checksums: bool = False) -> Decision | None:
        """Write the units that are not in the store or do not verify there.

        They are written by `data.num_workers` workers.

        Args:
            checksums: see `verify_or_remove`.

        Returns:
            how many workers were chosen; None: no unit was missing, or data.num_workers says it.

        Raises:
            DataError, PipelineError, EngineDiffers: see `prepare_parts`.
        """
        self.recall()
        missing = [
            part
            for part in self.parts
            if not self._verify_or_remove_units(part, recipe, checksums)
        ]
        if len(missing) < len(self.parts):
            log.info(
                "%d of %d parts of the text are tokenized already",
                len(self.parts) - len(missing),
                len(self.parts),
            )
        if not missing:
            return None
        workers = choose_workers(self.data, missing, Machine())
        choice = workers.choice
        if choice:
            log.info("%s: %s (%s)", choice.setting, choice.value, choice.reason)
        done = 0
        total = sum(part.size for part in missing)
        job = Job(recipe, self.filters)
        for part, report in prepare_parts(job, missing, self.data, workers):
            self._remember(part, report)
            done += part.size
            log.info("tokenizing", extra={"progress": megabytes(done, total)})
        return choice

    def _verify_or_remove_units(
        self,
        part: Part,
        recipe: Recipe,
        checksums: bool,
    ) -> bool:
        """Whether the part was read and all of its units are there; see `verify_or_remove`."""
        report = self.reports.get(part)
        if report is None:
            return False
        # Of all units, so that each damaged one is removed.
        verified = [
            verify_or_remove(recipe, unit.name, checksums) for unit in report.units
        ]
        return all(verified)

    def units_by_source(self) -> list[OfSource[str]]:
        """The units of each source as the keys take them; all parts are known."""
        by_part = self.units_by_part()

        def names(parts: Sequence[Part]) -> list[str]:
            return [name for part in parts for name in by_part[part]]

        return [
            OfSource(source.name, names(source.training), names(source.validation))
            for source in self.sources
        ]

    def units_by_part(self) -> dict[Part, list[str]]:
        """Names of the units of each part, without those of damaged files."""
        reports = self.used_reports()
        return {
            part: [unit.name for unit in reports[part].units] for part in self.parts
        }

    def used_reports(self) -> dict[Part, PartReport]:
        """The reports of the parts that are known, without damaged files."""
        return without_damaged_files(self.reports)

    def left_out(self, duplicates: int = 0, also_validation: int = 0) -> LeftOut:
        """The records that are left out.

        Args:
            duplicates, also_validation: counts of a selection of the units; see `Selection`.
        """
        names = ("records", "empty", "too_short", "bad_records", "bad_files")
        used = self.used_reports()
        reports = [used[part] for part in self.parts if part in used]
        counts = {
            name: sum(getattr(report, name) for report in reports) for name in names
        }
        bad = list(chain.from_iterable(report.bad for report in reports))
        return LeftOut(
            **counts,
            duplicates=duplicates,
            also_validation=also_validation,
            bad=tuple(bad[:NAMED]),
            own_files=dict(Counter(self.not_text.own.values())),
            other_files=dict(self.not_text.others),
            duplicates_dropped=self.data.deduplicate,
        )

    def inexpressible(self, recipe: Recipe) -> Inexpressible:
        """The text of all units that the tokenizer has no token for.

        Raises:
            DataError: it is too much, of all text or of a file.
        """
        # Unknown tokens, lost bytes and all bytes of each file, int64 [3], by its name.
        losses = defaultdict[str, np.ndarray](lambda: np.zeros(3, np.int64))
        files = dict[str, TextInput]()
        reports = self.used_reports()
        for part in self.parts:
            for unit in reports[part].units:
                lost = open_unit(recipe, unit.name).lost()
                if lost is None:
                    return Inexpressible()
                begin = 0
                for number, count in unit.files:
                    file = part.files[number]
                    files[str(file)] = file
                    losses[str(file)] += lost[begin : begin + count].sum(axis=0)
                    begin += count
        worst = [name for name in losses if losses[name][1]]
        worst.sort(key=lambda name: -losses[name][1])
        if not worst:
            return Inexpressible()
        for name in worst:
            _, lost_bytes, size = losses[name].tolist()
            if lost_bytes > max(FEW_BYTES, LARGEST_LOSS * size):
                raise _too_much_lost(files[name], losses[name], self.data)
        total = sum(losses.values(), np.zeros(3, np.int64))
        if total[1] > LARGEST_LOSS * total[2]:
            raise _too_much_lost(files[worst[0]], losses[worst[0]], self.data)
        return Inexpressible(
            unknown=int(total[0]),
            share=float(total[1] / total[2]),
            files=tuple(f"{name}: {losses[name][1]:,} bytes" for name in worst[:NAMED]),
        )
