//! Layout of tokens in the virtual tensors (vAttention §5.1 and §8.2), in numbers only.
//!
//! The K and V of `layers_per_group` layers share page groups (tensor slicing): there are `2 * layers /
//! layers_per_group` virtual tensors `[slot][layers_per_group][kv_heads][head_dim]`, all of one layout. The page groups
//! at the same index of every tensor hold the same tokens and are mapped together: they are a **stripe**, the unit that
//! the accounting counts in. An **rBlock** is the least whole number of stripes that is a whole number of tokens.

use super::VmmError;

/// Inputs of the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmShape {
    /// Layers on this instance (N in the paper).
    pub layers: u32,
    /// KV heads on this instance (H).
    pub kv_heads: u32,
    /// Elements of a head (D).
    pub head_dim: u32,
    /// Bytes of an element (P).
    pub element_bytes: u32,
    /// Bytes of a page group, a multiple of the device's granularity (2 MiB).
    pub page_group_bytes: u64,
    /// Layers that share a page group; divides `layers`. `layers` is full slicing, 1 is none.
    pub layers_per_group: u32,
}

/// The layout of all virtual tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmLayout {
    shape: VmmShape,
    /// Bytes of one token in one tensor.
    slot_bytes: u64,
    block_tokens: u32,
    block_stripes: u32,
}

/// Plane: K or V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    K,
    V,
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

impl VmmLayout {
    /// The layout of a shape.
    ///
    /// # Errors
    /// [`VmmError::Shape`] if a number is zero, `layers_per_group` does not divide `layers`, or an rBlock would have 2^20
    /// tokens or more.
    pub fn new(shape: VmmShape) -> Result<Self, VmmError> {
        let VmmShape { layers, kv_heads, head_dim, element_bytes, page_group_bytes, layers_per_group } = shape;
        let numbers = [layers, kv_heads, head_dim, element_bytes, layers_per_group];
        if numbers.contains(&0) || page_group_bytes == 0 {
            return Err(VmmError::Shape(format!("{shape:?} has a zero")));
        }
        if !layers.is_multiple_of(layers_per_group) {
            return Err(VmmError::Shape(format!("{layers} layers are not whole groups of {layers_per_group}")));
        }
        let slot_bytes = [layers_per_group, kv_heads, head_dim, element_bytes].map(u64::from).into_iter();
        let slot_bytes = slot_bytes
            .reduce(|a, b| a.saturating_mul(b))
            .filter(|bytes| *bytes < 1 << 40)
            .ok_or_else(|| VmmError::Shape(format!("{shape:?} is too large")))?;
        let common = gcd(page_group_bytes, slot_bytes);
        let (tokens, stripes) = (page_group_bytes / common, slot_bytes / common);
        match (u32::try_from(tokens), u32::try_from(stripes)) {
            (Ok(block_tokens), Ok(block_stripes)) if block_tokens < 1 << 20 => {
                Ok(Self { shape, slot_bytes, block_tokens, block_stripes })
            }
            _ => Err(VmmError::Shape(format!("an rBlock would have {tokens} tokens"))),
        }
    }

    /// Sizes of the mapped KV.
    #[must_use]
    pub fn shape(&self) -> VmmShape {
        self.shape
    }

    /// Number of virtual tensors, which is also the number of page groups in a stripe.
    #[must_use]
    pub fn tensors(&self) -> u32 {
        2 * (self.shape.layers / self.shape.layers_per_group)
    }

    /// Tokens of an rBlock: the least number that fills whole page groups in every tensor.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Stripes of an rBlock.
    #[must_use]
    pub fn block_stripes(&self) -> u32 {
        self.block_stripes
    }

