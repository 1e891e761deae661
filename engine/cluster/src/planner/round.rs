//! Working state of one round: each instance in a few numbers. Each order of the round changes them as it will change the
//! pool, so that later decisions see earlier ones.

use super::view::{InstanceView, PoolView, RequestView, link_between};
use super::{Order, Plan, PlannerConfig, Why};
use crate::perf::{CreditorState, DebtorState, LinkView, Pair, Rates, RemotePart};
use lagoon_protocol::Load;
use lagoon_types::{InstanceId, SeqId};
use std::cell::OnceCell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// One instance in a round.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub(super) id: InstanceId,
    pub(super) view: &'a InstanceView,
    pub(super) rates: Rates<'a>,
    /// Free blocks less those of incoming moves.
    pub(super) free: i64,
    pub(super) lendable: i64,
    /// Of `free`, blocks that orders of this round will free: not available to other orders yet.
    freed: i64,
    /// Blocks that the running sequences will grow by within the horizon.
    pub(super) growth: i64,
    /// Blocks that the reported waiting requests need.
    pub(super) queue: i64,
    /// Tokens that it attends to for its own sequences: local ones, and those in mapped creditor KV.
    pub(super) local_tokens: f64,
    /// Tokens that it attends to for its debtors, without those that debtors have mapped.
    pub(super) remote_request_tokens: f64,
    /// Blocks that it has lent, and borrowed, orders of this round included.
    pub(super) lent: i64,
    pub(super) borrowed: i64,
    /// Its debts, computed on first use.
    owes: Option<Owes>,
    sequence_blocks: OnceCell<i64>,
}

/// A debtor's side of its debts, orders of this round included.
#[derive(Clone, Debug, Default)]
pub(super) struct Owes {
    /// Blocks at each creditor, and the number of requests with blocks there.
    pub(super) creditors: BTreeMap<InstanceId, (i64, u32)>,
    /// Number of requests with remote blocks.
    rows: u32,
}

impl Node<'_> {
    fn runs(&self) -> bool {
        self.view.role.serves()
    }

    /// Whether the planner must not use it (frozen).
    pub(super) fn is_left_alone(&self) -> bool {
        self.view.frozen
    }

    /// Whether it has lent blocks, or will have by an order of this round; also while the last ones are moving away.
    pub(super) fn lends(&self) -> bool {
        self.lent > 0 || self.view.lent.iter().any(|(_, blocks)| *blocks > 0)
    }

    /// Free blocks that neither growth nor the queue will need.
    pub(super) fn surplus(&self) -> i64 {
        self.free - self.freed - self.growth - self.queue
    }

    /// Missing blocks for growth and for its first waiting request, beyond those that are leaving. A request larger than the
    /// instance does not count: it waits for blocks of the pool.
    pub(super) fn deficit(&self) -> i64 {
        let head = self.view.load.queue_blocks.first().filter(|b| **b <= self.view.blocks_total);
        let head = head.map_or(0, |b| i64::from(*b));
        let full = self.view.load.batch >= self.view.load.batch_max.max(1);
        let leaving = i64::from(self.view.blocks_outgoing);
        self.growth + if full { 0 } else { head } - self.free - leaving
    }

    /// Whether its own attention takes at least `share` of the rest of its step, or its memory is short. Otherwise no offload
    /// could gain as much as `share`.
    pub(super) fn attends(&self, share: f64) -> bool {
        let blocked = self.view.load.queue_blocks.first().is_some_and(|b| i64::from(*b) > self.free);
        let rest_us = self.rates.other_us(self.view.load.batch);
        blocked || self.borrowed > 0 || self.local_tokens * self.rates.attention_us >= share * rest_us
    }

    /// Blocks that a preemption frees on average: the exclusive blocks of one request, which are its movable ones and the
    /// partly filled one. Used less lent blocks would not do: both count shared blocks once per owner.
    pub(super) fn sequence_blocks(&self) -> i64 {
        *self.sequence_blocks.get_or_init(|| {
            let alone = self.view.requests.values().map(|r| i64::from(r.local_sealed.saturating_add(1).min(r.local)));
            (alone.sum::<i64>() / i64::from(self.view.load.batch.max(1))).max(1)
        })
    }
}

