//! Landing of a transaction: its bytes are copied to their places or into a buffer, and checked while they are copied.

use crate::{
    check::{Check, Checker},
    coalesce::Transaction,
    pull::Pull,
    region::{Region, RegionError},
};
use lagoon_backend::Xxh3;
use std::{collections::BTreeMap, sync::Arc};

/// Result of a landed transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landed {
    /// Checks of pieces, computed during the copy: (request, piece, check).
    pub checks: Vec<(u64, usize, Check)>,
    /// Finite values that the reader's element type cannot hold, by request.
    pub overflows: BTreeMap<u64, u64>,
}

/// Callback that writes the next bytes into a slice and, if there is a hash, feeds them to it in order ([`Xxh3::copy`] does
/// both). The caller of the callback settles the hash.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8], Option<&mut Xxh3>) -> Result<(), RegionError>;

/// Pulls of the requests in transfer, by request.
pub type Pulls = BTreeMap<u64, Arc<Pull>>;

#[cfg(target_os = "linux")]
fn is_on_device(region: &dyn Region) -> bool {
    region.on_device().is_some()
}

#[cfg(not(target_os = "linux"))]
fn is_on_device(_region: &dyn Region) -> bool {
    false
}

/// Regions of a writer in its shared device region, which this process has mapped.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct PeerRegions {
    peer: Box<dyn lagoon_backend::PeerRegion>,
    /// Offset and size of each region.
    regions: Vec<(u64, u64)>,
}

#[cfg(target_os = "linux")]
impl PeerRegions {
    /// Consecutive regions of these sizes.
    ///
    /// # Errors
    /// If the shared device region is smaller.
    pub fn new(peer: Box<dyn lagoon_backend::PeerRegion>, sizes: &[u64]) -> Result<Self, RegionError> {
        let mut end = 0u64;
        let mut place = |bytes: &u64| {
            let base = end;
            end = end.saturating_add(*bytes);
            (base, *bytes)
        };
        let regions = sizes.iter().map(&mut place).collect();
        let bytes = peer.bytes();
        if end > bytes {
            return Err(RegionError::Outside { offset: 0, end, bytes });
        }
        Ok(Self { peer, regions })
    }

    /// The shared device region.
    #[must_use]
    pub fn shared(&self) -> &dyn lagoon_backend::PeerRegion {
        self.peer.as_ref()
    }

    fn place(&self, remote: crate::Remote) -> Result<u64, RegionError> {
        let region = usize::try_from(remote.region).ok().and_then(|region| self.regions.get(region)).copied();
        let (base, bytes) = region.unwrap_or((0, 0));
        let end = remote.offset.saturating_add(remote.bytes);
        let outside = RegionError::Outside { offset: remote.offset, end, bytes };
        if end <= bytes { Ok(base + remote.offset) } else { Err(outside) }
    }
}

/// Executes a transaction between two shared device regions: the device copies the bytes to their places and computes their
/// checks there. Other transactions (conversions, destinations in host memory) pass through the host.
///
/// # Errors
/// If a range is outside, or the device fails.
#[cfg(target_os = "linux")]
pub fn land_on_device(
    transaction: &Transaction,
    pulls: &Pulls,
    regions: &[Arc<dyn Region>],
    verify: bool,
    from: &PeerRegions,
) -> Result<Landed, RegionError> {
    let own = transaction.local.and_then(|local| Some((local, regions[local.region as usize].on_device()?)));
    let Some((local, own)) = own else {
        let mut lander = Lander::new(transaction, pulls, regions, verify);
        for segment in &transaction.segments {
            let mut at = from.place(segment.remote)?;
            lander.push_with(segment.remote.bytes, &mut |target, hash| {
                from.peer.read(at, target)?;
                hash.into_iter().for_each(|hash| hash.update(target));
                at += target.len() as u64;
                Ok(())
            })?;
        }
        return lander.finish();
    };
    let to = own.place(local.offset, transaction.bytes)?;
    let (mut moves, mut at) = (Vec::with_capacity(transaction.segments.len()), 0);
    for segment in &transaction.segments {
        let bytes = segment.remote.bytes;
        if bytes > transaction.bytes - at {
            return Err(RegionError::Outside { offset: at, end: at.saturating_add(bytes), bytes: transaction.bytes });
        }
        moves.push(lagoon_backend::RegionCopy { from: from.place(segment.remote)?, to: to + at, bytes });
        at += bytes;
    }
    assert_eq!(at, transaction.bytes, "a transaction has the bytes of its segments");
    from.peer.copy(&moves)?;
    let (mut of, mut ranges) = (Vec::new(), Vec::new());
    for part in transaction.parts.iter().filter(|part| verify && part.plain) {
        let each = part.bytes / part.pieces as u64;
        of.extend((part.piece..part.piece + part.pieces).map(|piece| (part.request, piece)));
        ranges.extend((0..part.pieces as u64).map(|n| (local.offset + part.at + n * each, each)));
    }
    let checks = of.iter().zip(own.checks(&ranges)?);
    let checks = checks.map(|((request, piece), check)| (*request, *piece, check)).collect();
    Ok(Landed { checks, ..Landed::default() })
}

