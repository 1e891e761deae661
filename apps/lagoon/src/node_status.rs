//! Status of a node: `/lagoon/status`, and the source of its metrics.

use crate::path_probe::PathRow;
use crate::pool_client::{CalibrationRow, tier_name};
use crate::transfers::Carried;
use lagoon_instance::{InstanceConfig, InstanceStatus};
use serde::Serialize;

/// Constant properties of a running node.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct About {
    pub(crate) name: String,
    pub(crate) backend: String,
    /// `device` or `host`.
    pub(crate) tier: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) calibration: Option<CalibrationRow>,
}

impl About {
    pub(crate) fn new(config: &InstanceConfig) -> Self {
        Self {
            name: config.name.clone(),
            backend: config.backend.clone(),
            tier: tier_name(config.tier.into()),
            calibration: config.calibration.as_ref().map(CalibrationRow::from),
        }
    }
}

/// The response of `/lagoon/status`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NodeStatus {
    #[serde(flatten)]
    pub(crate) about: About,
    /// Its role as in `lagoon status`, and the role that it changes to.
    pub(crate) role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) becoming: Option<&'static str>,
    #[serde(flatten)]
    pub(crate) instance: InstanceStatus,
    /// Bytes of frames sent to peers, by class, since the start.
    pub(crate) control_bytes_sent: u64,
    pub(crate) partials_bytes_sent: u64,
    pub(crate) bulk_bytes_sent: u64,
    /// Measured paths to prefill workers' KV.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) paths: Vec<PathRow>,
    /// Traffic of paths, of an instance whose KV is shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) carried: Option<Carried>,
}
