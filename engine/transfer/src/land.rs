//! Where the bytes of a transaction go when they arrive: into place or into a buffer, checked while they are copied.

use crate::{
    check::{Check, Checker},
    coalesce::{Part, Transaction},
    pull::Pull,
    region::{Region, RegionError},
};
use lagoon_backend::Xxh3;
use std::{collections::BTreeMap, sync::Arc};

/// What a transaction's arrival came to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Landed {
    /// Checks of pieces that were computed on the way: (request, piece, check).
    pub checks: Vec<(u64, usize, Check)>,
    /// Finite values that the reader's element type cannot hold, by request.
    pub overflows: BTreeMap<u64, u64>,
}

/// Puts the next bytes into a slice. Where there is a hash it gets them too, in order: [`Xxh3::copy`] does both at once.
pub type Fill<'a> = &'a mut dyn FnMut(&mut [u8], Option<&mut Xxh3>) -> Result<(), RegionError>;

/// The pulls of the requests that are in transfer.
pub type Pulls = BTreeMap<u64, Arc<Pull>>;

/// Takes the bytes of one transaction, in order.
#[derive(Debug)]
pub struct Lander<'a> {
    transaction: &'a Transaction,
    pulls: &'a Pulls,
    regions: &'a [Arc<dyn Region>],
    verify: bool,
    at: u64,
    /// The next part, or the one that is arriving, and its check in the making.
    part: usize,
    checker: Checker,
    buffer: Vec<u8>,
    landed: Landed,
}

impl<'a> Lander<'a> {
    /// `verify`: checks are computed on the way where they can be.
    #[must_use]
    pub fn new(transaction: &'a Transaction, pulls: &'a Pulls, regions: &'a [Arc<dyn Region>], verify: bool) -> Self {
        let staged = if transaction.local.is_none() { usize::try_from(transaction.bytes).unwrap_or(0) } else { 0 };
        Self {
            transaction,
            pulls,
            regions,
            verify,
            at: 0,
            part: 0,
            checker: Checker::default(),
            buffer: Vec::with_capacity(staged),
            landed: Landed::default(),
        }
    }

    /// Bytes that have not come yet.
    #[must_use]
    pub fn missing(&self) -> u64 {
        self.transaction.bytes - self.at
    }

    /// The next bytes.
    ///
    /// # Errors
    /// When there are too many, or a region cannot be written.
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

    /// The next `bytes` bytes, which `fill` puts where they belong, in order, and hashes where it is asked to.
    ///
    /// # Errors
    /// As [`Lander::push`], and those of `fill`.
    pub fn push_with(&mut self, bytes: u64, fill: Fill<'_>) -> Result<(), RegionError> {
        if bytes > self.missing() {
            let (offset, end) = (self.at, self.at + bytes);
            return Err(RegionError::Outside { offset, end, bytes: self.transaction.bytes });
        }
        let Some(local) = self.transaction.local else {
            let start = self.buffer.len();
            self.buffer.resize(start + usize::try_from(bytes).unwrap_or(0), 0);
            self.at += bytes;
            return fill(&mut self.buffer[start..], None);
        };
        let regions = self.regions;
        let mut result = Ok(());
        let bytes = usize::try_from(bytes).unwrap_or(0);
        regions[local.region as usize].fill(local.offset + self.at, bytes, &mut |target| {
            if result.is_ok() {
                result = self.fill_parts(target, fill);
            }
        })?;
        result
    }

    /// Fills what is next, one part at a time, so that its check ends where it does.
    fn fill_parts(&mut self, mut target: &mut [u8], fill: Fill<'_>) -> Result<(), RegionError> {
        while !target.is_empty() {
            let part = self.transaction.parts[self.part];
            let room = usize::try_from(part.at + part.bytes - self.at).unwrap_or(usize::MAX);
            let (now, later) = target.split_at_mut(room.min(target.len()));
            fill(now, (self.verify && part.plain).then_some(&mut self.checker.0))?;
            self.at += now.len() as u64;
            self.end_part(&part);
            target = later;
        }
        Ok(())
    }

    fn end_part(&mut self, part: &Part) {
        if self.at < part.at + part.bytes {
            return;
        }
        self.part += 1;
        if self.verify && part.plain {
            self.landed.checks.push((part.request, part.piece, self.checker.finish()));
            self.checker.0.reset();
        }
    }

    /// All bytes came: converts what is in the buffer.
    ///
    /// # Errors
    /// When a region cannot be written.
    pub fn finish(mut self) -> Result<Landed, RegionError> {
        assert_eq!(self.missing(), 0, "a transaction ends with its last byte");
        if self.transaction.local.is_some() {
            return Ok(self.landed);
        }
        for part in &self.transaction.parts {
            let Some(pull) = self.pulls.get(&part.request) else { continue };
            let at = usize::try_from(part.at).unwrap_or(usize::MAX);
            let piece = &self.buffer[at..][..usize::try_from(part.bytes).unwrap_or(usize::MAX)];
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
