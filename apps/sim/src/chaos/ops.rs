//! Ops: requests, cancellations, faults, and operators' orders, with their times.

use crate::place::{GMANAGER, Place};
use crate::rng::Rng;
use crate::shared::DeviceFault;
use lagoon_protocol::Role;
use lagoon_types::{GenerateRequest, RequestOptions, SamplingParams};
use lagoon_wire::Class;
use std::fmt;

/// An external event at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    pub at_us: u64,
    pub what: What,
}

/// An op's kind. Every fault ends by itself, so any op of a list can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Submit {
        id: usize,
        place: Place,
        prompt: u32,
        max_tokens: u32,
        seed: u64,
    },
    Cancel {
        id: usize,
    },
    /// The process dies, and a new one starts in its place after `down_us`.
    Crash {
        place: Place,
        down_us: u64,
    },
    /// The connection is lost.
    Cut {
        a: Place,
        b: Place,
    },
    /// The KV transfer paths are lost; the connection is not.
    CutKv {
        a: Place,
        b: Place,
    },
    /// No frame passes between the two.
    Partition {
        a: Place,
        b: Place,
        us: u64,
    },
    /// The process is stopped, as by SIGSTOP.
    Pause {
        place: Place,
        us: u64,
    },
    /// Frames arrive `us` later.
    Slow {
        a: Place,
        b: Place,
        us: u64,
        for_us: u64,
    },
    /// The device fails once.
    Break {
        place: Place,
        fault: DeviceFault,
    },
    /// An operator drains an instance, and ends the drain after `us`.
    Drain {
        place: Place,
        us: u64,
    },
    /// An operator moves blocks of a request to another instance, or recalls them to its own.
    Move {
        id: usize,
        to: Place,
        blocks: u32,
    },
    /// An operator orders a role for an instance.
    Role {
        place: Place,
        role: Role,
    },
    /// The next frame of the class to a peer finds a full queue.
    Full {
        place: Place,
        class: Class,
    },
}

impl What {
    /// End of the fault in microseconds, if it began at `at_us`; `None` for other ops.
    #[must_use]
    pub const fn fault_end_us(&self, at_us: u64) -> Option<u64> {
        match *self {
            Self::Submit { .. } | Self::Cancel { .. } | Self::Move { .. } | Self::Role { .. } => None,
            Self::Cut { .. } | Self::CutKv { .. } | Self::Break { .. } | Self::Full { .. } => Some(at_us),
            Self::Drain { us, .. } => Some(at_us + us),
            Self::Crash { down_us: us, .. } | Self::Partition { us, .. } | Self::Pause { us, .. } => Some(at_us + us),
            Self::Slow { us, for_us, .. } => Some(at_us + us + for_us),
        }
    }
}

/// Number of common prompt beginnings, besides unique ones.
const BEGINNINGS: u64 = 3;
/// One of so many requests is another tenant's: its block hashes are salted.
const SALTED: u64 = 4;

/// The request of a [`What::Submit`]. Most prompts share a random part of a common beginning.
#[must_use]
pub(super) fn request(prompt: u32, max_tokens: u32, seed: u64) -> GenerateRequest {
    let mut rng = Rng::new(seed);
    let (mut beginning, shared) = (Rng::new(seed % (BEGINNINGS + 1)), rng.below(u64::from(prompt) + 1));
    let shared = if seed % (BEGINNINGS + 1) == BEGINNINGS { 0 } else { shared };
    let vocab = u64::from(crate::symbolic::model::VOCAB);
    let mut token = |pos: u64| if pos < shared { beginning.below(vocab) } else { rng.below(vocab) };
    let prompt = (0..u64::from(prompt)).map(|pos| u32::try_from(token(pos)).unwrap_or(0)).collect();
    let salt = if (seed / (BEGINNINGS + 1)).is_multiple_of(SALTED) { "another tenant" } else { "" };
    let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    GenerateRequest {
        prompt,
        answered: 0,
        max_tokens,
        sampling,
        min_tokens: 0,
        stop_ids: Vec::new(),
        return_logits: false,
        options: RequestOptions { cache_salt: salt.into(), ..RequestOptions::default() },
    }
}

fn name(place: Place) -> String {
    if place == GMANAGER { "the gManager".to_owned() } else { format!("node {place}") }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (s, ms) = (self.at_us / 1_000_000, self.at_us % 1_000_000 / 1000);
        write!(f, "{s:>4}.{ms:03} s  ")?;
        match self.what {
            What::Submit { id, place, prompt, max_tokens, .. } => {
                write!(f, "request {id} to {}: {prompt} tokens, {max_tokens} to generate", name(place))
            }
            What::Cancel { id } => write!(f, "request {id} is cancelled"),
            What::Crash { place, down_us } => write!(f, "{} dies, for {} ms", name(place), down_us / 1000),
            What::Cut { a, b } => write!(f, "{} and {} lose their connection", name(a), name(b)),
            What::CutKv { a, b } => write!(f, "{} and {} lose the paths of KV between them", name(a), name(b)),
            What::Partition { a, b, us } => {
                write!(f, "nothing passes between {} and {} for {} ms", name(a), name(b), us / 1000)
            }
            What::Pause { place, us } => write!(f, "{} is stopped for {} ms", name(place), us / 1000),
            What::Slow { a, b, us, for_us } => {
                let (us, for_us) = (us / 1000, for_us / 1000);
                write!(f, "frames between {} and {} are {us} ms late for {for_us} ms", name(a), name(b))
            }
            What::Break { place, fault } => write!(f, "the device of {} fails once: {fault:?}", name(place)),
            What::Drain { place, us } => write!(f, "{} is drained, for {} ms", name(place), us / 1000),
            What::Move { id, to, blocks } => write!(f, "{blocks} blocks of request {id} are moved to {}", name(to)),
            What::Role { place, role } => write!(f, "{} is ordered to be {role:?}", name(place)),
            What::Full { place, class } => write!(f, "{} finds a full queue: {class:?}", name(place)),
        }
    }
}
