//! Types that every crate of Lagoon shares: identifiers, units, limits, shapes, attention partials and requests.
//!
//! Nothing here does I/O, allocates on devices or knows a protocol. Only this crate defines the log base and the empty
//! partial ([`partial`]), the visible range of a query ([`run`]) and every bound ([`limits`]).
#![forbid(unsafe_code)]

pub mod alibi;
pub mod constraint;
pub mod dtype;
pub mod e4m3;
pub mod ids;
pub mod kv_dtype;
pub mod limits;
pub mod mutants;
pub mod partial;
pub mod request;
pub mod run;
pub mod shape;
pub mod space;
pub mod step;

pub use alibi::Alibi;
pub use constraint::{Constraint, Grammar, Reasoning};
pub use dtype::DType;
pub use ids::{Epoch, InstanceId, LeaseId, PhysBlock, SeqId, StepId};
pub use kv_dtype::KvDType;
pub use partial::Partial;
pub use request::{
    CONTEXT, CachedTokens, FinishReason, GenerateRequest, Pooling, PromptLogprob, RequestError, RequestOptions,
    SamplingParams, TokenEvent, TokenLogprobs,
};
pub use run::{KvRun, LeaseRun};
pub use shape::{AttentionGeometry, KvShape, ModelHash};
pub use space::KvSpace;
pub use step::{Chunk, MicroBatch, RingRows, StepPlan, WindowShape};
