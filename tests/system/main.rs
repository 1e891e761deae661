//! System tests of the whole pool, in one test binary.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::cast_possible_truncation, reason = "small sizes of tests")]
#![allow(clippy::print_stdout, reason = "measured differences, for --nocapture")]

mod active_experts;
mod cuda;
mod cuda_precision;
mod disaggregated;
mod drafts;
mod eight_bits;
mod embeddings;
mod failures;
mod families;
mod gguf;
mod goldens;
mod hand_back;
mod hostile;
mod hostile_frames;
mod left_behind;
mod membership;
mod micro_batches;
mod moves;
mod peer_access;
mod pooled;
mod prefix;
mod process_cli;
mod process_cluster;
mod process_cuda_trial;
mod process_disaggregated;
mod process_drain;
mod process_ends;
mod process_faults;
mod process_front;
mod process_health;
mod process_host_tier;
mod process_hostile;
mod process_http;
mod process_keys;
mod process_metrics;
mod process_moves;
mod process_operate;
mod process_peer_access;
mod process_regions;
mod process_replay;
mod process_requests;
mod process_standby;
mod process_stderr;
mod process_up;
mod random;
mod recovery;
mod roles;
mod sampling;
mod split;
mod staged;
mod swapping;
mod threshold;