/// Round in progress: nodes and orders.
#[derive(Debug)]
pub(super) struct Round<'a> {
    pub(super) view: &'a PoolView,
    pub(super) config: &'a PlannerConfig,
    pub(super) nodes: Vec<Node<'a>>,
    /// Instances that may lend, by the blocks that they can spare, most first.
    creditors: BTreeSet<(Reverse<i64>, usize)>,
    /// Spare blocks of each node in `creditors`; 0 if it is not listed.
    listed: Vec<i64>,
    /// Requests with an order in this round, with their remote blocks after it, by creditor.
    ordered: BTreeMap<(usize, SeqId), Vec<(InstanceId, i64)>>,
    /// Pairs left to search.
    pub(super) pairs_left: usize,
    pub(super) plan: Plan,
}

impl<'a> Round<'a> {
    pub(super) fn new(view: &'a PoolView, config: &'a PlannerConfig) -> Self {
        let mut assumed = 0;
        let mut nodes: Vec<Node<'a>> =
            view.instances.iter().map(|(id, v)| node(*id, v, view, config, &mut assumed)).collect();
        let plan = Plan { assumed, ..Plan::default() };
        for (creditor, blocks) in view.instances.values().flat_map(InstanceView::mapped_blocks) {
            // Mapped KV costs its creditor no compute.
            if let Ok(at) = nodes.binary_search_by_key(&creditor, |n| n.id) {
                let tokens = f64::from(blocks) * f64::from(view.shape.block_tokens);
                nodes[at].remote_request_tokens = (nodes[at].remote_request_tokens - tokens).max(0.0);
            }
        }
        let mut round = Self {
            view,
            config,
            nodes,
            creditors: BTreeSet::new(),
            listed: Vec::new(),
            ordered: BTreeMap::new(),
            pairs_left: config.pairs_max,
            plan,
        };
        round.listed = (0..round.nodes.len()).map(|at| round.spare_to_lend(at)).collect();
        let listed = round.listed.iter().enumerate().filter(|(_, spare)| **spare > 0);
        round.creditors = listed.map(|(at, spare)| (Reverse(*spare), at)).collect();
        round
    }

