//! Landing: the own blocks that a prompt's KV is read into, allocated all at once before the first read.
//!
//! Pull: allocated when the KV is ready; it comes as one part. Push: allocated before a worker gets the prompt, and
//! parts are read as they are announced, while the rest is computed.

use super::Prefills;
use super::ask::Stage;
use crate::batch::Batch;
use crate::batch::sequence::LayerChecks;
use crate::cx::Cx;
use lagoon_cluster::mutants::{self, Mutant};
use lagoon_kv::Owner;
use lagoon_runner::StageId;
use lagoon_transfer::{Check, Offer, PullId, reader::PullRefused};
use lagoon_types::{PhysBlock, SeqId};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The landing of one prompt. See the module's documentation.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) blocks: Vec<PhysBlock>,
    /// For the prompt's last window, which is read behind its tokens.
    pub(super) window: Vec<PhysBlock>,
    /// Blocks of the staging buffer that KV arrives in, if transports cannot write the store: copied from there, as
    /// `stage`, once complete.
    pub(super) staged: Vec<u32>,
    pub(super) stage: Option<StageId>,
    /// Mark behind peers' writes queued at allocation: some may target these blocks' old owners, and transports do not
    /// wait for the device.
    pub(super) after_writes: u64,
    /// Number of the prompt's oldest blocks, which stay with the worker.
    pub(super) left: u32,
    /// Prefix-cache hits at the start of `blocks` (none if `left`), and how many of them have hashes.
    pub(super) found: u32,
    pub(super) hashed: u32,
    /// Tokens to read: those of the prompt, then those of its last window.
    tokens: u32,
    layers: u32,
    /// Tokens of the prompt.
    prompt: u32,
    block_tokens: u32,
    /// Push: allocated before a worker got the prompt.
    pub(super) early: bool,
    /// Tokens and layers of announced parts.
    parts: Vec<(Range<u32>, Range<u32>)>,
    /// Announced parts that are not being read yet.
    offers: Vec<Offer>,
    /// The worker's checks of blocks that stay with it.
    left_checks: BTreeMap<u32, LayerChecks>,
    /// Reads in flight, with their tokens times layers.
    pulls: BTreeMap<PullId, u64>,
    /// Tokens times layers that have not arrived.
    missing: u64,
}

impl Landing {
    /// A landing for `tokens` tokens in `layers` layers, without the `left` oldest blocks and the `found` ones behind
    /// them.
    pub(super) fn new(
        blocks: Vec<PhysBlock>,
        (left, found): (u32, u32),
        (tokens, layers): (u32, u32),
        block_tokens: u32,
    ) -> Self {
        let missing = u64::from(tokens.saturating_sub((left + found) * block_tokens)) * u64::from(layers);
        let (parts, offers, pulls) = (Vec::new(), Vec::new(), BTreeMap::new());
        let (staged, stage, left_checks) = (Vec::new(), None, BTreeMap::new());
        Self {
            blocks,
            window: Vec::new(),
            staged,
            stage,
            after_writes: 0,
            left,
            found,
            hashed: 0,
            tokens,
            layers,
            prompt: tokens,
            block_tokens,
            early: false,
            parts,
            offers,
            left_checks,
            pulls,
            missing,
        }
    }

    /// The prompt's last window is read, too: into these blocks, with so many tokens in the export of both.
    pub(super) fn with_window(&mut self, window: Vec<PhysBlock>, exported: u32) {
        self.missing += u64::from(exported - self.tokens) * u64::from(self.layers);
        (self.window, self.tokens) = (window, exported);
    }

    /// The worker has no window for it. Returns its blocks.
    pub(super) fn without_window(&mut self) -> Vec<PhysBlock> {
        self.missing = self.missing.saturating_sub(u64::from(self.tokens - self.prompt) * u64::from(self.layers));
        self.tokens = self.prompt;
        std::mem::take(&mut self.window)
    }

    /// Number of leading blocks that are not read.
    fn first(&self) -> u32 {
        self.left + self.found
    }

    /// Tokens whose KV is read.
    pub(super) fn tokens_here(&self) -> u32 {
        self.tokens.saturating_sub(self.first() * self.block_tokens)
    }

    /// Blocks to read into, in the order of the export: without one for the next token only, if there is a window behind.
    pub(super) fn read_into(&self) -> Vec<PhysBlock> {
        let known = self.prompt.div_ceil(self.block_tokens).saturating_sub(self.left) as usize;
        let end = if self.window.is_empty() { self.blocks.len() } else { known };
        self.blocks[self.found as usize..end].iter().chain(&self.window).copied().collect()
    }

    /// Ends the copy from the staging buffer, done or dropped. Returns the staging blocks.
    pub(super) fn stored(&mut self) -> Vec<u32> {
        self.stage = None;
        std::mem::take(&mut self.staged)
    }

