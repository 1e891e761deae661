//! Replay: which instances one request is sent to, in which order and how often, until one answers it to its end. Sans-IO, as the
//! dispatcher; a gateway has one [`Replay`] for each of its requests.
//!
//! ```text
//! next() ──> Look ──> round(instances) ──> Send ──> answers, or: refuse(), hand_back(), lose() ──> next()
//!                                          Pause ──> Look
//!                                          Abort
//! ```
//!
//! Invariants:
//! * a request is sent again after a loss only if a second run does no harm, and with the tokens that its client has: none is lost or
//!   repeated;
//! * a request fails after the loss of [`ReplayLimits::replays_max`] instances, of [`ReplayLimits::fruitless_max`] in a row without a
//!   token, or [`ReplayLimits::deadline_ms`] after a loss;
//! * instances that were lost under it are tried last; one that asked for a pause is not tried before its end;
//! * a request that lost an instance is not handed back and does not queue again: its client has begun to read.

use crate::mutants::{self, Mutant};
use lagoon_types::limits::{REPLAY_DEADLINE_MS, REPLAYS_MAX};

/// Maximum of instances tried in one round.
const ATTEMPTS_MAX: usize = 4;

/// Limits of a request's replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayLimits {
    /// Maximum of instances lost under one request.
    pub replays_max: usize,
    /// Maximum of them in a row without a token for the client: a request that kills instances must not reach them all.
    pub fruitless_max: usize,
    /// Time after a loss within which another instance must begin to answer.
    pub deadline_ms: u64,
}

impl Default for ReplayLimits {
    fn default() -> Self {
        Self { replays_max: REPLAYS_MAX, fruitless_max: 2, deadline_ms: REPLAY_DEADLINE_MS }
    }
}

/// How much of a response the client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub tokens: u64,
    /// Whether these tokens are known one by one, so that another instance can go on after them.
    pub is_whole: bool,
    /// Whether nothing but the end mark is missing.
    pub has_ended: bool,
}

impl Progress {
    /// Nothing yet.
    pub const NONE: Self = Self { tokens: 0, is_whole: true, has_ended: false };
}

/// What is sent after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resend {
    /// The request and so many tokens of the response, after which the next instance goes on.
    After(u64),
    /// Nothing: the response is there.
    Nothing,
}

/// Reason for which a request is not sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Aborted {
    /// No instance took it, and none was lost.
    NoInstance,
    /// No other instance went on with it in time.
    Deadline,
    /// So many instances were lost under it.
    TooManyLost(usize),
    /// A second run might do harm.
    NotRepeatable,
    /// What its client has is not known token by token.
    NotWhole,
}

/// The next thing to do for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next<K> {
    /// Look which instances there are, and call [`Replay::round`]. A request that [`Replay::waits_for_turn`] waits for it first.
    Look,
    /// Send it to `instance`. Unless the attempt is free it is on the budget of retries; call [`Replay::next`] again if that is empty.
    Send {
        instance: K,
        is_free: bool,
    },
    /// Wait a moment.
    Pause,
    Abort(Aborted),
}

/// The attempts of one request. `K` names an instance. See the module's documentation.
#[derive(Clone, Debug)]
pub struct Replay<K> {
    limits: ReplayLimits,
    /// Whether a second run does no harm: it only computes a response.
    is_repeatable: bool,
    /// Instances of the present round, the next one last; `None` before a look.
    round: Option<Vec<K>>,
    /// Whether none has refused it since its last turn or loss.
    is_first: bool,
    /// Whether a pause is due before the next look.
    is_paused: bool,
    lost: Vec<K>,
    lost_at_ms: u64,
    /// Number of latest losses without a token for the client.
    fruitless: usize,
    /// Instances that refused it, and until when they asked not to be asked again.
    barred: Vec<(K, u64)>,
}

impl<K: Copy + PartialEq> Replay<K> {
    /// The replay of a request, which may be sent again if that does no harm.
    #[must_use]
    pub fn new(limits: ReplayLimits, is_repeatable: bool) -> Self {
        Self {
            limits,
            is_repeatable,
            round: None,
            is_first: true,
            is_paused: false,
            lost: Vec::new(),
            lost_at_ms: 0,
            fruitless: 0,
            barred: Vec::new(),
        }
    }

    /// Whether it waits in the queue for its turn, and may be handed back: no instance was lost under it.
    #[must_use]
    pub fn waits_for_turn(&self) -> bool {
        self.lost.is_empty()
    }

    /// Begins a round: `bound` first, then the others of `ranked`, which has the best first.
    pub fn round(&mut self, bound: Option<K>, ranked: impl IntoIterator<Item = K>) {
        let mut round: Vec<K> = ranked.into_iter().collect();
        // Stable: equals stay in their order.
        round.sort_by_key(|key| (Some(*key) != bound, self.lost.contains(key)));
        round.truncate(ATTEMPTS_MAX);
        round.reverse();
        self.round = Some(round);
    }

