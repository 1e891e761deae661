//! The work list of an attention call, planned on the host.
//!
//! Queries of one sequence that share a KV head form a list of items; a tile is [`Bounds::items`] consecutive items. The
//! visible keys of a tile are cut into works: at shard borders of the store, and further if there are too few tiles to fill a
//! device (decoding over a long context). A tile of one work writes the result itself; otherwise each work leaves a
//! part, and the tile is listed for the reduction.
//!
//! Invariant: the works of a tile cover each key that any of its items sees exactly once.

use crate::kernel::{HeadClass, Tile};
use crate::memory::word;
use lagoon_backend::{AttnBatch, AttnRows};
use lagoon_types::{KvDType, KvRun};
use std::ops::Range;

/// Keys that the kernel takes at once.
const KEY_TILE: u32 = 32;
/// Fewest workgroups that a device should have, as far as splitting helps.
const WORKGROUPS_WANTED: u32 = 256;
/// Fewest keys of a work; smaller ones are not split further.
const WORK_KEYS_MIN: u32 = 256;
/// Most parts that a tile is split into, shard borders aside.
const PARTS_MAX: u32 = 64;
/// Part number of a work that covers a whole tile.
const WHOLE: u32 = u32::MAX;

/// Works that read one shard of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardWorks {
    pub(crate) shard: usize,
    /// Offset of the first work in the words.
    pub(crate) at: u32,
    pub(crate) count: u32,
}

/// A planned call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Spans, works, tiles and slopes, as in `attention.wgsl`.
    pub(crate) words: Vec<u32>,
    /// Rounds, run one after the other: they share the scratch for parts.
    pub(crate) rounds: Vec<Round>,
    /// Parts of the largest round.
    pub(crate) parts: u32,
    /// Offset of the heads' slopes in the words; 0 without ALiBi.
    pub(crate) slopes: u32,
}

/// Works of some tiles, and the reduction of those that were split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) works: Vec<ShardWorks>,
    /// Offset of the first split tile in the words, and the number of split tiles.
    pub(crate) tiles_at: u32,
    pub(crate) tiles: u32,
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Slots of a shard of the store.
    pub(crate) shard_slots: u32,
    /// Items of a tile.
    pub(crate) items: u32,
    /// Parts that fit the scratch. A single tile may need more, if the store has many shards.
    pub(crate) parts: u32,
}

/// Consecutive keys in one shard.
#[derive(Clone, Copy, Debug)]
struct Span {
    shard: u32,
    /// Slot within the shard.
    base: u32,
    len: u32,
    pos: u32,
}

#[derive(Clone, Copy, Debug)]
struct Work {
    shard: u32,
    span: u32,
    skip: u32,
    keys: u32,
}

/// The tile for an adapter without a register file. [`Tile::Wide`] is for heads of [`HeadClass::D64`] in plain element types, as
/// compilers take minutes for longer ones. For the same keys it takes 0.4 times as long as [`Tile::Narrow`], whether its items exist or
/// not, if invocations load for each other (`lanes` of them), and up to 1.5 times if each loads for itself.
pub(crate) fn software_tile(batch: &AttnBatch<'_>, class: HeadClass, dtype: KvDType, lanes: u32) -> Tile {
    let cost = |tile: Tile| -> u64 {
        let tiles = |seq: &AttnRows| u64::from((seq.rows * batch.geometry.group()).div_ceil(tile.items()));
        batch.seqs.iter().map(|seq| tiles(seq) * u64::from(seq.pos0 + seq.rows)).sum()
    };
    let can = class == HeadClass::D64 && dtype.plain().is_some();
    if can && (lanes > 1 || 3 * cost(Tile::Wide) < 2 * cost(Tile::Narrow)) { Tile::Wide } else { Tile::Narrow }
}

