//! A mixture of experts: rows are sorted by expert and multiplied in groups.

use super::matmul::{Group, On, grouped};
use super::threads::{Disjoint, Threads, with_scratch};
use super::widen::widen;
use super::{CpuTensor, CpuWeight, activate};
use crate::{ExpertBuffers, Experts, GroupScore, Routing, Scoring};
use std::ops::Range;

/// Rows that one task routes, or sums up.
const ROWS: usize = 16;

/// The choices of a call, kept for the next one's.
#[derive(Debug, Default)]
pub(super) struct Routes {
    /// `[rows][top_k]`: experts by rank, and their weights.
    chosen: Vec<(u32, f32)>,
    /// `[rows][top_k]`: positions in the order by expert.
    places: Vec<u32>,
    /// Rows of each chosen expert in that order, and the expert.
    runs: Vec<(u32, Range<usize>)>,
    groups: Vec<Group>,
    /// Counts and ends of the experts' rows, while they are sorted.
    ends: Vec<usize>,
}

impl Routes {
    /// Chooses the experts of every row of `logits`, `[rows][count]`.
    fn choose(&mut self, threads: &Threads, logits: &[f32], count: usize, bias: Option<&CpuWeight>, routing: Routing) {
        let Routing { top_k, groups, top_groups, .. } = routing;
        assert!((1..=groups).contains(&top_groups) && count.is_multiple_of(groups), "groups of experts");
        assert!((1..=count / groups * top_groups).contains(&top_k), "experts of a token");
        let rows = logits.len() / count;
        self.chosen.clear();
        self.chosen.resize(rows * top_k, (0, 0.0));
        let chosen = Disjoint::new(&mut self.chosen);
        threads.run_chunks(rows, ROWS, |range| {
            with_scratch(3 * count + groups, |scratch| {
                let (scores, rest) = scratch.split_at_mut(count);
                let (keys, rest) = rest.split_at_mut(count);
                let (best, rest) = rest.split_at_mut(groups);
                let bias = bias.map(|bias| {
                    widen(bias.dtype(), bias.row(0), &mut rest[..count]);
                    &rest[..count]
                });
                for row in range.clone() {
                    // SAFETY: each row is of one task.
                    let chosen = unsafe { chosen.slice(row * top_k..(row + 1) * top_k) };
                    scores.copy_from_slice(&logits[row * count..][..count]);
                    choose_row(scores, (keys, best), bias, routing, chosen);
                }
            });
        });
    }

    /// Sorts the choices by expert, stably.
    fn sort(&mut self, count: usize) {
        let Self { chosen, ends, .. } = self;
        ends.clear();
        ends.resize(count, 0);
        chosen.iter().for_each(|(expert, _)| ends[*expert as usize] += 1);
        self.runs.clear();
        let mut start = 0;
        for (expert, end) in (0..).zip(self.ends.iter_mut()) {
            let rows = *end;
            if rows > 0 {
                self.runs.push((expert, start..start + rows));
            }
            *end = start;
            start += rows;
        }
        self.places.clear();
        for (expert, _) in &self.chosen {
            let place = &mut self.ends[*expert as usize];
            self.places.push(u32::try_from(*place).expect("rows of a step are a u32"));
            *place += 1;
        }
    }

    /// The groups of a product with a weight of `each` rows an expert.
    fn groups(&mut self, each: usize) -> &[Group] {
        let group = |(expert, rows): &(u32, Range<usize>)| {
            let first = *expert as usize * each;
            Group { rows: rows.clone(), weights: first..first + each }
        };
        self.groups.clear();
        self.groups.extend(self.runs.iter().map(group));
        &self.groups
    }

    /// Adds its expert's bias to every sorted row.
    fn add_biases(&self, threads: &Threads, biases: &CpuWeight, x: &mut CpuTensor) {
        let cols = x.cols;
        assert_eq!(biases.cols, cols, "columns of experts' biases");
        let x = Disjoint::new(x.head_mut(self.places.len()));
        threads.run(self.runs.len(), |run| {
            let (expert, rows) = &self.runs[run];
            // SAFETY: each run's rows are of one task.
            let x = unsafe { x.slice(rows.start * cols..rows.end * cols) };
            with_scratch(cols, |bias| {
                widen(biases.dtype(), biases.row(*expert as usize), &mut bias[..cols]);
                for x in x.chunks_exact_mut(cols) {
                    x.iter_mut().zip(bias.iter()).for_each(|(x, bias)| *x += bias);
                }
            });
        });
    }
}

