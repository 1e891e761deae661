//! A whole pool in one struct: rManagers and a gManager that exchange messages in memory, with seeded delays,
//! reordering across connections, lost connections and restarts. See [`world`] for the model, [`check`] for what must
//! hold at every event, and [`cluster`] for the runs.

mod check;
mod cluster;
mod node;
mod world;
