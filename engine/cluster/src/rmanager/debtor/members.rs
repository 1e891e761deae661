//! Queries for instances that may compute a part of a prompt (joint prefill): the gManager's candidates for a borrow, without the
//! borrow.

use super::super::output::Output;
use super::Debtor;
use lagoon_protocol::{BorrowAdvice, BorrowQuery, Candidate, ControlBody, TierRequest};
use lagoon_types::{InstanceId, SeqId, limits};
use std::collections::{BTreeMap, BTreeSet};

/// A query for candidates.
#[derive(Debug)]
struct Finding {
    seq: SeqId,
    blocks: u32,
    /// Number of instances wanted.
    wanted: usize,
    found: Vec<Candidate>,
    deadline_ms: u64,
}

/// Queries in progress, by their last number at the gManager.
#[derive(Debug, Default)]
pub(super) struct Findings(BTreeMap<u64, Finding>);

impl Findings {
    pub(super) fn next_wake_ms(&self) -> Option<u64> {
        self.0.values().map(|finding| finding.deadline_ms).min()
    }
}

impl Debtor {
    /// Looks for up to `wanted` instances, each with `blocks` blocks to lend. One [`Output::Members`] follows within
    /// [`limits::JOINT_ASK_MS`], unless cancelled.
    pub fn find_members(&mut self, seq: SeqId, blocks: u32, wanted: usize, now_ms: u64) {
        let (found, deadline_ms) = (Vec::new(), now_ms + limits::JOINT_ASK_MS);
        self.ask_for_members(Finding { seq, blocks, wanted, found, deadline_ms });
    }

    /// Ends the query of a sequence without an output.
    pub fn find_no_members(&mut self, seq: SeqId) {
        self.findings.0.retain(|_, finding| finding.seq != seq);
    }

    fn ask_for_members(&mut self, finding: Finding) {
        let query = self.issue();
        if let Some(debtor) = self.instance {
            let found = finding.found.iter().map(|candidate| candidate.instance);
            let exclude: BTreeSet<u32> = found.chain(self.paused.keys().map(|paused| paused.0)).collect();
            let message = BorrowQuery {
                query,
                debtor: debtor.0,
                blocks: finding.blocks,
                exclude: exclude.into_iter().collect(),
                tier: TierRequest::DeviceOnly.into(),
                prefix: Vec::new(),
            };
            self.held.outputs.push_back(Output::ToGManager(ControlBody::BorrowQuery(message)));
        }
        self.findings.0.insert(query, finding);
    }

    /// The gManager's reply to a query for members: more are asked for while there are new ones.
    pub(super) fn on_members(&mut self, advice: &BorrowAdvice) {
        let Some(mut finding) = self.findings.0.remove(&advice.query) else { return };
        let before = finding.found.len();
        for candidate in advice.candidates.iter().take(limits::CANDIDATES) {
            let instance = InstanceId(candidate.instance);
            let known = finding.found.iter().any(|found| found.instance == candidate.instance);
            let usable = candidate.instance != 0 && Some(instance) != self.instance && !known;
            if usable && candidate.blocks_lendable >= finding.blocks && finding.found.len() < finding.wanted {
                finding.found.push(candidate.clone());
            }
        }
        if finding.found.len() == before || finding.found.len() == finding.wanted {
            self.report_members(finding);
        } else {
            self.ask_for_members(finding);
        }
    }

    fn report_members(&mut self, finding: Finding) {
        self.held.outputs.push_back(Output::Members { seq: finding.seq, candidates: finding.found });
    }

    pub(super) fn tick_members(&mut self, now_ms: u64) {
        let late: Vec<Finding> =
            self.findings.0.extract_if(.., |_, f| f.deadline_ms <= now_ms).map(|(_, f)| f).collect();
        late.into_iter().for_each(|finding| self.report_members(finding));
    }
}
