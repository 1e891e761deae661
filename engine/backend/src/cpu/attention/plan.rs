//! Division of an attention call into tasks.

use crate::{AttnBatch, AttnRows};
use lagoon_types::run::visible;
use std::ops::Range;

/// Tasks per thread, to even out tasks of different cost.
const TASKS_PER_THREAD: usize = 4;
/// Fewest tokens of context that justify a task.
const PIECE_TOKENS_MIN: usize = 256;
/// Elements of the queries that a tile task keeps in cache (128 KiB), and as many of its outputs.
const TILE_ELEMENTS: usize = 32 << 10;

/// Rows and heads of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// One row, all heads.
    Row,
    /// Several rows of the query heads of one KV head.
    Tile { kv_head: usize },
}

/// Some rows and heads of a sequence over a span of positions.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) seq: usize,
    pub(super) work: Work,
    /// Rows within the sequence.
    pub(super) rows: Range<usize>,
    pub(super) span: Range<u32>,
    /// The first row among the pieces' rows; `None` writes the result itself.
    pub(super) piece_row: Option<usize>,
}

/// A sequence whose context was split.
#[derive(Clone, Copy, Debug)]
pub(super) struct Merge {
    pub(super) seq: usize,
    pub(super) pieces: usize,
    /// Piece `p`'s row `i` is at `piece_row + p * rows + i`.
    pub(super) piece_row: usize,
}

/// Tasks and merges of one call; kept between calls for its memory.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) tasks: Vec<Task>,
    pub(super) merges: Vec<Merge>,
    pub(super) piece_rows: usize,
    cuts: Vec<u32>,
}

impl Plan {
    /// Plans `batch` for `threads` threads.
    pub(super) fn make(&mut self, batch: &AttnBatch<'_>, threads: usize) {
        self.tasks.clear();
        self.merges.clear();
        self.piece_rows = 0;
        // With one thread there is nothing to even out.
        let wanted = if threads == 1 { 1 } else { threads * TASKS_PER_THREAD };
        let decoding: usize = batch.seqs.iter().filter(|s| s.rows == 1).map(|s| tokens(batch, s)).sum();
        let piece = decoding.div_ceil(wanted).max(PIECE_TOKENS_MIN);
        let tiles: usize = batch.seqs.iter().filter(|s| s.rows > 1).map(|s| strips(batch, s) * kv_heads(batch)).sum();
        for (seq, rows) in batch.seqs.iter().enumerate().filter(|(_, rows)| rows.rows > 0) {
            let tokens = tokens(batch, rows);
            let pieces = if rows.rows == 1 {
                tokens.div_ceil(piece)
            } else {
                wanted.div_ceil(tiles).min(tokens / PIECE_TOKENS_MIN)
            };
            self.sequence(batch, seq, pieces.max(1), tokens);
        }
        // Long tasks first, where rows are many and tasks differ.
        self.tasks.sort_unstable_by_key(|t| std::cmp::Reverse(t.rows.len() * (t.span.end - t.span.start) as usize));
    }

    /// Plans every row by itself and whole: its result depends on nothing else of the batch.
    pub(super) fn make_by_row(&mut self, batch: &AttnBatch<'_>) {
        self.tasks.clear();
        self.merges.clear();
        self.piece_rows = 0;
        for (seq, rows) in batch.seqs.iter().enumerate() {
            self.tasks.extend((0..rows.rows).map(|row| Task {
                seq,
                work: Work::Row,
                rows: row as usize..row as usize + 1,
                span: visible(rows.pos0 + row, batch.window),
                piece_row: None,
            }));
        }
    }

    /// Adds the tasks of one sequence, its context split into `pieces` of about as many of its `tokens`.
    fn sequence(&mut self, batch: &AttnBatch<'_>, seq: usize, pieces: usize, tokens: usize) {
        let rows = &batch.seqs[seq];
        let n = rows.rows as usize;
        self.cut(batch, rows, pieces, tokens);
        let pieces = self.cuts.len() - 1;
        let first = self.piece_rows;
        if pieces > 1 {
            self.merges.push(Merge { seq, pieces, piece_row: first });
            self.piece_rows += pieces * n;
        }
        let strip = n.div_ceil(strips(batch, rows));
        for p in 0..pieces {
            let span = self.cuts[p]..self.cuts[p + 1];
            for row in (0..n).step_by(strip) {
                let piece_row = (pieces > 1).then_some(first + p * n + row);
                let rows = row..n.min(row + strip);
                let works = if n == 1 { 1 } else { kv_heads(batch) };
                for kv_head in 0..works {
                    let work = if n == 1 { Work::Row } else { Work::Tile { kv_head } };
                    self.tasks.push(Task { seq, work, rows: rows.clone(), span: span.clone(), piece_row });
                }
            }
        }
    }

    /// Cuts the positions that a sequence sees into pieces of about `tokens` tokens.
    fn cut(&mut self, batch: &AttnBatch<'_>, rows: &AttnRows, pieces: usize, tokens: usize) {
        let span = seen(batch, rows);
        self.cuts.clear();
        self.cuts.push(span.start);
        let mut before = 0;
        for run in &batch.runs[rows.run0 as usize..][..rows.runs as usize] {
            let (from, to) = (run.positions().start.max(span.start), run.positions().end.min(span.end));
            let len = to.saturating_sub(from) as usize;
            while self.cuts.len() < pieces && tokens * self.cuts.len() / pieces < before + len {
                let at = tokens * self.cuts.len() / pieces - before;
                self.cuts.push(from + u32::try_from(at).expect("within the run"));
            }
            before += len;
        }
        self.cuts.push(span.end);
    }
}

fn kv_heads(batch: &AttnBatch<'_>) -> usize {
    batch.geometry.kv_heads as usize
}

/// Positions that some row of the sequence sees.
fn seen(batch: &AttnBatch<'_>, rows: &AttnRows) -> Range<u32> {
    visible(rows.pos0, batch.window).start..visible(rows.pos0 + rows.rows.max(1) - 1, batch.window).end
}

/// Tokens that some row of the sequence sees.
fn tokens(batch: &AttnBatch<'_>, rows: &AttnRows) -> usize {
    let span = seen(batch, rows);
    let runs = &batch.runs[rows.run0 as usize..][..rows.runs as usize];
    runs.iter().map(|r| r.positions().end.min(span.end).saturating_sub(r.first_pos.max(span.start)) as usize).sum()
}

/// Strips of rows that the tile tasks of a sequence are cut into.
fn strips(batch: &AttnBatch<'_>, rows: &AttnRows) -> usize {
    let g = batch.geometry;
    (rows.rows as usize * g.group() as usize * g.query_dim())
        .div_ceil(TILE_ELEMENTS)
        .clamp(1, rows.rows.max(1) as usize)
}
