//! The messages that instances and the gManager exchange: plain data with field tags, no I/O.
//!
//! Three classes, each on its own connection: [`Control`] evolves by tagged fields that an older peer skips;
//! [`PartialsFrame`] (queries and partials) and [`BulkFrame`] (KV) are fixed headers and raw bytes, encoded by
//! lagoon-wire. WIRE.md is the specification. Semantics that the types do not show:
//!
//! * A **lease** is an ordered list of physical rBlocks (entries) that a creditor lends to one sequence. Token offsets
//!   in a lease count from its first entry: entry `k` holds offsets `[k * block_tokens, (k + 1) * block_tokens)`.
//! * KV is written to a lease in ascending offset per layer; a creditor therefore keeps one written length per layer,
//!   and a query beyond it waits (within the step's deadline).
//! * Frames of one class from one peer arrive in order.
#![forbid(unsafe_code)]

pub mod control;
pub mod data;
pub mod direct;
pub mod heartbeat;
pub mod joint;
pub mod placement;
pub mod prefill;
pub mod prefix;
pub mod relay;
pub mod role;
pub mod transfer;

pub use control::*;
pub use data::*;
pub use direct::*;
pub use heartbeat::*;
pub use joint::*;
pub use placement::*;
pub use prefill::*;
pub use prefix::*;
pub use relay::*;
pub use role::*;
pub use transfer::*;

/// Versions of this protocol that this build speaks. Peers agree on the highest common one in their handshake.
///
/// Version 2: pool shapes and transfer layouts name the attention scale, the windows of layers and latent attention. A
/// version 1 process sends none of them, so differences to it would go unnoticed. Version 3: requests for prompts name penalties,
/// allowed tokens and a tenant, which an older worker would ignore.
pub const VERSION_MIN: u32 = 3;
/// See [`VERSION_MIN`].
pub const VERSION_MAX: u32 = 3;

/// Why a process that speaks the versions `min` to `max` cannot be served; `None` if it speaks a version of this build.
/// `peer` and `own` name the two processes, such as "the instance" and "the gManager".
#[must_use]
pub fn version_refusal((min, max): (u32, u32), peer: &str, own: &str) -> Option<String> {
    let older = if max < VERSION_MIN {
        peer
    } else if min > VERSION_MAX {
        own
    } else {
        return None;
    };
    let (theirs, ours) = (versions(min, max), versions(VERSION_MIN, VERSION_MAX));
    Some(format!(
        "{peer} speaks protocol {theirs}, {own} {ours}: no common version, {older} is older; hint: upgrade lagoon there, as \
         all processes of a pool must speak the same version"
    ))
}

fn versions(min: u32, max: u32) -> String {
    if min == max { format!("version {min}") } else { format!("versions {min} to {max}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_process_is_named() {
        let refusal = |of| version_refusal(of, "the instance", "the gManager");
        assert_eq!(refusal((VERSION_MIN, VERSION_MAX)), None);
        assert_eq!(refusal((1, VERSION_MAX + 5)), None);
        let older = refusal((1, 1)).unwrap_or_default();
        assert!(older.contains("the instance speaks protocol version 1, the gManager version 3"), "{older}");
        assert!(older.contains("the instance is older; hint: upgrade"), "{older}");
        let newer = refusal((4, 5)).unwrap_or_default();
        assert!(newer.contains("versions 4 to 5, the gManager version 3"), "{newer}");
        assert!(newer.contains("the gManager is older"), "{newer}");
    }
}
