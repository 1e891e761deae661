//! The journal of a streamed response, with which another server can go on if the first one is lost.
//!
//! A client that forwards streams (the gateway) requests the journal with the header [`HEADER`]. Each event is then
//! preceded by comment lines, one [`Entry`] each: the tokens that the client has got once it has the event. All entries
//! make a [`Resume`], which is sent to another server in the field [`FIELD`] of the same request. That server computes
//! prompt and previous tokens as a prompt, and streams the rest under the same id: tokens at their places in the
//! response, text from the same character on.

use crate::access::Report;
use axum::http::HeaderName;
use serde::{Deserialize, Serialize};

/// Request header that asks for the journal of a stream.
pub const HEADER: &str = "x-lagoon-journal";
/// Request header of a gateway that takes the request back if the instance cannot start it soon.
pub const HAND_BACK_HEADER: HeaderName = HeaderName::from_static("x-lagoon-hand-back");
/// Response header with the tokens of prompts and response known so far, when a journal was requested.
pub const TOKENS_HEADER: HeaderName = HeaderName::from_static("x-lagoon-tokens");
/// Request field with a response that another server began.
pub const FIELD: &str = "lagoon_resume";
/// Start of a line with a [`Report`]. Gateways that do not know it pass it on, a comment, to the client.
const REPORT_LINE: &str = ": lagoon-report ";
/// Start of a journal line: a comment in server-sent events.
const LINE: &str = ": lagoon ";
/// Maximum of tokens remembered of one response, over all sequences: 16 MiB.
const TOKENS_MAX: usize = 4 << 20;

/// Common properties of a response's events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Began {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Seed of the first sequence: the request may have left it to the server.
    pub seed: u64,
}

/// Tokens sent of one sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SentTokens {
    pub tokens: Vec<u32>,
    /// Whether its finish reason was sent.
    pub finished: bool,
}

/// One line of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Entry {
    /// First entry of a journal.
    Began(Began),
    /// The event's new tokens of a sequence.
    SentTokens { index: usize, tokens: Vec<u32>, finished: bool },
    /// Everything was sent; only the end mark follows.
    Ended,
    /// Everything was sent, and no end mark follows.
    Over,
    /// The event is the response's error. `again`: another server may succeed.
    Failed { again: bool },
}

impl Entry {
    /// The entry's journal line, with line break.
    pub(crate) fn line(&self) -> String {
        format!("{LINE}{}\n", serde_json::to_string(self).expect("entries serialise"))
    }
}

/// The line of a report, with line break.
pub(crate) fn report_line(report: &Report) -> String {
    format!("{REPORT_LINE}{}\n", serde_json::to_string(report).expect("reports serialise"))
}

/// A response that another server began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resume {
    pub began: Began,
    /// Tokens sent, by sequence of the request; missing sequences have none.
    pub sequences: Vec<SentTokens>,
}

impl Resume {
    /// `request`, a non-empty JSON object, with this resumption added, for another server.
    #[must_use]
    pub fn request(&self, request: &[u8]) -> Vec<u8> {
        let object = request.trim_ascii_end();
        let object = object.strip_suffix(b"}").unwrap_or(object);
        let resume = serde_json::to_string(self).expect("a resumption serialises");
        [object, format!(r#","{FIELD}":{resume}}}"#).as_bytes()].concat()
    }
}

/// Tokens that a client has received, from the journal entries of a stream's events.
#[derive(Debug, Default)]
pub struct Journal {
    began: Option<Began>,
    sequences: Vec<SentTokens>,
    tokens: usize,
    /// The latest report that was not taken.
    report: Option<Report>,
    /// Whether an event had no entry: then the state is unknown.
    gap: bool,
    /// Whether everything but the end mark was sent; and the end mark, too.
    ended: bool,
    done: bool,
}

/// How a forwarder treats an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read {
    /// Forward it: the journal counts it as sent.
    Event(Vec<u8>),
    /// An error. `again`: another server may succeed, and then the client need not see it.
    Error { event: Vec<u8>, again: bool },
}

impl Journal {
    /// Reads one event, which ends with an empty line, and removes its journal lines.
    pub fn read(&mut self, event: &[u8]) -> Read {
        let mut kept = Vec::with_capacity(event.len());
        let (mut explained, mut error) = (false, None);
        for line in event.split_inclusive(|byte| *byte == b'\n') {
            if let Some(report) = line.strip_prefix(REPORT_LINE.as_bytes()) {
                self.report = serde_json::from_slice(report).ok().or(self.report.take());
                continue;
            }
            let Some(entry) = line.strip_prefix(LINE.as_bytes()) else {
                kept.extend_from_slice(line);
                continue;
            };
            explained = true;
            match serde_json::from_slice(entry) {
                Ok(Entry::Began(began)) => self.began = Some(began),
                Ok(Entry::SentTokens { index, tokens, finished }) => self.note(index, SentTokens { tokens, finished }),
                Ok(Entry::Ended) => self.ended = true,
                Ok(Entry::Over) => (self.ended, self.done) = (true, true),
                Ok(Entry::Failed { again }) => error = Some(again),
                Err(_) => self.gap = true,
            }
        }
        if kept.trim_ascii().is_empty() {
            // Entries alone: nothing for the client.
            kept.clear();
        }
        if kept.starts_with(b"data: [DONE]") {
            self.done = true;
        } else if !explained && kept.starts_with(b"data") {
            // Comments that keep a connection alive need no entry.
            self.gap = true;
        }
        match error {
            Some(again) => Read::Error { event: kept, again },
            None => Read::Event(kept),
        }
    }

