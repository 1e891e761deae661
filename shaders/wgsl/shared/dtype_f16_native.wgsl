// Four f16 elements of KV, for adapters with f16 in shaders. Read only: conversion to f16 may truncate on some drivers, so
// stores are packed words (dtype_f16). The type is the buffer's, as naga 30 takes bitcast<vec2<f16>>(u32) for a
// bitcast to f32.
alias Quad = vec4<f16>;

fn widen(q: Quad) -> vec4<f32> {
    return vec4<f32>(q);
}
