//! Errors of devices.

/// Errors of a device that its caller cannot foresee.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("out of device memory: {what} needs {bytes} bytes")]
    OutOfMemory { what: String, bytes: u64 },
    #[error("the device cannot do this: {0}")]
    Unsupported(String),
    #[error("the device was lost: {0}")]
    Lost(String),
}
