//! Whether there is a CUDA driver, and which devices it has.
//!
//! Invariant: no panic for missing hardware or software. cudarc panics at the first call without the driver's library
//! and at a symbol that an old driver lacks; so the library is checked first, and a panic of the query is caught.

use cudarc::driver::result::{DriverError, device as driver_device};
use cudarc::driver::{result, sys};
use std::fmt;

/// Result of [`probe`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaProbe {
    /// No usable device; the reason is for people.
    Absent { reason: String },
    /// At least one device.
    Present {
        /// Newest CUDA version that the driver supports: 1000 times the major and 10 times the minor version.
        driver_version: u32,
        devices: Vec<ProbedDevice>,
    },
}

/// A CUDA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbedDevice {
    pub name: String,
    /// All memory of the device in bytes, used or not.
    pub memory_bytes: u64,
    /// Major and minor: `(9, 0)` for H100 and H200.
    pub compute_capability: (u32, u32),
    pub multiprocessors: u32,
}

impl fmt::Display for CudaProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent { reason } => write!(f, "no CUDA: {reason}"),
            Self::Present { driver_version, devices } => {
                write!(f, "CUDA {}.{}", driver_version / 1000, driver_version % 1000 / 10)?;
                devices.iter().try_for_each(|device| write!(f, ", {}", device.name))
            }
        }
    }
}

/// Looks for a CUDA driver and its devices. Never panics.
#[must_use]
pub fn probe() -> CudaProbe {
    // SAFETY: loads the driver's library by its usual names; its initialisers are those of NVIDIA's driver.
    if !unsafe { sys::is_culib_present() } {
        return CudaProbe::Absent {
            reason: "the driver's library (libcuda.so, nvcuda.dll) is not installed".to_owned(),
        };
    }
    // cudarc panics if the library lacks a function.
    let found = std::panic::catch_unwind(query)
        .unwrap_or_else(|_| Err(Failure("its library lacks a function that every driver has".to_owned())));
    match found {
        Ok((_, devices)) if devices.is_empty() => CudaProbe::Absent { reason: "the driver has no device".to_owned() },
        Ok((driver_version, devices)) => CudaProbe::Present { driver_version, devices },
        Err(error) => CudaProbe::Absent { reason: format!("the driver is installed, but fails: {}", error.0) },
    }
}

/// A driver's error, in words.
struct Failure(String);

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        // The code's name, not the driver's text: old drivers may lack the function that looks it up.
        Self(format!("{:?}", error.0))
    }
}

/// The driver's version and its devices. The library is present.
fn query() -> Result<(u32, Vec<ProbedDevice>), Failure> {
    result::init()?;
    let mut version = 0;
    // SAFETY: the pointer is to a live int, which the driver fills.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result()?;
    let count = driver_device::get_count()?;
    let devices = (0..count).map(device).collect::<Result<_, Failure>>()?;
    Ok((unsigned(version), devices))
}

fn device(ordinal: i32) -> Result<ProbedDevice, Failure> {
    use sys::CUdevice_attribute_enum as Attribute;
    let handle = driver_device::get(ordinal)?;
    // SAFETY: `handle` is a device that the driver has just given; it stays valid for the life of the process.
    let attribute = |attribute| unsafe { driver_device::get_attribute(handle, attribute) };
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: as above.
    let memory = unsafe { driver_device::total_mem(handle) }?;
    Ok(ProbedDevice {
        name: driver_device::get_name(handle)?,
        memory_bytes: memory as u64,
        compute_capability: (unsigned(major), unsigned(minor)),
        multiprocessors: unsigned(multiprocessors),
    })
}

/// The driver counts in `int`; negative numbers would be its bug.
fn unsigned(n: i32) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_never_panics_and_says_why_there_is_nothing() {
        match probe() {
            CudaProbe::Absent { reason } => {
                // SAFETY: as in `probe`.
                let installed = unsafe { sys::is_culib_present() };
                let expected = if installed { "the driver " } else { "is not installed" };
                assert!(reason.contains(expected), "{reason}");
            }
            CudaProbe::Present { driver_version, devices } => {
                assert!(driver_version >= 2020 && !devices.is_empty());
                assert!(devices.iter().all(|device| !device.name.is_empty() && device.memory_bytes > 0));
            }
        }
    }

    #[test]
    fn a_probe_reads_well() {
        let device =
            ProbedDevice { name: "A".to_owned(), memory_bytes: 1, compute_capability: (9, 0), multiprocessors: 132 };
        let present = CudaProbe::Present { driver_version: 13_010, devices: vec![device] };
        assert_eq!(present.to_string(), "CUDA 13.1, A");
        let absent = CudaProbe::Absent { reason: "none".to_owned() };
        assert_eq!(absent.to_string(), "no CUDA: none");
    }
}