    /// Whether a part of more than the prompt was announced.
    pub(super) fn exceeds_prompt(&self) -> bool {
        self.parts.iter().any(|(tokens, _)| tokens.end > self.prompt)
    }

    /// Accepts an announced part, to be read. False if it does not fit the prompt or was announced before.
    #[must_use]
    pub(super) fn accept(&mut self, offer: Offer) -> bool {
        let Some(end) = offer.first_token.checked_add(offer.tokens) else { return false };
        let tokens = offer.first_token..end;
        let edge = |token: u32| token.is_multiple_of(self.block_tokens) || token == self.tokens || token == self.prompt;
        let apart = |a: &Range<u32>, b: &Range<u32>| a.end <= b.start || b.end <= a.start;
        let new = self.parts.iter().all(|(t, l)| apart(t, &tokens) || apart(l, &offer.layers));
        let begins = tokens.start.is_multiple_of(self.block_tokens);
        let fits = !tokens.is_empty() && end <= self.tokens && begins && edge(end) && new;
        if fits {
            self.parts.push((tokens, offer.layers.clone()));
            self.offers.push(offer);
        }
        fits
    }

    /// Takes the oldest part to read: the number of its leading blocks to skip, and the target blocks of the others.
    fn next(&mut self) -> Option<(Offer, u32, Vec<u32>)> {
        let offer = (!self.offers.is_empty()).then(|| self.offers.remove(0))?;
        let first = offer.first_token / self.block_tokens;
        let end = (offer.first_token + offer.tokens).div_ceil(self.block_tokens);
        let (skip, from) = (self.first().clamp(first, end) - first, self.first());
        let into = (first + skip).saturating_sub(from) as usize..end.saturating_sub(from) as usize;
        let local = match &self.staged[..] {
            [] => self.read_into()[into].iter().map(|block| block.0).collect(),
            staged => staged[into].to_vec(),
        };
        Some((offer, skip, local))
    }

    /// Records the checks of a part's first blocks, which stay with the worker.
    fn leave(&mut self, offer: &Offer, checks: &[Check]) {
        let first = offer.first_token / self.block_tokens;
        for (block, check) in (first..self.left).zip(checks) {
            self.left_checks.entry(block).or_default().push((offer.layers.clone(), *check));
        }
    }

    /// Takes the checks of blocks that stay with the worker, as far as they cover all `layers` layers.
    pub(super) fn take_left_checks(&mut self, layers: u32) -> BTreeMap<u32, LayerChecks> {
        let known = |checks: &LayerChecks| checks.iter().map(|(of, _)| of.end - of.start).sum::<u32>() == layers;
        let mut checks = std::mem::take(&mut self.left_checks);
        checks.retain(|_, checks| known(checks));
        checks
    }

    fn started(&mut self, pull: PullId, offer: &Offer) {
        let from = offer.first_token.max(self.first() * self.block_tokens);
        let tokens = (offer.first_token + offer.tokens).saturating_sub(from);
        let layers = offer.layers.end - offer.layers.start;
        self.pulls.insert(pull, u64::from(tokens) * u64::from(layers));
    }

    pub(super) fn reads(&self, pull: PullId) -> bool {
        self.pulls.contains_key(&pull)
    }

    /// Whether this part is announced and not being read.
    pub(super) fn waits_for(&self, conn: lagoon_transfer::ConnId, export: u64) -> bool {
        self.offers.iter().any(|offer| (offer.conn, offer.export) == (conn, export))
    }

    /// Ends a read.
    pub(super) fn ended(&mut self, pull: PullId, well: bool) {
        let cells = self.pulls.remove(&pull).unwrap_or_default();
        self.missing -= if well { cells } else { 0 };
    }

    /// Whether a part was announced.
    pub(super) fn is_begun(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Whether KV is missing and no part is being read or announced.
    pub(super) fn is_idle(&self) -> bool {
        self.missing > 0 && self.pulls.is_empty() && self.offers.is_empty()
    }

    /// Whether all KV has arrived.
    pub(super) fn is_whole(&self) -> bool {
        self.missing == 0 && self.pulls.is_empty()
    }
}

/// Blocks of a dropped landing that reads or a copy still write to.
#[derive(Debug)]
pub(super) struct Settling {
    seq: SeqId,
    blocks: Vec<PhysBlock>,
    staged: Vec<u32>,
    stage: Option<StageId>,
    pulls: BTreeSet<PullId>,
}

impl Settling {
    pub(super) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    pub(super) fn seq(&self) -> SeqId {
        self.seq
    }