    pub(super) fn index(&self, id: InstanceId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |n| n.id).ok()
    }

    /// Whether the debtor has mapped the creditor's KV (peer access), to which it attends itself.
    pub(super) fn maps(&self, debtor: usize, creditor: usize) -> bool {
        self.nodes[debtor].view.mapped.contains(&self.nodes[creditor].id)
    }

    /// Whether a request has an order of this round.
    pub(super) fn is_ordered(&self, debtor: usize, seq: SeqId) -> bool {
        self.ordered.contains_key(&(debtor, seq))
    }

    pub(super) fn is_full(&self) -> bool {
        self.plan.orders.len() >= self.config.orders_max
    }

    /// Blocks that an instance can lend now, beyond its own growth and queue, with a share of its memory kept free if it runs
    /// requests itself. 0 for debtors.
    pub(super) fn spare_to_lend(&self, at: usize) -> i64 {
        let node = &self.nodes[at];
        let v = node.view;
        // An instance whose last blocks are moving home is still a debtor.
        if v.borrowed > 0 || node.borrowed > 0 || v.draining || v.paused || node.is_left_alone() {
            return 0;
        }
        let mut spare = node.lendable.min(node.surplus());
        if node.runs() {
            let kept = f64::from(v.blocks_total) * (1.0 - self.config.creditor_use_max).clamp(0.0, 1.0);
            spare = spare.min(node.free - node.freed - whole(kept));
        }
        spare.max(0)
    }

    fn list_again(&mut self, at: usize) {
        let spare = self.spare_to_lend(at);
        self.creditors.remove(&(Reverse(self.listed[at]), at));
        if spare > 0 {
            self.creditors.insert((Reverse(spare), at));
        }
        self.listed[at] = spare;
    }

    /// Creditors to compare for a debtor: those with most spare blocks, its present ones, and near ones.
    pub(super) fn creditors_for(&mut self, debtor: usize) -> Vec<usize> {
        let limit = self.config.creditors_max;
        let mut found: Vec<usize> = self.creditors.iter().map(|c| c.1).filter(|c| *c != debtor).take(limit).collect();
        let mut near: Vec<(u64, InstanceId)> =
            self.nodes[debtor].view.links.iter().map(|(id, link)| (distance(link.rtt_us), *id)).collect();
        near.sort_unstable();
        let known: Vec<InstanceId> = self.owes(debtor).creditors.keys().copied().collect();
        for id in known.into_iter().chain(near.into_iter().map(|n| n.1)) {
            if found.len() >= 2 * limit {
                break;
            }
            if let Some(at) = self.index(id).filter(|at| *at != debtor && !found.contains(at))
                && self.spare_to_lend(at) > 0
            {
                found.push(at);
            }
        }
        found
    }

    pub(super) fn link(&self, a: usize, b: usize) -> LinkView {
        let (a, b) = (&self.nodes[a], &self.nodes[b]);
        let measured = link_between((a.id, a.view), (b.id, b.view));
        measured.map_or(self.config.assumed_link, |l| l.or(self.config.assumed_link))
    }

    /// The debts of a debtor.
    pub(super) fn owes(&mut self, at: usize) -> &mut Owes {
        let node = &mut self.nodes[at];
        let view = node.view;
        node.owes.get_or_insert_with(|| {
            let mut owes = Owes::default();
            // Most instances have borrowed nothing: their requests are skipped.
            if view.borrowed > 0 || view.load.remote_tokens > 0 {
                for request in view.requests.values().filter(|r| !r.remote.is_empty()) {
                    owes.rows += 1;
                    for there in &request.remote {
                        let entry = owes.creditors.entry(there.creditor).or_default();
                        (entry.0, entry.1) = (entry.0 + i64::from(there.blocks), entry.1 + 1);
                    }
                }
            }
            owes
        })
    }

    /// A request's remote blocks by creditor, orders of this round included.
    fn remote_of(&self, debtor: usize, seq: SeqId) -> Vec<(InstanceId, i64)> {
        if let Some(parts) = self.ordered.get(&(debtor, seq)) {
            return parts.clone();
        }
        let request = self.nodes[debtor].view.requests.get(&seq);
        request.into_iter().flat_map(|r| &r.remote).map(|p| (p.creditor, i64::from(p.blocks))).collect()
    }

    /// The model's input for a request of `debtor` and a creditor.
    pub(super) fn pair(&mut self, debtor: usize, seq: SeqId, creditor: usize) -> Pair<'a> {
        let creditor_id = self.nodes[creditor].id;
        self.owes(debtor);
        let owes = self.nodes[debtor].owes.as_ref().expect("just looked at");
        let elsewhere = owes.creditors.iter().filter(|(id, _)| **id != creditor_id);
        let elsewhere = elsewhere.filter_map(|(id, owed)| self.index(*id).map(|at| (at, *owed)));
        let elsewhere_us = elsewhere.map(|(at, owed)| self.remote_us(debtor, at, owed)).fold(0.0, f64::max);
        let (d, c) = (&self.nodes[debtor], &self.nodes[creditor]);
        let (blocks_there, rows_there) = owes.creditors.get(&creditor_id).copied().unwrap_or_default();
        let mapped = self.maps(debtor, creditor);
        let theirs = if mapped { 0 } else { blocks_there.unsigned_abs() };
        let theirs = as_f64(theirs) * f64::from(self.view.shape.block_tokens);
        let others = (c.remote_request_tokens - theirs).max(0.0);
        let parts = self.remote_of(debtor, seq);
        Pair {
            shape: self.view.shape,
            config: self.config.model,
            debtor: DebtorState {
                rates: d.rates,
                batch: d.view.load.batch,
                batch_max: d.view.load.batch_max.max(d.view.load.batch),
                remote_rows: owes.rows,
                local_tokens: d.local_tokens,
                remote_request_tokens: d.remote_request_tokens,
                spare: d.free + i64::from(d.view.blocks_outgoing) - d.growth,
                sequence_blocks: d.sequence_blocks(),
                queue: &d.view.load.queue_blocks,
                elsewhere_us,
            },
            creditor: CreditorState {
                rates: c.rates,
                batch: c.view.load.batch,
                tokens: c.local_tokens + others,
                wait_us: wait_us(&c.view.load),
            },
            link: self.link(debtor, creditor),
            mapped,
            blocks_there,
            rows_there,
            request_there: parts.iter().filter(|p| p.0 == creditor_id).map(|p| p.1).sum(),
            request_remote: parts.iter().map(|p| p.1).sum(),
        }
    }

    fn remote_us(&self, debtor: usize, creditor: usize, (blocks, rows): (i64, u32)) -> f64 {
        let shape = &self.view.shape;
        let part = RemotePart {
            tokens: as_f64(blocks.max(0).unsigned_abs()) * f64::from(shape.block_tokens),
            rows,
            attention_us: self.nodes[creditor].rates.attention_us,
            wait_us: wait_us(&self.nodes[creditor].view.load),
            link: self.link(debtor, creditor),
            mapped: self.maps(debtor, creditor),
        };
        part.us(shape)
    }

    /// Predicted throughput of the pool before the orders (Eq. 7).
    pub(super) fn tokens_per_s(&self) -> f64 {
        let of = |n: &Node<'_>| {
            let batch = n.view.load.batch;
            let us = n.rates.other_us(batch) + (n.local_tokens + n.remote_request_tokens) * n.rates.attention_us;
            if batch == 0 { 0.0 } else { f64::from(batch) * 1e6 / us }
        };
        self.nodes.iter().map(of).sum()
    }

    /// Blocks that can move between two instances within `move_ms_max`.
    pub(super) fn movable_in_time(&self, a: usize, b: usize) -> i64 {
        self.blocks_in(self.config.move_ms_max, a, b)
    }

    /// Blocks that can move to a creditor within half the expected remaining time of a request: later ones gain nothing.
    pub(super) fn movable_in_life(&self, debtor: usize, creditor: usize) -> i64 {
        let node = &self.nodes[debtor];
        let tokens = node.local_tokens + node.remote_request_tokens;
        let step_us = node.rates.other_us(node.view.load.batch) + tokens * node.rates.attention_us;
        let half_ms = whole(self.config.tokens_expected * step_us / 2e3).unsigned_abs();
        self.blocks_in(half_ms, debtor, creditor)
    }

    fn blocks_in(&self, ms: u64, a: usize, b: usize) -> i64 {
        let shape = &self.view.shape;
        let copies = self.nodes[a].rates.copy_bytes_per_s().min(self.nodes[b].rates.copy_bytes_per_s());
        let rate = self.link(a, b).bytes_per_s.min(copies);
        let block_bytes = as_f64(shape.token_bytes) * f64::from(shape.block_tokens);
        whole(as_f64(ms) / 1e3 * rate / block_bytes)
    }

    /// Adds an order for as many of `blocks` as one order may have, and changes the working state as it will change the pool.
    /// Returns the blocks ordered.
    pub(super) fn order(
        &mut self,
        (debtor, seq): (usize, SeqId),
        (source, target): (usize, usize),
        blocks: i64,
        why: Why,
        gain_tokens_per_s: f64,
    ) -> i64 {
        let in_time = self.blocks_in(self.config.order_ms_max, source, target).max(1);
        let blocks = blocks.min(i64::from(self.config.order_blocks_max)).min(in_time);
        let ids = [debtor, source, target].map(|at| self.nodes[at].id);
        let order = Order {
            debtor: ids[0],
            seq,
            blocks: u32::try_from(blocks).expect("a positive 32-bit count"),
            source: ids[1],
            target: ids[2],
            why,
            gain_tokens_per_s,
        };
        self.plan.orders.push(order);
        self.carry_out((debtor, seq), (source, target), blocks);
        [source, target, debtor].into_iter().for_each(|at| self.list_again(at));
        blocks
    }

    fn carry_out(&mut self, (debtor, seq): (usize, SeqId), (source, target): (usize, usize), blocks: i64) {
        let tokens = as_f64(blocks.unsigned_abs()) * f64::from(self.view.shape.block_tokens);
        let mut parts = self.remote_of(debtor, seq);
        let row_before = parts.iter().any(|p| p.1 > 0);
        for (at, sign, unit) in [(source, -1, -1.0), (target, 1, 1.0)] {
            let mapped = at != debtor && self.maps(debtor, at);
            let attends = &mut self.nodes[if mapped { debtor } else { at }];
            let attended =
                if at == debtor || mapped { &mut attends.local_tokens } else { &mut attends.remote_request_tokens };
            *attended = (*attended + unit * tokens).max(0.0);
            let node = &mut self.nodes[at];
            let id = node.id;
            node.free -= sign * blocks;
            // Blocks are not free for other orders before they have left.
            node.lendable -= (sign * blocks).max(0);
            node.freed += (-sign * blocks).max(0);
            if at == debtor {
                continue;
            }
            node.lent += sign * blocks;
            self.nodes[debtor].borrowed += sign * blocks;
            let at = parts.iter().position(|p| p.0 == id).unwrap_or_else(|| {
                parts.push((id, 0));
                parts.len() - 1
            });
            let before = parts[at].1;
            parts[at].1 += sign * blocks;
            let after = parts[at].1;
            let owed = self.owes(debtor).creditors.entry(id).or_default();
            owed.0 += sign * blocks;
            owed.1 = step(owed.1, before > 0, after > 0);
        }
        let row_after = parts.iter().any(|p| p.1 > 0);
        let owes = self.owes(debtor);
        owes.rows = step(owes.rows, row_before, row_after);
        self.ordered.insert((debtor, seq), parts);
    }
}

