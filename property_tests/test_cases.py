"""Cases: a file replays exactly, what cannot be is refused with its name, and tensors are what the case says."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from moe_numerics.cases import Case, CaseError, Edit, TensorSpec, Values, Window, gauntlet_case
from moe_numerics.drawing import Space
from moe_numerics.strategies import cases

GATE_UP = TensorSpec("gate_up", columns=2)
INPUTS = (
    GATE_UP,
    TensorSpec("grad"),
    TensorSpec("offsets", kind="offsets"),
    TensorSpec("counts", kind="counts"),
    TensorSpec("prob", "float32", "prob"),
)
SPACE = Space("swiglu.bwd.bf16", INPUTS, max_rows=80, max_hidden=128, max_elements=4000, big_elements=8000)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name].view(torch.int16), b[name].view(torch.int16))
        for name in a
    )


@given(cases(SPACE))
def test_json_round_trip_is_exact(case: Case) -> None:
    """Catches a field that the file forgets, or a number that changes on the way."""
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert again == case
    assert hash(again) == hash(case)
    assert again.digest() == case.digest()
    assert same_bits(again.tensors(INPUTS), case.tensors(INPUTS))


@given(cases(SPACE))
def test_repr_and_pickle_give_the_case_back(case: Case) -> None:
    """Catches a failure report whose pasted case is another one, and cases that cannot go to a worker process."""
    assert eval(repr(case), {"Case": Case, "Values": Values, "Edit": Edit, "Window": Window}) == case
    assert pickle.loads(pickle.dumps(case)) == case


@given(cases(SPACE))
def test_digest_tells_cases_apart(case: Case) -> None:
    """Catches a digest that leaves a field out: two failing cases would share a file."""
    changed = [
        case.replace(path="other"),
        case.replace(seed=case.seed + 1),
        case.replace(tail=case.tail + 1),
        case.replace(options={"limit": 7.0}),
        case.replace(counts=(*case.counts, 0)),
        case.replace(values={**case.values, "grad": Values("gaussian", 1 << 40)}),
    ]
    assert case.digest() not in {other.digest() for other in changed}


@given(cases(SPACE))
def test_offsets_and_rows_agree(case: Case) -> None:
    """Catches regions that overlap or do not fit, and a row that two experts or none own."""
    offsets, regions = case.offsets, case.regions
    assert offsets[0] == 0
    assert offsets[-1] + case.tail == case.capacity
    for expert, count in enumerate(case.counts):
        assert offsets[expert + 1] - offsets[expert] == regions[expert]
        assert offsets[expert] % case.alignment == 0
        assert count <= regions[expert]
        assert regions[expert] < max(count, case.room) + case.alignment
        assert case.padded or regions[expert] == count
    owned = [row for row in range(case.capacity) if case.locate(row) is not None]
    assert owned == case.valid_rows().tolist()
    assert len(owned) == case.tokens


@given(cases(SPACE))
def test_shapes_and_dtypes(case: Case) -> None:
    """Catches a tensor of another shape than the path is told, and counts or probabilities given unasked."""
    tensors = case.tensors(INPUTS)
    experts = len(case.counts)
    assert tensors["gate_up"].shape == (case.capacity, 2 * case.hidden)
    assert tensors["grad"].shape == (case.capacity, case.hidden)
    assert tensors["gate_up"].dtype == tensors["grad"].dtype == torch.bfloat16
    assert tensors["offsets"].dtype == getattr(torch, case.offsets_dtype)
    assert tensors["offsets"].tolist() == list(case.offsets)
    assert len(case.offsets) == experts + 1
    assert ("counts" in tensors) == case.padded
    assert ("prob" in tensors) == case.prob
    if case.padded:
        assert tensors["counts"].dtype == torch.int32
        assert tensors["counts"].tolist() == list(case.counts)
    if case.prob:
        assert tensors["prob"].shape == (case.capacity,)
        assert tensors["prob"].dtype == torch.float32


@given(cases(SPACE))
def test_layouts_hold_the_same_values(case: Case) -> None:
    """Catches an interleaved case whose gate and up differ from those of the case in halves."""
    halves = case.replace(layout="halves", hidden=128, values={})
    mixed = halves.replace(layout="interleaved:32")
    flat, blocks = halves.bits(GATE_UP), mixed.bits(GATE_UP)
    owned = case.valid_rows()
    for column in range(0, 128, 7):
        for part in (0, 1):
            physical = mixed.physical_column(part, column, 2)
            assert mixed.logical_column(physical, 2) == (part, column)
            assert (flat[owned, part * 128 + column] == blocks[owned, physical]).all()
    assert sorted(mixed.physical_column(p, c, 2) for p in (0, 1) for c in range(128)) == list(range(256))


@pytest.mark.parametrize(("fill", "bits"), [("zero", 0), ("nan", 0x7FC0), ("inf", 0x7F80)])
def test_padding_holds_what_the_case_says(fill: str, bits: int) -> None:
    """Catches padding that is harmless although the case says NaN, which would hide a padding leak (B47, B49)."""
    case = Case("p", (3, 0, 5), 32, alignment=4, padded=True, room=2, tail=3, padding_fill=fill)
    x = case.bits(TensorSpec("x"))
    assert case.offsets == (0, 4, 8, 16)
    padding = np.setdiff1d(np.arange(case.capacity), case.valid_rows())
    assert padding.tolist() == [3, 4, 5, 6, 7, 13, 14, 15, 16, 17, 18]
    assert (x[padding] == bits).all()
    assert (x[case.valid_rows()] != bits).any()


@given(cases(SPACE))
def test_padding_does_not_change_owned_values(case: Case) -> None:
    """Catches values that depend on what surrounds them: such cases could not show a padding leak."""
    other = case.replace(padding_fill="nan", tail=case.tail + 5, offsets_dtype="int64")
    for spec in (GATE_UP, INPUTS[1], INPUTS[4]):
        assert (case.bits(spec)[case.valid_rows()] == other.bits(spec)[case.valid_rows()]).all()


def test_edits_are_the_last_word() -> None:
    """Catches an edit in the wrong place: element 3 of expert 1's only token must be 0x0461, and nothing else."""
    plain = Case("p", (2, 1), 32, values={"x": Values()})
    edited = plain.replace(values={"x": Values(edits=(Edit(2, 3, 0x0461),))})
    a, b = plain.bits(TensorSpec("x")), edited.bits(TensorSpec("x"))
    assert (a == 0x3F80).all()
    assert b[2, 3] == 0x0461
    assert (a != b).sum() == 1
    assert "expert 1 has 1 token" in edited.describe()
    assert "expert 1 token 0: x[3] is 0x0461" in edited.describe()


