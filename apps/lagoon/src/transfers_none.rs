//! KV transfer on systems without shared memory (other than Linux): nothing is exported or read.

use crate::args::EngineArgs;
use crate::path_probe::PathRow;
use crate::transfer_addr::Endpoint;
use lagoon_instance::{InstanceConfig, TransferConfig, TransferEffect, TransferEvent};
use lagoon_runner::KvMemory;
use lagoon_transport::{Identity, Subject};
use lagoon_types::InstanceId;
use std::net::SocketAddr;

/// No traffic.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Carried {
    pub(crate) bytes: std::collections::BTreeMap<&'static str, u64>,
    pub(crate) regions_mapped: usize,
    pub(crate) regions_refused: u64,
}

/// No completions.
#[derive(Debug)]
pub(crate) enum Completion {}

/// No KV transfer.
#[derive(Debug)]
pub(crate) enum Transfers {}

pub(crate) fn is_possible() -> bool {
    false
}

pub(crate) fn config(_of: &InstanceConfig, _stage_blocks: u32, _engine: &EngineArgs) -> anyhow::Result<TransferConfig> {
    anyhow::bail!("prefill and decode workers need Linux\nhint: leave out --role")
}

impl Transfers {
    pub(crate) fn start(
        _config: &InstanceConfig,
        _memory: &KvMemory,
        endpoint: &Endpoint,
        _identity: &Identity,
    ) -> anyhow::Result<Self> {
        anyhow::bail!("KV cannot be served on {}: that needs Linux\nhint: leave out --role", endpoint.listen)
    }

    #[must_use]
    pub(crate) fn announcing(self, _announce: bool) -> Self {
        self
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        match *self {}
    }

    pub(crate) fn reading_us(&self) -> u64 {
        match *self {}
    }

    pub(crate) fn measured(&self) -> &[PathRow] {
        match *self {}
    }

    pub(crate) fn carried(&self) -> Carried {
        match *self {}
    }

    pub(crate) async fn next(&mut self) -> Option<Completion> {
        match *self {}
    }

    pub(crate) fn reader_is(&self, _reader: InstanceId, _subject: &Subject) {
        match *self {}
    }

    pub(crate) fn carry_out(&mut self, _effect: TransferEffect) {
        match *self {}
    }

    pub(crate) fn on_completion(&mut self, completion: Completion) -> Option<TransferEvent> {
        match completion {}
    }

    pub(crate) fn tick(&mut self) {
        match *self {}
    }
}
