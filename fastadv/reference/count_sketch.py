"""The chunk-shift count sketch (Charikar, Chen and Farach-Colton 2002, with neighbours hashed together)."""

from __future__ import annotations

import torch
from torch import Tensor

from fastadv.coins import STEP, mixed, shifted

CHUNK = 32  # columns that share a hash
LIMIT = 2.0**50  # quanta that a value stays below


def descend(state: Tensor | int, number: Tensor) -> Tensor:
    """The state below a state with this number: of a copy, of a row in it, of a chunk in that."""
    return mixed(state + (number + 1) * STEP)


def count_sketch(
    values: Tensor, size: int, key: int, row_offset: int, column_offset: int, quantum: float, copies: int
) -> Tensor:
    """`[copies, size]` int64 of `[rows, columns]` values, a piece of a parameter that begins at the offsets.

    Element (r, c) of the parameter adds round(value / quantum), ties to even, to slot (start + c % 32) % size, where
    start is a hash of (copy, r, c // 32), and so is the sign of column c % 32. A value that is not below LIMIT quanta
    adds 2^(62 - i) to the chunk's i-th slot, for each i, instead. Sums are modulo 2^64.
    """
    rows, columns = values.shape
    device = values.device
    row = row_offset + torch.arange(rows, device=device)  # [rows]
    column = column_offset + torch.arange(columns, device=device)  # [columns]
    place = column % CHUNK  # [columns]
    first = column_offset // CHUNK
    chunk = column // CHUNK - first  # [columns], from 0
    chunks = (column_offset + columns + CHUNK - 1) // CHUNK - first
    slot = torch.arange(CHUNK, device=device)  # [32]

    quanta = values.to(torch.float64) / quantum  # [rows, columns]
    good = quanta.abs() < LIMIT  # not of NaN
    whole = torch.where(good, quanta, 0).round().to(torch.int64)
    bad = torch.zeros(rows, chunks, dtype=torch.int64, device=device).index_add(1, chunk, (~good).to(torch.int64))
    poison = bad[:, :, None] << (62 - slot)  # [rows, chunks, 32]

    sketches = []
    for copy in torch.arange(copies, device=device):
        of_row = descend(descend(key, copy), row)  # [rows]
        state = descend(of_row[:, None], first + torch.arange(chunks, device=device))  # [rows, chunks]
        start = (shifted(state, 32) * size) >> 32
        slots = (start[:, :, None] + slot) % size  # [rows, chunks, 32]
        negative = (state[:, chunk] >> place) & 1  # [rows, columns]
        signed = torch.where(negative == 1, -whole, whole)
        empty = torch.zeros(size, dtype=torch.int64, device=device)
        sketch = empty.index_add(0, ((start[:, chunk] + place) % size).flatten(), signed.flatten())
        sketches.append(sketch.index_add(0, slots.flatten(), poison.flatten()))
    return torch.stack(sketches)


def sketch_values(sketch: Tensor, quantum: float) -> Tensor:
    """A sketch in float64, like it; NaN all over where any slot is 2^61 or more from 0."""
    bad = ((sketch >= 2**61) | (sketch <= -(2**61))).any(-1, keepdim=True)
    return torch.where(bad, torch.nan, sketch.to(torch.float64) * quantum)