    fn note(&mut self, index: usize, output: SentTokens) {
        self.tokens += output.tokens.len();
        if index >= crate::limits::SEQUENCES_MAX || self.tokens > TOKENS_MAX {
            self.gap = true;
            return;
        }
        if self.sequences.len() <= index {
            self.sequences.resize(index + 1, SentTokens::default());
        }
        let sequence = &mut self.sequences[index];
        sequence.tokens.extend(output.tokens);
        sequence.finished |= output.finished;
    }

    /// The latest report of the instance, once.
    pub fn take_report(&mut self) -> Option<Report> {
        self.report.take()
    }

    /// Tokens of the answer so far.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether another server can go on with the answer.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        !self.gap
    }

    /// Whether everything was sent; the end mark may be missing.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.ended || self.done
    }

    /// Whether the end mark was sent.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// The resumption for another server; `None` if nothing was sent yet.
    #[must_use]
    pub fn resume(&self) -> Option<Resume> {
        Some(Resume { began: self.began.clone()?, sequences: self.sequences.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn began() -> Began {
        Began { id: "cmpl-1".to_owned(), created: 7, seed: u64::MAX }
    }

    fn sent(index: usize, tokens: &[u32], finished: bool) -> Entry {
        Entry::SentTokens { index, tokens: tokens.to_vec(), finished }
    }

    #[test]
    fn a_journal_has_the_tokens_of_its_events_and_its_lines_are_not_shown() {
        let mut journal = Journal::default();
        assert_eq!(journal.resume(), None);
        let event = format!("{}{}data: a\n\n", Entry::Began(began()).line(), sent(1, &[5, 6], false).line());
        assert_eq!(journal.read(event.as_bytes()), Read::Event(b"data: a\n\n".to_vec()));
        let event = format!("{}data: b\n\n", sent(0, &[], true).line());
        assert_eq!(journal.read(event.as_bytes()), Read::Event(b"data: b\n\n".to_vec()));
        let event = format!("{}data: c\n\n", sent(1, &[7], false).line());
        assert_eq!(journal.read(event.as_bytes()), Read::Event(b"data: c\n\n".to_vec()));
        let sequences =
            vec![SentTokens { tokens: vec![], finished: true }, SentTokens { tokens: vec![5, 6, 7], finished: false }];
        assert_eq!(journal.resume(), Some(Resume { began: began(), sequences }));
        assert!(journal.is_whole());
        let event = format!("{}data: {{\"usage\":1}}\n\n", Entry::Ended.line());
        assert_eq!(journal.read(event.as_bytes()), Read::Event(b"data: {\"usage\":1}\n\n".to_vec()));
        assert!(journal.has_ended() && !journal.is_done());
        let report = Report { model: Some("m".to_owned()), prompt_tokens: Some(3), ..Report::default() };
        assert_eq!(
            journal.read(format!("{}data: x\n\n", report_line(&report)).as_bytes()),
            Read::Event(b"data: x\n\n".to_vec())
        );
        assert_eq!([journal.take_report(), journal.take_report()], [Some(report), None]);
        let event = format!("{}data: x\n\n", Entry::Failed { again: true }.line());
        assert_eq!(journal.read(event.as_bytes()), Read::Error { event: b"data: x\n\n".to_vec(), again: true });
    }

    /// Servers that keep no journal, and entries that nobody understands.
    #[test]
    fn an_event_that_no_entry_explains_is_a_gap() {
        for event in [&b"data: {}\n\n"[..], b": lagoon {\"new\":1}\ndata: {}\n\n", b": lagoon nonsense\ndata: {}\n\n"] {
            let mut journal = Journal::default();
            assert!(journal.read(b": keep alive\n\n") == Read::Event(b": keep alive\n\n".to_vec()));
            assert!(journal.is_whole());
            assert_eq!(journal.read(event), Read::Event(b"data: {}\n\n".to_vec()));
            assert!(!journal.is_whole());
        }
        let mut journal = Journal::default();
        assert_eq!(journal.read(b"data: [DONE]\n\n"), Read::Event(b"data: [DONE]\n\n".to_vec()));
        assert!(journal.is_whole() && journal.is_done());
        journal.read(format!("{}data: {{}}\n\n", sent(usize::MAX, &[1], false).line()).as_bytes());
        assert!(!journal.is_whole());
    }

    #[test]
    fn a_resumed_request_is_the_request_with_one_field_more() {
        let resume = Resume { began: began(), sequences: vec![SentTokens { tokens: vec![5], finished: false }] };
        let request: serde_json::Value =
            serde_json::from_slice(&resume.request(b" {\"prompt\": \"a}\", \"n\": 1 } \n")).unwrap();
        assert_eq!((&request["prompt"], &request["n"]), (&"a}".into(), &1.into()));
        assert_eq!(serde_json::from_value::<Resume>(request[FIELD].clone()).unwrap(), resume);
    }
}
