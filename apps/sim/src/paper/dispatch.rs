//! Which instance a request is sent to: the papers' dispatch beside ours. The choices here are made at arrival, functions of what each
//! instance reports; [`Dispatch::Late`] is the shipped gateway's, which queues requests (`gateway.rs`).

use super::hardware::{StepShape, Timing};
use super::traces::Request;

/// For how long a request counts against its instance under [`Dispatch::FreeLessRecent`].
pub const CHARGE_US: u64 = 1_000_000;

/// A rule of dispatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dispatch {
    /// The most free memory, blind to queues: v2 §7.1 read literally, for Infinite-LLM and for vLLM-multi.
    FreeMemory,
    /// The most free memory minus what was sent there in the last second ([`CHARGE_US`]): the gateway's rule without
    /// predictions. Bursts spread; queues are not seen.
    FreeLessRecent,
    /// The least outstanding work, bound at arrival. Answers' lengths are known, which no gateway knows: the strongest rule of its kind.
    #[default]
    LeastWork,
    /// The shipped gateway: least predicted work, bound late, given back by instances that fall behind.
    Late,
}

impl Dispatch {
    /// Those that choose at arrival ([`choose`]).
    pub const AT_ARRIVAL: [Self; 3] = [Self::FreeMemory, Self::FreeLessRecent, Self::LeastWork];

    /// The rule's name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::FreeMemory => "most free memory",
            Self::FreeLessRecent => "most free memory less the last second's",
            Self::LeastWork => "least predicted work",
            Self::Late => "bound late by the gateway",
        }
    }
}

/// What the dispatcher knows of an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct View {
    pub free_tokens: i64,
    /// Contexts of requests that were sent there within [`CHARGE_US`], in tokens.
    pub recent_tokens: i64,
    /// Predicted work of requests that were sent there and have not ended: see [`work_us`].
    pub work_us: f64,
    /// The longest context that it can hold, with borrowed memory if it has any.
    pub holds_tokens: u64,
}

/// Predicted device time of what is left of a request: its prompt, if that is not computed yet, and each of its tokens'
/// attention and share of a step, which is the share of the memory that it takes from other requests.
#[must_use]
pub fn work_us(timing: &Timing, kv_tokens: u64, request: &Request, generated: u32, computes_prompt: bool) -> f64 {
    let context = f64::from(request.prompt_tokens) + f64::from(generated + request.output_tokens) / 2.0;
    let left = f64::from(request.output_tokens.saturating_sub(generated));
    let step = StepShape { rows: 1.0, sampled: 1.0, seqs: 1.0, ..StepShape::default() };
    let share = (context / kv_tokens.max(1) as f64).min(1.0);
    let decode = left * (timing.attention_us(context, 0.0) + share * timing.step(&step).linear_us);
    if !computes_prompt || generated > 0 {
        return decode;
    }
    let prompt = f64::from(request.prompt_tokens);
    let chunk = StepShape { rows: prompt, prompt_rows: prompt, ..StepShape::default() };
    decode + timing.step(&chunk).linear_us + timing.attention_us(0.0, prompt * prompt / 2.0)
}

/// The index of the instance that a request goes to. Instances that hold it whole are preferred to others, which would
/// refuse it; equal ones are taken in turn, from `turn` on. `None` without instances.
#[must_use]
pub fn choose(dispatch: Dispatch, views: &[View], tokens: u64, turn: usize) -> Option<usize> {
    let key = |at: usize| {
        let view = &views[at];
        let rank = match dispatch {
            Dispatch::FreeMemory => -(view.free_tokens as f64),
            Dispatch::FreeLessRecent => -((view.free_tokens - view.recent_tokens) as f64),
            Dispatch::LeastWork | Dispatch::Late => view.work_us,
        };
        (view.holds_tokens < tokens, rank)
    };
    let in_turn = (0..views.len()).map(|at| (turn + at) % views.len());
    in_turn.min_by(|a, b| {
        let ((a_short, a_rank), (b_short, b_rank)) = (key(*a), key(*b));
        a_short.cmp(&b_short).then(a_rank.total_cmp(&b_rank))
    })
}

#[cfg(test)]
mod tests {
    use super::super::hardware::{LLAMA2_7B, Parallel};
    use super::*;

    fn view(free_tokens: i64, recent_tokens: i64, work_us: f64) -> View {
        View { free_tokens, recent_tokens, work_us, holds_tokens: 1000 }
    }

    #[test]
    fn each_rule_sees_what_its_name_says() {
        // The freest was sent more than it holds just now; the second freest has more work than the third.
        let views = [view(900, 5000, 9e6), view(500, 0, 5e6), view(100, 0, 1e6)];
        let chosen = |dispatch| choose(dispatch, &views, 100, 0).unwrap();
        assert_eq!(Dispatch::AT_ARRIVAL.map(chosen), [0, 1, 2]);
        assert_eq!(choose(Dispatch::LeastWork, &[], 100, 0), None);
    }

    #[test]
    fn equal_instances_are_taken_in_turn_and_one_that_holds_the_request_first() {
        let equal = [view(500, 0, 0.0); 3];
        for dispatch in Dispatch::AT_ARRIVAL {
            let turns: Vec<usize> = (0..6).map(|turn| choose(dispatch, &equal, 100, turn).unwrap()).collect();
            assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
            let large = View { holds_tokens: 4000, free_tokens: 10, work_us: 1e9, ..equal[0] };
            assert_eq!(choose(dispatch, &[equal[0], large], 2000, 0), Some(1));
        }
    }

    #[test]
    fn work_falls_as_tokens_come_and_grows_with_context() {
        let timing = Timing::new(LLAMA2_7B, Parallel::tp(1));
        let request = |prompt_tokens| Request { arrival_us: 0, prompt_tokens, output_tokens: 300 };
        let work = |prompt, generated, computes| work_us(&timing, 111_615, &request(prompt), generated, computes);
        assert!(work(12_000, 0, true) > work(12_000, 0, false));
        assert!(work(12_000, 1, true) < work(12_000, 0, false));
        assert!(work(12_000, 200, true) < work(12_000, 100, true));
        assert!(work(60_000, 0, false) > 4.0 * work(12_000, 0, false));
        assert_eq!(work(12_000, 300, true), 0.0);
    }
}
