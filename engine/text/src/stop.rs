//! Stop strings in a stream of text.
//!
//! The text ends before the stop string that is completed first (before the longest, if several are completed at once), or
//! behind it where it is to be included.
//! This depends on the text alone, not on how it is split into pieces. Text is released as soon as it cannot be the
//! beginning of a stop string.

/// Most stop strings of one request.
pub const STOPS_MAX: usize = 16;
/// Longest stop string, in bytes.
pub const STOP_BYTES_MAX: usize = 1024;

/// Error of refused stop strings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    #[error("a stop string is empty")]
    Empty,
    #[error("a stop string has {bytes} bytes, the limit is {STOP_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("there are {count} stop strings, the limit is {STOPS_MAX}")]
    TooMany { count: usize },
}

/// Search for the first stop string in a stream.
#[derive(Clone, Debug)]
pub struct StopStrings {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string.
    held: String,
    /// The stop string that was found.
    found: Option<usize>,
    /// The text ends behind the stop string, not before it.
    included: bool,
}

impl StopStrings {
    /// A new stream with these stop strings; with none, text passes unchanged.
    pub fn new(stops: Vec<String>) -> Result<Self, StopError> {
        if stops.len() > STOPS_MAX {
            return Err(StopError::TooMany { count: stops.len() });
        }
        if stops.iter().any(String::is_empty) {
            return Err(StopError::Empty);
        }
        if let Some(long) = stops.iter().find(|stop| stop.len() > STOP_BYTES_MAX) {
            return Err(StopError::TooLong { bytes: long.len() });
        }
        Ok(Self { stops, held: String::new(), found: None, included: false })
    }

    /// With `included`, the stop string that ends the text is its last part.
    #[must_use]
    pub fn including(self, included: bool) -> Self {
        Self { included, ..self }
    }

    /// The stop strings.
    #[must_use]
    pub fn strings(&self) -> &[String] {
        &self.stops
    }

    /// Takes the next piece and appends the text that cannot be part of a stop string to `out`. Returns whether a stop
    /// string is complete; from then on it appends nothing.
    pub fn push(&mut self, piece: &str, out: &mut String) -> bool {
        if self.found.is_some() {
            return true;
        }
        self.held.push_str(piece);
        // The end that comes first wins; of stop strings with that end, the longest, which begins first.
        let find = |(index, stop): (usize, &String)| {
            self.held.find(stop.as_str()).map(|start| (start + stop.len(), start, index))
        };
        if let Some((end, start, index)) = self.stops.iter().enumerate().filter_map(find).min() {
            out.push_str(&self.held[..if self.included { end } else { start }]);
            self.held.clear();
            self.found = Some(index);
            return true;
        }
        let keep_from = self.undecided_from();
        out.push_str(&self.held[..keep_from]);
        self.held.drain(..keep_from);
        false
    }

    /// Appends the text held back, after the last piece; empty if a stop string was found.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Whether a stop string was found.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that was found.
    #[must_use]
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.stops[index].as_str())
    }

    /// Start of the longest suffix of `held` that is a prefix of a stop string.
    fn undecided_from(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let earliest = self.held.len().saturating_sub(longest);
        let open = |start: &usize| {
            let end = &self.held.as_bytes()[*start..];
            self.held.is_char_boundary(*start) && self.stops.iter().any(|stop| stop.as_bytes().starts_with(end))
        };
        (earliest..self.held.len()).find(open).unwrap_or(self.held.len())
    }
}