    pub(super) fn staged(&self) -> &[u32] {
        &self.staged
    }
}

impl Prefills {
    /// Starts reads of announced parts.
    pub(super) fn read_landings(&mut self, cx: &mut Cx, batch: &mut Batch) {
        let writes = &cx.writes;
        let written =
            |landing: &Landing| writes.has_written(landing.after_writes) || mutants::is(Mutant::WritesUnawaited);
        let waits = |stage: &Stage| stage.landing().is_some_and(|of| !of.offers.is_empty() && written(of));
        let waiting = self.away.iter().filter(|(_, away)| waits(&away.stage));
        let ids: Vec<SeqId> = waiting.map(|(seq, _)| *seq).collect();
        ids.into_iter().for_each(|id| self.read_landing(cx, batch, id));
    }

    fn read_landing(&mut self, cx: &mut Cx, batch: &mut Batch, id: SeqId) {
        let now_ms = cx.now_ms;
        loop {
            let landing = self.away.get_mut(&id).and_then(|away| away.stage.landing_mut());
            let Some((landing, reader)) = landing.zip(self.reader.as_mut()) else { return };
            // If all KV stays with the worker, no read ends that would complete the landing.
            let Some((offer, skip, local)) = landing.next() else { return self.land(cx, batch, id) };
            let checks = reader.offered_checks(offer.conn, offer.export);
            let left: Vec<Check> = checks.iter().take(skip as usize).copied().collect();
            if local.is_empty() {
                landing.leave(&offer, &left);
                // All blocks of this part stay with the worker, under the sequence's lease, or are here.
                reader.decline(offer.conn, offer.export, now_ms);
                continue;
            }
            match reader.pull_from(offer.conn, offer.export, skip, local, 0, now_ms) {
                Ok(pull) => {
                    landing.leave(&offer, &left);
                    landing.started(pull, &offer);
                }
                Err(PullRefused::Busy) => return landing.offers.insert(0, offer),
                Err(error) => return self.redo(cx, batch, id, &error.to_string()),
            }
        }
    }

    /// Frees the blocks of a landing: at once, or when nothing writes to them any more.
    pub(super) fn drop_landing(&mut self, cx: &mut Cx, batch: &mut Batch, seq: SeqId, landing: Landing) {
        let now_ms = cx.now_ms;
        let Landing { mut blocks, window, staged, stage, offers, pulls, found, .. } = landing;
        blocks.extend(window);
        let pulls: BTreeSet<PullId> = pulls.into_keys().collect();
        if let Some(reader) = &mut self.reader {
            offers.iter().for_each(|offer| reader.decline(offer.conn, offer.export, now_ms));
            pulls.iter().for_each(|pull| reader.cancel(*pull, now_ms));
        }
        batch.forget_mapping(seq);
        if pulls.is_empty() && stage.is_none() {
            cx.memory.rm.pool.free(Owner::Own(seq), &blocks);
            self.unstage(cx, batch, staged);
        } else {
            // Prefix-cache hits are in no transport's read.
            let found: Vec<PhysBlock> = blocks.drain(..found as usize).collect();
            cx.memory.rm.pool.free(Owner::Own(seq), &found);
            self.settling.push(Settling { seq, blocks, staged, stage, pulls });
        }
    }

    /// Ends a read of a dropped landing.
    pub(super) fn settle(&mut self, cx: &mut Cx, batch: &mut Batch, pull: PullId) {
        let settling = &mut self.settling;
        let at = settling.iter_mut().position(|s| s.pulls.remove(&pull) && s.pulls.is_empty());
        self.settled(cx, batch, at);
    }

    /// Ends a copy of a dropped landing.
    pub(super) fn settle_stage(&mut self, cx: &mut Cx, batch: &mut Batch, stage: StageId) {
        let at = self.settling.iter().position(|s| s.stage == Some(stage));
        self.settled(cx, batch, at);
    }