    /// The next thing to do at `now_ms`, until an instance answers.
    pub fn next(&mut self, now_ms: u64) -> Next<K> {
        let Some(round) = &mut self.round else {
            return if std::mem::take(&mut self.is_paused) { self.pause(now_ms) } else { Next::Look };
        };
        while let Some(instance) = round.pop() {
            if !self.barred.iter().any(|(key, until_ms)| *key == instance && now_ms < *until_ms) {
                return Next::Send { instance, is_free: self.is_first };
            }
        }
        self.round = None;
        if self.lost.is_empty() {
            return Next::Abort(Aborted::NoInstance);
        }
        self.pause(now_ms)
    }

    fn pause(&self, now_ms: u64) -> Next<K> {
        let is_late = now_ms >= self.lost_at_ms.saturating_add(self.limits.deadline_ms);
        if is_late { Next::Abort(Aborted::Deadline) } else { Next::Pause }
    }

    /// An answer began: another loss begins anew.
    pub fn answered(&mut self) {
        (self.round, self.is_first) = (None, true);
    }

    /// The client got something.
    pub fn progressed(&mut self) {
        self.fruitless = 0;
    }

    /// An instance refused it, and another one may take it.
    pub fn refuse(&mut self) {
        self.is_first = false;
    }

    /// The instance does not get it before `until_ms`.
    pub fn bar(&mut self, instance: K, until_ms: u64, now_ms: u64) {
        self.barred.retain(|(other, until_ms)| *other != instance && *until_ms > now_ms);
        self.barred.push((instance, until_ms));
    }

    /// The instance gave it back: it waits for its turn again.
    pub fn hand_back(&mut self) {
        (self.round, self.is_first) = (None, true);
    }

