"""`tensormap.replace` turns any tensor map into any other, field by field, and touches nothing else.

Faults this catches: a field written to another place, with its neighbour, without the number that is stored less one, a
stride that loses its upper bits, and a replacement of one thread that shows in another's map.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_numerics.virtual_gpu import VirtualGPUError, virtual_gpu
from moe_numerics.virtual_gpu.tensor_map import ELEMENT_BITS, SPREAD, TF32, TensorMap, decode, encode

KERNEL = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 from, .param .u64 to)
{{
    .reg .b32 %t, %k, %v, %n;
    .reg .b64 %p, %q, %d;
    .reg .pred %more;
    .shared .align 128 .b8 maps[256];
    ld.param.u64 %p, [from];
    ld.param.u64 %q, [to];
    mov.u32 %t, %tid.x;
    mad.wide.u32 %p, %t, 128, %p;
    mad.wide.u32 %q, %t, 128, %q;
    mov.u32 %k, maps;
    mad.lo.u32 %k, %t, 128, %k;
    {copy_in}
    {replacements}
    {copy_out}
    ret;
}}
"""
FIELDS = ("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
          "swizzle_mode", "fill_mode", "interleave_layout")  # fmt: skip


@st.composite
def maps(draw: st.DrawFn) -> TensorMap:
    rank = draw(st.integers(1, 5))
    kind = draw(st.sampled_from([code for code in ELEMENT_BITS if code not in SPREAD and code != 11]))

    def several(values: st.SearchStrategy[int], count: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    return TensorMap(
        draw(st.integers(0, 2**53)) * 16,
        ELEMENT_BITS[kind],
        several(st.integers(1, 2**32), rank),
        several(st.integers(1, 2**36 - 1).map(lambda n: 16 * n), rank - 1),
        several(st.integers(1, 256), rank),
        draw(st.integers(0, 3)),
        kind,
        several(st.integers(1, 8), rank),
        draw(st.booleans()),
    )


def _replacements(m: TensorMap, fields: tuple[str, ...], space: str) -> str:
    """PTX that writes these fields of `m`."""
    driver = {TF32 + 7: 11, TF32 + 8: 12}
    lists = {"box_dim": m.box, "global_dim": m.sizes, "global_stride": m.strides, "element_stride": m.steps}
    single = {"global_address": m.address, "rank": m.rank - 1, "elemtype": driver.get(m.kind, m.kind),
              "swizzle_mode": m.swizzle, "fill_mode": int(m.nan), "interleave_layout": 0}  # fmt: skip
    lines = []
    for field in fields:
        wide = field in ("global_address", "global_stride")
        register, bits = ("%d", 64) if wide else ("%v", 32)
        at = "[%k]" if space == "shared::cta" else "[%q]"
        # The last dimension first, so that one that spills into its neighbour shows.
        for ordinal, value in reversed(list(enumerate(lists.get(field, (single.get(field),))))):
            name = f"tensormap.replace.tile.{field}.{space}.b1024.b{bits} {at}"
            if field in lists:
                name += f", {ordinal}"
            if field in ("elemtype", "swizzle_mode", "fill_mode", "interleave_layout"):
                lines.append(f"{name}, {value};")
            else:
                lines.append(f"mov.b{bits} {register}, {value % 2**bits:#x}; {name}, {register};")  # type: ignore[operator]
    return "\n    ".join(lines)


def _run(words: np.ndarray, replacements: str, space: str) -> np.ndarray:
    """Every thread on 128 bytes of its own; [2, 32] words before and after."""
    given_words, out = torch.from_numpy(words.copy()), torch.zeros(2, 32, dtype=torch.int32)
    shared = space == "shared::cta"
    parts = {
        "copy_in": [f"ld.global.b32 %n, [%p+{n}]; st.{'shared' if shared else 'global'}.b32 "
                    f"[{'%k' if shared else '%q'}+{n}], %n;" for n in range(0, 128, 4)],
        "copy_out": [f"ld.shared.b32 %n, [%k+{n}]; st.global.b32 [%q+{n}], %n;" for n in range(0, 128, 4)],
    }  # fmt: skip
    text = KERNEL.format(
        copy_in="\n    ".join(parts["copy_in"]), replacements=replacements,
        copy_out="\n    ".join(parts["copy_out"]) if shared else "",
    )  # fmt: skip
    with virtual_gpu("sm_90a") as gpu:
        gpu.launch(text, "k", 1, 2, [given_words, out])
        assert gpu.findings == []
    return out.numpy()


@pytest.mark.parametrize("space", ["shared::cta", "global"])
@given(old=st.tuples(maps(), maps()), new=maps(), order=st.permutations(FIELDS))
def test_replacing_every_field_makes_the_other_map(
    space: str, old: tuple[TensorMap, TensorMap], new: TensorMap, order: list[str]
) -> None:
    # A type keeps the mark of tf32 that is there.
    before = [replace(m, kind=m.kind % TF32) for m in old]
    words = np.stack([np.frombuffer(encode(m), np.int32) for m in before])
    after = _run(words, _replacements(new, tuple(order), space), space)
    for row in after:
        assert decode(row.tobytes()) == new


@given(m=maps(), fields=st.lists(st.sampled_from(FIELDS), max_size=4), seed=st.integers(0, 2**32))
def test_replacing_fields_by_what_they_hold_changes_nothing(m: TensorMap, fields: list[str], seed: int) -> None:
    """Whatever the other 64 bytes hold."""
    words = np.stack([np.frombuffer(encode(m), np.int32)] * 2)
    words[:, 16:] = np.random.Generator(np.random.Philox(seed)).integers(-(2**31), 2**31, (2, 16))
    assert np.array_equal(_run(words, _replacements(m, tuple(fields), "shared::cta"), "shared::cta"), words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tensormap.replace.tile.elemtype.global.b1024.b32 [%q], 13;", "an immediate value from 0 to 12"),
        ("tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%q], %v;", "an immediate value from 0 to 3"),
        ("tensormap.replace.tile.box_dim.global.b1024.b32 [%q], 5, %v;", "an immediate dimension from 0 to 4"),
        ("tensormap.replace.tile.global_stride.global.b1024.b64 [%q], 4, %d;", "an immediate dimension from 0 to 3"),
    ],
)
def test_what_ptxas_refuses_is_refused(line: str, message: str) -> None:
    with pytest.raises(VirtualGPUError, match=message):
        _run(np.zeros((2, 32), np.int32), line, "global")
