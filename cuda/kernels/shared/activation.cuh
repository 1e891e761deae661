// Activations of one element, for the kernels that stand alone and for the epilogues of products.
#pragma once
#include "common.cuh"

// SwiGLU (Shazeer 2020). The exponential of a steeply negative gate overflows to infinity, and the quotient is zero, as it
// should be.
DEVICE float silu_times(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// The Gaussian error linear unit (Hendrycks and Gimpel 2016).
DEVICE float gelu_exact(float x) { return 0.5f * x * erfcf(-0.7071067811865476f * x); }
