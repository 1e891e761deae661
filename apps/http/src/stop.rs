//! Stop strings in a stream of text: nothing of a match shows, and text that may be the start of one waits.

/// Looks for the first of some strings in text that arrives in pieces.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    stops: Vec<String>,
    /// Text that was not released: a proper prefix of some stop string, or empty.
    pending: String,
}

/// What a piece of text releases.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) text: String,
    /// A stop string was found; `text` ends before it and nothing may follow.
    pub(crate) matched: bool,
}

impl StopMatcher {
    /// `stops` are not empty strings.
    pub(crate) fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), pending: String::new() }
    }

    pub(crate) fn push(&mut self, text: &str) -> Cut {
        self.pending.push_str(text);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.pending.find(stop.as_str())).min() {
            self.pending.truncate(at);
            return Cut { text: std::mem::take(&mut self.pending), matched: true };
        }
        let held = self.stops.iter().map(|stop| overlap(&self.pending, stop)).max().unwrap_or(0);
        let rest = self.pending.split_off(self.pending.len() - held);
        Cut { text: std::mem::replace(&mut self.pending, rest), matched: false }
    }

    /// The end of the text: what was held back is no stop string.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.pending)
    }
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let lengths = stop.char_indices().map(|(at, _)| at).rev();
    lengths.into_iter().find(|length| text.ends_with(&stop[..*length])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(&stops.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        let mut out = String::new();
        for piece in pieces {
            let cut = matcher.push(piece);
            out.push_str(&cut.text);
            if cut.matched {
                return (out, true);
            }
        }
        out.push_str(&matcher.finish());
        (out, false)
    }

    #[test]
    fn a_match_across_pieces_is_cut_whole() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".to_owned(), true));
        assert_eq!(run(&["END"], &["one EN", "ough"]), ("one ENough".to_owned(), false));
        assert_eq!(run(&["END"], &["EEN", "D"]), ("E".to_owned(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".to_owned(), true));
    }

    #[test]
    fn the_earliest_match_wins_and_characters_stay_whole() {
        assert_eq!(run(&["c", "b"], &["abc"]), ("a".to_owned(), true));
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".to_owned(), false));
        assert_eq!(run(&["é!"], &["caf", "é", "!"]), ("caf".to_owned(), true));
        assert_eq!(run(&["é"], &["cafè"]), ("cafè".to_owned(), false));
    }

    #[test]
    fn a_possible_start_waits() {
        let mut matcher = StopMatcher::new(&["\n\n".to_owned()]);
        assert_eq!(matcher.push("hi\n"), Cut { text: "hi".to_owned(), matched: false });
        assert_eq!(matcher.push("yo"), Cut { text: "\nyo".to_owned(), matched: false });
    }
}
