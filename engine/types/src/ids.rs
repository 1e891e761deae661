//! Identifiers, each its own type, so that the compiler catches mix-ups.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// Instance: one process with one model replica, numbered by the gManager at registration. 0 is never assigned.
    InstanceId(u32),
    "i"
);
id!(
    /// Sequence of a request on its debtor; unique within that instance's incarnation.
    SeqId(u64),
    "s"
);
id!(
    /// Lease: rBlocks that one creditor lends to one sequence; issued by the creditor, unique in its incarnation.
    LeaseId(u64),
    "l"
);
id!(
    /// Epoch: the creditor's fencing number of a lease; a stale epoch is refused.
    Epoch(u64),
    "e"
);
id!(
    /// Forward step of a debtor; unique within that instance's incarnation.
    StepId(u64),
    "t"
);
id!(
    /// Physical rBlock of one instance: slots `[p * block_tokens, (p + 1) * block_tokens)` of its KV store.
    PhysBlock(u32),
    "p"
);