/// Plans `batch`.
pub(crate) fn plan(batch: &AttnBatch<'_>, bounds: Bounds) -> Plan {
    let group = batch.geometry.group();
    let tiles_all: u32 = batch.seqs.iter().map(|seq| (seq.rows * group).div_ceil(bounds.items)).sum();
    let workgroups = (tiles_all * batch.geometry.kv_heads).max(1);
    // Half of the scratch is left for cuts at shard borders.
    let parts_wanted = (WORKGROUPS_WANTED / workgroups).min(PARTS_MAX).min(bounds.parts / 2).max(1);

    let mut spans = Vec::new();
    let seq_spans: Vec<Range<usize>> = batch
        .seqs
        .iter()
        .map(|seq| {
            let span0 = spans.len();
            push_spans(&batch.runs[seq.run0 as usize..][..seq.runs as usize], bounds.shard_slots, &mut spans);
            span0..spans.len()
        })
        .collect();
    let mut builder = Builder::new(&spans);
    let mut cut = Vec::new();
    for (seq, range) in batch.seqs.iter().zip(seq_spans) {
        for item0 in (0..seq.rows * group).step_by(bounds.items as usize) {
            let seen = tile_positions(seq, item0..item0 + bounds.items, group, batch.window);
            cut_tile(&spans[range.clone()], seen, parts_wanted, &mut cut);
            if builder.parts as usize + cut.len() > bounds.parts as usize {
                builder.close_round();
            }
            builder.push_tile(seq, item0, word(range.start), &cut);
        }
    }
    let mut plan = builder.finish();
    // Without works, offset 0 is free, and no kernel would read the slopes.
    if let (Some(alibi), false) = (batch.alibi, plan.words.is_empty()) {
        plan.slopes = word(plan.words.len());
        plan.words.extend(alibi.slopes(batch.geometry.heads).map(f32::to_bits));
    }
    plan
}

/// Lays out the words: spans, then for each round its works by shard and its split tiles.
struct Builder {
    plan: Plan,
    works: Vec<(u32, [u32; 8])>,
    tiles: Vec<[u32; 8]>,
    /// Parts of this round.
    parts: u32,
}

impl Builder {
    fn new(spans: &[Span]) -> Self {
        let words = spans.iter().flat_map(|span| [span.base, span.len, span.pos]).collect();
        let plan = Plan { words, rounds: Vec::new(), parts: 0, slopes: 0 };
        Self { plan, works: Vec::new(), tiles: Vec::new(), parts: 0 }
    }

    fn push_tile(&mut self, seq: &AttnRows, item0: u32, span0: u32, cut: &[Work]) {
        let split = cut.len() > 1;
        if split {
            self.tiles.push([seq.row0, seq.rows, item0, self.parts, word(cut.len()), 0, 0, 0]);
        }
        for work in cut {
            let part = if split { self.parts } else { WHOLE };
            self.parts += u32::from(split);
            let span = span0 + work.span;
            let words = [seq.row0, seq.rows, seq.pos0, item0, span, work.skip, work.keys, part];
            self.works.push((work.shard, words));
        }
    }

    fn close_round(&mut self) {
        if self.works.is_empty() {
            return;
        }
        self.works.sort_by_key(|(shard, _)| *shard);
        let words = &mut self.plan.words;
        let mut works: Vec<ShardWorks> = Vec::new();
        for (shard, work) in self.works.drain(..) {
            let shard = shard as usize;
            match works.last_mut() {
                Some(last) if last.shard == shard => last.count += 1,
                _ => works.push(ShardWorks { shard, at: word(words.len()), count: 1 }),
            }
            words.extend(work);
        }
        let (tiles_at, tiles) = (word(words.len()), word(self.tiles.len()));
        words.extend(self.tiles.drain(..).flatten());
        self.plan.rounds.push(Round { works, tiles_at, tiles });
        self.plan.parts = self.plan.parts.max(std::mem::take(&mut self.parts));
    }

    fn finish(mut self) -> Plan {
        self.close_round();
        self.plan
    }
}

/// Positions that any of a tile's `items` sees.
fn tile_positions(seq: &AttnRows, items: Range<u32>, group: u32, window: Option<u32>) -> Range<u32> {
    let last = items.end.min(seq.rows * group) - 1;
    let first_pos = seq.pos0 + items.start / group;
    let end = seq.pos0 + last / group + 1;
    window.map_or(0, |w| (first_pos + 1).saturating_sub(w))..end
}

