//! Where a layer's KV lives: in the pool, or, in layers with a window, in rings of the debtor's own (ADR 24).

use crate::{ModelError, ModelSpec};
use lagoon_types::{KvDType, KvShape, WindowShape};

/// The store of a layer's KV, and the layer's index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPlace {
    /// rBlocks: lent, moved, transferred, hashed.
    Pooled(u32),
    /// A ring of the last positions a sequence.
    Windowed(u32),
}

/// A model whose layers with a window keep their KV apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSplit {
    /// By layer.
    pub places: Vec<KvPlace>,
    /// The longest window, in tokens.
    pub window: u32,
    /// Number of positions before a row that must be computed for the row's windowed KV to be right, without kept windows: the
    /// j-th windowed layer reads outputs of the layer before it at up to `window - 1` earlier positions, so this is the sum of
    /// `window - 1` over these layers.
    pub warm_up: u32,
}

impl KvSplit {
    fn layers(&self, windowed: bool) -> u32 {
        let of = |place: &&KvPlace| matches!(place, KvPlace::Windowed(_)) == windowed;
        u32::try_from(self.places.iter().filter(of).count()).unwrap_or(u32::MAX)
    }
}

impl ModelSpec {
    /// Keeps the KV of layers with a window apart. Every instance of a pool must do it, or none.
    ///
    /// # Errors
    /// [`ModelError::NotSplit`] if no layer has a window, or all have, or windows are about as long as sequences.
    pub fn split_kv(&mut self) -> Result<(), ModelError> {
        let windows: Vec<Option<u32>> = self.layers.iter().map(|layer| layer.attention.window).collect();
        let refuse =
            |problem: &str| Err(ModelError::NotSplit { family: self.family.to_owned(), problem: problem.to_owned() });
        let Some(window) = windows.iter().flatten().copied().max() else { return refuse("no layer has a window") };
        if windows.iter().all(Option::is_some) {
            return refuse("every layer has a window");
        }
        if window > self.max_positions / 2 {
            return refuse("its windows are longer than half of its longest sequence");
        }
        let (mut pooled, mut windowed) = (0, 0);
        let next = |count: &mut u32| {
            *count += 1;
            *count - 1
        };
        let places = windows.iter().map(|window| match window {
            None => KvPlace::Pooled(next(&mut pooled)),
            Some(_) => KvPlace::Windowed(next(&mut windowed)),
        });
        let places = places.collect();
        let warm_up = windows.iter().flatten().map(|window| window.saturating_sub(1)).fold(0u32, u32::saturating_add);
        self.split = Some(KvSplit { places, window, warm_up });
        Ok(())
    }