/// Chooses `chosen.len()` experts in descending order of their scores with the bias, and weighs them by their scores.
/// `scores` are logits and become scores; `keys` are scratch of as many, `best` of as many as there are groups.
fn choose_row(
    scores: &mut [f32],
    (keys, best): (&mut [f32], &mut [f32]),
    bias: Option<&[f32]>,
    routing: Routing,
    chosen: &mut [(u32, f32)],
) {
    keys.copy_from_slice(scores);
    match routing.scoring {
        Scoring::Softmax => {
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            scores.iter_mut().for_each(|x| *x = (*x - most).exp());
            let sum: f32 = scores.iter().sum();
            scores.iter_mut().for_each(|x| *x /= sum);
        }
        Scoring::Sigmoid => scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
    }
    // Unequal logits can have equal scores: where nothing is added to scores, logits decide.
    match bias {
        Some(bias) => keys.iter_mut().zip(scores.iter().zip(bias)).for_each(|(key, (score, bias))| *key = score + bias),
        None if routing.adds_scores() => keys.copy_from_slice(scores),
        None => {}
    }
    if routing.top_groups < routing.groups {
        drop_groups(keys, best, routing);
    }
    let mut len = 0;
    for (expert, &key) in (0u32..).zip(keys.iter()).filter(|(_, key)| **key > f32::NEG_INFINITY) {
        let at = chosen[..len].iter().position(|(_, other)| key > *other).unwrap_or(len);
        if at == chosen.len() {
            continue;
        }
        len = (len + 1).min(chosen.len());
        chosen[at..len].rotate_right(1);
        chosen[at] = (expert, key);
    }
    chosen.iter_mut().for_each(|(expert, weight)| *weight = scores[*expert as usize]);
    let sum: f32 = chosen.iter().map(|(_, weight)| weight).sum();
    let sum = if routing.normalised { sum.max(f32::MIN_POSITIVE) } else { 1.0 };
    chosen.iter_mut().for_each(|(_, weight)| *weight = *weight / sum * routing.scale);
}

/// Sets the keys of all but the best groups to minus infinity. `best` is scratch.
fn drop_groups(keys: &mut [f32], best: &mut [f32], routing: Routing) {
    let size = keys.len() / routing.groups;
    let score = |group: &[f32]| {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &key in group {
            (first, second) = if key > first { (key, first) } else { (first, second.max(key)) };
        }
        if size == 1 || routing.group_score == GroupScore::Best { first } else { first + second }
    };
    best.iter_mut().zip(keys.chunks_exact(size)).for_each(|(best, group)| *best = score(group));
    let best = &*best;
    for (group, keys) in keys.chunks_exact_mut(size).enumerate() {
        let better = |(other, key): (usize, &f32)| *key > best[group] || (*key == best[group] && other < group);
        if best.iter().enumerate().filter(|pair| better(*pair)).count() >= routing.top_groups {
            keys.fill(f32::NEG_INFINITY);
        }
    }
}

/// See [`crate::Device::experts`].
pub(super) fn experts(
    on: On<'_>,
    routes: &mut Routes,
    (x, logits): (&CpuTensor, &CpuTensor),
    experts: &Experts<'_, CpuWeight>,
    rows: usize,
    buffers: &mut ExpertBuffers<CpuTensor>,
    out: &mut CpuTensor,
) {
    let Experts { count, up, up_bias, down, down_bias, choice_bias, activation, routing } = *experts;
    let (hidden, n, top_k) = (x.cols, down.cols, routing.top_k);
    let columns = activation.inputs() * n;
    assert_eq!((up.rows, up.cols, down.rows), (count * columns, hidden, count * hidden), "shapes of experts");
    assert_eq!((logits.cols, out.cols, buffers.act.cols), (count, hidden, n), "shapes of a mixture's tensors");
    let On { threads, isa, .. } = on;
    routes.choose(threads, logits.head(rows), count, choice_bias, routing);
    routes.sort(count);
    let (input, sorted) = (x.head(rows), Disjoint::new(buffers.hidden.head_mut(rows * top_k)));
    threads.run_chunks(rows, ROWS, |range| {
        for row in range {
            for place in &routes.places[row * top_k..(row + 1) * top_k] {
                let place = *place as usize * hidden;
                // SAFETY: every choice has a place of its own.
                let to = unsafe { sorted.slice(place..place + hidden) };
                to.copy_from_slice(&input[row * hidden..][..hidden]);
            }
        }
    });
    grouped(on, &buffers.hidden, up, routes.groups(columns), &mut buffers.product);
    if let Some(bias) = up_bias {
        routes.add_biases(threads, bias, &mut buffers.product);
    }
    activate((threads, isa), activation, &buffers.product, rows * top_k, &mut buffers.act);
    grouped(on, &buffers.act, down, routes.groups(hidden), &mut buffers.hidden);
    if let Some(bias) = down_bias {
        routes.add_biases(threads, bias, &mut buffers.hidden);
    }
    let results = buffers.hidden.head(rows * top_k);
    let sums = Disjoint::new(out.head_mut(rows));
    threads.run_chunks(rows, ROWS, |range| {
        for row in range {
            // SAFETY: each row is of one task.
            let sum = unsafe { sums.slice(row * hidden..(row + 1) * hidden) };
            let choices = row * top_k..(row + 1) * top_k;
            for ((_, weight), place) in routes.chosen[choices.clone()].iter().zip(&routes.places[choices]) {
                let result = &results[*place as usize * hidden..][..hidden];
                sum.iter_mut().zip(result).for_each(|(sum, x)| *sum += weight * x);
            }
        }
    });
}
