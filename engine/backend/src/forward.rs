//! [`forward!`](crate::forward): operations that a wrapper passes on as they are.

/// Forwards operations by name to a field that is a device with the same tensors, and weights and KV as far as the operations have
/// any, in an `impl` of [`Device`](crate::Device): `forward!(inner: tensor, write, sync);`.
#[macro_export]
macro_rules! forward {
    ($to:tt: $($operation:ident),+ $(,)?) => { $($crate::forward!(@ $operation $to);)+ };
    (@ info $to:tt) => { fn info(&self) -> $crate::DeviceInfo { self.$to.info() } };
    (@ takes $to:tt) => { fn takes(&self, format: $crate::WeightFormat) -> bool { self.$to.takes(format) } };
    (@ kv_shape $to:tt) => { fn kv_shape(&self, kv: &Self::Kv) -> ::lagoon_types::KvShape { self.$to.kv_shape(kv) } };
    (@ tensor $to:tt) => { $crate::forward!(@ $to tensor(rows: usize, cols: usize) -> Self::Tensor); };
    (@ weight $to:tt) => { $crate::forward!(@ $to weight(source: $crate::WeightSource) -> Self::Weight); };
    (@ kv $to:tt) => { $crate::forward!(@ $to kv(shape: ::lagoon_types::KvShape, slots: usize) -> Self::Kv); };
    (@ write $to:tt) => { $crate::forward!(@ $to write(tensor: &mut Self::Tensor, row0: usize, data: &[f32]) -> ()); };
    (@ read $to:tt) => {
        $crate::forward!(@ $to read(
            tensor: &Self::Tensor, rows: ::std::ops::Range<usize>, cols: ::std::ops::Range<usize>, out: &mut Vec<f32>
        ) -> ());
    };
    (@ kv_write $to:tt) => {
        $crate::forward!(@ $to kv_write(kv: &mut Self::Kv, layer: usize, slot0: u32, bytes: &[u8]) -> ());
    };
    (@ kv_read $to:tt) => {
        $crate::forward!(@ $to kv_read(kv: &Self::Kv, layer: usize, slot0: u32, tokens: u32, out: &mut Vec<u8>) -> ());
    };
    (@ kv_read_pieces $to:tt) => {
        $crate::forward!(@ $to kv_read_pieces(kv: &Self::Kv, pieces: &[$crate::KvPiece], out: &mut Vec<u8>) -> ());
    };
    (@ sync $to:tt) => { $crate::forward!(@ $to sync() -> ()); };
    (@ embed $to:tt) => { $crate::forward!(@ $to embed(table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> ()); };
    (@ embed_add $to:tt) => {
        $crate::forward!(@ $to embed_add(table: &Self::Weight, ids: &[u32], out: &mut Self::Tensor) -> ());
    };
    (@ rms_norm $to:tt) => {
        $crate::forward!(@ $to rms_norm(
            x: &Self::Tensor, weight: &Self::Weight, eps: f32, rows: usize, out: &mut Self::Tensor
        ) -> ());
    };
    (@ layer_norm $to:tt) => {
        $crate::forward!(@ $to layer_norm(
            x: &Self::Tensor, weight: &Self::Weight, eps: f32, rows: usize, out: &mut Self::Tensor
        ) -> ());
    };
    (@ matmul $to:tt) => {
        $crate::forward!(@ $to matmul(
            x: &Self::Tensor, weight: &Self::Weight, rows: usize, mode: $crate::Mode, out: &mut Self::Tensor
        ) -> ());
    };
    (@ matmul_activated $to:tt) => {
        $crate::forward!(@ $to matmul_activated(
            x: &Self::Tensor, weight: &Self::Weight, rows: usize, activation: $crate::Activation,
            product: &mut Self::Tensor, out: &mut Self::Tensor
        ) -> ());
    };
    (@ activate $to:tt) => {
        $crate::forward!(@ $to activate(
            product: &Self::Tensor, rows: usize, activation: $crate::Activation, out: &mut Self::Tensor
        ) -> ());
    };
    (@ add $to:tt) => { $crate::forward!(@ $to add(x: &mut Self::Tensor, y: &Self::Tensor, rows: usize) -> ()); };
    (@ scale $to:tt) => { $crate::forward!(@ $to scale(x: &mut Self::Tensor, factor: f32, rows: usize) -> ()); };
    (@ softcap $to:tt) => { $crate::forward!(@ $to softcap(x: &mut Self::Tensor, cap: f32, rows: usize) -> ()); };
    (@ add_bias $to:tt) => {
        $crate::forward!(@ $to add_bias(x: &mut Self::Tensor, bias: &Self::Weight, rows: usize) -> ());
    };
    (@ head_norm $to:tt) => {
        $crate::forward!(@ $to head_norm(
            qkv: &mut Self::Tensor, weights: (&Self::Weight, &Self::Weight), eps: f32,
            geometry: ::lagoon_types::AttentionGeometry, rows: usize
        ) -> ());
    };
    (@ experts $to:tt) => {
        $crate::forward!(@ $to experts(
            x: &Self::Tensor, logits: &Self::Tensor, experts: &$crate::Experts<'_, Self::Weight>, rows: usize,
            buffers: &mut $crate::ExpertBuffers<Self::Tensor>, out: &mut Self::Tensor
        ) -> ());
    };
    (@ rope_append $to:tt) => {
        $crate::forward!(@ $to rope_append(
            qkv: &mut Self::Tensor, rope: &Self::Tensor, geometry: ::lagoon_types::AttentionGeometry, slots: &[u32],
            kv: &mut Self::Kv, layer: usize
        ) -> ());
    };
    (@ head_matmul $to:tt) => {
        $crate::forward!(@ $to head_matmul(
            x: &Self::Tensor, weight: &Self::Weight, heads: $crate::HeadStrides, rows: usize, out: &mut Self::Tensor
        ) -> ());
    };
    (@ latent_append $to:tt) => {
        $crate::forward!(@ $to latent_append(
            qkv: &mut Self::Tensor, row: $crate::LatentRow<'_, Self::Tensor>,
            geometry: ::lagoon_types::AttentionGeometry, slots: &[u32], kv: &mut Self::Kv, layer: usize
        ) -> ());
    };
    (@ attention $to:tt) => {
        $crate::forward!(@ $to attention(
            q: &Self::Tensor, batch: &$crate::AttnBatch<'_>, kv: &Self::Kv, layer: usize,
            out: &mut $crate::Partials<Self::Tensor>
        ) -> ());
    };
    (@ merge $to:tt) => {
        $crate::forward!(@ $to merge(
            acc: &mut $crate::Partials<Self::Tensor>, other: &$crate::Partials<Self::Tensor>,
            geometry: ::lagoon_types::AttentionGeometry
        ) -> ());
    };
    (@ sink $to:tt) => {
        $crate::forward!(@ $to sink(
            partials: &mut $crate::Partials<Self::Tensor>, sinks: &Self::Weight,
            geometry: ::lagoon_types::AttentionGeometry
        ) -> ());
    };
    (@ gather_rows $to:tt) => {
        $crate::forward!(@ $to gather_rows(x: &Self::Tensor, rows: &[u32], out: &mut Self::Tensor) -> ());
    };
    (@ $to:tt $operation:ident($($name:ident: $of:ty),*) -> $out:ty) => {
        fn $operation(&mut self, $($name: $of),*) -> Result<$out, $crate::DeviceError> {
            self.$to.$operation($($name),*)
        }
    };
}
