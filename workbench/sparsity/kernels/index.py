"""The index arrays of a block-sparse weight, and weights stored with and without their zero blocks.

A compact weight is a tensor [non-zero blocks, block, block], in the order of the rows of blocks. Its index says where
the blocks belong, in the order of rows and in the order of columns, because a product reads one and its gradient the
other. All index arrays are in one tensor. Its length depends on the number of blocks alone, which stays while a pattern
moves, so that the new index is copied over the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.base.errors import InvalidArgument

BLOCKS = (16, 32, 64)
"""Sides of blocks for which there are kernels."""
GROUP_COLUMNS = 128
"""Columns that a program of the weight gradient computes, from several blocks of one line.

The tensor cores of Hopper multiply tiles with a long side of a multiple of 64."""

_ALIGNMENT = 4
"""Index arrays begin at multiples of 16 bytes, so that kernels read them in whole words whatever their lengths are."""


class Lines(NamedTuple):
    """The non-zero blocks in the order of lines, which are the rows of blocks or the columns of blocks.

    `starts` [lines + 1] says where each line begins in the two arrays [non-zero blocks] that follow: `others` is a
    block's place along the line, and `slots` its place in the compact weight. `order` [lines] has the longest line
    first, so that programs that run last are short ones.
    """

    starts: Tensor
    others: Tensor
    slots: Tensor
    order: Tensor


class Groups(NamedTuple):
    """Groups of blocks of one line that the weight gradient computes together: their lines, and their first blocks.

    Lines are rows of blocks, or columns of blocks where the weight has more rows than columns, because longer lines
    fill more of their last group. Unused entries are -1.
    """

    lines: Tensor
    first: Tensor


class Sections(NamedTuple):
    """The parts of an index tensor."""

    by_row: Lines
    by_column: Lines
    groups: Groups


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """The stored blocks of a weight [rows, cols]; `data` holds the index arrays (int32) on the weight's device."""

    rows: int
    cols: int
    block: int
    num_blocks: int
    data: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor, block: int) -> BlockIndex:
        """Build the index of a mask (bool [rows / block, cols / block]) that is true where a block is stored.

        Raises `InvalidArgument` if the mask is no matrix of bools, or if there are no kernels for this block.
        """
        if mask.ndim != 2 or mask.dtype != torch.bool:
            raise InvalidArgument(
                f"A mask of blocks is a matrix of bools; this one has shape {list(mask.shape)} and {mask.dtype}."
            )
        if block not in BLOCKS:
            raise InvalidArgument(
                f"There are kernels for blocks of {', '.join(map(str, BLOCKS))}, and none for {block}. "
                "Multiply by the masked dense weight instead."
            )
        rows, cols = mask.shape[0] * block, mask.shape[1] * block
        by_row, by_column = _lines(mask), _lines(mask.T)
        slot_of = torch.full(mask.shape, -1, dtype=torch.long, device=mask.device)
        slot_of[mask] = by_row.slots
        by_column = by_column._replace(slots=slot_of.T[mask.T])
        num_blocks = len(by_row.others)
        starts, per_group = (by_column if rows > cols else by_row).starts, GROUP_COLUMNS // block
        counts = (starts.diff() + per_group - 1) // per_group
        lines = torch.arange(len(counts), device=starts.device).repeat_interleave(counts)
        place = torch.arange(len(lines), device=starts.device) - (counts.cumsum(0) - counts)[lines]
        groups = Groups(lines, starts[lines] + place * per_group)
        sizes = _sizes(rows, cols, block, num_blocks)
        data = torch.full((index_length(rows, cols, block, num_blocks),), -1, dtype=torch.int32, device=mask.device)
        parts = (*by_row, *by_column, *groups)
        for part, room in zip(parts, data.split([_aligned(size) for size in sizes]), strict=True):
            room[: len(part)] = part
        return cls(rows, cols, block, num_blocks, data)

    @property
    def sections(self) -> Sections:
        """Views of the index arrays."""
        sizes = _sizes(self.rows, self.cols, self.block, self.num_blocks)
        rooms = self.data.split([_aligned(size) for size in sizes])
        parts = [room[:size] for room, size in zip(rooms, sizes, strict=True)]
        return Sections(Lines(*parts[:4]), Lines(*parts[4:8]), Groups(*parts[8:]))

    @property
    def coordinates(self) -> tuple[Tensor, Tensor]:
        """Row and column of blocks of every stored block, in the order of the compact weight."""
        starts, cols = self.sections.by_row[:2]
        lines = torch.arange(len(starts) - 1, device=self.data.device)
        # Without `output_size`, the host would wait for the device to learn how long the result is.
        return lines.repeat_interleave(starts.diff(), output_size=self.num_blocks), cols.long()

    @property
    def mask(self) -> Tensor:
        """Bools [rows / block, cols / block], true where a block is stored."""
        mask = torch.zeros(self.rows // self.block, self.cols // self.block, dtype=torch.bool, device=self.data.device)
        mask[self.coordinates] = True
        return mask

    def to(self, device: torch.device | str) -> BlockIndex:
        return BlockIndex(self.rows, self.cols, self.block, self.num_blocks, self.data.to(device))


def index_length(rows: int, cols: int, block: int, num_blocks: int) -> int:
    """Return the number of elements (int32) of the index of a weight [rows, cols] with so many stored blocks."""
    return sum(map(_aligned, _sizes(rows, cols, block, num_blocks)))


def to_compact(dense: Tensor, index: BlockIndex) -> Tensor:
    """Return the stored blocks [non-zero blocks, block, block] of a dense weight [rows, cols]."""
    if tuple(dense.shape) != (index.rows, index.cols):
        raise InvalidArgument(
            f"The weight has shape {list(dense.shape)}, and its pattern is for [{index.rows}, {index.cols}]."
        )
    rows, cols = index.coordinates
    blocks: Tensor = dense.unflatten(1, (-1, index.block)).unflatten(0, (-1, index.block))
    return blocks[rows, :, cols]


def to_dense(compact: Tensor, index: BlockIndex) -> Tensor:
    """Return the dense weight [rows, cols] of stored blocks, with zeros where no block is stored."""
    _check_compact(compact, index)
    blocks = compact.new_zeros(index.rows // index.block, index.cols // index.block, index.block, index.block)
    blocks = blocks.index_put(index.coordinates, compact)
    return blocks.transpose(1, 2).reshape(index.rows, index.cols)


def move(compact: Tensor, old: BlockIndex, new: BlockIndex) -> Tensor:
    """Return the blocks stored by `new`: those that `old` stores too are kept, and the others are zero.

    The same function moves a weight, its gradient and the state of its optimiser.
    """
    _check_compact(compact, old)
    if (old.rows, old.cols, old.block) != (new.rows, new.cols, new.block):
        raise InvalidArgument(
            f"A pattern of blocks of {old.block} of a weight [{old.rows}, {old.cols}] cannot move to a pattern of "
            f"blocks of {new.block} of a weight [{new.rows}, {new.cols}]. Build both from masks of the same weight."
        )
    slot_of = torch.full_like(old.mask, -1, dtype=torch.long)
    slot_of[old.coordinates] = torch.arange(old.num_blocks, device=compact.device)
    slots = slot_of[new.coordinates]
    moved = compact.new_zeros(new.num_blocks, new.block, new.block)
    moved[slots >= 0] = compact[slots[slots >= 0]]
    return moved


def _check_compact(compact: Tensor, index: BlockIndex) -> None:
    expected = (index.num_blocks, index.block, index.block)
    if tuple(compact.shape) != expected:
        raise InvalidArgument(
            f"The compact weight has shape {list(compact.shape)}, and its pattern has {index.num_blocks} blocks: "
            f"{list(expected)} is needed."
        )


def _lines(mask: Tensor) -> Lines:
    counts = mask.sum(1)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    others = mask.nonzero()[:, 1]
    slots = torch.arange(len(others), device=mask.device)
    return Lines(starts, others, slots, counts.argsort(descending=True, stable=True))


def _sizes(rows: int, cols: int, block: int, num_blocks: int) -> list[int]:
    """Return the lengths of the index arrays; the number of groups is the largest that any pattern has."""
    row_lines, column_lines = rows // block, cols // block
    groups = num_blocks * block // GROUP_COLUMNS + min(num_blocks, min(row_lines, column_lines))
    lines = [[count + 1, num_blocks, num_blocks, count] for count in (row_lines, column_lines)]
    return [*lines[0], *lines[1], groups, groups]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
