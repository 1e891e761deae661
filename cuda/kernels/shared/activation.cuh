// Activations of one element, for the kernels that stand alone and for the epilogues of products.
#pragma once
#include "common.cuh"

// The logistic function of z, times x. The exponential of a steeply negative z overflows to infinity, and the quotient is zero, as
// it should be.
DEVICE float times_sigmoid(float x, float z) { return x / (1.0f + expf(-z)); }

// SwiGLU (Shazeer 2020).
DEVICE float silu_times(float gate, float up) { return times_sigmoid(gate, gate) * up; }

// The Gaussian error linear unit (Hendrycks and Gimpel 2016).
DEVICE float gelu_exact(float x) { return 0.5f * x * erfcf(-0.7071067811865476f * x); }

// Its approximation by tanh. 1 + tanh(a) = 2 / (1 + exp(-2 a)), which loses nothing where tanh is close to -1.
DEVICE float gelu_tanh(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return times_sigmoid(x, 2.0f * inner);
}

// The clamped gate of gpt-oss; numbers as lagoon_backend's SWIGLU_LIMIT and SWIGLU_ALPHA.
DEVICE float clamped_swiglu(float gate, float up) {
    constexpr float LIMIT = 7.0f, ALPHA = 1.702f;
    // By comparisons, which NaN fails and so stays; fminf would give the limit.
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
    return (up + 1.0f) * times_sigmoid(gate, ALPHA * gate);
}

// Whether an activation takes a gate and an up element.
DEVICE bool is_gated(uint32_t activation) {
    return activation == ACTIVATION_SILU_MUL || activation >= ACTIVATION_GELU_TANH_MUL;
}

// An activation that is known at run time only; `up` is of gated ones. The branches are the same for all threads.
DEVICE float activated(uint32_t activation, float x, float up) {
    switch (activation) {
        case ACTIVATION_SILU_MUL: return silu_times(x, up);
        case ACTIVATION_GELU: return gelu_exact(x);
        case ACTIVATION_GELU_TANH: return gelu_tanh(x);
        case ACTIVATION_GELU_TANH_MUL: return gelu_tanh(x) * up;
        case ACTIVATION_CLAMPED_SWIGLU: return clamped_swiglu(x, up);
        default: return x;
    }
}
