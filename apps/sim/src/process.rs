//! Processes of the pool: an instance with its modelled device, and the gManager.

use crate::clock::Clock;
use crate::shared::Registrations;
use lagoon_cluster::GManager;
use lagoon_instance::{Instance, InstanceConfig};
use lagoon_runner::{Command, Report};
use lagoon_types::InstanceId;
use std::collections::VecDeque;

/// One instance's process, the `life`-th at its place.
#[derive(Debug)]
pub struct Process<R> {
    pub life: u64,
    pub clock: Clock,
    pub instance: Instance,
    pub runner: R,
    /// Commands that the device has not taken yet.
    pub(crate) commands: VecDeque<Command>,
    /// Reports of the work in progress on the device.
    pub(crate) reports: Vec<Report>,
    pub(crate) busy: bool,
    /// Number of the piece of work; raised when one ends, and when commands change it.
    pub(crate) piece: u64,
    pub(crate) ticks: u64,
    /// End of the pause, if stopped.
    pub paused_until_us: Option<u64>,
    /// Only its loop is stopped: its transports go on.
    pub(crate) transports_run: bool,
    /// Was stopped and has not read its clock since.
    pub dazed: bool,
    /// Reasons for closed connections.
    pub closed: Vec<String>,
    /// The gManager's reason for a refusal.
    pub rejected: Option<String>,
    /// It reported that its drain is done.
    pub drained: bool,
}

impl<R> Process<R> {
    /// A new process.
    ///
    /// # Panics
    /// If the configuration is invalid.
    #[must_use]
    pub fn new(config: InstanceConfig, runner: R, clock: Clock, life: u64) -> Self {
        Self {
            life,
            clock,
            instance: Instance::new(config).expect("the simulator's configurations work"),
            runner,
            commands: VecDeque::new(),
            reports: Vec::new(),
            busy: false,
            piece: 0,
            ticks: 0,
            paused_until_us: None,
            transports_run: false,
            dazed: false,
            closed: Vec::new(),
            rejected: None,
            drained: false,
        }
    }

    /// Its number, once registered.
    #[must_use]
    pub fn id(&self) -> Option<InstanceId> {
        self.instance.status().instance
    }
}

/// The gManager's process, and the registered connections.
#[derive(Debug)]
pub struct Coordinator {
    pub life: u64,
    pub clock: Clock,
    pub gmanager: GManager,
    pub(crate) tick_us: u64,
    pub(crate) registered: Registrations,
    pub paused_until_us: Option<u64>,
}