    /// Bytes of a token in one tensor.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// Bytes of a stripe in all tensors.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        self.shape.page_group_bytes * u64::from(self.tensors())
    }

    /// Stripes that hold the first `tokens` tokens: `(s + t - 1) / t` of §5.3.3.
    #[must_use]
    pub fn stripes_for(&self, tokens: u32) -> u32 {
        let stripes = (u64::from(tokens) * self.slot_bytes).div_ceil(self.shape.page_group_bytes);
        u32::try_from(stripes).expect("rBlocks are limited, so that stripes are fewer than bytes")
    }

    /// rBlocks that hold `tokens` tokens.
    #[must_use]
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }

    /// The tensor that holds a layer's K or V, and the byte offset of slot 0's first element in it.
    #[must_use]
    pub fn tensor_of(&self, layer: u32, plane: Plane) -> (u32, u64) {
        let group = layer / self.shape.layers_per_group;
        let within = u64::from(layer % self.shape.layers_per_group);
        let layer_bytes = self.slot_bytes / u64::from(self.shape.layers_per_group);
        (2 * group + u32::from(plane == Plane::V), within * layer_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(layers: u32, kv_heads: u32, layers_per_group: u32, page: u64) -> VmmLayout {
        let (head_dim, element_bytes) = (128, 2);
        VmmLayout::new(VmmShape { layers, kv_heads, head_dim, element_bytes, page_group_bytes: page, layers_per_group })
            .unwrap()
    }

    const MIB2: u64 = 2 << 20;

    /// docs/virtual-memory.md: an rBlock is a whole number of page groups and of tokens, K and V one range each.
    #[test]
    fn rblocks_of_the_models_are_as_the_design_lists_them() {
        for (model, layers, kv_heads, tokens, stripes) in [
            ("Llama-3-8B", 32, 8, 32, 1),
            ("Llama-2-70B", 80, 8, 64, 5),
            ("Llama-2-13B", 40, 40, 128, 25),
            ("Yi-34B", 60, 8, 256, 15),
        ] {
            let l = layout(layers, kv_heads, layers, MIB2);
            assert_eq!((l.block_tokens(), l.block_stripes(), l.tensors()), (tokens, stripes, 2), "{model}");
        }
    }

    /// Whole tokens in a page group.
    fn page_tokens(layout: &VmmLayout) -> u32 {
        (layout.shape.page_group_bytes / layout.slot_bytes).try_into().unwrap()
    }

    /// vAttention's Table 8: tokens of a page group without slicing, by page-group size and tensor parallelism.
    #[test]
    fn page_groups_hold_what_table_8_says() {
        for (model, layers, kv_heads, tokens) in [
            ("Yi-6B TP-1", 32, 4, [64, 128, 256, 2048]),
            ("Yi-6B TP-2", 32, 2, [128, 256, 512, 4096]),
            ("Llama-3-8B TP-1", 32, 8, [32, 64, 128, 1024]),
            ("Llama-3-8B TP-2", 32, 4, [64, 128, 256, 2048]),
            ("Yi-34B TP-1", 60, 8, [32, 64, 128, 1024]),
            ("Yi-34B TP-2", 60, 4, [64, 128, 256, 2048]),
        ] {
            for (kib, tokens) in [64, 128, 256, 2048].into_iter().zip(tokens) {
                let l = layout(layers, kv_heads, 1, kib << 10);
                assert_eq!((page_tokens(&l), l.block_tokens()), (tokens, tokens), "{model}, {kib} KiB");
            }
        }
    }

    /// Table 10: tokens of a 2 MiB page with full slicing. Its Yi-34B rows (18 and 36) cannot be had: a page holds 17.07
    /// and 34.13 tokens; 18 is the first rounded up, 36 neither rounding of the second but twice 18.
    #[test]
    fn slicing_gives_table_10_but_for_yi_34b() {
        for (model, layers, kv_heads, tokens) in
            [("Yi-6B TP-1", 32, 4, 64), ("Yi-6B TP-2", 32, 2, 128), ("Llama-3-8B TP-1", 32, 8, 32), ("TP-2", 32, 4, 64)]
        {
            assert_eq!(page_tokens(&layout(layers, kv_heads, layers, MIB2)), tokens, "{model}");
        }
        let (tp1, tp2) = (layout(60, 8, 60, MIB2), layout(60, 4, 60, MIB2));
        assert_eq!((page_tokens(&tp1), page_tokens(&tp2)), (17, 34));
        // Whole tokens in whole page groups need 15 of them.
        assert_eq!((tp1.block_tokens(), tp1.block_stripes()), (256, 15));
        assert_eq!((tp2.block_tokens(), tp2.block_stripes()), (512, 15));
    }

    #[test]
    fn every_byte_of_a_slot_belongs_to_one_layer() {
        for group in [1, 2, 3, 6] {
            let l = layout(6, 2, group, 1 << 16);
            let layer_bytes = 2 * 128 * 2;
            let mut seen = std::collections::BTreeSet::new();
            for layer in 0..6 {
                for plane in [Plane::K, Plane::V] {
                    let (tensor, offset) = l.tensor_of(layer, plane);
                    assert!(tensor < l.tensors() && offset + layer_bytes <= l.slot_bytes());
                    assert!(seen.insert((tensor, offset)), "two layers at one place");
                }
            }
            assert_eq!(seen.len(), 12);
        }
    }

    #[test]
    fn stripes_cover_tokens_that_straddle_them() {
        let l = layout(60, 8, 60, MIB2);
        assert_eq!((l.stripes_for(0), l.stripes_for(1), l.stripes_for(17), l.stripes_for(18)), (0, 1, 1, 2));
        assert_eq!((l.stripes_for(256), l.stripes_for(257)), (15, 16));
    }

    #[test]
    fn bad_shapes_are_errors() {
        let good = layout(6, 2, 3, MIB2).shape();
        for bad in [
            VmmShape { layers: 0, ..good },
            VmmShape { layers_per_group: 4, ..good },
            VmmShape { page_group_bytes: 0, ..good },
            VmmShape { kv_heads: u32::MAX, head_dim: u32::MAX, ..good },
            VmmShape { head_dim: 1, kv_heads: 1, element_bytes: 1, page_group_bytes: 1 << 40, ..good },
        ] {
            assert!(matches!(VmmLayout::new(bad), Err(VmmError::Shape(_))), "{bad:?}");
        }
    }
}
