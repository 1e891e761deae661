//! A layout that tests share.

use lagoon_transfer::{Axis, Dim, Layout, LayoutParts, Part, Plane};
use lagoon_types::{KvDType, ModelHash};

/// One layer of `[slot][k | v][heads][dim]`, 16 bytes a token.
pub(crate) fn layout(blocks: u32, block_tokens: u32) -> Layout {
    let axes = vec![
        Axis { dim: Dim::Block, size: blocks, stride: u64::from(block_tokens) * 8 },
        Axis { dim: Dim::Token, size: block_tokens, stride: 8 },
        Axis { dim: Dim::Kv, size: 2, stride: 4 },
        Axis { dim: Dim::Head, size: 2, stride: 2 },
        Axis { dim: Dim::Elem, size: 2, stride: 1 },
    ];
    let plane = Plane { region: 0, base: 0, axes, dtype: KvDType::BF16, first_layer: 0, part: Part::Both };
    Layout::new(LayoutParts {
        model: ModelHash([7; 32]),
        block_tokens,
        blocks,
        layers: 0..1,
        heads: 0..2,
        head_dim: 2,
        region_bytes: vec![u64::from(blocks * block_tokens) * 16],
        planes: vec![plane],
    })
    .unwrap()
}
