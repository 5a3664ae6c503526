"""The inputs that a run is bound to, and what its training changed since."""

from pydantic import Field, PositiveInt

from infini_llama.configs.reading import JsonObject
from infini_llama.configs.schema import TrainingConfig
from infini_llama.model.config import LlamaConfig
from infini_llama.tasks.records.dataset import TextSummary
from infini_llama.tasks.records.record import Record


class SampleRange(Record):
    """Samples first … end-1."""

    first: int
    end: int


class LineageCurriculumStage(Record):
    """A stage of data.curriculum, and the digest of its row table."""

    sequence_length: int
    until: int | float
    row_table_digest: str


class LineageDataset(Record):
    """The dataset of a run and the order of its samples.

    Attributes:
        row_table_digest: of the row table chunks/<row_table>.
        weights: of each source, where data.sources has weights.
        curriculum: stages of other row lengths.
    """

    path: str
    digest: str
    row_table: str
    row_table_digest: str
    sequence_length: int
    weights: dict[str, float] | None = None
    curriculum: tuple[LineageCurriculumStage, ...] | None = None


class Conversation(Record):
    """Settings of a Hugging Face folder for generation and chat, which the run and its export keep.

    Attributes:
        end_tokens: IDs that end a text, of its config.json and generation_config.json.
        generation: its generation_config.json.
        chat_template: or several, by their names.
        special_tokens: of its tokenizer_config.json or special_tokens_map.json, where it has a chat
            template, which may name them.
        tokenizer_settings: of its tokenizer_config.json, where it has a chat template: further
            special tokens, and the side of padding and truncation.
    """

    end_tokens: tuple[int, ...] = ()
    generation: JsonObject = Field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    special_tokens: dict[str, str] = Field(default_factory=dict)
    tokenizer_settings: JsonObject = Field(default_factory=dict)

    def ends_with(self, end_of_text: int) -> tuple[int, ...]:
        """IDs that end a text: the dataset's end of text, then the end tokens."""
        return tuple(dict.fromkeys((end_of_text, *self.end_tokens)))


class InitialWeights(Record):
    """The Hugging Face folder that a run starts from.

    Attributes:
        digest: of its configuration and weights.
        max_position_embeddings: the length that it reads, which may be more than that of the run's
            rows; 0: not recorded.
        memory: whether they have learned to use a memory, so that a run goes on with the whole
            jitter.
    """

    path: str
    digest: str
    vocab_size: int
    max_position_embeddings: int = 0
    conversation: Conversation = Conversation()
    memory: bool = False


class Lineage(Record):
    """Written as lineage.json when a run starts, and again when training changes it.

    Attributes:
        text: as the last command read it.
        train: section `train`, as the last command set it.
        max_steps: optimizer steps of the whole run, also where the configuration says it in epochs
            or tokens.
        loss_weights: of each source, where they are not all alike.
        curriculum_ends: last step of each stage of data.curriculum.
        skipped_samples: ranges that rollbacks have left out.
        micro_batch_limit: the largest micro-batch after an out-of-memory error; None: the plan's.
        resumed_from: the path in runtime.resume that the run follows.
        resumed_checkpoint: the checkpoint there, to which `latest` or `best` pointed then.
    """

    dataset: LineageDataset
    text: TextSummary = TextSummary()
    model: LlamaConfig
    train: TrainingConfig
    max_steps: int
    init_from: InitialWeights | None = None
    loss_weights: dict[str, float] | None = None
    curriculum_ends: tuple[int, ...] = ()
    skipped_samples: tuple[SampleRange, ...] = ()
    micro_batch_limit: PositiveInt | None = None
    resumed_from: str | None = None
    resumed_checkpoint: str | None = None

    @property
    def conversation(self) -> Conversation:
        """The conversation settings of the model that the run started from, if any."""
        return self.init_from.conversation if self.init_from else Conversation()
