//! Pins: the public key of each connected node, by name, and the budgets that its sessions share. A second key for a name is
//! refused until the last session with the first one has ended.

use crate::{Subject, TransportConfig, event::Shares};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// Nodes with sessions: at most as many as there are sessions.
#[derive(Debug, Default)]
struct Nodes {
    /// The key, and how many sessions it has.
    pinned: BTreeMap<Arc<str>, (Subject, usize)>,
    /// Of those with sessions, or with frames that wait.
    shares: BTreeMap<Arc<str>, Weak<Shares>>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Pins(Mutex<Nodes>);

/// Disconnected nodes whose shares are kept, beyond the number of connected ones.
const GONE_MAX: usize = 64;

impl Nodes {
    fn shares_of(&mut self, node: &Arc<str>, config: &TransportConfig) -> Arc<Shares> {
        if let Some(shares) = self.shares.get(node).and_then(Weak::upgrade) {
            return shares;
        }
        if self.shares.len() > self.pinned.len().saturating_mul(2).saturating_add(GONE_MAX) {
            self.shares.retain(|_, shares| shares.strong_count() > 0);
        }
        let shares = Arc::new(Shares::new(config));
        self.shares.insert(Arc::clone(node), Arc::downgrade(&shares));
        shares
    }
}

impl Pins {
    fn lock(&self) -> MutexGuard<'_, Nodes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks that a node's name is not pinned to another key, and that it may have one more session.
    ///
    /// # Errors
    /// The reason of the refusal.
    pub(crate) fn admits(&self, subject: &Subject, sessions_max: usize) -> Result<(), String> {
        match self.lock().pinned.get(&subject.node) {
            Some((pinned, _)) if pinned != subject => {
                Err(format!("node {:?} is connected with another key", subject.node))
            }
            Some((_, sessions)) if *sessions >= sessions_max => {
                Err(format!("node {:?} has {sessions} sessions, its most", subject.node))
            }
            _ => Ok(()),
        }
    }

    /// Budgets that the node's connections share.
    pub(crate) fn shares(&self, subject: &Subject, config: &TransportConfig) -> Arc<Shares> {
        self.lock().shares_of(&subject.node, config)
    }

    /// A session of it begins, and lasts until the pin is dropped.
    pub(crate) fn begin(self: &Arc<Self>, subject: &Subject, config: &TransportConfig) -> Pin {
        let mut nodes = self.lock();
        let (_, sessions) = nodes.pinned.entry(Arc::clone(&subject.node)).or_insert_with(|| (subject.clone(), 0));
        *sessions = sessions.saturating_add(1);
        let shares = nodes.shares_of(&subject.node, config);
        drop(nodes);
        Pin { pins: Arc::clone(self), node: Arc::clone(&subject.node), shares }
    }
}

/// One session of a node.
#[derive(Debug)]
pub(crate) struct Pin {
    pins: Arc<Pins>,
    node: Arc<str>,
    pub(crate) shares: Arc<Shares>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let pinned = &mut self.pins.lock().pinned;
        let Some((_, sessions)) = pinned.get_mut(&self.node) else { return };
        *sessions = sessions.saturating_sub(1);
        if *sessions == 0 {
            pinned.remove(&self.node);
        }
    }
}
