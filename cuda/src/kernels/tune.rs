//! Tuning of the decode kernel: candidate shapes, the choice among them, and its text form.
//!
//! The caller measures: [`tune`] asks for the seconds of one shape at one context. The result is a [`Tuned`], a few
//! lines of text to be cached beside the device's name, driver and head size. A text that is damaged, of another
//! version or with a shape that no kernel has is an error, and the caller tunes again.

use super::attention::{DecodeClass, SHARED_BYTES_MAX, Tuning};
use lagoon_types::KvDType;
use std::fmt;
use std::str::FromStr;

/// Contexts, in keys, at which the three classes are measured: the middle of each on a logarithmic scale, and twice
/// the last bound.
pub const CONTEXTS: [u32; 3] = [2 << 10, 16 << 10, 64 << 10];

/// Least gain over the untuned shape, as a share of its time; less is noise.
const GAIN_MIN: f64 = 0.01;

/// Bounds between the classes, in keys.
const CLASS_KEYS: [u32; 2] = [8 << 10, 32 << 10];

/// Stores that are measured are of 16 bits; classes for 8 bits follow from theirs ([`DecodeClass::for_store`]).
const TUNED: KvDType = KvDType::BF16;

/// The first word of the text, with the version of its format.
const HEADER: &str = "lagoon-attention-tuning-3";

/// The fastest shapes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuned {
    pub head_dim: u32,
    pub classes: [DecodeClass; 3],
}

/// Reason why a tuning text is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no tuning of this version: {0}")]
pub struct BadTuning(String);

/// Candidate shapes for heads of this size: those that fit a block's shared memory, each once.
#[must_use]
pub fn candidates(head_dim: u32, shared_bytes_max: u32) -> Vec<DecodeClass> {
    let mut out = Vec::new();
    for (warps, stages) in [(2, 2), (2, 4), (4, 2), (4, 3), (4, 4), (8, 2), (8, 3)] {
        for blocks_per_sm in [1, 2, 3, 4] {
            for piece_keys_min in [256, 512, 1024] {
                let class = DecodeClass { warps, stages, blocks_per_sm, piece_keys_min };
                if class.fitted(head_dim, TUNED, shared_bytes_max) == class {
                    out.push(class);
                }
            }
        }
    }
    out
}

/// Measures every candidate at the context of each class and keeps the fastest, or the class of `untuned` if none is
/// clearly faster. `seconds(class, keys)` is the time of one decode call over `contexts[i]` keys, or infinity for a
/// shape that was not tried.
///
/// # Errors
/// The first of `seconds`, which ends the tuning.
pub fn tune<E>(
    head_dim: u32,
    untuned: &Tuning,
    contexts: [u32; 3],
    mut seconds: impl FnMut(DecodeClass, u32) -> Result<f64, E>,
) -> Result<Tuned, E> {
    let mut classes = untuned.classes.map(|class| class.fitted(head_dim, TUNED, untuned.shared_bytes_max));
    for (class, keys) in classes.iter_mut().zip(contexts) {
        let mut best = seconds(*class, keys)? * (1.0 - GAIN_MIN);
        for candidate in candidates(head_dim, untuned.shared_bytes_max) {
            let time = seconds(candidate, keys)?;
            // NaN loses.
            if time < best {
                (*class, best) = (candidate, time);
            }
        }
    }
    Ok(Tuned { head_dim, classes })
}

impl Tuned {
    /// `base` with these classes.
    #[must_use]
    pub fn apply(&self, base: Tuning) -> Tuning {
        Tuning { classes: self.classes, class_keys: CLASS_KEYS, ..base }
    }
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEADER} {}", self.head_dim)?;
        self.classes.iter().try_for_each(|class| {
            let DecodeClass { warps, stages, blocks_per_sm, piece_keys_min } = class;
            writeln!(f, "{warps} {stages} {blocks_per_sm} {piece_keys_min}")
        })
    }
}

impl FromStr for Tuned {
    type Err = BadTuning;

    fn from_str(text: &str) -> Result<Self, BadTuning> {
        let bad = |what: &str| BadTuning(what.to_owned());
        let mut lines = text.lines();
        let head = lines.next().and_then(|line| line.strip_prefix(HEADER)).ok_or_else(|| bad("its first line"))?;
        let head_dim = head.trim().parse().map_err(|_| bad("the size of heads"))?;
        if ![64, 96, 128, 256].contains(&head_dim) {
            return Err(bad("the size of heads"));
        }
        let mut class = || {
            let numbers = lines.next().unwrap_or_default().split(' ').map(str::parse).collect::<Result<Vec<u32>, _>>();
            let [warps, stages, blocks_per_sm, piece_keys_min] = numbers.ok()?.try_into().ok()?;
            let class = DecodeClass { warps, stages, blocks_per_sm, piece_keys_min };
            candidates(head_dim, SHARED_BYTES_MAX).contains(&class).then_some(class)
        };
        let classes = [class(), class(), class()];
        let [Some(a), Some(b), Some(c)] = classes else { return Err(bad("a shape")) };
        Ok(Self { head_dim, classes: [a, b, c] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_kept_and_noise_is_not() {
        let untuned = Tuning::untuned(132);
        let fast = DecodeClass { warps: 8, stages: 2, blocks_per_sm: 1, piece_keys_min: 1024 };
        let measure = |class: DecodeClass, keys: u32| -> Result<f64, ()> {
            // One shape is faster on long contexts; on others the difference is measurement noise.
            let gain = if keys == CONTEXTS[2] { 0.5 } else { 0.995 };
            Ok(if class == fast { gain } else { 1.0 } * f64::from(keys))
        };
        let tuned = tune(128, &untuned, CONTEXTS, measure).unwrap();
        assert_eq!(tuned.classes[..2], untuned.classes[..2]);
        assert_eq!(tuned.classes[2], fast);
        assert_eq!(tuned.apply(untuned).classes, tuned.classes);
        assert_eq!(tune(128, &untuned, CONTEXTS, |_, _| Err("lost")), Err("lost"));
    }

    #[test]
    fn a_tuning_is_remembered_as_text() {
        for head_dim in [64, 96, 128, 256] {
            let tuned = tune(head_dim, &Tuning::untuned(108), CONTEXTS, |class, _| Ok::<_, ()>(f64::from(class.warps)));
            let tuned = tuned.unwrap();
            let text = tuned.to_string();
            assert_eq!(text.parse(), Ok(tuned), "{text}");
            for (from, to) in [("-3 ", "-2 "), ("\n2 ", "\n3 "), ("\n2 ", "\n-2 "), ("\n", "")] {
                assert!(text.contains(from), "{text:?} {from:?}");
                assert!(text.replacen(from, to, 1).parse::<Tuned>().is_err(), "{from:?} -> {to:?}");
            }
        }
    }

    #[test]
    fn untuned_shapes_are_candidates() {
        for head_dim in [64, 96, 128, 256] {
            let known = candidates(head_dim, SHARED_BYTES_MAX);
            assert!(known.len() >= 8);
            for class in Tuning::untuned(1).classes.map(|class| class.fitted(head_dim, TUNED, SHARED_BYTES_MAX)) {
                assert!(known.contains(&class), "{class:?}");
            }
        }
    }
}