def test_a_window_is_the_seeded_values_inside_and_ones_outside() -> None:
    """Catches a window whose values are not those of the whole tensor: shrinking to it would lose the failure."""
    whole = Case("p", (5, 4), 64, layout="interleaved:32", values={"gate_up": Values("gaussian", 9)})
    window = Values("gaussian", 9, window=Window(3, 7, 30, 34, 1, 2))
    part = whole.replace(values={"gate_up": window})
    a, b = whole.bits(GATE_UP), part.bits(GATE_UP)
    for row in range(9):
        for column in range(128):
            half, logical = whole.logical_column(column, 2)
            inside = 3 <= row < 7 and 30 <= logical < 34 and half == 1
            assert b[row, column] == (a[row, column] if inside else 0x3F80)


@given(cases(SPACE))
def test_values_depend_only_on_their_own_place(case: Case) -> None:
    """Catches values that move when another expert loses tokens: a shrunk case would be another case."""
    case = case.replace(values={}, padded=True)
    fewer = tuple(count // 2 if expert % 2 else count for expert, count in enumerate(case.counts))
    smaller = case.replace(counts=fewer)
    a, b = case.bits(GATE_UP), smaller.bits(GATE_UP)
    for expert, count in enumerate(fewer):
        start, old = smaller.offsets[expert], case.offsets[expert]
        assert (b[start : start + count] == a[old : old + count]).all()


GOLDEN = {
    "gate_up": "043ff7b7235ce2f3",
    "grad": "07913d041318f65f",
    "prob": "a4cfa4d0f490c7d0",
}


def test_the_gauntlet_is_the_same_everywhere() -> None:
    """Catches bits that depend on the machine or on a library's version: recorded digests of the fixed case."""
    case = gauntlet_case("swiglu.bwd.bf16", inputs=INPUTS)
    digests = {
        name: hashlib.sha256(case.bits(spec).astype("<u4").tobytes()).hexdigest()[:16]
        for name, spec in (("gate_up", GATE_UP), ("grad", INPUTS[1]), ("prob", INPUTS[4]))
    }
    assert digests == GOLDEN


def test_the_gauntlet_has_all_of_it() -> None:
    """Catches a gauntlet that lost a special value, an empty expert or an awkward count."""
    case = gauntlet_case("swiglu.bwd.bf16", inputs=INPUTS)
    tensors = case.tensors(INPUTS)
    owned = torch.from_numpy(case.valid_rows())
    gate, up = tensors["gate_up"].chunk(2, dim=1)
    for x in (gate[owned], up[owned], tensors["grad"][owned]):
        bits = x.contiguous().view(torch.int16).int() & 0xFFFF
        assert x.isnan().any()
        assert {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F} <= set(bits.unique().tolist())
        assert ((bits & 0x7F80 == 0) & (bits & 0x7F != 0)).any()
    prob = tensors["prob"][owned]
    assert (prob == 0).any()
    assert (prob == 1).any()
    assert ((prob >= 0) & (prob <= 1)).all()
    assert {0, 1, 15, 16, 17, 31, 32, 33, 127, 129} <= set(case.counts)
    assert any(region > count == 0 for region, count in zip(case.regions, case.counts, strict=True))
    assert 500 <= case.capacity <= 750
    assert not tensors["gate_up"][case.offsets[-1] :].isfinite().any()


@pytest.mark.parametrize(("alignment", "padded"), [(1, False), (32, False), (32, True), (256, True)])
def test_the_gauntlet_fits_every_alignment(alignment: int, padded: bool) -> None:
    """Catches a fixed case that some path cannot take."""
    case = gauntlet_case("p", inputs=INPUTS, alignment=alignment, padded=padded)
    assert all(offset % alignment == 0 for offset in case.offsets)
    assert Case.from_json(case.to_json()) == case


GOOD: dict[str, Any] = {
    "schema": 1,
    "path": "swiglu.fwd.bf16",
    "counts": [3, 0, 5],
    "hidden": 64,
    "values": {"x": {"kind": "gaussian", "seed": 1, "edits": [[0, 3, "0x0461"]]}},
}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"hiden": 64}, "'hiden' is not a key of the case"),
    ({"schema": 2}, "schema = 2 is unknown: expected 1"),
    ({"schema": True}, "schema = True"),
    ({"hidden": "64"}, "hidden = '64' is text: expected an integer"),
    ({"hidden": 64.0}, "hidden = 64.0 is a fraction: expected an integer"),
    ({"hidden": True}, "hidden = True is true or false: expected an integer"),
    ({"hidden": 0}, "hidden = 0 is out of range: expected 1 or more"),
    ({"hidden": None}, "hidden = None is null: expected an integer"),
    ({"counts": []}, r"counts = \[\] is empty"),
    ({"counts": 3}, "counts is an integer: expected a list"),
    ({"counts": [3, -1]}, r"counts\[1\] = -1 is out of range: expected 0 or more"),
    ({"counts": [1 << 31]}, "past int32: use offsets_dtype int64"),
    ({"counts": [1 << 40], "offsets_dtype": "int64"}, "expected fewer rows or columns"),
    ({"alignment": 257}, "alignment = 257 is out of range: expected 1 to 256"),
    ({"alignment": 2}, r"counts\[0\] = 3 is not a multiple of alignment = 2"),
    ({"room": 4}, "room = 4 without counts"),
    ({"padded": 1}, "padded = 1 is neither true nor false"),
    ({"layout": "interleaved"}, "layout = 'interleaved' is unknown"),
    ({"layout": 32}, "layout = 32 is unknown"),
    ({"layout": "interleaved:48"}, "48 is not a multiple of 32 columns"),
    ({"layout": "interleaved:96"}, "hidden = 64 is not a multiple"),
    ({"offsets_dtype": "int16"}, "offsets_dtype = 'int16' is unknown: expected one of int32, int64"),
    ({"padding_fill": "NaN"}, "padding_fill = 'NaN' is unknown"),
    ({"seed": -1}, "seed = -1 is out of range"),
    ({"seed": 1 << 64}, "seed = 18446744073709551616 is out of range"),
    ({"path": "a b"}, "path = 'a b' is not a name"),
    ({"profile": 3}, "profile = 3 is not a name"),
    ({"options": [1]}, "options is a list: expected names with values"),
    ({"options": {"limit": [7]}}, r"options.limit = \[7\] is not text, a number"),
    ({"options": {"limit": float("inf")}}, "options.limit = inf is not finite"),
    ({"values": {"x": "gaussian"}}, "values.x is text: expected an object"),
    ({"values": {"x": {"kind": "normal"}}}, "values.x.kind = 'normal' is unknown"),
    ({"values": {"x": {"kind": "plain", "sed": 1}}}, "'sed' is not a key of values.x"),
    ({"values": {"x": {"seed": "1"}}}, "values.x.seed = '1' is text: expected an integer"),
    ({"values": {"x": {"exponent": 301}}}, "values.x.exponent = 301 is out of range"),
    ({"values": {"x": {"edits": [[8, 0, "0x1"]]}}}, r"values.x.edits\[0\].row = 8 is past the 8 rows"),
    ({"values": {"x": {"edits": [[0, 0, 1]]}}}, r"values.x.edits\[0\].bits = 1 is not hexadecimal text"),
    ({"values": {"x": {"edits": [[0, 0]]}}}, r"values.x.edits\[0\] has 2 numbers: expected row, column, bits"),
    ({"values": {"x": {"edits": [[0, -1, "0x1"]]}}}, r"values.x.edits\[0\].column = -1 is out of range"),
    ({"values": {"x": {"window": [0, 9, 0, 1, 0, 1]}}}, "values.x.window.row_end = 9 is more than 8"),
    ({"values": {"x": {"window": [2, 1, 0, 1, 0, 1]}}}, "values.x.window.row_end = 1 is less than window.row = 2"),
]


