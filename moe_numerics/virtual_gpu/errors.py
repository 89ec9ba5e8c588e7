"""What the virtual GPU reports: errors that stop a launch and findings that a run collects."""

from __future__ import annotations

from dataclasses import dataclass

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Finding:
    """One thing a checker saw.

    kind: a short name such as `out_of_bounds`, `misaligned`, `uninitialised`, `race`, `barrier`, `deadlock`.
    kernel, line, text: the kernel's name, the line of its PTX (1 is the first) and that line's text.
    block, thread: `blockIdx` and `threadIdx`; None where no single thread is to blame.
    address: the address that was used, None where there is none.
    """

    kind: str
    message: str
    kernel: str | None = None
    line: int | None = None
    text: str | None = None
    block: Triple | None = None
    thread: Triple | None = None
    address: int | None = None

    def __str__(self) -> str:
        where = []
        if self.kernel is not None:
            where.append(f"kernel {self.kernel}")
        if self.line is not None:
            where.append(f"PTX line {self.line}: `{self.text}`")
        if self.block is not None:
            where.append(f"blockIdx {self.block} threadIdx {self.thread}")
        if self.address is not None:
            where.append(f"address {self.address:#x}")
        tail = f" ({'; '.join(where)})" if where else ""
        return f"{self.kind}: {self.message}{tail}"


class VirtualGPUError(Exception):
    """A launch that cannot go on, or PTX that cannot be run. `finding` holds the parts of the message."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Fault(Exception):
    """Raised inside an instruction; the executor adds kernel, line and thread and raises VirtualGPUError.

    position: index of the thread in the running wave, None where no single thread is to blame. instruction: the one to
    blame, if it is not the one that runs.
    """

    def __init__(self, kind: str, message: str, position: int | None = None, address: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.position = position
        self.address = address
        self.instruction: object = None


def error(kind: str, message: str, **where: object) -> VirtualGPUError:
    """A VirtualGPUError with a finding of this kind, message and place."""
    return VirtualGPUError(Finding(kind, message, **where))  # type: ignore[arg-type]
