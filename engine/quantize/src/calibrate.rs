//! Importance of columns: the mean square of what each matrix multiplies, over the tokens of a text ([`calibrate`]).
//!
//! The model runs on the CPU as it is, in stretches of at most [`STRETCH_TOKENS`] tokens without a past. Experts of a layer share
//! their importance: it is that of all rows that some expert of the layer multiplies.

use crate::observed::{Observed, Squares};
use crate::{QuantizeError, Source};
use lagoon_backend::Device;
use lagoon_model::Weights;
use lagoon_model::export::{Kind, Role};
use lagoon_model::spec::Mlp;
use lagoon_model::weights::{MlpWeights, ProjectionWeights};
use lagoon_runner::{Activations, Decoder, Model};
use lagoon_text::Tokenizer;
use lagoon_types::KvShape;
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

/// Tokens that are computed at once.
const STRETCH_TOKENS: usize = 512;
/// Rows of a stretch that the head is computed for: its product is the largest.
const HEAD_ROWS: usize = 32;
/// Tokens that a text has at least.
const TOKENS_MIN: usize = 64;
/// Bytes that are read of a text for each token.
const BYTES_A_TOKEN: u64 = 32;

/// A place in a model where rows are multiplied with a matrix, or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Site {
    /// Queries, keys and values of a layer.
    Attention(usize),
    AttentionOut(usize),
    Up(usize),
    Down(usize),
    ExpertsUp(usize),
    ExpertsDown(usize),
    Head,
}

impl Site {
    /// The site of a tensor; `None` for those that multiply nothing.
    fn of(role: Role) -> Option<Self> {
        Some(match role {
            Role::Wide | Role::Table { is_head: false } => return None,
            Role::Table { is_head: true } | Role::Head => Self::Head,
            Role::Matrix { layer, kind } => match kind {
                Kind::Queries | Kind::Keys | Kind::Values | Kind::Fused => Self::Attention(layer),
                Kind::AttentionOut => Self::AttentionOut(layer),
                Kind::Up => Self::Up(layer),
                Kind::Down => Self::Down(layer),
                Kind::ExpertsUp => Self::ExpertsUp(layer),
                Kind::ExpertsDown => Self::ExpertsDown(layer),
            },
        })
    }
}

/// Mean squares of columns.
#[derive(Clone, Debug, Default)]
pub struct Importance {
    columns: BTreeMap<Site, Vec<f32>>,
    tokens: usize,
}

impl Importance {
    /// The importance of a tensor's columns, of which there are `cols`.
    #[must_use]
    pub fn of(&self, role: Role, cols: usize) -> Option<&[f32]> {
        let columns = self.columns.get(&Site::of(role)?)?;
        (columns.len() == cols).then_some(columns.as_slice())
    }

    /// Tokens that the model was run over.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }
}

/// Runs the model over the first `tokens_max` tokens of the text in `path`. `progress` is called with the tokens done and all, and
/// returns whether to go on.
///
/// # Errors
/// If the text cannot be read or is too short, or the model cannot be loaded.
pub fn calibrate(
    source: &Source,
    path: &Path,
    (tokens_max, threads): (usize, usize),
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<Importance, QuantizeError> {
    let refuse = |problem: String| QuantizeError::Calibration { path: path.to_owned(), problem };
    let tokenizer = source.tokenizer()?;
    let tokens = tokens(&tokenizer, path, tokens_max)?;
    if tokens.len() < TOKENS_MIN {
        return Err(refuse(format!("it has {} tokens, fewer than {TOKENS_MIN}", tokens.len())));
    }
    let (spec, checkpoint) = (&source.export.spec, &source.export.checkpoint);
    let mut device = Observed::new(threads);
    let weights = Weights::load(&mut device, checkpoint, spec, None, &mut |_, _| {})?;
    let model = Model::new(spec, weights);
    device.watch(sites(&model));
    let first = tokenizer.bos_id().filter(|bos| tokenizer.encode("", true).is_ok_and(|ids| ids.first() == Some(bos)));
    run(&mut device, &model, (first, &tokens), progress)?;
    let columns = device.squares().iter().map(|(site, squares)| (*site, squares.means()));
    Ok(Importance { columns: columns.collect(), tokens: tokens.len() })
}

/// The first tokens of a text, of which no more is read than they can need.
fn tokens(tokenizer: &Tokenizer, path: &Path, most: usize) -> Result<Vec<u32>, QuantizeError> {
    let refuse = |problem: String| QuantizeError::Calibration { path: path.to_owned(), problem };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|error| refuse(error.to_string()))?;
    let read = file.take(most as u64 * BYTES_A_TOKEN).read_to_end(&mut bytes);
    read.map_err(|error| refuse(error.to_string()))?;
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        // Cut within a character.
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(error) => return Err(refuse(format!("it is not UTF-8: {error}"))),
    };
    let mut tokens = tokenizer.encode(text, false)?;
    tokens.truncate(most);
    Ok(tokens)
}

