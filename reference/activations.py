"""Every activation by name, forward and backward, in float32 with every rounding explicit.

    ACTIVATIONS["swiglu"].forward(gate, up) -> y
    ACTIVATIONS["swiglu"].backward(grad, gate, up) -> (dgate, dup)
    ACTIVATIONS["gelu"].forward(x), .backward(grad, x) -> dx

Products are taken in this order, each rounded; with a router probability, y is multiplied by it last and grad
first:

    unary       y = f(x);  dx = grad * f'(x)
    gated       y = activated(gate) * linear(up)
                dgate = (grad * linear(up)) * activated'(gate)
                dup = grad * activated(gate), and for situglu (grad * activated(gate)) * linear'(up)

`differentiate` gives y and the gradients together, for dprob, which is the row's sum of grad * y.

A derivative never comes from a stored result and never from one that cancels: 1 - sigmoid is its own
quantity.

Kinks. A masked gradient is +0, by selection: whatever `grad` holds there, NaN and Inf included, does not
matter.

    activation                      gradient passes where           at the kink
    relu, reglu                     x > 0                           0
    srelu, sreglu, tanh_srelu       x > 0                           0
    clamped_swiglu, gate            not gate > limit                1 at gate = limit
    clamped_swiglu, up              not |up| > limit                1 at up = -limit and up = limit
    step preset, gate               not silu(gate) > limit          1 where silu(gate) = limit, in float32
    step preset, up                 not |up| > limit                1 at up = -limit and up = limit

NaN in an operand reaches every result that depends on it: y, and the gradient of that operand where it
depends on it (for `relu` it gives NaN too). The gradient of a linear operand does not depend on it, and a NaN
there is not masked.

Infinities: f(-Inf) of gelu, gelu_erf, qgelu and silu is NaN, being Inf * 0; their derivatives have their
limits, -0 at -Inf and 1 at Inf. tanh_srelu(Inf) is scale**2 and situglu is finite. Finite x far below zero
give -0.

Parameters are used as their nearest float32.
"""

from .gated_activations import (
    ClampedSwiglu,
    Gated,
    GatedActivation,
    SituGlu,
    StepSwiglu,
)
from .unary_activations import (
    Gelu,
    GeluErf,
    QuickGelu,
    Relu,
    Sigmoid,
    Silu,
    SquaredRelu,
    TanhSquaredRelu,
    UnaryActivation,
)

__all__ = [
    "ACTIVATIONS",
    "CLAMPED_SWIGLU_PRESETS",
    "GATED_ACTIVATIONS",
    "UNARY_ACTIVATIONS",
    "Activation",
    "ClampedSwiglu",
    "Gated",
    "GatedActivation",
    "Gelu",
    "GeluErf",
    "QuickGelu",
    "Relu",
    "Sigmoid",
    "Silu",
    "SituGlu",
    "SquaredRelu",
    "StepSwiglu",
    "TanhSquaredRelu",
    "UnaryActivation",
]

Activation = UnaryActivation | GatedActivation

UNARY_ACTIVATIONS: dict[str, UnaryActivation] = {
    "gelu": Gelu(),
    "gelu_erf": GeluErf(),
    "qgelu": QuickGelu(),
    "silu": Silu(),
    "relu": Relu(),
    "srelu": SquaredRelu(),
    "tanh_srelu": TanhSquaredRelu(),
}

GATED_ACTIVATIONS: dict[str, GatedActivation] = {
    "glu": Gated(Sigmoid()),
    "geglu": Gated(Gelu()),
    "geglu_erf": Gated(GeluErf()),
    "qgeglu": Gated(QuickGelu()),
    "reglu": Gated(Relu()),
    "sreglu": Gated(SquaredRelu()),
    "swiglu": Gated(Silu()),
    "clamped_swiglu": ClampedSwiglu(),
    "situglu": SituGlu(),
}

ACTIVATIONS: dict[str, Activation] = {**UNARY_ACTIVATIONS, **GATED_ACTIVATIONS}

# gpt-oss: OpenAI's model.py. DeepSeek V4: gate clamped above only, before SiLU, limit 10 (cudnn-frontend
# 1.28, grouped_gemm_glu). Step-3.5: gate clamped after SiLU.
CLAMPED_SWIGLU_PRESETS: dict[str, ClampedSwiglu | StepSwiglu] = {
    "gpt_oss": ClampedSwiglu(limit=7.0, alpha=1.702, offset=1.0),
    "deepseek": ClampedSwiglu(limit=10.0, alpha=1.0, offset=0.0),
    "step": StepSwiglu(limit=7.0),
}
