//! Errors of devices.

/// Errors of a device that its caller cannot foresee.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: String, bytes: u64 },
    #[error("the device cannot do this: {0}")]
    Unsupported(String),
    /// One call failed; later ones may not.
    #[error("the device failed: {0}")]
    Failed(String),
    /// Every later call fails, too: the process has to start anew.
    #[error("the device was lost: {0}")]
    Lost(String),
}