    /// The instance was lost under it; says what is sent to the next one.
    ///
    /// # Errors
    /// Why it is not given to another one.
    pub fn lose(&mut self, instance: K, progress: Progress, now_ms: u64) -> Result<Resend, Aborted> {
        if progress.has_ended {
            return Ok(Resend::Nothing);
        }
        self.lost.push(instance);
        self.lost_at_ms = now_ms;
        (self.round, self.is_first, self.is_paused) = (None, true, true);
        self.fruitless += 1;
        if !self.is_repeatable {
            return Err(Aborted::NotRepeatable);
        }
        let is_fruitless = self.fruitless >= self.limits.fruitless_max && !mutants::is(Mutant::LossesUncounted);
        if self.lost.len() > self.limits.replays_max || is_fruitless {
            return Err(Aborted::TooManyLost(self.lost.len()));
        }
        if !progress.is_whole {
            return Err(Aborted::NotWhole);
        }
        Ok(Resend::After(if mutants::is(Mutant::ReplayedFromStart) { 0 } else { progress.tokens }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: ReplayLimits = ReplayLimits { replays_max: 4, fruitless_max: 2, deadline_ms: 1_000 };

    fn send<K>(instance: K, is_free: bool) -> Next<K> {
        Next::Send { instance, is_free }
    }

    #[test]
    fn the_bound_instance_is_first_and_those_that_refuse_are_passed() {
        let mut replay = Replay::new(LIMITS, true);
        assert_eq!(replay.next(0), Next::Look);
        replay.round(Some('c'), "abcdef".chars());
        for instance in ['c', 'a', 'b', 'd'] {
            assert_eq!(replay.next(0), send(instance, true));
        }
        assert_eq!(replay.next(0), Next::Abort(Aborted::NoInstance), "four at most");
        // Those after a refusal are on the budget.
        replay.round(Some('c'), "abc".chars());
        assert_eq!(replay.next(0), send('c', true));
        replay.refuse();
        assert_eq!(replay.next(0), send('a', false));
        replay.hand_back();
        replay.round(Some('b'), "abc".chars());
        assert_eq!(replay.next(0), send('b', true));
    }

    #[test]
    fn after_a_loss_the_others_are_first_and_one_attempt_is_free() {
        let mut replay = Replay::new(LIMITS, true);
        replay.round(None, "ab".chars());
        assert_eq!(replay.next(0), send('a', true));
        assert!(replay.waits_for_turn());
        assert_eq!(replay.lose('a', Progress { tokens: 7, ..Progress::NONE }, 10), Ok(Resend::After(7)));
        assert!(!replay.waits_for_turn());
        assert_eq!([replay.next(10), replay.next(10)], [Next::Pause, Next::Look]);
        replay.round(None, "abc".chars());
        assert_eq!(replay.next(20), send('b', true));
        replay.refuse();
        replay.bar('b', 500, 20);
        assert_eq!([replay.next(20), replay.next(20)], [send('c', false), send('a', false)]);
        assert_eq!([replay.next(20), replay.next(20)], [Next::Pause, Next::Look]);
        // Whoever asked for a pause has it.
        for (now_ms, next) in [(499, Next::Pause), (500, send('b', false)), (1_010, Next::Abort(Aborted::Deadline))] {
            replay.round(None, (now_ms < 1_000).then_some('b'));
            assert_eq!(replay.next(now_ms), next);
        }
    }

    #[test]
    fn what_must_not_or_cannot_run_twice_does_not() {
        assert_eq!(Replay::new(LIMITS, false).lose('a', Progress::NONE, 0), Err(Aborted::NotRepeatable));
        let unknown = Progress { is_whole: false, ..Progress::NONE };
        assert_eq!(Replay::new(LIMITS, true).lose('a', unknown, 0), Err(Aborted::NotWhole));
        let ended = Progress { has_ended: true, ..unknown };
        let mut replay = Replay::new(LIMITS, false);
        assert_eq!((replay.lose('a', ended, 0), replay.waits_for_turn()), (Ok(Resend::Nothing), true));
    }

    /// What an instance does with a request.
    #[derive(Clone, Copy, Debug)]
    enum Does {
        /// It streams so many tokens, and is lost.
        Breaks(u64),
        Refuses(u64),
        HandsBack,
        Unreachable,
    }

    fn does() -> impl Strategy<Value = Does> {
        prop_oneof![
            (0u64..3).prop_map(Does::Breaks),
            (0u64..400).prop_map(Does::Refuses),
            Just(Does::HandsBack),
            Just(Does::Unreachable),
        ]
    }

    fn play(script: Vec<(Does, u64)>, instances: u32, is_repeatable: bool) -> Result<(), TestCaseError> {
        let mut replay = Replay::new(LIMITS, is_repeatable);
        let (mut now_ms, mut tokens, mut fruitless, mut lost_at_ms) = (0, 0, 0, None::<u64>);
        let mut was_refused = false;
        let (mut lost, mut rests) = (Vec::new(), std::collections::BTreeMap::new());
        let mut script = script.into_iter();
        loop {
            match replay.next(now_ms) {
                Next::Look => replay.round(None, 0..instances),
                Next::Pause => {
                    prop_assert!(lost_at_ms.is_some_and(|at_ms| now_ms < at_ms + LIMITS.deadline_ms));
                    now_ms += 25;
                }
                Next::Abort(why) => {
                    prop_assert_eq!(why == Aborted::NoInstance, lost.is_empty());
                    return Ok(());
                }
                Next::Send { instance, is_free } => {
                    prop_assert_eq!(is_free, !was_refused);
                    prop_assert!(rests.get(&instance).is_none_or(|until_ms| now_ms >= *until_ms));
                    // It is answered when the script ends.
                    let Some((does, takes_ms)) = script.next() else { return Ok(()) };
                    now_ms += takes_ms;
                    was_refused = match does {
                        Does::Unreachable => was_refused,
                        Does::HandsBack => !lost.is_empty(),
                        Does::Refuses(_) => true,
                        Does::Breaks(_) => false,
                    };
                    match does {
                        Does::Unreachable => {}
                        Does::HandsBack if lost.is_empty() => replay.hand_back(),
                        Does::HandsBack => replay.refuse(),
                        Does::Refuses(rest_ms) => {
                            replay.refuse();
                            replay.bar(instance, now_ms + rest_ms, now_ms);
                            rests.insert(instance, now_ms + rest_ms);
                        }
                        Does::Breaks(more) => {
                            if more > 0 {
                                replay.answered();
                                replay.progressed();
                                fruitless = 0;
                            }
                            tokens += more;
                            fruitless += 1;
                            lost.push(instance);
                            lost_at_ms = Some(now_ms);
                            let verdict = replay.lose(instance, Progress { tokens, ..Progress::NONE }, now_ms);
                            let may =
                                is_repeatable && fruitless < LIMITS.fruitless_max && lost.len() <= LIMITS.replays_max;
                            prop_assert_eq!(verdict.ok(), may.then_some(Resend::After(tokens)));
                            if !may {
                                return Ok(());
                            }
                        }
                    }
                }
            }
        }
    }

    proptest! {
        /// Whatever instances do, a request ends: within its losses, and within the deadline of the last one.
        #[test]
        fn every_request_ends_within_its_limits(
            script in prop::collection::vec((does(), 0u64..50), 1..200),
            instances in 1u32..7,
            is_repeatable in any::<bool>(),
        ) {
            play(script, instances, is_repeatable)?;
        }
    }
}