/// Matrices that are watched, with what they multiply and their columns.
fn sites(model: &Model<Observed>) -> Vec<(&<Observed as Device>::Weight, Site, usize)> {
    let (spec, weights) = (&model.spec, &model.weights);
    let mut sites = vec![(weights.output(), Site::Head, spec.hidden)];
    for (i, (of, weights)) in spec.layers.iter().zip(&weights.layers).enumerate() {
        if let ProjectionWeights::Heads(heads) = &weights.projection {
            sites.push((&heads.qkv, Site::Attention(i), spec.hidden));
        }
        sites.push((&weights.out, Site::AttentionOut(i), of.attention.out.cols));
        match (&of.mlp, &weights.mlp) {
            (Mlp::Dense(of), MlpWeights::Dense(dense)) => {
                sites.push((&dense.up, Site::Up(i), spec.hidden));
                sites.push((&dense.down, Site::Down(i), of.width));
            }
            (Mlp::Experts(of), MlpWeights::Experts(experts)) => {
                sites.push((&experts.up, Site::ExpertsUp(i), spec.hidden));
                sites.push((&experts.down, Site::ExpertsDown(i), of.width));
                if let (Some(of), Some(shared)) = (&of.shared, &experts.shared) {
                    sites.push((&shared.up, Site::Up(i), spec.hidden));
                    sites.push((&shared.down, Site::Down(i), of.width));
                }
            }
            _ => unreachable!("weights are built from their spec"),
        }
    }
    sites
}

/// Runs the model over stretches of tokens, each behind the token that texts begin with.
fn run(
    device: &mut Observed,
    model: &Model<Observed>,
    (first, tokens): (Option<u32>, &[u32]),
    progress: &mut dyn FnMut(usize, usize) -> bool,
) -> Result<(), QuantizeError> {
    let (spec, decoder) = (&model.spec, Decoder::new(model));
    let rows = STRETCH_TOKENS.min(spec.max_positions as usize);
    let mut activations = Activations::new(device, spec, rows, HEAD_ROWS)?;
    let layers = u32::try_from(spec.layers.len()).expect("layers are within LAYERS_MAX");
    let shape = KvShape { layers, ..spec.kv_shape(model.weights.dtype) };
    let mut kv = device.kv(shape, rows)?;
    let each = (rows - usize::from(first.is_some())).max(1);
    let mut done = 0;
    for stretch in tokens.chunks(each) {
        let stretch: Vec<u32> = first.into_iter().chain(stretch.iter().copied()).take(rows).collect();
        decoder.plain_pass(device, &stretch, &mut activations, &mut kv)?;
        let some = (0..u32::try_from(stretch.len()).expect("a stretch is short")).step_by(rows.div_ceil(HEAD_ROWS));
        decoder.logits(device, &some.collect::<Vec<u32>>(), &mut activations)?;
        done = (done + each).min(tokens.len());
        if !progress(done, tokens.len()) {
            return Err(QuantizeError::Stopped);
        }
    }
    Ok(())
}

impl Squares {
    fn means(&self) -> Vec<f32> {
        #[allow(clippy::cast_possible_truncation, reason = "weights of errors need no more than f32 has")]
        let mean = |sum: &f64| (sum / self.rows.max(1) as f64) as f32;
        self.sums.iter().map(mean).collect()
    }
}