/// Joins runs that continue each other and cuts them at shard borders.
fn push_spans(runs: &[KvRun], shard_slots: u32, spans: &mut Vec<Span>) {
    let start = spans.len();
    for run in runs {
        let (mut base, mut len, mut pos) = (run.base, run.len, run.first_pos);
        while len > 0 {
            let (shard, at) = (base / shard_slots, base % shard_slots);
            let take = len.min(shard_slots - at);
            match spans[start..].last_mut() {
                Some(last) if last.shard == shard && last.base + last.len == at && last.pos + last.len == pos => {
                    last.len += take;
                }
                _ => spans.push(Span { shard, base: at, len: take, pos }),
            }
            (base, len, pos) = (base + take, len - take, pos + take);
        }
    }
}

/// Cuts the keys at the positions `seen` into works: into about `parts` equal ones, and at changes of shard.
fn cut_tile(spans: &[Span], seen: Range<u32>, parts: u32, works: &mut Vec<Work>) {
    works.clear();
    let first = spans.partition_point(|span| span.pos + span.len <= seen.start);
    let pieces = spans[first..].iter().take_while(|span| span.pos < seen.end).map(|span| {
        let skip = seen.start.saturating_sub(span.pos);
        (span.shard, skip, (seen.end - span.pos).min(span.len) - skip)
    });
    let keys: u32 = pieces.clone().map(|(_, _, keys)| keys).sum();
    let work_keys = keys.div_ceil(parts).max(WORK_KEYS_MIN).next_multiple_of(KEY_TILE);
    for (index, (shard, mut skip, mut left)) in pieces.enumerate() {
        while left > 0 {
            let open = works.last_mut().filter(|work| work.shard == shard && work.keys < work_keys);
            let take = left.min(work_keys - open.as_ref().map_or(0, |work| work.keys));
            match open {
                Some(work) => work.keys += take,
                None => {
                    works.push(Work { shard, span: word(first + index), skip, keys: take });
                }
            }
            skip += take;
            left -= take;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lagoon_types::{AttentionGeometry, run::visible};
    use std::collections::BTreeMap;

    /// Slots that each item sees by the plan, with repetitions.
    fn seen(plan: &Plan, batch: &AttnBatch<'_>, bounds: Bounds) -> BTreeMap<(u32, u32), Vec<u32>> {
        let Bounds { shard_slots, items, .. } = bounds;
        let group = batch.geometry.group();
        let mut seen: BTreeMap<_, Vec<u32>> = BTreeMap::new();
        for works in plan.rounds.iter().flat_map(|round| &round.works) {
            for index in 0..works.count as usize {
                let work = &plan.words[works.at as usize + index * 8..][..8];
                let (row0, rows, pos0, item0) = (work[0], work[1], work[2], work[3]);
                let (mut span, mut skip, mut left) = (work[4] as usize, work[5], work[6]);
                while left > 0 {
                    let [base, len, pos] = [0, 1, 2].map(|i| plan.words[span * 3 + i]);
                    let take = (len - skip).min(left);
                    for item in item0..(item0 + items).min(rows * group) {
                        let range = visible(pos0 + item / group, batch.window);
                        let keys = (skip..skip + take).filter(|k| range.contains(&(pos + k)));
                        let slots = keys.map(|k| u32::try_from(works.shard).unwrap() * shard_slots + base + k);
                        seen.entry((row0 + item / group, item % group)).or_default().extend(slots);
                    }
                    (left, span, skip) = (left - take, span + 1, 0);
                }
            }
        }
        seen
    }

    #[test]
    fn works_cover_each_visible_key_once() {
        let geometry = AttentionGeometry { heads: 6, kv_heads: 2, head_dim: 8, latent: false };
        let runs = [
            KvRun { base: 40, len: 60, first_pos: 0 },
            KvRun { base: 100, len: 7, first_pos: 60 },
            KvRun { base: 300, len: 900, first_pos: 70 },
            KvRun { base: 10, len: 5, first_pos: 20 },
        ];
        let seqs = [
            AttnRows { row0: 0, rows: 1, pos0: 969, run0: 0, runs: 3 },
            AttnRows { row0: 1, rows: 13, pos0: 60, run0: 0, runs: 3 },
            AttnRows { row0: 20, rows: 3, pos0: 22, run0: 3, runs: 1 },
        ];
        for window in [None, Some(1), Some(33), Some(500)] {
            for (shard_slots, items) in [(64, 16), (1000, 16), (4096, 16), (64, 64), (4096, 64)] {
                let batch =
                    AttnBatch { geometry, scale: 1.0, window, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
                let bounds = Bounds { shard_slots, items, parts: if shard_slots == 64 { 20 } else { 1000 } };
                let plan = plan(&batch, bounds);
                assert!(plan.parts <= bounds.parts);
                let mut seen = seen(&plan, &batch, bounds);
                for seq in &seqs {
                    for row in 0..seq.rows {
                        let range = visible(seq.pos0 + row, window);
                        let runs = &runs[seq.run0 as usize..][..seq.runs as usize];
                        let mut want: Vec<u32> = runs
                            .iter()
                            .flat_map(|r| (0..r.len).map(|k| (r.first_pos + k, r.base + k)))
                            .filter(|(pos, _)| range.contains(pos))
                            .map(|(_, slot)| slot)
                            .collect();
                        want.sort_unstable();
                        for head in 0..geometry.group() {
                            let mut got = seen.remove(&(seq.row0 + row, head)).unwrap_or_default();
                            got.sort_unstable();
                            assert_eq!(got, want, "window {window:?} shards {shard_slots} items {items} row {row}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn wide_tiles_are_for_many_queries_of_most_keys() {
        let runs = [KvRun { base: 0, len: 6000, first_pos: 0 }];
        let cases = [
            (1, vec![(512, 0)], true),
            (3, vec![(64, 0)], true),
            (1, vec![(16, 100)], false),
            (1, vec![(17, 100)], true),
            (8, vec![(1, 500)], false),
            (8, vec![(1, 500), (1, 20), (1, 700)], false),
            // A prompt beside decoding rows, with more keys and with fewer.
            (2, vec![(256, 1000), (1, 4000)], true),
            (2, vec![(32, 0), (1, 4000)], false),
        ];
        for (group, seqs, wide) in cases {
            let geometry = AttentionGeometry { heads: 2 * group, kv_heads: 2, head_dim: 64, latent: false };
            let rows = |(rows, pos0): &(u32, u32)| AttnRows { row0: 0, rows: *rows, pos0: *pos0, run0: 0, runs: 1 };
            let seqs: Vec<AttnRows> = seqs.iter().map(rows).collect();
            let batch =
                AttnBatch { geometry, scale: 1.0, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
            for (class, dtype) in HeadClass::ALL.into_iter().flat_map(|class| KvDType::ALL.map(|dtype| (class, dtype)))
            {
                let tile = match (class, dtype) {
                    (HeadClass::D64, KvDType::F32 | KvDType::F16 | KvDType::BF16) if wide => Tile::Wide,
                    _ => Tile::Narrow,
                };
                let got = software_tile(&batch, class, dtype, 1);
                assert_eq!(got, tile, "{class:?} {dtype} group {group} sequences {seqs:?}");
                // Loads for each other make any tile worth it.
                let can = class == HeadClass::D64 && dtype.plain().is_some();
                assert_eq!(software_tile(&batch, class, dtype, 8) == Tile::Wide, can, "{class:?} {dtype}");
            }
        }
    }

    #[test]
    fn a_long_decode_is_split_and_a_short_one_is_not() {
        let geometry = AttentionGeometry { heads: 8, kv_heads: 2, head_dim: 64, latent: false };
        for (len, parts) in [(200, 0), (1 << 15, 64)] {
            let runs = [KvRun { base: 0, len, first_pos: 0 }];
            let seqs = [AttnRows { row0: 0, rows: 1, pos0: len - 1, run0: 0, runs: 1 }];
            let batch =
                AttnBatch { geometry, scale: 1.0, window: None, alibi: None, softcap: None, seqs: &seqs, runs: &runs };
            assert_eq!(plan(&batch, Bounds { shard_slots: 1 << 20, items: 16, parts: 1000 }).parts, parts);
        }
    }
}
