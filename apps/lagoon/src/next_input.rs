//! Inputs of the loop that a node may not have: without one, they never come.

use crate::transfers::{Completion, Transfers};
use lagoon_transport::Inbox;

/// The next frame of a class.
pub(crate) async fn recv<T>(inbox: Option<&mut Inbox<T>>) -> Option<T> {
    match inbox {
        Some(inbox) => inbox.recv().await,
        None => std::future::pending().await,
    }
}

/// The next completion of the KV transports.
pub(crate) async fn next_completion(transfers: Option<&mut Transfers>) -> Option<Completion> {
    match transfers {
        Some(transfers) => transfers.next().await,
        None => std::future::pending().await,
    }
}
