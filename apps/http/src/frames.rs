//! The stream of a response in server-sent events: one event a piece, then its error or its end. With a journal every event is
//! preceded by the journal's lines ([`crate::journal`]).

use crate::{
    access::REPORT_HEADER,
    error::ApiError,
    journal::{self, Began, Entry},
    keys::Caller,
    limits::Limits,
    piece::{Failure, Piece, Pieces},
};
use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::Response,
};
use futures::{Stream, StreamExt, stream};
use std::{collections::VecDeque, convert::Infallible, time::Duration};
use tokio::time::timeout;

/// A comment in a stream that is silent: no client reads it.
pub(crate) const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// A response that is sent piece by piece.
pub(crate) trait Streamed: Send + 'static {
    /// The journal's last entry.
    const LAST: Entry;

    /// Its id in the log.
    fn id(&self) -> &str;

    /// Whose request it answers.
    fn caller(&self) -> &Caller;

    /// The journal's first entry; `None` without a journal.
    fn journal(&self) -> Option<&Began>;

    /// Tokens of prompts and response so far.
    fn tokens(&self) -> usize;

    /// Counts a piece. Returns the JSON of its event.
    fn event(&mut self, piece: Piece) -> String;

    /// The frames behind the last piece; may be empty.
    fn end(&self) -> String;
}

/// Streams the pieces. The headers wait up to [`Limits::headers_hold`] for the first piece, so that an early failure has its own status.
pub(crate) async fn respond<S: Streamed>(
    response: S,
    mut pieces: Pieces,
    limits: &Limits,
) -> Result<Response, ApiError> {
    let mut ready = VecDeque::new();
    let mut head = Response::default();
    report(&response, &mut head);
    // Dropping `next` loses nothing: the sequences keep their place inside `pieces`. There is no piece if another
    // server has sent all but the end.
    if let Ok(Some(piece)) = timeout(limits.headers_hold, pieces.next()).await {
        ready.push_back(piece?);
    }
    let (began, journal) = (response.journal().cloned(), response.journal().is_some());
    let state = Some(Frames { response, pieces, ready, journal, began, keep_alive: limits.keep_alive });
    let frames = stream::unfold(state, |state| async move {
        let (frame, state) = state?.next().await?;
        Some((Ok::<_, Infallible>(Bytes::from(frame)), state))
    });
    Ok(event_stream(head, frames))
}

/// Adds to `head` the headers that a gateway reads, if it asked for a journal.
pub(crate) fn report<S: Streamed>(response: &S, head: &mut Response) {
    if response.journal().is_some() {
        add_headers(head, response.tokens(), response.caller());
    }
}

/// Adds the headers with the tokens known so far, for a gateway to charge, and with the report for its access log; the journal of a
/// stream has the rest.
pub(crate) fn add_headers(head: &mut Response, tokens: usize, caller: &Caller) {
    head.headers_mut().insert(journal::TOKENS_HEADER, HeaderValue::from(tokens));
    let report = caller.record().report().header();
    report.into_iter().for_each(|report| drop(head.headers_mut().insert(REPORT_HEADER, report)));
}

/// A streamed response in flight.
struct Frames<S> {
    response: S,
    pieces: Pieces,
    /// Pieces that arrived before the headers were sent.
    ready: VecDeque<Piece>,
    journal: bool,
    /// Taken once its journal line is sent.
    began: Option<Began>,
    /// See [`Limits::keep_alive`].
    keep_alive: Duration,
}

impl<S: Streamed> Frames<S> {
    /// The next frame, and the rest of the stream unless it was the last one; `None` if nothing is left to send.
    async fn next(mut self) -> Option<(String, Option<Self>)> {
        let piece = match self.ready.pop_front() {
            Some(piece) => Some(Ok(piece)),
            None => match timeout(self.keep_alive, self.pieces.next()).await {
                Ok(piece) => piece,
                Err(_silent) => return Some((KEEP_ALIVE.to_owned(), Some(self))),
            },
        };
        match piece {
            Some(Ok(mut piece)) => {
                let end = piece.end_behind_calls();
                let mut frames = self.frame(piece, end.is_some());
                end.into_iter().for_each(|end| frames.push_str(&self.frame(end, true)));
                Some((frames, Some(self)))
            }
            Some(Err(Failure { error, again })) => {
                tracing::warn!(id = %self.response.id(), %error, "a stream failed");
                self.response.caller().record().failed(error.code.unwrap_or("error"));
                Some((self.lines(&Entry::Failed { again }) + &frame(&error.body()), None))
            }
            None => {
                let (lines, end) = (self.lines(&S::LAST), self.response.end());
                match (lines.is_empty(), end.is_empty()) {
                    (true, true) => None,
                    // Comments are an event of their own.
                    (false, true) => Some((lines + "\n", None)),
                    (_, false) => Some((lines + &end, None)),
                }
            }
        }
    }

    /// A piece's event behind its journal lines; `ends`: nothing but the sequence's end comes after it.
    fn frame(&mut self, piece: Piece, ends: bool) -> String {
        let tokens = piece.tokens.iter().map(|token| token.id).collect();
        let entry = Entry::SentTokens { index: piece.index, tokens, finished: ends || piece.finish.is_some() };
        // First: the report has its tokens.
        let event = frame(&self.response.event(piece));
        self.lines(&entry) + &event
    }

    /// The journal lines of the next event; empty without a journal.
    fn lines(&mut self, entry: &Entry) -> String {
        if !self.journal {
            return String::new();
        }
        let began = self.began.take().map(|began| Entry::Began(began).line());
        // With the first event, for a client that leaves before the last one, and with that.
        let reports = began.is_some() || matches!(entry, Entry::Ended | Entry::Over);
        let report = reports.then(|| journal::report_line(&self.response.caller().record().report()));
        began.unwrap_or_default() + &report.unwrap_or_default() + &entry.line()
    }
}

/// `response` with a body of server-sent events.
pub(crate) fn event_stream(
    mut response: Response,
    frames: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    *response.body_mut() = Body::from_stream(frames);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

pub(crate) fn frame(data: &str) -> String {
    format!("data: {data}\n\n")
}
