//! Places of processes, and their addresses.

/// A process's address. [`GMANAGER`] is the gManager's; instances follow.
pub type Place = usize;
/// The gManager's place.
pub const GMANAGER: Place = 0;

/// Address of a process.
#[must_use]
pub fn address(place: Place) -> String {
    format!("10.{}.{}.{}:7000", place >> 16 & 255, place >> 8 & 255, place & 255)
}

/// Inverse of [`address`].
#[must_use]
pub fn place_of(address: &str) -> Option<Place> {
    let (ip, _) = address.split_once(':')?;
    let bytes: Vec<usize> = ip.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
    let [_, a, b, c] = bytes[..] else { return None };
    Some(a << 16 | b << 8 | c)
}
