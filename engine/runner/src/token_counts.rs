//! The tokens that a sequence has, counted for penalties. The sequence keeps them and adds each new token; a step's
//! [`crate::SampleSpec`] shares them.

/// Distinct tokens of a prompt and of its answer so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Ascending.
    prompt: Vec<u32>,
    /// Ascending, each with the times that it was generated.
    generated: Vec<(u32, u32)>,
}

impl TokenCounts {
    /// The tokens of a prompt and of what was generated so far.
    #[must_use]
    pub fn new(prompt: &[u32], generated: &[u32]) -> Self {
        let mut distinct = prompt.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let mut counts = Self { prompt: distinct, generated: Vec::new() };
        generated.iter().for_each(|token| counts.push(*token));
        counts
    }

    /// Counts a generated token.
    pub fn push(&mut self, token: u32) {
        match self.generated.binary_search_by_key(&token, |(id, _)| *id) {
            Ok(at) => self.generated[at].1 = self.generated[at].1.saturating_add(1),
            Err(at) => self.generated.insert(at, (token, 1)),
        }
    }

    /// Generated tokens with their counts, ascending.
    pub(crate) fn generated(&self) -> &[(u32, u32)] {
        &self.generated
    }

    /// Every token of prompt and answer once.
    pub(crate) fn all(&self) -> impl Iterator<Item = u32> {
        let new = |id: &u32| self.prompt.binary_search(id).is_err();
        self.prompt.iter().copied().chain(self.generated.iter().map(|(id, _)| *id).filter(new))
    }
}