def test_the_good_case_is_good() -> None:
    """Catches a base of the refusals below that is refused itself."""
    assert Case.from_json(GOOD).tensors([TensorSpec("x")])["x"].shape == (8, 64)


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_what_cannot_be_is_refused_by_name(change: dict[str, Any], text: str) -> None:
    """Catches a broken file that is taken for something else, and an error that does not say what is wrong."""
    with pytest.raises(CaseError, match=text):
        Case.from_json({**GOOD, **change})


@pytest.mark.parametrize("name", ["schema", "path", "counts", "hidden"])
def test_missing_keys_are_named(name: str) -> None:
    """Catches a KeyError or a silent default for what only the file can know."""
    with pytest.raises(CaseError, match=f"{name} is missing"):
        Case.from_json({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"y": Values()}, "values.y is no input of p: expected one of x"),
        ({"x": Values("router")}, "values.x.kind = 'router' is unknown"),
        ({"x": Values(edits=(Edit(0, 64, 1),))}, r"edits\[0\].column = 64 is past the 64 columns of x"),
        ({"x": Values(edits=(Edit(0, 0, 1 << 16),))}, r"edits\[0\].bits = 0x10000 has more bits than bfloat16"),
        ({"x": Values(window=Window(0, 1, 0, 1, 0, 2))}, "window.part_end = 2 is more than 1"),
    ],
)
def test_values_that_do_not_fit_the_inputs_are_refused(values: dict[str, Values], text: str) -> None:
    """Catches a case that names a tensor or an element which the path has not."""
    with pytest.raises(CaseError, match=text):
        Case("p", (2,), 64, values=values).tensors([TensorSpec("x")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "line 1 is not JSON"),
        (b"\xff{}", "byte 0 is not UTF-8"),
        (b"[1]", "the case is a list: expected an object"),
        (b'{"schema": 1, "schema": 1}', "'schema' stands twice"),
        (b'{"schema": NaN}', "NaN is not a JSON number"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "digits"),
        (b"[" * 200_000, "nested too deeply|not JSON"),
        (b"", "line 1 is not JSON"),
    ],
    ids=["cut short", "not text", "not an object", "twice", "NaN", "huge", "nested", "empty"],
)
def test_broken_files_are_refused_with_their_name(tmp_path: Path, text: bytes, message: str) -> None:
    """Catches a traceback where one clear line is due."""
    file = tmp_path / "case.json"
    file.write_bytes(text)
    with pytest.raises(CaseError, match=message) as caught:
        Case.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    """Catches an OSError that reaches the user."""
    with pytest.raises(CaseError, match=r"none\.json: cannot be read"):
        Case.load(tmp_path / "none.json")


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a half-written file, or a temporary one left behind, when the disk fails."""
    file = tmp_path / "case.json"
    case = Case.from_json(GOOD)
    case.save(file)
    assert Case.load(file) == case

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        case.replace(seed=5).save(file)
    monkeypatch.undo()
    assert Case.load(file) == case
    assert [p.name for p in tmp_path.iterdir()] == ["case.json"]
