//! lagoon-sched
