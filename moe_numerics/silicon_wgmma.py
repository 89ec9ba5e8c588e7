"""`wgmma` in the silicon comparison: random shared memory, seen through descriptors of every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_numerics.silicon_data import operand
from moe_numerics.silicon_scenes import Scene

__all__ = ["products"]

_DEPTH = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32}
_IMAGES = (8192, 32768)
"""Bytes of shared memory for A and B: rows of 32 bytes lie 128 bytes apart under the widest swizzle."""


@dataclass(frozen=True)
class Layout:
    """A descriptor without its address: offsets in bytes and the swizzle mode (0 none, 1: 128, 2: 64, 3: 32 bytes)."""

    name: str
    leading: int
    stride: int
    mode: int

    @property
    def bits(self) -> int:
        return (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | self.mode << 62


# K-major: rows in groups of eight, `stride` apart; without a swizzle the two 16-byte columns are `leading` apart.
_K_MAJOR = (
    Layout("none", 128, 256, 0),
    Layout("none_wide", 4096, 128, 0),
    Layout("swizzle_32", 16, 256, 3),
    Layout("swizzle_64", 16, 512, 2),
    Layout("swizzle_128", 16, 1024, 1),
)
# MN-major: 64, 32 or 16 elements of 16 bits a row, `leading` from one such column block to the next.
_MN_MAJOR = (
    Layout("swizzle_128", 2048, 1024, 1),
    Layout("swizzle_64", 1024, 512, 2),
    Layout("swizzle_32", 512, 256, 3),
)


def _image(kind: str, side: int) -> npt.NDArray[np.uint8]:
    fragment = {"tf32": "b32:f32", "e4m3": "b32:fp8", "e5m2": "b32:fp8"}.get(kind, f"b32:{kind}")
    return operand(fragment, 0, _IMAGES[side] // 4, side + 1).view(np.uint8)


def _special(image: npt.NDArray[np.uint8], seed: int) -> npt.NDArray[np.uint8]:
    """An image with random bits, so that NaN, infinities and the largest exponents occur, at one word in 16."""
    words = image.view(np.uint32).copy()
    random = operand("u32", 7, words.size, seed)
    words[seed % 16 :: 16] = random[seed % 16 :: 16]
    return words.view(np.uint8)


def _scene(
    columns: int, a: str, b: str, result: str, left: Layout | None, right: Layout, transpose: tuple[int, int] = (0, 0),
    signs: tuple[int, int] = (1, 1), accumulate: bool = True, special: bool = False,
) -> Scene:  # fmt: skip
    """One product [64, K] by [K, columns]; left None: operand A from registers."""
    depth = _DEPTH[a]
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.{result}.{a}.{b}"
    count = columns // 2 if result == "f32" else columns // 4
    registers = ", ".join(f"%d{n}" for n in range(count))
    image_a, image_b = _image(a, 0), _image(b, 1)
    if special:
        image_a, image_b = _special(image_a, 3), _special(image_b, 4)
    accumulator = operand("b32:f32" if result == "f32" else "b32:f16", 3, 128 * count)
    majors = f", {transpose[0]}, {transpose[1]}" if a in ("bf16", "f16") else ""
    if left is None:
        source = "{%a0, %a1, %a2, %a3}"
        majors = f", {transpose[1]}" if a in ("bf16", "f16") else ""
    else:
        source = "%da"
    copies = "\n    ".join(
        f"ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%at{side}+{part}]; "
        f"st.shared.v4.b32 [%k+{part + side * _IMAGES[0]}], {{%a0, %a1, %a2, %a3}};"
        for side in (0, 1) for part in range(0, _IMAGES[side], 2048)
    )  # fmt: skip
    loads = "\n    ".join(f"ld.global.b32 %d{n}, [%acc+{512 * n}];" for n in range(count))
    stores = "\n    ".join(f"st.global.b32 [%out+{512 * n}], %d{n};" for n in range(count))
    body = f"""
    mov.u32 %s, image;
    mad.lo.u32 %k, %t, 16, %s;
    mad.wide.u32 %at0, %t, 16, %p0; mad.wide.u32 %at1, %t, 16, %p1;
    mad.wide.u32 %acc, %t, 4, %p2; mad.wide.u32 %out, %t, 4, %p3;
    {copies}
    {loads}
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%at0];
    fence.proxy.async.shared::cta;
    bar.sync 0;
    shr.u32 %k, %s, 4; cvt.u64.u32 %da, %k;
    add.u64 %db, %da, {_IMAGES[0] >> 4};
    or.b64 %da, %da, {left.bits if left else 0:#x};
    or.b64 %db, %db, {right.bits:#x};
    setp.ne.b32 %q, {int(accumulate)}, 0;
    wgmma.fence.sync.aligned;
    {name} {{{registers}}}, {source}, %db, %q, {signs[0]}, {signs[1]}{majors};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    """
    about = [left.name if left else "registers", right.name]
    about += [f"transposed{transpose[0]}{transpose[1]}"] if any(transpose) else []
    about += [f"signs{signs[0]}{signs[1]}"] if signs != (1, 1) else []
    about += [] if accumulate else ["fresh"]
    about += ["special"] if special else []
    shows = (name, "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned", "wgmma.wait_group.sync.aligned")
    return Scene(
        f"{name}.{'.'.join(about)}", body, shows, (image_a, image_b, accumulator.view(np.uint8)), (512 * count,),
        registers=f".reg .b32 %k, %a<4>, %d<{count}>; .reg .b64 %at<2>, %acc, %out, %da, %db; .reg .pred %q;",
        module=f".shared .align 1024 .b8 image[{sum(_IMAGES)}];",
    )  # fmt: skip


def products() -> Iterator[Scene]:
    """Every type, layout, sign and width that a kernel here or of CUTLASS uses."""
    pairs = [("bf16", "bf16"), ("f16", "f16"), ("tf32", "tf32")]
    pairs += [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
    plain = _K_MAJOR[4]
    for a, b in pairs:
        for layout in _K_MAJOR:
            yield _scene(32, a, b, "f32", layout, layout)
        yield _scene(64, a, b, "f32", None, plain)
        yield _scene(32, a, b, "f32", plain, plain, special=True)
        yield _scene(16, a, b, "f32", plain, _K_MAJOR[0], accumulate=False)
        if a == b:
            yield _scene(8, a, b, "f32", plain, plain, signs=(-1, 1))
            yield _scene(24, a, b, "f32", None, plain, signs=(1, -1))
    for kind in ("bf16", "f16"):
        for layout in _MN_MAJOR:
            yield _scene(64, kind, kind, "f32", plain, layout, (0, 1))
            yield _scene(32, kind, kind, "f32", layout, plain, (1, 0))
        yield _scene(64, kind, kind, "f32", None, _MN_MAJOR[0], (0, 1))
        yield _scene(128, kind, kind, "f32", _MN_MAJOR[0], _MN_MAJOR[0], (1, 1))
    for a, b in (("f16", "f16"), ("e4m3", "e4m3"), ("e5m2", "e4m3")):
        yield _scene(32, a, b, "f16", plain, plain)
        yield _scene(64, a, b, "f16", None, plain)
        yield _scene(32, a, b, "f16", plain, plain, special=True)
    # The width of 32 is above, with every layout.
    for columns in (8 * n for n in range(1, 33) if n != 4):
        for a, b in (("bf16", "bf16"), ("tf32", "tf32"), ("e4m3", "e4m3")):
            yield _scene(columns, a, b, "f32", plain, plain)