/// Lander: receives the bytes of one transaction, in order.
#[derive(Debug)]
pub struct Lander<'a> {
    transaction: &'a Transaction,
    pulls: &'a Pulls,
    regions: &'a [Arc<dyn Region>],
    verify: bool,
    at: u64,
    /// Current part.
    part: usize,
    /// Current piece of the part, its incremental check, and its end in the transaction.
    piece: usize,
    checker: Checker,
    end: u64,
    /// Buffer of all bytes, if they are converted or copied to a device at the end.
    buffer: Option<Vec<u8>>,
    landed: Landed,
}

impl<'a> Lander<'a> {
    /// A lander of `transaction`. `verify` computes checks during the copy where possible.
    #[must_use]
    pub fn new(transaction: &'a Transaction, pulls: &'a Pulls, regions: &'a [Arc<dyn Region>], verify: bool) -> Self {
        let gathers = transaction.local.is_none_or(|local| is_on_device(regions[local.region as usize].as_ref()));
        let room = || Vec::with_capacity(usize::try_from(transaction.bytes).unwrap_or(0));
        Self {
            transaction,
            pulls,
            regions,
            verify,
            at: 0,
            part: 0,
            piece: 0,
            checker: Checker::default(),
            end: 0,
            buffer: gathers.then(room),
            landed: Landed::default(),
        }
    }

    /// Bytes that have not arrived yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.transaction.bytes - self.at
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// If they exceed the transaction, or a region cannot be written.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), RegionError> {
        let mut rest = bytes;
        self.push_with(bytes.len() as u64, &mut |target, hash| {
            let (now, later) = rest.split_at(target.len());
            match hash {
                Some(hash) => hash.copy(now, target),
                None => target.copy_from_slice(now),
            }
            rest = later;
            Ok(())
        })
    }

    /// Takes the next `bytes` bytes, which `fill` writes to their places, in order, and hashes on request.
    ///
    /// # Errors
    /// As [`Lander::push`], and those of `fill`.
    pub fn push_with(&mut self, bytes: u64, fill: Fill<'_>) -> Result<(), RegionError> {
        if bytes > self.missing() {
            let (offset, end) = (self.at, self.at + bytes);
            return Err(RegionError::Outside { offset, end, bytes: self.transaction.bytes });
        }
        if let Some(mut buffer) = self.buffer.take() {
            let start = buffer.len();
            buffer.resize(start + usize::try_from(bytes).unwrap_or(0), 0);
            let result = match self.transaction.local {
                Some(_) => {
                    let result = self.fill_parts(&mut buffer[start..], fill);
                    // Another thread may continue with the checker.
                    self.checker.0.settle();
                    result
                }
                None => {
                    self.at += bytes;
                    fill(&mut buffer[start..], None)
                }
            };
            self.buffer = Some(buffer);
            return result;
        }
        let Some(local) = self.transaction.local else { unreachable!("what has no place of its own is gathered") };
        let regions = self.regions;
        let mut result = Ok(());
        let bytes = usize::try_from(bytes).unwrap_or(0);
        regions[local.region as usize].fill(local.offset + self.at, bytes, &mut |target| {
            if result.is_ok() {
                result = self.fill_parts(target, fill);
                // Settled before the region allows other readers.
                self.checker.0.settle();
            }
        })?;
        result
    }

    /// Fills `target` one piece at a time, so that each piece's check ends with it.
    fn fill_parts(&mut self, mut target: &mut [u8], fill: Fill<'_>) -> Result<(), RegionError> {
        while !target.is_empty() {
            let part = self.transaction.parts[self.part];
            let checked = self.verify && part.plain;
            if self.at == self.end {
                let each = part.bytes / part.pieces as u64;
                self.end += each;
                self.checker.0.begin(each);
            }
            let room = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
            let (now, later) = target.split_at_mut(room.min(target.len()));
            fill(now, checked.then_some(&mut self.checker.0))?;
            self.at += now.len() as u64;
            if self.at == self.end {
                if checked {
                    self.landed.checks.push((part.request, part.piece + self.piece, self.checker.finish()));
                }
                self.piece += 1;
                if self.piece == part.pieces {
                    (self.part, self.piece) = (self.part + 1, 0);
                }
            }
            target = later;
        }
        Ok(())
    }

    /// Finishes after the last byte: writes or converts the buffer, if there is one.
    ///
    /// # Errors
    /// If a region cannot be written.
    pub fn finish(mut self) -> Result<Landed, RegionError> {
        assert_eq!(self.missing(), 0, "a transaction ends with its last byte");
        let Some(buffer) = self.buffer.take() else { return Ok(self.landed) };
        if let Some(local) = self.transaction.local {
            crate::region::write(self.regions[local.region as usize].as_ref(), local.offset, &buffer)?;
            return Ok(self.landed);
        }
        for part in &self.transaction.parts {
            let Some(pull) = self.pulls.get(&part.request) else { continue };
            let at = usize::try_from(part.at).unwrap_or(usize::MAX);
            let piece = &buffer[at..][..usize::try_from(part.bytes).unwrap_or(usize::MAX)];
            if self.verify {
                self.landed.checks.push((part.request, part.piece, pull.check_staged(part.piece, piece)));
            }
            let overflows = pull.convert(part.piece, piece, self.regions)?;
            if overflows > 0 {
                *self.landed.overflows.entry(part.request).or_default() += overflows;
            }
        }
        Ok(self.landed)
    }
}
