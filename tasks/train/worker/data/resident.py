"""Token shards in a device's memory, and batches built there: the same bytes as `loader.to_batch` makes of the reader's rows."""

# pyright: reportUnknownMemberType=false
import logging

import numpy as np
import torch

from infini_llama.model.loss import IGNORE_INDEX
from infini_llama.tasks.preprocess.tokens.reader import TokenReader

# Of a GPU's memory that the tokens may take; the memory estimate leaves twice that free.
SHARE = 0.1
# torch computes with few unsigned types; the bits are those of a signed one, of which gathered tokens lose the sign.
SIGNED = {np.dtype(np.uint16): (np.int16, 0xFFFF), np.dtype(np.uint32): (np.int32, 0xFFFFFFFF)}
log = logging.getLogger("infini_llama.worker")


class ResidentTokens:
    """The token stream of a split and where its documents and answers begin, on one device.

    Attributes:
        stream: tokens in their stored width, [tokens].
        beginnings: first tokens of documents, int64, ascending and distinct.
        answers: first tokens of documents, and of their answers (data.loss_on: answer), int64 [documents] each; else None.
    """

    def __init__(self, reader: TokenReader, device: torch.device, documents: bool) -> None:
        signed, self.mask = SIGNED[reader.dtype]
        self.stream = torch.empty(sum(reader.tokens), dtype=torch.from_numpy(np.empty(0, signed)).dtype, device=device)
        filled = 0
        for tokens in reader.shards():
            # A copy in memory: torch takes no read-only view of a file.
            self.stream[filled : filled + len(tokens)] = torch.from_numpy(tokens.view(signed).copy()).to(device)
            filled += len(tokens)
        offsets = reader.document_offsets()[:-1] if documents or reader.loss_on_answers else np.empty(0, np.int64)
        self.beginnings = torch.from_numpy(np.unique(offsets)).to(device)
        self.answers = None
        if reader.loss_on_answers:
            begins = (
                offsets,
                offsets + np.concatenate([reader.prompts[number] for number in range(len(reader.paths))]),
            )
            self.answers = tuple(torch.from_numpy(places).to(device) for places in begins)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """Tokens int64 at these places of the stream, of the same shape."""
        return self.stream[places].long() & self.mask

    def of_answers(self, labels: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """`labels` of these places of the stream; where answers alone are learned, IGNORE_INDEX for all others."""
        if self.answers is None:
            return labels
        documents, answers = self.answers
        document = torch.searchsorted(documents, places.contiguous(), right=True) - 1
        return labels.masked_fill(places < answers[document], IGNORE_INDEX)


class ResidentRows:
    """A row table on the device of its tokens, and batches of its rows."""

    def __init__(self, reader: TokenReader, tokens: ResidentTokens) -> None:
        self.tokens, self.device, self.padding = tokens, tokens.stream.device, reader.padding
        self.starts = torch.from_numpy(np.array(reader.starts)).to(self.device)
        self.pieces, self.most_pieces = None, 0
        if reader.pieces is not None:
            self.pieces = torch.from_numpy(np.array(reader.pieces)).to(self.device)
            self.most_pieces = int(np.diff(reader.starts).max(initial=1))
        self.places = torch.arange(reader.sequence_length + 1, device=self.device)

    def batch(self, rows: torch.Tensor, isolate: bool) -> tuple[torch.Tensor, ...]:
        """Inputs and labels int64 [b, L] of rows int64 [b], and with `isolate` the documents of the inputs, int32 [b, L].

        Nothing here waits for the device: no shape depends on a value on it.
        """
        if self.pieces is not None:
            return self._packed(rows, self.pieces, isolate)
        places = self.starts[rows][:, None] + self.places
        tokens = self.tokens.at(places)
        labels = self.tokens.of_answers(tokens[:, 1:], places[:, 1:])
        if not isolate:
            return tokens[:, :-1], labels
        numbers = torch.searchsorted(self.tokens.beginnings, places, right=True)
        return tokens[:, :-1], labels, (numbers - numbers[:, :1]).int()[:, :-1]

    def _packed(self, rows: torch.Tensor, pieces: torch.Tensor, isolate: bool) -> tuple[torch.Tensor, ...]:
        """Row i holds pieces starts[i] … starts[i + 1] - 1, read as if every row had as many as the one with the most."""
        first, end = self.starts[rows][:, None], self.starts[rows + 1][:, None]
        numbers = first + torch.arange(self.most_pieces, device=self.device)
        begin, sizes = pieces[numbers.clamp(max=len(pieces) - 1)].unbind(-1)
        sizes = torch.where(numbers < end, sizes, 0)
        ends = sizes.cumsum(dim=1)  # in the row, [b, pieces]
        places = self.places.expand(len(rows), -1).contiguous()
        piece = torch.searchsorted(ends, places, right=True)  # of each token, [b, L + 1]
        filled = places < ends[:, -1:]
        piece = piece.clamp(max=self.most_pieces - 1)
        offsets = places - (ends - sizes).gather(1, piece)  # in the piece
        stream = torch.where(filled, begin.gather(1, piece) + offsets, 0)
        tokens = torch.where(filled, self.tokens.at(stream), self.padding)
        counts = (filled & (offsets > 0))[:, 1:]  # nothing in the row leads to a piece's first token
        labels = self.tokens.of_answers(tokens[:, 1:].masked_fill(~counts, IGNORE_INDEX), stream[:, 1:])
        if not isolate:
            return tokens[:, :-1], labels
        return tokens[:, :-1], labels, torch.where(filled, piece, -1).int()[:, :-1]


def is_resident(readers: list[TokenReader], device: torch.device) -> bool:
    """Whether the tokens of these row tables are kept in the device's memory: on a GPU, if they take at most SHARE of it."""
    if device.type != "cuda":
        return False
    need = sum(readers[0].tokens) * readers[0].dtype.itemsize
    need += sum(table.nbytes for reader in readers for table in (reader.starts, reader.pieces) if table is not None)
    _, total = torch.cuda.mem_get_info(device)
    resident = need <= SHARE * total
    log.info("training tokens, %.2f GiB: kept in the memory of the %s", need / 2**30, "GPU" if resident else "host")
    return resident