fn node<'a>(
    id: InstanceId,
    view: &'a InstanceView,
    pool: &PoolView,
    config: &'a PlannerConfig,
    assumed: &mut u32,
) -> Node<'a> {
    let runs = view.role.serves();
    let measured = view.calibration.as_ref().and_then(|c| Rates::new(c, runs));
    let rates = measured.unwrap_or_else(|| {
        *assumed += 1;
        Rates::new(&config.assumed, true).expect("the assumed calibration is checked when the planner is made")
    });
    let load = &view.load;
    let mapped: u64 = view.mapped_blocks().map(|(_, blocks)| u64::from(blocks)).sum();
    let mapped = mapped * u64::from(pool.shape.block_tokens);
    let local = load.context_tokens.saturating_sub(load.remote_tokens.saturating_sub(mapped));
    let free = i64::from(view.blocks_free) - i64::from(view.blocks_incoming);
    let queue = load.queue_blocks.iter().map(|b| i64::from(*b)).sum();
    let mut node = Node {
        id,
        view,
        rates,
        free,
        lendable: i64::from(view.blocks_lendable) - i64::from(view.blocks_incoming),
        growth: 0,
        queue,
        local_tokens: as_f64(local),
        remote_request_tokens: as_f64(load.remote_request_tokens),
        lent: view.lent.iter().map(|(_, b)| i64::from(*b)).sum(),
        borrowed: i64::from(view.borrowed),
        freed: 0,
        owes: None,
        sequence_blocks: OnceCell::new(),
    };
    let step_us = rates.other_us(load.batch) + (node.local_tokens + node.remote_request_tokens) * rates.attention_us;
    if load.batch > 0 && step_us > 0.0 {
        let steps = as_f64(config.horizon_ms) * 1e3 / step_us;
        let growth = f64::from(load.batch) * steps / f64::from(pool.shape.block_tokens.max(1));
        // At least one block; at most all memory.
        node.growth = (whole(growth) + 1).min(i64::from(view.blocks_total));
    }
    node
}

/// Distance class of a round trip: its power of two in microseconds.
fn distance(rtt_us: f64) -> u64 {
    whole(rtt_us).clamp(1, i64::from(u32::MAX)).unsigned_abs().ilog2().into()
}

/// Updates a count for one item that was (not) counted before and is (not) counted now.
fn step(count: u32, was: bool, is: bool) -> u32 {
    match (was, is) {
        (false, true) => count + 1,
        (true, false) => count.saturating_sub(1),
        _ => count,
    }
}

/// Movable blocks of a request on its debtor.
pub(super) fn movable(request: &RequestView) -> i64 {
    i64::from(request.local_sealed.min(request.local))
}

pub(super) use crate::perf::{as_f64, whole};

/// Time that the queries of a debtor's step wait for a creditor with this load: in each layer, on average, for half of one of the layers
/// that it computes, one after another; nothing at a creditor that computes no steps.
fn wait_us(load: &Load) -> f64 {
    let computes = load.batch > 0 || load.prefill_tokens.is_some_and(|tokens| tokens > 0);
    if computes { f64::from(load.step_us) / 2.0 } else { 0.0 }
}
