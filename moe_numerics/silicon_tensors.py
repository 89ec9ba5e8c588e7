"""Tensor copies in the silicon comparison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_numerics.silicon_data import operand
from moe_numerics.silicon_scenes import WAIT, Scene, as_bytes
from moe_numerics.virtual_gpu.tensor_map import ELEMENT_BITS, ELEMENT_TYPE, TensorMap

__all__ = ["tensors"]

_CODE = {name: code for code, name in ELEMENT_TYPE.items()}


@dataclass(frozen=True)
class Tile:
    """A tensor, a box of it and where the box begins. swizzle: 0 none, 1, 2, 3 for 32, 64 and 128 bytes."""

    kind: str
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    swizzle: int = 0

    @property
    def name(self) -> str:
        words = ("x".join(map(str, part)) for part in (self.sizes, self.box, self.at))
        return f"{self.kind}.{'.'.join(words)}.swizzle{self.swizzle}"

    @property
    def map(self) -> TensorMap:
        """The tensor map with rows padded to 16 bytes."""
        bits = ELEMENT_BITS[_CODE[self.kind]]
        strides = []
        span = -(-self.sizes[0] * bits // 128) * 16
        for size in self.sizes[1:]:
            strides.append(span)
            span *= size
        return TensorMap(0, bits, self.sizes, tuple(strides), self.box, self.swizzle, _CODE[self.kind])

    @property
    def tensor_bytes(self) -> int:
        strides = self.map.strides
        return strides[-1] * self.sizes[-1] if strides else -(-self.sizes[0] * self.map.bits // 128) * 16

    @property
    def where(self) -> str:
        """The coordinates' registers."""
        return "{" + ", ".join(f"%c{k}" for k in range(len(self.at))) + "}"

    @property
    def moves(self) -> str:
        return " ".join(f"mov.b32 %c{k}, {v};" for k, v in enumerate(self.at))


_READY = """
    mov.u32 %s, tile; mov.u32 %bar, barrier;
    setp.ne.u32 %other, %t, 0;
"""
_MODULE = ".shared .align 1024 .b8 tile[{size}]; .shared .align 8 .b8 barrier[8];"
_REGISTERS = ".reg .b32 %k, %n, %v, %w, %bar, %c<5>; .reg .pred %q, %other; .reg .b64 %at;"


def _dump(size: int, out: int) -> str:
    """Copies the words of the tile to an output."""
    return f"""
    mov.u32 %n, %t;
    DUMP:
    setp.ge.u32 %q, %n, {size // 4};
    @%q bra DUMPED;
    mad.lo.u32 %k, %n, 4, %s; ld.shared.b32 %v, [%k];
    mad.lo.u32 %w, %c, {size // 4}, %n; mad.wide.u32 %at, %w, 4, %p{out}; st.global.b32 [%at], %v;
    add.u32 %n, %n, 128;
    bra DUMP;
    DUMPED:
    """


def _load(tile: Tile, space: str) -> Scene:
    size = tile.map.box_bytes
    copy = f"cp.async.bulk.tensor.{len(tile.at)}d.{space}.global.tile.mbarrier::complete_tx::bytes"
    ahead = f"cp.async.bulk.prefetch.tensor.{len(tile.at)}d.L2.global.tile"
    body = (
        f"""{_READY}{tile.moves}
    @%other bra READY;
    mbarrier.init.shared::cta.b64 [%bar], 1;
    fence.mbarrier_init.release.cluster;
    prefetch.tensormap [%p2];
    {ahead} [%p2, {tile.where}];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size};
    {copy} [%s], [%p2, {tile.where}], [%bar];
    READY:
    bar.sync 0;
    """
        + WAIT.format(label="WAIT", parity=0)
        + _dump(size, 1)
    )
    shows = (copy, ahead, "prefetch.tensormap", "bra")
    data = as_bytes(operand("u32", 0, tile.tensor_bytes // 4, 3))
    return Scene(
        f"{copy}.{tile.name}", body, shows, (data,), (size,), registers=_REGISTERS,
        module=_MODULE.format(size=size), maps=((tile.map, 0),),
    )  # fmt: skip


def tensors() -> Iterator[Scene]:
    """A tile that begins before its tensor."""
    yield _load(Tile("u32", (100,), (64,), (-8,)), "shared::cluster")
