//! Addresses of devices on the PCI bus.

use std::fmt;
use std::str::FromStr;

/// A function of a device on the PCI bus: `0000:3b:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<Self, PciAddressError> {
        let hex = |part: &str| u32::from_str_radix(part, 16).map_err(|_no_number| PciAddressError);
        let byte = |part: &str| u8::from_str_radix(part, 16).map_err(|_no_number| PciAddressError);
        let (place, function) = text.split_once('.').ok_or(PciAddressError)?;
        let parts: Vec<&str> = place.split(':').collect();
        let &[domain, bus, device] = &parts[..] else { return Err(PciAddressError) };
        Ok(Self { domain: hex(domain)?, bus: byte(bus)?, device: byte(device)?, function: byte(function)? })
    }
}

/// The error of a text that is no [`PciAddress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a PCI address is domain:bus:device.function in hexadecimal")]
pub struct PciAddressError;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn an_address_is_what_it_says() {
        let address = PciAddress { domain: 0x1_0000, bus: 0x3b, device: 0x1f, function: 7 };
        assert_eq!(address.to_string(), "10000:3b:1f.7");
        assert_eq!(address.to_string().parse(), Ok(address));
        assert_eq!("0000:00:03.0".parse::<PciAddress>().unwrap().to_string(), "0000:00:03.0");
        for text in
            ["", "3b:00.0", "0000:3b:00", "0000:3b:00.0.0", "0000:100:00.0", "pci0000:3b", "0:0:0:0.0", "0000:3b:zz.0"]
        {
            assert_eq!(text.parse::<PciAddress>(), Err(PciAddressError), "{text}");
        }
    }
}