    fn settled(&mut self, cx: &mut Cx, batch: &mut Batch, at: Option<usize>) {
        let Some(at) = at else { return };
        let Settling { seq, blocks, staged, .. } = self.settling.swap_remove(at);
        cx.memory.rm.pool.free(Owner::Own(seq), &blocks);
        self.unstage(cx, batch, staged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_transfer::ConnId;
    use lagoon_types::InstanceId;

    fn offer(export: u64, first_token: u32, tokens: u32, layers: Range<u32>) -> Offer {
        Offer { conn: ConnId(1), writer: InstanceId(2), export, request: 3, first_token, tokens, layers }
    }

    /// 14 tokens in 4 layers, in blocks of 4, of which the oldest `left` stay away.
    fn landing(left: u32) -> Landing {
        let blocks = (10..14 - left).map(PhysBlock).collect();
        Landing::new(blocks, (left, 0), (14, 4), 4)
    }

    #[test]
    fn parts_are_disjoint_and_whole_blocks() {
        let mut of = landing(0);
        assert!(of.accept(offer(1, 0, 8, 0..2)) && of.accept(offer(2, 8, 6, 0..4)));
        assert!(of.accept(offer(3, 0, 8, 2..4)), "the other layers");
        for wrong in [offer(4, 4, 4, 1..2), offer(5, 0, 6, 0..1), offer(6, 12, 4, 0..1), offer(7, 8, 0, 0..4)] {
            assert!(!of.accept(wrong.clone()), "{wrong:?}");
        }
        assert!(!of.accept(offer(8, u32::MAX, 2, 0..4)));
    }

    #[test]
    fn it_is_whole_when_every_part_has_arrived() {
        let mut of = landing(0);
        assert!(of.accept(offer(1, 0, 8, 0..3)) && of.accept(offer(2, 0, 8, 3..4)) && of.accept(offer(3, 8, 6, 0..4)));
        for (pull, expected) in [(1, vec![10, 11]), (2, vec![10, 11]), (3, vec![12, 13])] {
            let (offer, skip, local) = of.next().unwrap();
            assert_eq!((offer.export, skip, &local), (pull, 0, &expected));
            of.started(PullId(pull), &offer);
        }
        assert!(of.next().is_none() && !of.is_whole());
        of.ended(PullId(2), true);
        of.ended(PullId(1), true);
        assert!(!of.is_whole());
        of.ended(PullId(3), true);
        assert!(of.is_whole());
    }

    #[test]
    fn what_is_here_already_is_not_read() {
        let mut of = Landing::new((10..14).map(PhysBlock).collect(), (0, 3), (14, 4), 4);
        assert_eq!((of.tokens_here(), of.read_into()), (2, vec![PhysBlock(13)]));
        assert!(of.accept(offer(1, 0, 8, 0..4)) && of.accept(offer(2, 8, 6, 0..4)));
        assert_eq!(of.next().map(|(_, skip, local)| (skip, local)), Some((2, vec![])));
        let (rest, skip, local) = of.next().unwrap();
        assert_eq!((skip, &local), (1, &vec![13]));
        of.started(PullId(1), &rest);
        of.ended(PullId(1), true);
        assert!(of.is_whole());
        // Beside the store there is room for what is read alone.
        let mut of = Landing::new((10..14).map(PhysBlock).collect(), (0, 1), (14, 4), 4);
        of.staged = vec![7, 8, 9];
        assert!(of.accept(offer(1, 0, 14, 0..4)));
        assert_eq!(of.next().map(|(_, skip, local)| (skip, local)), Some((1, vec![7, 8, 9])));
        assert!(Landing::new((10..14).map(PhysBlock).collect(), (0, 4), (14, 4), 4).is_whole(), "nothing is missing");
    }

    #[test]
    fn a_window_is_read_behind_the_prompt() {
        // 14 tokens, one block more for the next ones, and a window of 6 in two blocks of its own.
        let with_window = || {
            let mut of = Landing::new((10..15).map(PhysBlock).collect(), (0, 1), (14, 4), 4);
            of.with_window(vec![PhysBlock(30), PhysBlock(31)], 22);
            of
        };
        let mut of = with_window();
        assert!(!of.accept(offer(1, 14, 8, 0..4)), "a window begins at a block");
        assert!(of.accept(offer(2, 0, 22, 0..4)));
        let (whole, skip, local) = of.next().unwrap();
        assert_eq!((skip, local), (1, vec![11, 12, 13, 30, 31]));
        of.started(PullId(1), &whole);
        of.ended(PullId(1), true);
        assert!(of.is_whole());
        // The worker had no memory for it.
        let mut of = with_window();
        assert!(of.accept(offer(1, 0, 12, 0..4)) && of.accept(offer(2, 12, 2, 0..4)) && !of.exceeds_prompt());
        assert_eq!(of.without_window(), [PhysBlock(30), PhysBlock(31)]);
        for (pull, expected) in [(1, vec![11, 12]), (2, vec![13])] {
            let (part, _, local) = of.next().unwrap();
            assert_eq!(local, expected);
            of.started(PullId(pull), &part);
            of.ended(PullId(pull), true);
        }
        assert!(of.is_whole() && !of.accept(offer(3, 16, 6, 0..4)));
        let mut of = with_window();
        assert!(of.accept(offer(1, 12, 10, 0..4)) && of.exceeds_prompt());
    }

    #[test]
    fn what_stays_away_is_not_read() {
        let mut of = landing(3);
        assert!(of.accept(offer(1, 0, 8, 0..4)) && of.accept(offer(2, 8, 6, 0..4)));
        assert_eq!(of.next().map(|(_, skip, local)| (skip, local)), Some((2, vec![])));
        let (rest, skip, local) = of.next().unwrap();
        assert_eq!((skip, &local), (1, &vec![10]));
        of.started(PullId(1), &rest);
        of.ended(PullId(1), true);
        assert!(of.is_whole());
    }
}