    /// Windows of the layers whose KV is pooled, 0 for none, and of those whose KV is kept apart. The first list is empty if
    /// all pooled layers have [`ModelSpec::window`].
    #[must_use]
    pub fn layer_windows(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut pooled, mut apart) = (Vec::new(), Vec::new());
        for (number, layer) in self.layers.iter().enumerate() {
            let windows = match self.kv_place(number) {
                KvPlace::Pooled(_) => &mut pooled,
                KvPlace::Windowed(_) => &mut apart,
            };
            windows.push(layer.attention.window.unwrap_or(0));
        }
        let all = self.window().unwrap_or(0);
        if pooled.iter().all(|window| *window == all) {
            pooled.clear();
        }
        (pooled, apart)
    }

    /// Where a layer's KV lives.
    #[must_use]
    pub fn kv_place(&self, layer: usize) -> KvPlace {
        match &self.split {
            Some(split) => split.places[layer],
            None => KvPlace::Pooled(u32::try_from(layer).unwrap_or(u32::MAX)),
        }
    }

    /// The shape of one token's pooled KV when it is stored in `dtype`: that of all layers, or, of a model that is
    /// split, of those without a window.
    ///
    /// # Panics
    /// Never for a configuration that was parsed: layers are within `LAYERS_MAX`.
    #[must_use]
    pub fn kv_shape(&self, dtype: impl Into<KvDType>) -> KvShape {
        KvShape {
            layers: match &self.split {
                Some(split) => split.layers(false),
                None => u32::try_from(self.layers.len()).expect("layers are within LAYERS_MAX"),
            },
            kv_heads: self.geometry.kv_heads,
            head_dim: self.geometry.head_dim,
            dtype: dtype.into(),
        }
    }

    /// The shape of one token's windowed KV, if the model is split.
    #[must_use]
    pub fn windowed_shape(&self, dtype: impl Into<KvDType>) -> Option<KvShape> {
        self.split.as_ref().map(|split| KvShape { layers: split.layers(true), ..self.kv_shape(dtype) })
    }

    /// How windowed KV lies in rBlocks where it is transferred, if the model is split.
    #[must_use]
    pub fn window_shape(&self) -> Option<WindowShape> {
        let shape = |split: &KvSplit| WindowShape {
            tokens: split.window - 1,
            folds: split.layers(true).div_ceil(split.layers(false).max(1)),
            warm_up: split.warm_up,
        };
        self.split.as_ref().map(shape)
    }

    /// Slots of a sequence's ring if a step has at most `step_rows` rows: the positions that the first row sees, and the rows.
    #[must_use]
    pub fn ring_slots(&self, step_rows: u32) -> u32 {
        self.split.as_ref().map_or(0, |split| (split.window - 1).saturating_add(step_rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn golden(name: &str) -> ModelSpec {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens").join(name);
        ModelSpec::open(&dir).unwrap()
    }

    #[test]
    fn layers_with_a_window_leave_the_pool() {
        let mut spec = golden("gpt_oss");
        let layers = spec.kv_shape(KvDType::F32).layers;
        assert_eq!(spec.layers.len(), layers as usize);
        assert_eq!((spec.windowed_shape(KvDType::F32), spec.kv_place(1)), (None, KvPlace::Pooled(1)));
        spec.split_kv().unwrap();
        let windows: Vec<u32> = spec.layers.iter().filter_map(|layer| layer.attention.window).collect();
        let pooled = spec.kv_shape(KvDType::F32).layers;
        assert_eq!(spec.windowed_shape(KvDType::F32).unwrap().layers + pooled, layers);
        assert_eq!(windows.len() + pooled as usize, layers as usize);
        // gpt-oss begins with a layer that has a window.
        assert_eq!((spec.kv_place(0), spec.kv_place(1)), (KvPlace::Windowed(0), KvPlace::Pooled(0)));
        let split = spec.split.as_ref().unwrap();
        assert_eq!(split.warm_up, windows.iter().map(|window| window - 1).sum::<u32>());
        assert_eq!(spec.ring_slots(16), windows.iter().max().unwrap() - 1 + 16);
        let shape = spec.window_shape().unwrap();
        assert_eq!((shape.tokens, shape.warm_up), (split.window - 1, split.warm_up));
        let windowed = u32::try_from(windows.len()).unwrap();
        assert!(shape.folds * pooled >= windowed && (shape.folds - 1) * pooled < windowed);
        assert_eq!(
            (shape.positions(4), shape.slots(4)),
            (4 - 4.min(shape.tokens)..4, 4.min(shape.tokens) * shape.folds)
        );
    }

    #[test]
    fn windows_are_listed_by_layer_where_they_differ() {
        let mut spec = golden("gpt_oss");
        let window = spec.layers[0].attention.window.unwrap();
        let (pooled, apart) = spec.layer_windows();
        assert_eq!((pooled.len(), &pooled[..2], apart), (spec.layers.len(), &[window, 0][..], Vec::<u32>::new()));
        spec.split_kv().unwrap();
        let (pooled, apart) = spec.layer_windows();
        assert!(pooled.is_empty());
        assert!(!apart.is_empty() && apart.iter().all(|of| *of == window));
        assert_eq!(golden("mistral_window").layer_windows(), Default::default());
        assert_eq!(golden("qwen3").layer_windows(), Default::default());
    }

    #[test]
    fn models_without_both_kinds_of_layers_are_refused_by_what_they_lack() {
        for (name, why) in [("qwen3", "no layer has a window"), ("mistral_window", "every layer has a window")] {
            let mut spec = golden(name);
            assert!(spec.split_kv().unwrap_err().to_string().contains(why), "{name}");
            assert_eq!(spec.split, None);
        }
        let mut spec = golden("gpt_oss");
        spec.max_positions = spec.layers[0].attention.window.unwrap() * 2 - 1;
        assert!(spec.split_kv().unwrap_err().to_string().contains("half of its longest"));
    }
}
