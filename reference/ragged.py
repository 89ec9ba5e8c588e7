"""Ragged experts: which rows of a token buffer belong to which expert, and where its column-wise scales go.

Tokens are sorted by expert. `offsets` [experts + 1] says where each expert's rows start and where the used
part of the buffer ends; `counts` [experts] says how many of an expert's rows are valid (absent: all). Rows
between an expert's count and the next offset, and rows past `offsets[-1]`, are padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_ALIGNMENT = 256


@dataclass(frozen=True)
class Experts:
    """Rows owned by each expert: expert e owns rows starts[e] : starts[e] + counts[e] of a token buffer.

    starts: first row of each expert, not decreasing, each a multiple of `alignment`.
    counts: valid rows of each expert; they end before the next expert starts and within `capacity`.
    capacity: rows of the buffer.
    alignment: what every start is declared to be a multiple of, 1 to 256. It also fixes the layout of
    column-wise scales (see `colwise_row`).
    ValueError: anything that breaks these rules, with the value and the rule.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    capacity: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.capacity < 0:
            raise ValueError(f"capacity is {self.capacity}: it is a number of rows and must not be negative")
        if not 1 <= self.alignment <= MAX_ALIGNMENT:
            raise ValueError(f"alignment is {self.alignment}: expected 1 to {MAX_ALIGNMENT}")
        if len(self.starts) != len(self.counts):
            raise ValueError(f"{len(self.starts)} starts and {len(self.counts)} counts: expected one of each an expert")
        if self.starts and self.starts[0] != 0:
            raise ValueError(f"starts[0] = {self.starts[0]}: the first expert must start at row 0")
        for e, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            if start % self.alignment:
                raise ValueError(f"starts[{e}] = {start} is not a multiple of the alignment {self.alignment}")
            end = self.starts[e + 1] if e + 1 < len(self.starts) else self.capacity
            if end < start:
                what = f"starts[{e + 1}]" if e + 1 < len(self.starts) else "capacity"
                raise ValueError(f"{what} = {end} is less than starts[{e}] = {start}: starts must not decrease")
            if not 0 <= count <= end - start:
                raise ValueError(
                    f"counts[{e}] = {count} does not fit: expert {e} has room for {end - start} rows "
                    f"(rows {start} to {end})"
                )

    @classmethod
    def from_offsets(
        cls,
        offsets: torch.Tensor | Sequence[int],
        counts: torch.Tensor | Sequence[int] | None = None,
        capacity: int | None = None,
        alignment: int = 1,
    ) -> Experts:
        """Gives the experts of offsets [experts + 1] and counts [experts], both checked.

        offsets: int32 or int64 tensor, or a sequence; begins with 0, does not decrease, ends at or before
        capacity, every entry a multiple of alignment. counts: int32 or int64 tensor, or a sequence; None:
        every row is valid.
        capacity: rows of the buffer; None: offsets[-1]. ValueError: names the value and the rule it breaks.
        """
        bounds = _integers("offsets", offsets)
        if not bounds:
            raise ValueError("offsets are empty: expected one entry an expert and one more, beginning with 0")
        if bounds[0] != 0:
            raise ValueError(f"offsets[0] = {bounds[0]}: offsets must begin with 0")
        for e in range(1, len(bounds)):
            if bounds[e] < bounds[e - 1]:
                raise ValueError(
                    f"offsets[{e}] = {bounds[e]} is less than offsets[{e - 1}] = {bounds[e - 1]}: "
                    "offsets must not decrease"
                )
        rows = bounds[-1] if capacity is None else capacity
        if bounds[-1] > rows:
            raise ValueError(
                f"offsets[{len(bounds) - 1}] = {bounds[-1]} is past the buffer, which has {rows} rows: "
                "the last offset must not exceed the capacity"
            )
        if not 1 <= alignment <= MAX_ALIGNMENT:
            raise ValueError(f"alignment is {alignment}: expected 1 to {MAX_ALIGNMENT}")
        for e, bound in enumerate(bounds):
            if bound % alignment:
                raise ValueError(f"offsets[{e}] = {bound} is not a multiple of the alignment {alignment}")
        room = tuple(after - before for before, after in itertools.pairwise(bounds))
        valid = room if counts is None else _integers("counts", counts)
        if len(valid) != len(room):
            raise ValueError(f"counts have {len(valid)} entries: expected {len(room)}, one less than offsets")
        for e, (count, space) in enumerate(zip(valid, room, strict=True)):
            if not 0 <= count <= space:
                raise ValueError(
                    f"counts[{e}] = {count} does not fit between offsets[{e}] = {bounds[e]} and "
                    f"offsets[{e + 1}] = {bounds[e + 1]}: expected 0 to {space}"
                )
        return cls(bounds[:-1], valid, rows, alignment)

    @classmethod
    def single(cls, rows: int) -> Experts:
        """Gives one expert that owns all rows of a plain matrix."""
        return cls((0,), (rows,), rows, MAX_ALIGNMENT)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def full(self) -> bool:
        """Whether every row of the buffer is owned."""
        return sum(self.counts) == self.capacity

    def valid_rows(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives bool [capacity]: whether a row is owned by an expert."""
        return self.row_expert(device) >= 0

    def row_expert(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives int64 [capacity]: the expert that owns a row, -1 for padding."""
        owner = torch.full((self.capacity,), -1, dtype=torch.int64, device=device)
        for e, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            owner[start : start + count] = e
        return owner

    def row_index(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives int64 [capacity]: a row's number within its expert, -1 for padding."""
        owner = self.row_expert(device)
        starts = torch.tensor(self.starts or (0,), dtype=torch.int64, device=device)
        rows = torch.arange(self.capacity, dtype=torch.int64, device=device)
        return torch.where(owner >= 0, rows - starts[owner.clamp(min=0)], -1)

    def _spread(self, block: int) -> int:
        """How many scale rows each expert is moved by beyond starts[e] // block."""
        if block < 1:
            raise ValueError(f"block is {block}: expected a positive number of rows")
        return 0 if self.alignment % block == 0 else 1

    def colwise_rows(self, block: int) -> int:
        """Gives the number of rows of compact column-wise scales for blocks of `block` rows.

        ceil(capacity / block) when the alignment is a multiple of block, else capacity // block + experts.
        """
        if self._spread(block):
            return self.capacity // block + len(self)
        return -(-self.capacity // block)

    def colwise_row(self, expert: int, index: int, block: int) -> int:
        """Gives the scale row of an expert's block number `index`.

        starts[expert] // block + index when the alignment is a multiple of block, else that plus `expert`; so
        blocks of different experts never share a row. IndexError: no such expert or block.
        """
        if not 0 <= expert < len(self):
            raise IndexError(f"expert {expert} does not exist: there are {len(self)}")
        blocks = -(-self.counts[expert] // block)
        if not 0 <= index < blocks:
            raise IndexError(
                f"block {index} of expert {expert} does not exist: its {self.counts[expert]} rows "
                f"make {blocks} blocks of {block}"
            )
        return self.starts[expert] // block + self._spread(block) * expert + index

    def owned_colwise_rows(self, block: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives bool [colwise_rows(block)]: whether a scale row belongs to a block with a valid row."""
        owned = torch.zeros(self.colwise_rows(block), dtype=torch.bool, device=device)
        for e, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            first = start // block + self._spread(block) * e
            owned[first : first + -(-count // block)] = True
        return owned

    def colwise_slots(self, block: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives int64 [capacity]: scale row * block + place in the block of valid rows, -1 for padding."""
        owner, index = self.row_expert(device), self.row_index(device)
        starts = torch.tensor(self.starts or (0,), dtype=torch.int64, device=device)
        known = owner.clamp(min=0)
        first = torch.div(starts[known], block, rounding_mode="floor") + self._spread(block) * known
        return torch.where(owner >= 0, first * block + index, -1)

    def slot_rows(self, block: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Gives int64 [colwise_rows(block) * block]: the row that stands at a slot, -1 for none."""
        slots = self.colwise_slots(block, device)
        rows = torch.full((self.colwise_rows(block) * block,), -1, dtype=torch.int64, device=device)
        rows[slots[slots >= 0]] = torch.arange(self.capacity, device=device)[slots >= 0]
        return rows

    def blocks(self, block: int) -> Experts:
        """Gives the experts of the block-aligned buffer, which has colwise_rows(block) * block rows.

        There every expert starts at a multiple of `block` and owns whole blocks: its valid rows, filled up
        with zeros to a multiple of `block`. It is the layout of column-wise blocks, of their rotation and of
        transposed codes.
        """
        starts = tuple((start // block + self._spread(block) * e) * block for e, start in enumerate(self.starts))
        counts = tuple(-(-count // block) * block for count in self.counts)
        return Experts(starts, counts, self.colwise_rows(block) * block, block)

    def to_blocks(self, x: torch.Tensor, block: int) -> torch.Tensor:
        """Gives the rows of x [capacity, ...] in the block-aligned buffer, zeros where no row stands."""
        slots = self.colwise_slots(block, x.device)
        moved = torch.zeros((self.colwise_rows(block) * block, *x.shape[1:]), dtype=x.dtype, device=x.device)
        moved[slots[slots >= 0]] = x[slots >= 0]
        return moved

    def from_blocks(self, blocks: torch.Tensor, block: int, fill: float = 0) -> torch.Tensor:
        """Gives the rows of the block-aligned buffer in their places [capacity, ...], `fill` elsewhere."""
        slots = self.colwise_slots(block, blocks.device)
        rows = torch.full((self.capacity, *blocks.shape[1:]), fill, dtype=blocks.dtype, device=blocks.device)
        rows[slots >= 0] = blocks[slots[slots >= 0]]
        return rows


def _integers(name: str, values: torch.Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor):
        if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} have dtype {values.dtype} and shape {tuple(values.shape)}: expected int32 or int64, "
                "one dimension"
            )
        return tuple(int(value) for value in values.tolist())
    return tuple(int(value) for value in values)
