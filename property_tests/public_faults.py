"""The list of public faults that the suite was built from: what each row is about, and of which kinds it is.

Kinds: FMT scalar codecs and packing; MXQ and NVQ quantisers; AMAX; RHT rotated transposes; SR stochastic rounding;
ACT-F and ACT-B activations; RAG ragged groups; SWZ scale layouts; RED reductions; HARN comparing and harnesses.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "PUBLIC_FAULTS", "PublicFault"]

KINDS = ("FMT", "MXQ", "NVQ", "AMAX", "RHT", "SR", "ACT-F", "ACT-B", "RAG", "SWZ", "RED", "HARN")


class PublicFault(NamedTuple):
    """A row: its id, one report, what went wrong, its kinds, and why no test has it, or nothing."""

    id: str
    report: str
    fault: str
    kinds: tuple[str, ...]
    inexpressible: str = ""


PUBLIC_FAULTS = (
    PublicFault("B01", "pytorch#178817", "E4M3 saturate vs NaN", ("FMT",)),
    PublicFault("B02", "pytorch#147466", "E8M0 cast", ("FMT", "MXQ")),
    PublicFault("B03", "sglang#31210", "ceil/rceil rounding", ("MXQ",)),
    PublicFault("B04", "ao#4725", "double rounding, mode", ("MXQ",)),
    PublicFault("B05", "mlx#4353", "floor/ceil/rceil mismatch", ("MXQ",)),
    PublicFault("B06", "flashinfer#4023", "E8M0 overflow", ("MXQ",)),
    PublicFault("B08", "TransformerEngine#3262", "E8M0 decode", ("FMT",)),
    PublicFault("B09", "flashinfer#2440", "amax denormal", ("MXQ",)),
    PublicFault("B10", "flashinfer#4679", "tiny amax overflow", ("NVQ", "AMAX")),
    PublicFault("B11", "compressed-tensors#595", "amax zero", ("NVQ", "MXQ")),
    PublicFault("B12", "Model-Optimizer#1397", "E4M3 scale NaN", ("NVQ",)),
    PublicFault("B15", "aiter#3992", "E2M1 ties", ("FMT", "NVQ")),
    PublicFault("B16", "tt-metal#51971", "rounding, subnormal", ("FMT",)),
    PublicFault("B17", "triton#11753", "double rounding", ("FMT", "MXQ")),
    PublicFault("B18", "ml_dtypes#401", "double rounding", ("FMT", "HARN")),
    PublicFault("B19", "b12x#388", "E4M3 subnormal", ("FMT", "NVQ")),
    PublicFault("B20", "ao#3123", "nibble order", ("FMT", "NVQ")),
    PublicFault("B21", "onnx#7784", "ceil helper", ("MXQ",)),
    PublicFault("B22", "DeepGEMM#35", "scale packing", ("SWZ",)),
    PublicFault("B23", "Megatron-LM#6588", "sReLU precision", ("ACT-F", "MXQ")),
    PublicFault("B24", "TileKernels#16", "amax reduction", ("AMAX",)),
    PublicFault("B25", "TensorRT-LLM#9551", "amax grouping", ("AMAX", "RAG")),
    PublicFault("B26", "triton#7349", "NaN in amax", ("AMAX", "MXQ")),
    PublicFault("B27", "TransformerEngine#3342", "format mix-up", ("MXQ", "ACT-B")),
    PublicFault("B28", "TransformerEngine#3424", "clamp boundary grad", ("ACT-B",)),
    PublicFault("B29", "flashinfer#3492", "clamped SwiGLU", ("ACT-F",)),
    PublicFault("B30", "onnxruntime#27221", "clamp default", ("ACT-F",)),
    PublicFault("B31", "cudnn-frontend#447", "clamp gradient", ("ACT-B",)),
    PublicFault("B32", "vllm#29273", "GLU interleave", ("ACT-F", "ACT-B")),
    PublicFault("B33", "mistral.rs#1867", "gelu variant", ("ACT-F", "ACT-B")),
    PublicFault("B34", "candle#1722", "silu overflow", ("ACT-B",)),
    PublicFault("B35", "TransformerEngine#1460", "operand order", ("ACT-B",)),
    PublicFault("B37", "TransformerEngine#2411", "RHT amax", ("RHT", "AMAX")),
    PublicFault("B38", "uzu#277", "RHT tail", ("RHT", "RAG")),
    PublicFault("B40", "TransformerEngine#2487", "SR seeding", ("SR",)),
    PublicFault("B42", "TransformerEngine#1490", "transpose consistency", ("MXQ",)),
    PublicFault("B43", "torch-xpu-ops#2951", "-0.0", ("FMT", "SR")),
    PublicFault("B44", "triton#10745", "e4m3fnuz", ("FMT",)),
    PublicFault("B45", "cutlass#3382", "DSL conversion", ("FMT", "HARN")),
    PublicFault("B65", "tt-metal#55724", "sReLU/sigmoid backward precision", ("ACT-B",)),
    PublicFault("B46", "pytorch#172439", "empty expert", ("RAG", "RED")),
    PublicFault("B47", "pytorch#193633", "padding leak", ("RAG", "AMAX", "RED")),
    PublicFault("B49", "flashinfer#3057", "padding leak", ("NVQ", "RAG")),
    PublicFault("B50", "TransformerEngine#3070", "scale padding", ("SWZ",)),
    PublicFault("B52", "marin#8339", "alignment", ("RAG", "RED")),
    PublicFault("B53", "flashinfer#3792", "grouping", ("RAG",)),
    PublicFault("B54", "DeepGEMM#343", "race", ("RED", "HARN")),
    PublicFault("B55", "Liger-Kernel#1248", "int32 / one expert takes all", ("RAG",)),
    PublicFault("B56", "DeepGEMM#444", "graph capture", ("HARN", "RAG")),
    PublicFault("B57", "Liger-Kernel#1413", "new-arch miscompile", ("ACT-B",)),
    PublicFault("B59", "cudnn-frontend#521", "nondeterminism", ("RED", "HARN")),
    PublicFault("B61", "pytorch#136181", "compile numerics", ("HARN",)),
    PublicFault("B62", "TransformerEngine#2044", "stale amax", ("AMAX",)),
    PublicFault("B63", "array-api-tests#42", "FTZ", ("HARN",)),
    PublicFault("B64", "pytorch#192497", "torch limits", ("HARN", "FMT")),
)
