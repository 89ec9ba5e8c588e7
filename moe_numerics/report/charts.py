"""Inline SVG for the HTML page: histograms as bars, and a map of where mismatches sit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup, escape

from moe_numerics.findings import COLUMN_BUCKETS
from moe_numerics.report.model import OutputResult

_WIDTH = 440
_ROW = 22
_LABEL = 96
_COUNT = 96
_MAP_LABEL = 44
_MAP_ROW = 16
_SHOWN_EXPERTS = 24
_MOST_ROWS = 40


def ulp_bars(output: OutputResult) -> Markup:
    """Bars of the elements by ULP distance from the reference."""
    bars = [(_ulp_label(label), count, _ulp_tone(label, output)) for label, count in output.ulp_histogram.items()]
    return _bars(f"Elements of {output.name} by ULP distance", bars)


def error_bars(output: OutputResult) -> Markup:
    """Bars of the elements by error over bound."""
    bars = [
        ("NaN" if label == "nan" else _range(label), count, "bad" if label in (">1", "nan") else "calm")
        for label, count in output.error_histogram.items()
    ]
    return _bars(f"Elements of {output.name} by error over bound", bars)


def mismatch_map(output: OutputResult) -> Markup:
    """Cells of expert x column, the stronger the more mismatches sit there (logarithmic)."""
    cells = {(expert, bucket): count for expert, bucket, count in output.mismatch_map}
    if not cells:
        return Markup("")
    rows = map_rows(output)
    parts = [
        _map_row(output, expert, _row_counts(cells, expert, output.columns), number * _MAP_ROW)
        for number, expert in enumerate(rows)
    ]
    bottom = len(rows) * _MAP_ROW
    last = max(output.columns - 1, 0)
    parts.append(
        Markup(
            '<text class="label" x="{}" y="{}">column 0</text>'
            '<text class="label" x="{}" y="{}" text-anchor="end">{}</text>'
        ).format(_MAP_LABEL, bottom + 14, _WIDTH, bottom + 14, last if last else "")
    )
    title = f"Where the mismatches of {output.name} sit, expert by column"
    return _svg(title, bottom + 20, Markup("").join(parts))


def map_rows(output: OutputResult) -> list[int]:
    """The experts that the map shows: all of a few, else those with mismatches, and no more than fit."""
    present = sorted({expert for expert, _, _ in output.mismatch_map})
    if output.experts and output.experts <= _SHOWN_EXPERTS:
        return [*(expert for expert in present if expert < 0), *range(output.experts)]
    return present[:_MOST_ROWS]


def map_left_out(output: OutputResult) -> int:
    """How many experts with mismatches the map has no room for."""
    return len({expert for expert, _, _ in output.mismatch_map} - set(map_rows(output)))


@dataclass(frozen=True)
class BitDifference:
    """The bits of two codes, most significant first, and for each position whether they differ."""

    expected: str
    got: str
    differs: tuple[bool, ...]


def bit_difference(expected_bits: str, got_bits: str) -> BitDifference:
    """Two hexadecimal bit patterns of one width, bit by bit."""
    width = 4 * max(len(expected_bits) - 2, len(got_bits) - 2)
    expected, got = (f"{int(bits, 16):0{width}b}" for bits in (expected_bits, got_bits))
    return BitDifference(expected, got, tuple(a != b for a, b in zip(expected, got, strict=True)))


def _shown_columns(columns: int) -> int:
    return min(max(columns, 1), COLUMN_BUCKETS)


def _row_counts(cells: Mapping[tuple[int, int], int], expert: int, columns: int) -> dict[int, int]:
    """Mismatches of an expert by shown column; a bucket of a narrow output is the column it was made from."""
    counts: dict[int, int] = {}
    for (owner, bucket), count in cells.items():
        if owner == expert:
            narrow = (2 * bucket + 1) * _shown_columns(columns) // (2 * COLUMN_BUCKETS)
            column = bucket if columns >= COLUMN_BUCKETS else narrow
            counts[column] = counts.get(column, 0) + count
    return counts


def _map_row(output: OutputResult, expert: int, counts: Mapping[int, int], y: int) -> Markup:
    """The cells of one expert, on a strip that stands for the columns without mismatches."""
    shown = _shown_columns(output.columns)
    size = (_WIDTH - _MAP_LABEL) / shown
    most = max(count for _, _, count in output.mismatch_map)
    name = str(expert) if expert >= 0 else "none" if output.experts else "rows"
    parts = [
        Markup(
            '<text class="label" x="{}" y="{}" text-anchor="end">{}</text>'
            '<rect class="empty" x="{}" y="{}" width="{}" height="{}"/>'
        ).format(_MAP_LABEL - 8, y + _MAP_ROW - 4, name, _MAP_LABEL, y + 0.5, _WIDTH - _MAP_LABEL, _MAP_ROW - 1)
    ]
    for column, count in sorted(counts.items()):
        where = f"{_expert_words(expert)}, {_column_words(column, shown, output.columns)}"
        parts.append(
            Markup(
                '<rect class="{}" fill-opacity="{:.2f}" x="{:.1f}" y="{}" width="{:.1f}" height="{}">'
                "<title>{}: {:,} mismatches</title></rect>"
            ).format(
                "bad" if output.unexplained else "calm",
                min(1.0, 0.3 + 0.7 * math.log1p(count) / math.log1p(most)),
                _MAP_LABEL + column * size + 0.5,
                y + 0.5,
                size - 1,
                _MAP_ROW - 1,
                where,
                count,
            )
        )
    return Markup("").join(parts)


def _expert_words(expert: int) -> str:
    return f"expert {expert}" if expert >= 0 else "rows of no expert"


def _column_words(cell: int, shown: int, columns: int) -> str:
    if columns <= shown:
        return f"column {cell}"
    # The first column whose middle lies in bucket b, the inverse of how buckets are numbered.
    first, after = (-((COLUMN_BUCKETS - 2 * columns * b) // (2 * COLUMN_BUCKETS)) for b in (cell, cell + 1))
    return f"columns {first} to {min(after, columns) - 1}"


def _range(label: str) -> str:
    return label.replace("-", " to ")


def _ulp_label(label: str) -> str:
    """`4-7` as `4 to 7`, and from 2^10 on as `2^10 to 2^11`, which still fits beside a bar."""
    if label == "nan":
        return "one is NaN"
    low, _, high = label.partition("-")
    if high and int(low) >= 1024:
        return f"2^{int(low).bit_length() - 1} to 2^{int(high).bit_length()}"
    return _range(label)


def _ulp_tone(label: str, output: OutputResult) -> str:
    if label == "0":
        return "good"
    return "bad" if output.unexplained else "calm"


def _bars(title: str, bars: list[tuple[str, int, str]]) -> Markup:
    """Horizontal bars, a row each, with logarithmic lengths: one element stays visible beside a million."""
    if not bars:
        return Markup("")
    most = max(count for _, count, _ in bars)
    room = _WIDTH - _LABEL - _COUNT
    parts: list[Markup] = []
    for number, (label, count, tone) in enumerate(bars):
        y = number * _ROW
        length = max(3.0, room * math.log10(count + 1) / math.log10(most + 1))
        parts.append(
            Markup(
                '<text class="label" x="{}" y="{}" text-anchor="end">{}</text>'
                '<rect class="{}" x="{}" y="{}" width="{:.1f}" height="{}" rx="2"/>'
                '<text class="count" x="{:.1f}" y="{}">{:,}</text>'
            ).format(
                _LABEL - 8,
                y + 15,
                label,
                tone,
                _LABEL,
                y + 3,
                length,
                _ROW - 6,
                _LABEL + length + 7,
                y + 15,
                count,
            )
        )
    words = "; ".join(f"{label}: {count:,}" for label, count, _ in bars)
    return _svg(f"{title}. {words}", len(bars) * _ROW, Markup("").join(parts))


def _svg(title: str, height: int, content: Markup) -> Markup:
    return Markup('<svg viewBox="0 0 {} {}" width="{}" height="{}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, height, _WIDTH, height, escape(title), content
    )
